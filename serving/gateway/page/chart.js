// One line over the last minutes, drawn as SVG: an interval around it, a dashed line at 1, and marks where drafts changed.

import { byId, clock, svg } from "./dom.js";

const HEIGHT = 190;
const PAD = { top: 22, right: 8, bottom: 22, left: 34 };
const LEAST_SPAN_MS = 60_000;
const LABEL_WIDTH = 34;
const GAP_MS = 5000;

export class Chart {
  /** `value` and `band` read a point of the history; `format` writes a value; `missing` is said where there is none. */
  constructor(id, readingId, { value, band, format, missing }) {
    this.root = byId(id);
    this.reading = byId(readingId);
    Object.assign(this, { value, band, format, missing, points: [], marks: [], nowMs: 0, pointerX: null });
    new ResizeObserver(() => this.redraw()).observe(this.root);
    this.root.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.root.addEventListener("pointerleave", () => this.point(null));
  }

  draw(points, marks, nowMs) {
    Object.assign(this, { points, marks, nowMs });
    this.redraw();
  }

  point(x) {
    this.pointerX = x;
    this.redraw();
  }

  redraw() {
    const width = this.root.clientWidth;
    if (width === 0 || this.nowMs === 0) return;
    this.root.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const known = this.points.filter((point) => this.value(point) !== null);
    const scale = this.scale(known, width);
    this.root.replaceChildren(
      this.clip(width),
      ...this.grid(scale, width),
      ...this.bands(scale),
      ...this.marked(scale),
      ...this.lines(scale),
      ...this.focus(known, scale),
    );
  }

  scale(known, width) {
    const firstMs = Math.min(this.points[0]?.[0] ?? this.nowMs, this.nowMs - LEAST_SPAN_MS);
    // The newest interval is there whole; of the first ones, which are wide, what is beside the line.
    const values = [...known.map(this.value), ...known.slice(-1).flatMap(this.band)].filter((value) => value !== null);
    const low = Math.min(1, ...values), high = Math.max(1.2, ...values);
    const margin = 0.15 * (high - low);
    const bottom = low - margin / 2, top = high + margin;
    const step = niceStep((top - bottom) / 4);
    const right = width - PAD.right, down = HEIGHT - PAD.bottom;
    return {
      firstMs, step, bottom, top,
      x: (ms) => PAD.left + ((right - PAD.left) * (ms - firstMs)) / (this.nowMs - firstMs),
      y: (value) => down - ((down - PAD.top) * (value - bottom)) / (top - bottom),
    };
  }

  clip(width) {
    const area = svg("rect", { x: PAD.left, y: PAD.top, width: Math.max(width - PAD.left - PAD.right, 0), height: HEIGHT - PAD.top - PAD.bottom });
    return svg("clipPath", { id: `${this.root.id}-clip` }, area);
  }

  grid({ x, y, step, bottom, top, firstMs }, width) {
    const lines = [];
    for (let value = Math.ceil(bottom / step) * step; value <= top; value += step) {
      const at = y(value);
      lines.push(svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: at, y2: at }));
      lines.push(svg("text", { class: "axis", x: PAD.left - 6, y: at + 4, "text-anchor": "end" }, value.toFixed(step < 0.1 ? 2 : 1)));
    }
    lines.push(svg("line", { class: "one", x1: PAD.left, x2: width - PAD.right, y1: y(1), y2: y(1) }));
    const span = Math.round((this.nowMs - firstMs) / 1000);
    const past = span < 120 ? `${span} s ago` : `${Math.round(span / 60)} min ago`;
    lines.push(svg("text", { class: "axis", x: x(firstMs), y: HEIGHT - 6 }, past));
    lines.push(svg("text", { class: "axis", x: width - PAD.right, y: HEIGHT - 6, "text-anchor": "end" }, "now"));
    return lines;
  }

  /** The points in runs without a gap. */
  runs(has) {
    const runs = [];
    let beforeMs = -Infinity;
    for (const point of this.points) {
      if (!has(point)) continue;
      if (point[0] - beforeMs > GAP_MS) runs.push([]);
      runs.at(-1).push(point);
      beforeMs = point[0];
    }
    return runs;
  }

  bands({ x, y }) {
    return this.runs((point) => this.band(point).every((bound) => bound !== null)).map((run) => {
      const ends = (index) => run.map((point) => `${x(point[0])},${y(this.band(point)[index])}`);
      return svg("polygon", { class: "band", points: [...ends(1), ...ends(0).reverse()].join(" "), "clip-path": `url(#${this.root.id}-clip)` });
    });
  }

  lines({ x, y }) {
    return this.runs((point) => this.value(point) !== null).map((run) =>
      svg("polyline", { class: "line", points: run.map((point) => `${x(point[0])},${y(this.value(point))}`).join(" ") }),
    );
  }

  marked({ x }) {
    let freeFrom = 0;
    return this.marks.flatMap(({ atMs, version, isBack }) => {
      const at = x(atMs), kind = isBack ? "mark back" : "mark swap";
      const line = svg("line", { class: kind, x1: at, x2: at, y1: PAD.top, y2: HEIGHT - PAD.bottom });
      if (at < freeFrom) return [line];
      freeFrom = at + LABEL_WIDTH;
      return [line, svg("text", { class: kind, x: at, y: PAD.top - 7, "text-anchor": "middle" }, `${isBack ? "↩" : ""}v${version}`)];
    });
  }

  /** The newest value, or the one under the pointer, in words; and a dot on it. */
  focus(known, { x, y }) {
    const newest = known.at(-1);
    if (!newest) {
      this.write(this.missing);
      return [];
    }
    const distance = (point) => Math.abs(x(point[0]) - this.pointerX);
    const chosen = this.pointerX === null ? newest : known.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    const [lower, upper] = this.band(chosen);
    const bounds = lower === null || upper === null ? "" : ` (${lower.toFixed(2)} … ${upper.toFixed(2)})`;
    const when = this.pointerX === null ? "" : `${clock(chosen[0])}  `;
    this.write(`${when}${this.format(this.value(chosen))}${bounds}`);
    return [svg("circle", { class: "dot", cx: x(chosen[0]), cy: y(this.value(chosen)), r: 4 })];
  }

  write(text) {
    if (this.reading.textContent !== text) this.reading.textContent = text;
  }
}

/** 1, 2 or 5 times a power of ten, not below `least`. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}
