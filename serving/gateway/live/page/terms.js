// A sentence behind each term: a button opens it beside itself; Escape, or a click elsewhere, closes it.

import { byId, element } from "./common.js";

/** Text, or terms of their own with a sentence each. The glossary of docs/reference/glossary.md has the same words. */
const TERMS = {
  speedup: "Time a token in plain decode rounds over time a token in rounds with drafts, at the same batch size, in the same two minutes. A small share of rounds drafts nothing, so that there is a baseline. 95 of 100 such intervals hold the true value.",
  "end-to-end": "Time a token as clients see it, prompts included: in stretches of rounds in which all requests are served plainly, over that in the other rounds.",
  accept: "Tokens that one verification commits: the accepted proposals, and one token of the target's own. Plain decoding commits 1.00.",
  draft: "The draft head is a small network that proposes what the target model may say next. Each version of it replaces the one before while requests run.",
  rate: "Tokens that the engine commits in a second, for all requests together, over the last ten seconds.",
  "first-token": "Seconds from a request's headers to the first token of its answer, of answers that began in the last minute: half began within the median, 95 of 100 within the 95th percentile. Both are read from a histogram.",
  requests: "Running requests get tokens in each decode round; waiting requests have no place in the batch yet.",
  traces: "A trace is what one answer teaches the trainer. It is captured when its answer ends, and dropped when it finds no room or may not be kept.",
  swaps: "Replacements of the draft's weights between two decode steps; and versions that were rolled back since they were worse on live traffic.",
  trainer: "The process that learns from traces and writes draft versions. The server starts it again when it ends, later each time that it ends soon.",
  sources: {
    "draft head": "The small network proposed the token.",
    "own text": "The token continues what the same request has said before.",
    "prompt group": "It continues an answer to the same prompt, as in a rollout.",
    "tenant's earlier text": "It continues another request of the same tenant.",
  },
  positions: "How many proposals deep a token stands in its round. The target accepts proposals from the first one on, up to the first that it would not have said.",
  head: "The small network that is trained on live traffic.",
  suffix: "Suffix drafts: proposals that continue text which occurred before, in the request, its prompt group, or the tenant's other requests.",
  version: {
    "in service": "An engine drafts with it now.",
    canary: "One engine tries it while the other engines wait.",
    pinned: "Engines serve it whatever the trainer publishes.",
    published: "Engines are to install it.",
    "last good": "What engines fall back to.",
  },
  state: {
    written: "Its files are complete on disk.",
    validated: "Its files were read back and verified.",
    "passed the gate": "It beat the version before it on held-out traces.",
    "on trial": "An engine has it in service and compares it with the version before.",
    promoted: "Live traffic confirmed it.",
    "rolled back": "Live traffic, or an operator, spoke against it.",
    quarantined: "No engine takes it any more.",
    damaged: "Its files cannot be read.",
  },
  gate: "The gate decodes held-out traces with the candidate and with the draft before it. It compares their accept lengths, with a 95% interval.",
  "held-out": "Traces that judge candidates; they are learned from only once they judge no longer.",
  operate: {
    promote: "Engines serve this version, until the trainer publishes a newer one.",
    pin: "Engines serve this version whatever the trainer publishes.",
    unpin: "Engines serve what is published.",
    "roll back": "No engine takes this version any more; the last good one is served instead.",
  },
  events: {
    gate: "A candidate was compared with the version in service: promote, refuse, or hold and train on.",
    review: "The trainer compared a version in service with the one before it, on new traces.",
    "golden set renewed": "The traces that guard what came first were replaced, since traffic has moved for good.",
    "publishing paused": "The trainer publishes nothing until what made it stop is over.",
  },
};

export function setUpTerms() {
  const note = byId("term-note");
  document.addEventListener("click", ({ target }) => {
    const button = target.closest(".term");
    if (!button) return;
    const found = TERMS[button.dataset.term];
    byId("term-title").textContent = button.textContent;
    byId("term-text").replaceChildren(typeof found === "string" ? element("p", {}, found) : list(found));
    note.hidePopover(); // of another term
    note.showPopover();
    place(note, button.getBoundingClientRect());
    note.focus({ preventScroll: true });
  });
}

const list = (terms) => element("dl", {}, ...Object.entries(terms).flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]));

/** Below the button where there is room, else above it; within the window's width. */
function place(note, button) {
  const { width, height } = note.getBoundingClientRect(), view = document.documentElement;
  const isBelow = button.bottom + height + 12 < view.clientHeight || button.top < height + 12;
  note.style.left = `${scrollX + Math.max(8, Math.min(button.left, view.clientWidth - width - 8))}px`;
  note.style.top = `${scrollY + (isBelow ? button.bottom + 6 : button.top - height - 6)}px`;
}
