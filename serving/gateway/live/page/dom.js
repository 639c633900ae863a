// Small helpers for building the page: text only ever goes in as text.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Set text only where it differs, so that screen readers and selections are left alone. */
export function say(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

export const NONE = "–";

export const fixed = (value, digits = 2) => (value === null ? NONE : value.toFixed(digits));

export const count = (value) => (value === null ? "not available" : Math.round(value).toLocaleString("en"));

/** 0.098 as "+9.8%". */
export function signedPercent(share) {
  const percent = Math.round(1000 * share) / 10;
  return `${percent < 0 ? "−" : "+"}${Math.abs(percent).toFixed(1)}%`;
}

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

/** The time of day, with the day where it is not today. */
export function moment(ms) {
  const day = new Date(ms);
  const isToday = day.toDateString() === new Date().toDateString();
  return isToday ? clock(ms) : `${day.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock(ms)}`;
}
