// Asks the gateway once a second and shows its figures and their history.

import { byId, clock, count, element, fixed, isLocked, NONE, refusal, say, setUpKey, setUpTheme, withKey } from "./common.js";
import { watchDrafts } from "./drafts.js";
import { setUpTry } from "./try.js";

const POLL_MS = 1000;
const TIMEOUT_MS = 5000;
const HISTORY_MS = 300_000;
const OLD_MS = 6000;
const NUM_POSITIONS = 8;

// Of a chart.
const HEIGHT = 190;
const LEAST_SPAN_MS = 60_000;
const LABEL_WIDTH = 34;
const GAP_MS = 5000;

const AT = 0, RATIO = 1, LOWER = 2, UPPER = 3, LENGTH = 4, RATE = 5, VERSION = 6; // places in a point of the history

let startedMs = null;
let history = [];
let hasSpoken = false;

function take(live) {
  if (live.started_ms !== startedMs) history = [];
  startedMs = live.started_ms;
  history.push(...live.history);
  history = history.filter((point) => point[AT] > live.now_ms - HISTORY_MS);
  hasSpoken = true;
}

function show(live) {
  const newest = history.at(-1);
  const { health, speedup } = live;
  say("model", live.model);
  document.title = speedup.ratio === null ? "Slipstream" : `${fixed(speedup.ratio)}× · Slipstream`;
  showSpeedup(speedup);
  showEndToEnd(live.end_to_end);
  say("accept-length", newest ? fixed(newest[LENGTH]) : NONE);
  say("version", live.draft_version ? `v${live.draft_version}` : "none");
  say("rate", newest && newest[RATE] !== null ? newest[RATE].toFixed(0) : "not available");
  say("requests", `${health.running} running, ${health.waiting} waiting`);
  showTotals(live.totals);
  showPositions(live.positions);
  showSources(live.sources, live.head_added);
  for (const chart of charts) chart.draw(history, marks(), live.now_ms);
  const isOld = !newest || live.now_ms - newest[AT] > OLD_MS;
  if (!health.alive || !health.ready) setStatus("trouble", health.alive ? "engine not ready" : "engine stopped");
  else setStatus(isOld ? "trouble" : "live", isOld ? "figures are old" : "live");
}

function showSpeedup(speedup) {
  const hasRatio = speedup.ratio !== null;
  byId("speedup").classList.toggle("empty", !hasRatio);
  say("speedup", hasRatio ? `${fixed(speedup.ratio)}×` : NONE);
  say("interval", hasRatio ? interval(speedup) : "not measured yet: it needs traffic, and some rounds without a draft to compare with");
  const baseline = speedup.baseline === null ? "" : ` (${speedup.baseline})`;
  say("baseline", `Decode rounds with drafts, from remembered text and from the draft head together, over plain rounds of the same engine, in the same two minutes, at equal batch sizes${baseline}. Prompts are left out, so a client sees less.`);
}

function showEndToEnd(seen) {
  say("end-to-end", seen.ratio === null ? NONE : `${fixed(seen.ratio)}×`);
  say("end-to-end-interval", seen.ratio === null ? "not measured yet" : interval(seen));
}

function interval(speedup) {
  const isBounded = speedup.lower !== null && speedup.upper !== null;
  return isBounded ? `95% interval ${fixed(speedup.lower)} … ${fixed(speedup.upper)}` : "too little traffic for an interval yet";
}

function showTotals(totals) {
  const capture = totals.captured === null ? "not captured here" : `${count(totals.captured)} captured, ${count(totals.dropped ?? 0)} dropped`;
  say("traces", capture);
  const back = totals.rollbacks === null ? "" : `, ${count(totals.rollbacks)} rolled back`;
  const failed = totals.failed_swaps ? `, ${count(totals.failed_swaps)} failed` : "";
  say("swaps", totals.swaps === null ? "not available" : `${count(totals.swaps)}${back}${failed}`);
}

function showPositions(rows) {
  const body = byId("positions");
  body.replaceChildren();
  if (rows === null || rows.length === 0) {
    const why = rows === null ? "Not available: the engine has not counted proposals by position." : "No proposals in the last two minutes.";
    say("positions-note", why);
    return;
  }
  const deepest = Math.max(...rows.map((row) => row.position));
  for (let position = 1; position <= Math.min(deepest, NUM_POSITIONS); position++) {
    const cells = ["head", "suffix"].map((source) => positionCell(source, rows.find((row) => row.source === source && row.position === position)));
    body.append(element("tr", {}, element("th", { scope: "row" }, String(position)), ...cells));
  }
  say("positions-note", deepest > NUM_POSITIONS ? `Proposals go on to position ${deepest}.` : "");
}

function positionCell(source, row) {
  if (!row) return element("td", { class: "none" }, NONE);
  const share = row.accepted / row.proposed;
  const bar = element("span", { class: `bar ${source}` });
  bar.style.width = `${100 * share}%`;
  const text = element("span", { class: "value" }, `${Math.round(100 * share)}%`, element("small", {}, ` of ${count(row.proposed)}`));
  return element("td", {}, element("span", { class: "track", "aria-hidden": "true" }, bar), text);
}

const SOURCES = { head: "draft head", own: "the request's own text", group: "its prompt group", tenant: "its tenant's earlier text", suffix: "earlier text" };

/** Accepted tokens by who proposed them, and what the head added beside earlier text. */
function showSources(found, added) {
  const total = Object.values(found ?? {}).reduce((sum, one) => sum + one, 0);
  byId("sources-section").hidden = total === 0;
  if (total === 0) return;
  const rows = Object.keys(SOURCES).filter((source) => found[source]);
  const parts = rows.map((source) => {
    const part = element("span", { class: `part ${source}` });
    part.style.width = `${(100 * found[source]) / total}%`;
    return part;
  });
  byId("sources-bar").replaceChildren(...parts);
  const legend = rows.map((source) => element("span", { class: "entry" }, element("span", { class: `dot ${source}` }), `${SOURCES[source]} ${Math.round((100 * found[source]) / total)}%`));
  byId("sources").replaceChildren(...legend);
  const isMeasured = added.ratio !== null;
  byId("head-added").hidden = !isMeasured;
  if (isMeasured) say("head-added", `In turns without the head, rounds took ${fixed(added.ratio)}× the time a token (${interval(added)}).`);
}

/** Where the version changed from one point to the next. */
function marks() {
  const found = [];
  for (let i = 1; i < history.length; i++) {
    const before = history[i - 1][VERSION], version = history[i][VERSION];
    if (version !== before) found.push({ atMs: history[i][AT], version, isBack: version < before });
  }
  return found;
}

function setStatus(kind, text) {
  document.body.dataset.connection = kind;
  say("status", text);
}

/** What the gateway says now; null where it does not answer, undefined where it refuses: the status says why. */
async function ask() {
  const since = history.length ? history.at(-1)[AT] : 0;
  try {
    const response = await fetch(`slipstream/live?since=${since}`, { headers: withKey(), signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (await isLocked(response)) {
      setStatus("trouble", "needs a key");
      return undefined;
    }
    if (!response.ok) {
      setStatus("trouble", await refusal(response));
      return undefined;
    }
    return await response.json();
  } catch {
    return null;
  }
}

async function poll() {
  try {
    const live = document.hidden ? undefined : await ask();
    if (live === null) setStatus("lost", hasSpoken ? "disconnected, trying again" : "no answer from the gateway, trying again");
    else if (live) {
      take(live);
      tryPrompt.serves(live);
      show(live);
    }
  } finally {
    setTimeout(poll, POLL_MS);
  }
}

/** A line over the last minutes, drawn by uPlot: an interval around it, a dashed line at 1, and marks where drafts changed. */
class Chart {
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

const charts = [
  new Chart("speedup-chart", "speedup-reading", {
    value: (point) => point[RATIO],
    band: (point) => [point[LOWER], point[UPPER]],
    format: (value) => `${value.toFixed(2)}×`,
    missing: "no plain rounds to compare with yet",
  }),
  new Chart("accept-chart", "accept-reading", {
    value: (point) => point[LENGTH],
    band: () => [null, null],
    format: (value) => value.toFixed(2),
    missing: "nothing verified yet",
  }),
];

setUpTheme();
setUpKey();
const tryPrompt = setUpTry();
watchDrafts();
poll();
