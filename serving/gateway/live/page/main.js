// Asks the gateway once a second and shows its figures and their history.

import { AT, point, RANGES, seconds, showCharts } from "./charts.js";
import { beside, byId, count, element, fixed, isLocked, moment, NONE, put, refusal, say, setUpKey, setUpTheme, withKey } from "./common.js";
import { watchDrafts } from "./drafts.js";
import { setUpTerms } from "./terms.js";
import { setUpTry } from "./try.js";

const POLL_MS = 1000;
const TIMEOUT_MS = 5000;
const OLD_MS = 6000;
const NUM_POSITIONS = 8;

let startedMs = null;
let history = [];
let span = "minutes";
let hasSpoken = false;

/** Join what came after `since`, in milliseconds, to the history; for 0 it is all there is. */
function take(live, since) {
  startedMs = live.started_ms;
  history = [...(since ? history : []), ...live.history];
  // None of the future: after the server's clock has stepped back, only points since them would be asked for.
  history = history.filter((point) => point[AT] > live.now_ms - RANGES[span].ms && point[AT] <= live.now_ms);
  hasSpoken = true;
}

function show(live) {
  const { health, speedup, newest } = live;
  say("model", live.model);
  document.title = speedup.ratio === null ? "Slipstream" : `${fixed(speedup.ratio)}× · Slipstream`;
  showSpeedup(speedup);
  showEndToEnd(live.end_to_end);
  say("accept-length", fixed(point.length(newest)));
  say("version", live.draft_version ? `v${live.draft_version}` : "none");
  say("rate", point.rate(newest) === null ? "not available" : fixed(point.rate(newest), 0));
  say("first-token", point.first(newest) === null ? NONE : `${seconds(point.first(newest))}, 95% within ${seconds(point.slowest(newest))}`);
  say("requests", `${health.running} running, ${health.waiting} waiting`);
  showTotals(live.totals);
  showTrainer(live.trainer, live.draft_version);
  showPositions(live.positions);
  showSources(live.sources, live.head_added);
  // A coarser history ends with its last whole step.
  showCharts(span === "minutes" ? history : [...history, newest], live.now_ms, RANGES[span]);
  const isOld = live.now_ms - newest[AT] > OLD_MS;
  if (!health.alive || !health.ready) setStatus("trouble", health.alive ? "engine not ready" : "engine stopped");
  else setStatus(isOld ? "trouble" : "live", isOld ? "figures are old" : "live");
}

function showSpeedup(speedup) {
  const hasRatio = speedup.ratio !== null;
  byId("speedup").classList.toggle("empty", !hasRatio);
  say("speedup", hasRatio ? `${fixed(speedup.ratio)}×` : NONE);
  say("interval", hasRatio ? interval(speedup) : "not measured yet: it needs traffic, and some rounds without a draft to compare with");
  const baseline = speedup.baseline === null ? "" : ` (${speedup.baseline})`;
  say("baseline", `Decode rounds with drafts, compared with plain rounds${baseline} of the last two minutes. Prompts are left out, so a client sees less.`);
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

/** Of a trainer that the server keeps; null where it keeps none. */
function showTrainer(trainer, version) {
  byId("trainer-row").hidden = trainer === null;
  byId("trainer-notice").hidden = trainer === null || trainer.running || !trainer.num_ended;
  if (trainer === null) return;
  const { running, num_ended, exit_code, ended_ms, again_ms } = trainer;
  const how = exit_code === null ? "" : exit_code < 0 ? ` by signal ${-exit_code}` : ` with exit code ${exit_code}`;
  const ended = `ended ${num_ended === 1 ? "once," : `${num_ended} times, last`}${how} at ${moment(ended_ms)}`;
  say("trainer", running ? (num_ended ? `running; ${ended}` : "running") : num_ended ? "ended" : "starting");
  if (!running && num_ended) say("trainer-notice", `The trainer ${ended}. The server starts it again at ${moment(again_ms)}; train.log in the data directory says why it ended. Answers go on with draft v${version}, and nothing is learned meanwhile.`);
}

function showPositions(rows) {
  const lines = [];
  if (rows === null || rows.length === 0) {
    put(byId("positions"));
    const why = rows === null ? "Not available: the engine has not counted proposals by position." : "No proposals in the last two minutes.";
    say("positions-note", why);
    return;
  }
  const deepest = Math.max(...rows.map((row) => row.position));
  for (let position = 1; position <= Math.min(deepest, NUM_POSITIONS); position++) {
    const cells = ["head", "suffix"].map((source) => positionCell(source, rows.find((row) => row.source === source && row.position === position)));
    lines.push(element("tr", {}, element("th", { scope: "row" }, String(position)), ...cells));
  }
  put(byId("positions"), ...lines);
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
  put(byId("sources-bar"), ...parts);
  const legend = rows.map((source) => element("span", { class: "entry" }, element("span", { class: `dot ${source}` }), `${SOURCES[source]} ${Math.round((100 * found[source]) / total)}%`));
  put(byId("sources"), ...legend);
  const isMeasured = added.ratio !== null;
  byId("head-added").hidden = !isMeasured;
  if (isMeasured) say("head-added", `In turns without the head, rounds took ${fixed(added.ratio)}× the time a token (${interval(added)}).`);
}

function setStatus(kind, text) {
  document.body.dataset.connection = kind;
  say("status", text);
}

/** What the gateway says now; null where it does not answer, undefined where it refuses: the status says why. */
async function ask(since = history.at(-1)?.[AT] ?? 0) {
  const asked = history;
  try {
    const response = await fetch(beside(`slipstream/live?since=${since}&range=${span}`), { headers: withKey(), signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (await isLocked(response)) {
      setStatus("trouble", "needs a key");
      return undefined;
    }
    if (!response.ok) {
      setStatus("trouble", await refusal(response));
      return undefined;
    }
    const live = await response.json();
    if (asked !== history) return undefined; // of a range chosen before
    // Started again, or another gateway at this address: what it has after `since` does not continue this history.
    if (since && live.started_ms !== startedMs) return ask(0);
    take(live, since);
    return live;
  } catch {
    return null;
  }
}

async function poll() {
  try {
    const live = document.hidden ? undefined : await ask();
    if (live === null) setStatus("lost", hasSpoken ? "disconnected, trying again" : "no answer from the gateway, trying again");
    else if (live) {
      tryPrompt.serves(live);
      show(live);
    }
  } finally {
    setTimeout(poll, POLL_MS);
  }
}

setUpTheme();
setUpKey();
setUpTerms();
byId("ranges").addEventListener("change", ({ target }) => {
  span = target.value;
  history = [];
});
const tryPrompt = setUpTry();
watchDrafts();
poll();
