// The API key, where the gateway has keys: asked for once it refuses, kept by this tab, sent to this gateway alone.

import { byId, say } from "./dom.js";

let key = "";

export function setUpKey() {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = byId("api-key").value;
    say("key-status", "asking …");
  });
}

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
  byId("entry").hidden = !locked;
  // A link is followed without the key.
  if (locked) byId("links").hidden = true;
  if (locked) say("key-status", key ? await refusal(response) : "");
  return locked;
}

/** Why the gateway, or what stands before it, refuses. */
export async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `refused with status ${response.status}`;
  }
}
