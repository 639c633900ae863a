// Draft versions and events, which every API key may see, and the actions on them, which need the admin key.

import { beside, byId, element, fixed, isOff, moment, NONE, refusal, say, setOff, signedPercent, withBearer, withKey } from "./common.js";

const POLL_MS = 2000;
const TIMEOUT_MS = 10_000;
const ACT_TIMEOUT_MS = 30_000;

const STATES = {
  written: "written", validated: "validated", scored: "passed the gate", live: "on trial", promoted: "promoted",
  rolled_back: "rolled back", quarantined: "quarantined",
};
const KINDS = {
  gate: "Gate", live: "On trial", promoted: "Promoted", rolled_back: "Rolled back", quarantined: "Quarantined",
  promote: "Operator promoted", rollback: "Operator rolled back", pin: "Pinned", unpin: "Unpinned", export: "Exported",
  publishing_paused: "Publishing paused", publishing_resumed: "Publishing goes on",
  golden_renewed: "Golden set renewed", review: "Review",
  erase: "Tenant erased",
};
const BAD = new Set(["rolled_back", "quarantined", "rollback", "publishing_paused"]);

let shown = "";
let versions = [];

export function watchDrafts() {
  // No button submits: Enter in a text field must not set off whichever comes first.
  byId("admin-form").addEventListener("submit", (event) => event.preventDefault());
  for (const button of actions()) button.addEventListener("click", () => isOff(button) || act(button.value));
  poll();
}

async function poll() {
  try {
    if (!document.hidden) await refresh();
  } finally {
    setTimeout(poll, POLL_MS);
  }
}

async function refresh() {
  let text = "", board = null, why = "The draft store cannot be read now";
  try {
    const response = await fetch(beside("slipstream/drafts"), { headers: withKey(), signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (response.status === 401) return; // the head of the page asks for a key
    if (response.ok) board = JSON.parse((text = await response.text()));
    else why = await refusal(response);
  } catch (failure) {
    if (failure instanceof TypeError) return; // the head of the page says that the gateway is gone
  }
  if (board === null) {
    say("versions-note", `${why.replace(/\.$/, "")}; trying again.`);
    shown = "";
  } else if (text !== shown) {
    shown = text;
    show(board);
  }
}

function show(board) {
  byId("desk").hidden = byId("events-section").hidden = !board.available;
  if (!board.available) {
    say("versions-note", "Not available: this gateway was started without a draft store.");
    return;
  }
  const more = board.num_versions - board.versions.length;
  const older = more > 0 ? ` ${more} older ones are left out.` : "";
  const redis = board.knows_engines ? "" : " Redis does not answer: what is in service is not known now.";
  const pin = board.pinned === null ? "" : ` Version ${board.pinned} is pinned.`;
  const rest = board.trainer_rests ? " The trainer rests: no engine asks the draft head, and more training would hardly change that." : "";
  say("versions-note", `Each must beat the one before it on answers that neither has learned from, then holds its place on live traffic or is taken back.${rest}${pin}${redis}${older}`);
  versions = board.versions;
  byId("versions").replaceChildren(...board.versions.map(versionRow));
  byId("events").replaceChildren(...board.events.map(eventItem));
  showChoices(board.versions);
}

function versionRow(row) {
  const gate = row.gate;
  const tags = [];
  if (row.num_engines) tags.push(row.num_engines > 1 ? `in service on ${row.num_engines}` : "in service");
  if (row.has_canary) tags.push("canary");
  if (row.is_pinned) tags.push("pinned");
  else if (row.is_desired && !row.num_engines) tags.push("published");
  if (row.is_last_good && !row.num_engines) tags.push("last good");
  const state = row.is_damaged ? "damaged" : (STATES[row.state] ?? "unknown");
  const lengths = gate ? `${fixed(gate.incumbent_length)} → ${fixed(gate.candidate_length)}` : NONE;
  return element("tr", row.num_engines ? { class: "serving" } : {},
    element("th", { scope: "row" }, `v${row.version}`, ...tags.map((tag) => element("span", { class: "tag" }, tag))),
    element("td", {}, element("span", { class: `state ${row.state}` }, state)),
    element("td", { class: "wide" }, lengths),
    element("td", {}, gate ? change(gate) : "not judged"),
    element("td", { class: "wide" }, gate ? String(gate.num_traces) : NONE),
    element("td", { class: "wide" }, row.parent === null ? NONE : `v${row.parent}`),
    element("td", { class: "wide" }, row.created_ms === null ? NONE : moment(row.created_ms)));
}

function change(found) {
  if (found.change === null) return NONE;
  const bounds = found.lower === null || found.upper === null ? "" : ` ${signedPercent(found.lower)} … ${signedPercent(found.upper)}`;
  return element("span", { class: "change" }, signedPercent(found.change), element("small", {}, bounds));
}

function eventItem(event) {
  const parts = [element("time", { datetime: new Date(event.at_ms).toISOString() }, moment(event.at_ms))];
  const name = KINDS[event.kind] ?? event.kind.replaceAll("_", " ");
  parts.push(element("b", BAD.has(event.kind) ? { class: "bad" } : {}, event.outcome ? `${name}: ${event.outcome}` : name));
  if (event.version !== null) parts.push(element("span", {}, `v${event.version}`));
  if (event.change !== null) parts.push(change(event));
  if (event.reason) parts.push(element("span", { class: "reason" }, event.reason));
  return element("li", {}, ...parts.flatMap((part) => [part, " "]));
}

function showChoices(versions) {
  const select = byId("admin-version"), chosen = select.value;
  select.replaceChildren(...versions.map(({ version }) => element("option", { value: String(version) }, `v${version}`)));
  if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
}

function actions() {
  return byId("admin-form").querySelectorAll("button[value]");
}

async function act(action) {
  const version = byId("admin-version").value;
  const path = { promote: `${version}/promote`, pin: `${version}/pin`, unpin: "unpin", rollback: "rollback" }[action];
  const body = action === "rollback" ? JSON.stringify({ version: Number(version), reason: byId("admin-reason").value }) : "";
  if (action === "rollback" && !byId("admin-reason").value.trim()) {
    say("admin-status", "Say why: a rollback needs a reason.");
    byId("admin-reason").focus();
    return;
  }
  if (!(await isConfirmed(action, Number(version)))) return;
  say("admin-status", "asking …");
  for (const button of actions()) setOff(button, true);
  try {
    const response = await fetch(beside(`admin/drafts/${path}`), { method: "POST", headers: headers(), body, signal: AbortSignal.timeout(ACT_TIMEOUT_MS) });
    say("admin-status", response.ok ? outcome(action, await response.json()) : await refusal(response));
  } catch {
    say("admin-status", "The gateway did not say whether that was done. The table of draft versions shows what happened.");
  } finally {
    for (const button of actions()) setOff(button, false);
  }
  await refresh();
}

const ACTIONS = {
  promote: ["Promote", "Engines install it now, and serve it until the trainer publishes a newer one."],
  pin: ["Pin", "Engines install it now, and serve it whatever the trainer publishes, until somebody unpins it."],
  unpin: ["Unpin", "Engines install what is published."],
  rollback: ["Roll back", "No engine takes it any more, and the last good version is served instead."],
};

/** Ask before anything changes what users are served with. */
function isConfirmed(action, version) {
  const [name, effect] = ACTIONS[action], dialog = byId("confirm"), yes = byId("confirm-yes");
  const serving = versions.filter((row) => row.num_engines).map((row) => `v${row.version}`).join(", ");
  say("confirm-title", action === "unpin" ? "Unpin?" : `${name} version ${version}?`);
  say("confirm-text", `${effect} ${serving ? `Now in service: ${serving}.` : ""}`);
  yes.textContent = name;
  yes.className = action === "rollback" ? "danger" : "";
  dialog.showModal();
  return new Promise((settle) => {
    dialog.returnValue = "";
    yes.onclick = () => dialog.close("yes");
    byId("confirm-no").onclick = () => dialog.close();
    dialog.onclose = () => settle(dialog.returnValue === "yes");
  });
}

function headers() {
  return withBearer(byId("admin-key").value, { "content-type": "application/json" });
}

function outcome(action, found) {
  const done = { promote: "promoted", pin: "pinned", unpin: "no longer pinned", rollback: "rolled back" }[action];
  return `Version ${found.version} is ${done}; engines should run ${found.desired === null ? "what they have" : `version ${found.desired}`}.`;
}
