// What the parts of the page share: text into elements, the API key, the theme.

export const byId = (id) => document.getElementById(id);

/** Beside this page; a relative address would take a login from the page's own, and fetch refuses those. */
export const beside = (path) => new URL(path, location.origin + location.pathname).href;

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

/** Children for a node; those that it has already stay, and with them what is selected. */
export function put(node, ...children) {
  for (const [at, child] of children.entries()) {
    const old = node.childNodes[at];
    if (!old) node.append(child);
    else if (old.cloneNode().isEqualNode(child.cloneNode())) put(old, ...child.childNodes);
    else old.replaceWith(child);
  }
  while (node.childNodes.length > children.length) node.lastChild.remove();
}

/** Unlike one with `disabled`, such a button keeps the focus, and is heard: what listens to it must look first. */
export const setOff = (button, off) => button.setAttribute("aria-disabled", off);

export const isOff = (button) => button.getAttribute("aria-disabled") === "true";

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

// -- the API key: asked for once the gateway refuses, kept by this tab, sent to this gateway alone --

let key = "";

export function setUpKey() {
  takeKey();
  addEventListener("hashchange", takeKey);
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = byId("api-key").value;
    say("key-status", "asking …");
  });
}

/** A link may bring it: what is behind the # is sent to nobody, and leaves the address at once. */
function takeKey() {
  const found = /^#key=(.+)$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", location.pathname);
  key = decoded(found[1]);
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    // Not percent-encoded: a % of the key's own.
    return text;
  }
}

export const hasKey = () => key !== "";

/** `headers`, and the key where there is one. */
export const withKey = (headers = {}) => withBearer(key, headers);

export function withBearer(secret, headers) {
  // A header holds bytes, and the gateway compares the UTF-8 of what was typed.
  const bytes = String.fromCharCode(...new TextEncoder().encode(secret));
  return secret ? { ...headers, authorization: `Bearer ${bytes}` } : headers;
}

/** Ask for a key, or stop asking; true where this answer is a refusal for want of the right one. */
export async function isLocked(response) {
  const locked = response.status === 401;
  if (!locked && byId("entry").contains(document.activeElement)) document.querySelector("main").focus();
  byId("entry").hidden = !locked;
  // A link is followed without the key.
  if (locked) byId("links").hidden = true;
  if (locked) say("key-status", key ? await refusal(response) : "");
  return locked;
}

/** Why the gateway, or what stands before it, refuses. A proxy that gets no answer says 502 or 504, in no form of ours. */
export async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    const { status } = response;
    return [502, 504].includes(status) ? `no answer from the gateway (status ${status})` : `refused with status ${status}`;
  }
}

// -- dark, light, or as the system has it; remembered in this browser --

const CHOICES = ["system", "dark", "light"];
const THEME_KEY = "slipstream-theme";

export function setUpTheme() {
  apply(remembered());
  byId("theme").addEventListener("click", () => {
    const next = CHOICES[(CHOICES.indexOf(document.documentElement.dataset.theme) + 1) % CHOICES.length];
    remember(next);
    apply(next);
  });
}

// A browser that blocks a site's data throws; then the choice lasts as long as the page.
function remembered() {
  try {
    return localStorage.getItem(THEME_KEY);
  } catch {
    return null;
  }
}

function remember(theme) {
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    return;
  }
}

function apply(stored) {
  const theme = CHOICES.includes(stored) ? stored : "system";
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}
