// The form that asks the model, and its streamed answer, coloured by where each token comes from.

import { byId, element, fixed, refusal, say, withKey } from "./common.js";

const SOURCES = ["head", "suffix", "target"];
const WORDS = { head: "from the head", suffix: "from remembered text", target: "the target's own" };

export function setUpTry() {
  const served = { model: null, shows_tokens: false };
  let running = null;

  byId("prompt-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running || served.model === null) return;
    running = new AbortController();
    byId("send").disabled = true;
    byId("stop").disabled = false;
    try {
      await answer(served, running.signal);
    } finally {
      running = null;
      byId("send").disabled = false;
      byId("stop").disabled = true;
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("prompt-form").requestSubmit();
  });

  /** What the gateway serves now. */
  return { serves: (live) => Object.assign(served, { model: live.model, shows_tokens: live.shows_tokens }) };
}

async function answer(served, signal) {
  const shown = new Answer(served.shows_tokens);
  say("answer-status", "waiting for the first token");
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: withKey({ "content-type": "application/json" }),
      body: JSON.stringify(question(served)),
      signal,
    });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      shown.take(event);
    }
    if (!shown.isDone) throw new Error("the answer broke off");
    say("answer-status", shown.summary());
  } catch (failure) {
    const what = shown.firstMs === null ? "No answer" : "Broke off";
    say("answer-status", signal.aborted ? "Stopped." : `${what}: ${failure.message}`);
  }
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
  constructor(showsTokens) {
    this.askedMs = performance.now();
    this.firstMs = this.lastMs = null;
    this.usage = null;
    this.isDone = false;
    this.counts = { head: 0, suffix: 0, target: 0 };
    this.showsTokens = showsTokens;
    this.root = byId("answer");
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
    const text = choice.delta.content;
    if (!text) return;
    this.firstMs ??= this.lastMs;
    const isAtEnd = this.root.scrollHeight - this.root.scrollTop - this.root.clientHeight < 40;
    for (const piece of choice.slipstream?.pieces ?? [{ text, source: "plain" }]) {
      this.root.append(element("span", { class: `token ${piece.source}` }, piece.text));
      if (piece.source in this.counts) this.counts[piece.source]++;
    }
    if (isAtEnd) this.root.scrollTop = this.root.scrollHeight;
  }

  /** In words: how long, how fast, and whose tokens. Without `usage` there is no count of tokens. */
  summary() {
    const first = `first token after ${fixed((this.firstMs - this.askedMs) / 1000)} s`;
    const tokens = this.usage?.completion_tokens;
    if (!tokens || tokens < 2 || this.firstMs === null) return this.firstMs === null ? "The answer is empty." : first;
    const seconds = (this.lastMs - this.firstMs) / 1000;
    const parts = [`${tokens} tokens`];
    if (seconds > 0.02) parts.push(`${((tokens - 1) / seconds).toFixed(0)} a second`);
    const accepted = this.usage.completion_tokens_details?.accepted_prediction_tokens;
    // The prefill commits the first token; each round commits what was accepted of its proposals, and one more.
    if (this.showsTokens) parts.push(`${fixed((tokens - 1) / Math.max(tokens - 1 - accepted, 1))} a step`);
    parts.push(first);
    const total = SOURCES.reduce((sum, source) => sum + this.counts[source], 0);
    if (total) parts.push(SOURCES.map((source) => `${Math.round((100 * this.counts[source]) / total)}% ${WORDS[source]}`).join(", "));
    return parts.join(" · ");
  }
}
