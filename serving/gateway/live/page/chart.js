// One line over the last minutes, drawn by uPlot: an interval around it, a dashed line at 1, and marks where drafts changed.

import { byId, clock } from "./dom.js";

const HEIGHT = 190;
const LEAST_SPAN_MS = 60_000;
const LABEL_WIDTH = 34;
const GAP_MS = 5000;

export class Chart {
  /** `value` and `band` read a point of the history; `format` writes a value; `missing` is said where there is none. */
  constructor(id, readingId, { value, band, format, missing }) {
    this.root = byId(id);
    this.reading = byId(readingId);
    Object.assign(this, { value, band, format, missing, rows: [], marks: [], nowMs: 0 });
    const accent = () => this.colour("--accent"), muted = () => this.colour("--muted");
    const axis = { stroke: muted, grid: { stroke: () => this.colour("--line"), width: 1 }, ticks: { show: false }, font: `12px ${getComputedStyle(this.root).fontFamily}` };
    const edge = { width: 0, points: { show: false } };
    this.plot = new uPlot({
      width: this.root.clientWidth,
      height: HEIGHT,
      padding: [22, 8, 0, 0],
      pxAlign: false,
      ms: 1,
      legend: { show: false },
      cursor: { y: false, drag: { x: false } },
      scales: {
        x: { range: () => [Math.min(this.rows[0]?.[0] ?? this.nowMs, this.nowMs - LEAST_SPAN_MS), this.nowMs] },
        y: { range: () => range(this.rows) },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 24, space: 80, values: (_, splits) => splits.map(clock) },
        { ...axis, size: 42, space: 30 },
      ],
      series: [{}, { stroke: accent, width: 2.25, points: { show: false } }, edge, edge],
      bands: [{ series: [3, 2], fill: () => `color-mix(in srgb, ${accent()} 16%, transparent)` }],
      hooks: { draw: [() => this.mark()], setCursor: [() => this.read()] },
    }, [[], [], [], []], this.root);
    new ResizeObserver(() => this.plot.setSize({ width: this.root.clientWidth, height: HEIGHT })).observe(this.root);
  }

  draw(points, marks, nowMs) {
    Object.assign(this, { rows: [], marks, nowMs });
    for (const point of points.filter((point) => this.value(point) !== null)) {
      if (point[0] - this.rows.at(-1)?.[0] > GAP_MS) this.rows.push([point[0] - 1, null, null, null]);
      this.rows.push([point[0], this.value(point), ...this.band(point)]);
    }
    this.plot.setData([0, 1, 2, 3].map((place) => this.rows.map((row) => row[place])));
    this.read();
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
    line(bbox.left, one, bbox.left + bbox.width, one, "--muted", 1, [3 * scale, 4 * scale]);
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

  /** The newest value, or the one under the pointer, in words. */
  read() {
    const under = this.rows[this.plot.cursor.idx];
    const pointed = under && under[1] !== null ? under : null; // not in a gap
    const [atMs, value, lower, upper] = pointed ?? this.rows.at(-1) ?? [];
    const bounds = (lower ?? null) === null || upper === null ? "" : ` (${lower.toFixed(2)} … ${upper.toFixed(2)})`;
    const text = (value ?? null) === null ? this.missing : `${pointed ? `${clock(atMs)}  ` : ""}${this.format(value)}${bounds}`;
    if (this.reading.textContent !== text) this.reading.textContent = text;
  }

  /** A colour of the page's theme, as a canvas takes it. */
  colour(name) {
    this.root.style.color = `var(${name})`;
    return getComputedStyle(this.root).color;
  }
}

/** From where to where the values of rows are drawn. The newest interval is there whole; of the first ones, which are wide, what is beside the line. */
export function range(rows) {
  const values = [...rows.map((row) => row[1]), ...(rows.at(-1)?.slice(2) ?? [])].filter((value) => value !== null);
  const low = Math.min(1, ...values), high = Math.max(1.2, ...values);
  const margin = 0.15 * (high - low);
  return [low - margin / 2, high + margin];
}
