// The form that asks the model, and its streamed answer, coloured by where each token comes from.

import { beside, byId, element, fixed, hasKey, refusal, say, setOff, withKey } from "./common.js";

const SOURCES = ["head", "suffix", "target"];
const WORDS = { head: "from the head", suffix: "from remembered text", target: "the target's own" };

export function setUpTry() {
  const served = { model: null, shows_tokens: false };
  let running = null;

  async function run(ask) {
    if (running || served.model === null) return;
    running = new AbortController();
    setBusy(true);
    try {
      await ask(served, running.signal);
    } finally {
      running = null;
      setBusy(false);
    }
  }
  byId("prompt-form").addEventListener("submit", (event) => {
    event.preventDefault();
    run(ask);
  });
  byId("compare").addEventListener("click", () => byId("prompt-form").reportValidity() && run(compare));
  byId("stop").addEventListener("click", () => running?.abort());
  byId("copy").addEventListener("click", () => copyAsCurl(served));
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("prompt-form").requestSubmit();
  });

  /** What the gateway serves now. An engine that shows tokens can also do without drafts. */
  return {
    serves({ model, shows_tokens }) {
      Object.assign(served, { model, shows_tokens });
      byId("compare").hidden = !shows_tokens;
    },
  };
}

function setBusy(isBusy) {
  for (const id of ["send", "compare"]) setOff(byId(id), isBusy);
  setOff(byId("stop"), !isBusy);
}

function ask(served, signal) {
  showSides(false);
  return answer("answer", question(served), served, signal);
}

/** One after the other, so that neither takes the other's time. */
async function compare(served, signal) {
  showSides(true);
  // With one seed a sampled text does not depend on drafts either.
  const body = { ...question(served), seed: crypto.getRandomValues(new Uint32Array(1))[0] };
  const drafted = await answer("answer", body, served, signal);
  if (!drafted.isDone) return;
  // It leaves no text behind that the next one could be proposed from.
  const plain = await answer("plain", { ...body, slipstream: { ...body.slipstream, draft: false, capture: false } }, served, signal);
  if (plain.isDone) say("comparison", compared(drafted, plain));
}

function showSides(areTwo) {
  byId("plain-side").hidden = byId("drafted-title").hidden = !areTwo;
  byId("plain").replaceChildren();
  for (const id of ["plain-status", "comparison"]) say(id, "");
}

function compared(drafted, plain) {
  const [a, b] = [drafted.text, plain.text];
  let at = 0;
  while (at < a.length && a[at] === b[at]) at++;
  const isEqual = a === b;
  const texts = isEqual ? "Both texts are equal" : `The texts differ from character ${at + 1} on: without kernels of its own, the engine's rounding in bfloat16 can decide between two tokens that are nearly as likely`;
  const [fast, slow] = [drafted.rate(), plain.rate()];
  return fast && slow ? `${texts}. ${fast.toFixed(0)} tokens a second with drafts, ${slow.toFixed(0)} plainly: ${fixed(fast / slow)}×.` : `${texts}.`;
}

async function copyAsCurl(served) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl -N ${quoted(beside("v1/chat/completions"))}`, "-H 'content-type: application/json'"];
  if (hasKey()) lines.push('-H "authorization: Bearer $SLIPSTREAM_API_KEY"'); // the key itself is not for the clipboard
  const command = [...lines, `-d ${quoted(JSON.stringify(question(served), null, 2))}`].join(" \\\n  ");
  byId("curl").hidden = byId("copy-status").hidden = false;
  say("curl", command);
  try {
    await navigator.clipboard.writeText(command);
    say("copy-status", "Copied.");
  } catch {
    // Browsers give no clipboard to a page that came over HTTP from another machine.
    say("copy-status", "This browser does not let the page copy: select the command.");
    getSelection().selectAllChildren(byId("curl"));
  }
}

/** Stream the answer to `body` into the element `id`, and say there how it went. */
async function answer(id, body, served, signal) {
  const shown = new Answer(id, served.shows_tokens), status = `${id}-status`;
  say(status, "waiting for the first token");
  try {
    const response = await fetch(beside("v1/chat/completions"), {
      method: "POST",
      headers: withKey({ "content-type": "application/json" }),
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      shown.take(event);
    }
    if (!shown.isDone) throw new Error("the answer broke off");
    say(status, shown.summary());
  } catch (failure) {
    const what = shown.firstMs === null ? "No answer" : "Broke off";
    say(status, signal.aborted ? "Stopped." : `${what}: ${failure.message}`);
  }
  return shown;
}

function question({ model, shows_tokens }) {
  const extension = { capture: byId("learn").checked, ...(shows_tokens ? { tokens: true } : {}) };
  return {
    model,
    messages: [{ role: "user", content: byId("prompt").value }],
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    slipstream: extension,
  };
}

/** The data of each server-sent event, up to [DONE]. */
async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // the end of an event, or a comment
      const data = line.slice("data:".length).trim();
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

class Answer {
  constructor(id, showsTokens) {
    this.askedMs = performance.now();
    this.firstMs = this.lastMs = null;
    this.usage = this.reasoning = null;
    this.isDone = false;
    this.text = "";
    this.counts = { head: 0, suffix: 0, target: 0 };
    this.showsTokens = showsTokens;
    this.root = byId(id);
    this.root.replaceChildren();
    this.root.hidden = false;
    byId("answer-legend").hidden = !showsTokens;
    byId("uncoloured").hidden = showsTokens;
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    if (choice.finish_reason) this.isDone = true;
    this.lastMs = performance.now(); // the last token may have no text, and takes its time all the same
    const text = choice.delta.content ?? "", thought = choice.delta.reasoning_content ?? "";
    if (!text && !thought) return;
    this.firstMs ??= this.lastMs;
    const isAtEnd = this.root.scrollHeight - this.root.scrollTop - this.root.clientHeight < 40;
    if (thought) this.think(thought);
    if (text) this.show(text, choice);
    if (isAtEnd) this.root.scrollTop = this.root.scrollHeight;
  }

  /** What the model thinks before it answers comes apart from its answer, and has no pieces. */
  think(thought) {
    if (this.reasoning === null) {
      this.reasoning = element("p", {});
      this.root.prepend(element("details", { class: "reasoning", open: "" }, element("summary", {}, "Reasoning"), this.reasoning));
    }
    this.reasoning.append(thought);
  }

  show(text, choice) {
    this.text += text;
    for (const piece of choice.slipstream?.pieces ?? [{ text, source: "plain" }]) {
      this.root.append(element("span", { class: `token ${piece.source}` }, piece.text));
      if (piece.source in this.counts) this.counts[piece.source]++;
    }
  }

  /** Tokens a second behind the first one; null where too few came, or too fast, to say. */
  rate() {
    const tokens = this.usage?.completion_tokens, seconds = (this.lastMs - this.firstMs) / 1000;
    return tokens > 1 && seconds > 0.02 ? (tokens - 1) / seconds : null;
  }

  /** In words: how long, how fast, and whose tokens. Without `usage` there is no count of tokens. */
  summary() {
    const first = `first token after ${fixed((this.firstMs - this.askedMs) / 1000)} s`;
    const tokens = this.usage?.completion_tokens;
    if (!tokens || tokens < 2 || this.firstMs === null) return this.firstMs === null ? "The answer is empty." : first;
    const parts = [`${tokens} tokens`], rate = this.rate();
    if (rate) parts.push(`${rate.toFixed(0)} a second`);
    const accepted = this.usage.completion_tokens_details?.accepted_prediction_tokens;
    // The prefill commits the first token; each round commits what was accepted of its proposals, and one more.
    if (this.showsTokens) parts.push(`${fixed((tokens - 1) / Math.max(tokens - 1 - accepted, 1))} a step`);
    parts.push(first);
    const total = SOURCES.reduce((sum, source) => sum + this.counts[source], 0);
    if (total) parts.push(SOURCES.map((source) => `${Math.round((100 * this.counts[source]) / total)}% ${WORDS[source]}`).join(", "));
    return parts.join(" · ");
  }
}
