// The charts of the history, drawn by uPlot; for the keyboard, for screen readers, and as a table.

import { byId, clock, element, fixed, moment, NONE } from "./common.js";

const HEIGHT = 190;
const LABEL_WIDTH = 34;
const TIME_WIDTH = 58;
const RIGHT = 8; // pixels between the plot and the canvas's edge
const PAGE_POINTS = 10;
const TABLE_ROWS = 60;
const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -PAGE_POINTS, PageDown: PAGE_POINTS, Home: -Infinity, End: Infinity };

export const AT = 0; // places in a point of the history
const RATIO = 1, LOWER = 2, UPPER = 3, LENGTH = 4, RATE = 5, VERSION = 6, END_TO_END = 7, FIRST = 8, FIRST_P95 = 9;
export const point = { length: (found) => found[LENGTH], rate: (found) => found[RATE], first: (found) => found[FIRST], slowest: (found) => found[FIRST_P95] };

/** What the history may span: milliseconds, milliseconds a point, and how its times are written. */
export const RANGES = {
  minutes: { ms: 300_000, stepMs: 1000, write: clock },
  hour: { ms: 3_600_000, stepMs: 10_000, write: clock },
  day: { ms: 86_400_000, stepMs: 240_000, write: (ms) => clock(ms).slice(0, 5) },
};

let shown = { points: [], nowMs: 0, range: RANGES.minutes };

export function showCharts(points, nowMs, range) {
  const isOther = range !== shown.range;
  shown = { points, nowMs, range };
  for (const chart of charts) chart.draw(points, marks(points), nowMs, range);
  if (isOther) showTable();
}

/** Where the version changed from one point to the next. */
function marks(points) {
  const found = [];
  for (let i = 1; i < points.length; i++) {
    const before = points[i - 1][VERSION], version = points[i][VERSION];
    if (version !== before) found.push({ atMs: points[i][AT], version, isBack: version < before });
  }
  return found;
}

/** As it is when it is opened, or the range changes: what is read row by row must not move. */
function showTable() {
  const { points, nowMs } = shown;
  if (!byId("figures").open || !nowMs) return;
  const every = Math.ceil(points.length / TABLE_ROWS);
  const rows = points.filter((_, index) => (points.length - 1 - index) % every === 0).reverse();
  byId("figures-note").textContent = `Newest first, as of ${clock(nowMs)}; close and open it for newer ones.`;
  byId("figures-rows").replaceChildren(...rows.map((row) => element("tr", {},
    element("th", { scope: "row" }, moment(row[AT])),
    ...[fixed(row[RATIO]), row[LOWER] === null ? NONE : `${fixed(row[LOWER])} … ${fixed(row[UPPER])}`, fixed(row[END_TO_END]), fixed(row[LENGTH]),
      fixed(row[RATE], 0), seconds(row[FIRST]), seconds(row[FIRST_P95]), `v${row[VERSION]}`].map((text) => element("td", {}, text)))));
}

export const seconds = (value) => (value === null ? NONE : `${fixed(value, value < 1 ? 3 : 1)} s`);

/** A line over the history: an interval or a second line beside it, a dashed line at 1, and marks where drafts changed. */
class Chart {
  /** `value`, `band` and `second` read a point; `format` writes a value, `name` says what the second is; `missing` is
   * said where there is none. The lowest and highest value are `floor` or beyond. */
  constructor(id, { value, band = () => [null, null], second = () => null, name = "", format, missing, floor }) {
    this.root = byId(`${id}-chart`);
    this.reading = byId(`${id}-reading`);
    Object.assign(this, { value, band, second, name, format, missing, floor, rows: [], marks: [], nowMs: 0, range: RANGES.minutes, pointedMs: null });
    const accent = () => this.colour("--accent"), muted = () => this.colour("--muted");
    const axis = { stroke: muted, grid: { stroke: () => this.colour("--line"), width: 1 }, ticks: { show: false }, font: `12px ${getComputedStyle(this.root).fontFamily}` };
    const edge = { width: 0, points: { show: false } };
    this.plot = new uPlot({
      width: this.root.clientWidth,
      height: HEIGHT,
      padding: [22, RIGHT, 0, 0],
      pxAlign: false,
      ms: 1,
      legend: { show: false },
      cursor: { y: false, drag: { x: false } },
      scales: {
        x: { range: () => [Math.min(this.rows[0]?.[0] ?? this.nowMs, this.nowMs - this.range.ms / 5), this.nowMs] },
        y: { range: () => range(this.rows, this.floor) },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 24, space: 80, values: (plot, splits) => splits.map((ms) => (this.fits(plot, ms) ? this.range.write(ms) : "")) },
        { ...axis, size: 42, space: 30 },
      ],
      series: [{}, { stroke: accent, width: 2.25, points: { show: () => this.rows.length === 1, size: 6, fill: accent } }, edge, edge, { stroke: () => this.colour("--second"), width: 2, dash: [7, 4], points: { show: false } }],
      bands: [{ series: [3, 2], fill: () => `color-mix(in srgb, ${accent()} 16%, transparent)` }],
      hooks: { draw: [() => this.mark(), () => this.pointedMs !== null && this.pointAt(this.pointedMs)], setCursor: [() => this.read()] },
    }, [[], [], [], [], []], this.root);
    new ResizeObserver(() => this.plot.setSize({ width: this.root.clientWidth, height: HEIGHT })).observe(this.root);
    this.tell(-1);
    this.root.addEventListener("keydown", (event) => this.step(event));
    this.root.addEventListener("blur", () => this.pointAt(null));
  }

  draw(points, marks, nowMs, range) {
    Object.assign(this, { rows: [], marks, nowMs, range });
    for (const point of points.filter((point) => this.value(point) !== null || this.second(point) !== null)) {
      if (point[AT] - this.rows.at(-1)?.[0] > Math.max(5000, 2.5 * range.stepMs)) this.rows.push([point[AT] - 1, null, null, null, null]);
      this.rows.push([point[AT], this.value(point), ...this.band(point), this.second(point)]);
    }
    this.plot.setData([0, 1, 2, 3, 4].map((place) => this.rows.map((row) => row[place])));
    this.read();
    // A screen reader that is here reads on only where a key moves.
    if (document.activeElement !== this.root) this.tell(this.rows.length - 1);
  }

  /** Whether a time's label, centred below it, ends before the canvas does. */
  fits(plot, ms) {
    return plot.valToPos(ms, "x") + TIME_WIDTH / 2 <= plot.bbox.width / devicePixelRatio + RIGHT;
  }

  /** The dashed line at 1, and a line with its version's number wherever that changed. */
  mark() {
    const { ctx, bbox, valToPos } = this.plot, scale = devicePixelRatio;
    const line = (fromX, fromY, toX, toY, colour, width, dash) => {
      ctx.strokeStyle = ctx.fillStyle = this.colour(colour);
      ctx.lineWidth = width * scale;
      ctx.setLineDash(dash);
      ctx.beginPath();
      ctx.moveTo(fromX, fromY);
      ctx.lineTo(toX, toY);
      ctx.stroke();
    };
    ctx.save();
    const one = valToPos(1, "y", true), bottom = bbox.top + bbox.height;
    if (this.floor[0] === 1) line(bbox.left, one, bbox.left + bbox.width, one, "--muted", 1, [3 * scale, 4 * scale]);
    ctx.textAlign = "center";
    let freeFrom = 0;
    for (const { atMs, version, isBack } of this.marks) {
      const x = valToPos(atMs, "x", true);
      line(x, bbox.top, x, bottom, isBack ? "--bad" : "--muted", isBack ? 2 : 1, []);
      if (x < freeFrom) continue;
      freeFrom = x + LABEL_WIDTH * scale;
      ctx.fillText(`${isBack ? "↩" : ""}v${version}`, x, bbox.top - 7 * scale);
    }
    ctx.restore();
  }

  /** To another point by the keyboard; gaps are passed over. */
  step(event) {
    const by = STEPS[event.key];
    if (by === undefined || !this.rows.length) return;
    event.preventDefault();
    const known = this.rows.filter((row) => row[1] !== null || row[4] !== null);
    const at = this.pointedMs === null ? known.length : known.findIndex((row) => row[0] >= this.pointedMs);
    const row = known[Math.max(0, Math.min(known.length - 1, at + by))];
    this.pointAt(row[0]);
    this.tell(this.rows.indexOf(row));
  }

  /** Put the cursor on the point of that time; nowhere for null, or where that point is not in the history any more. */
  pointAt(ms) {
    this.pointedMs = this.rows.some((row) => row[0] === ms) ? ms : null;
    this.plot.setCursor(this.pointedMs === null ? { left: -10, top: -10 } : { left: this.plot.valToPos(ms, "x"), top: 0 });
  }

  /** As a screen reader has it: which point it is, and what it says. */
  tell(index) {
    const values = { min: 0, max: Math.max(this.rows.length - 1, 0), now: Math.max(index, 0), text: this.reading.textContent };
    for (const [name, value] of Object.entries(values)) this.root.setAttribute(`aria-value${name}`, value);
  }

  /** The newest value, or the one under the pointer, in words. */
  read() {
    const under = this.pointedMs === null ? this.rows[this.plot.cursor.idx] : this.rows.find((row) => row[0] === this.pointedMs);
    const pointed = under && (under[1] !== null || under[4] !== null) ? under : null; // not in a gap
    const [atMs, value, lower, upper, second] = pointed ?? this.rows.at(-1) ?? [];
    const bounds = (lower ?? null) === null || upper === null ? "" : ` (${lower.toFixed(2)} … ${upper.toFixed(2)})`;
    const beside = (second ?? null) === null ? "" : `, ${this.name} ${this.format(second)}`;
    const text = (value ?? null) === null && !beside ? this.missing : `${pointed ? `${moment(atMs)}  ` : ""}${(value ?? null) === null ? NONE : this.format(value)}${bounds}${beside}`;
    if (this.reading.textContent !== text) this.reading.textContent = text;
  }

  /** A colour of the page's theme, as a canvas takes it. */
  colour(name) {
    this.root.style.color = `var(${name})`;
    return getComputedStyle(this.root).color;
  }
}

/** From where to where the values of rows are drawn. The newest interval is there whole; of the first ones, which are wide, what is beside the line. */
export function range(rows, [least, most] = [1, 1.2]) {
  const values = [...rows.flatMap((row) => [row[1], row[4] ?? null]), ...(rows.at(-1)?.slice(2) ?? [])].filter((value) => value !== null);
  const low = Math.min(least, ...values), high = Math.max(most, ...values);
  const margin = 0.15 * (high - low);
  return [low && low - margin / 2, high + margin];
}

const times = (value) => `${value.toFixed(2)}×`;
const charts = [
  new Chart("speedup", {
    value: (point) => point[RATIO],
    band: (point) => [point[LOWER], point[UPPER]],
    second: (point) => point[END_TO_END],
    name: "end to end",
    format: times,
    missing: "no plain rounds to compare with yet",
    floor: [1, 1.2],
  }),
  new Chart("accept", { value: point.length, format: (value) => value.toFixed(2), missing: "nothing verified yet", floor: [1, 1.2] }),
  new Chart("rate", { value: point.rate, format: (value) => value.toFixed(0), missing: "not available", floor: [0, 1] }),
  new Chart("latency", { value: point.first, second: point.slowest, name: "95th percentile", format: seconds, missing: "no answer in the last minute", floor: [0, 0.1] }),
];
byId("figures").addEventListener("toggle", showTable);
