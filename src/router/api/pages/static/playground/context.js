// The meter below the composer: how many tokens of the context the chat takes, with the draft once it is long.

import * as server from "./server.js";
import * as settings from "./settings.js";
import { post } from "./api.js";
import { byId, element } from "./dom.js";

const COUNT_FROM = 200; // characters of a draft from which the server is asked to count
const WAIT_MS = 500;

let timer = null;
let asking = null;

/** `known`: tokens of the last answer and its prompt. `draft`: what would be sent, if something is being written. */
export function show(known, draft) {
  clearTimeout(timer);
  asking?.abort();
  draw(known, "");
  if (!draft || byId("chat-input").value.length < COUNT_FROM) return;
  timer = setTimeout(() => count(draft), WAIT_MS);
}

async function count(draft) {
  const abort = asking = new AbortController();
  try {
    const { model, messages, tools } = draft().body;
    const options = { key: settings.key(), signal: abort.signal };
    const counted = await post("chat_tokenize", { model, messages, ...(tools ? { tools } : {}) }, options);
    if (!abort.signal.aborted) draw(counted.tokenize_response.length, ", with this message");
  } catch {
    // A count that fails is no reason to bother a person: sending says what is wrong.
  }
}

function draw(tokens, words) {
  const most = server.contextTokens();
  byId("context").hidden = !most || !tokens;
  if (!most || !tokens) return;
  byId("context").replaceChildren(
    element("meter", { min: 0, max: most, high: most * 0.9, value: Math.min(tokens, most), "aria-hidden": "true" }),
    ` ${tokens.toLocaleString("en")} of ${most.toLocaleString("en")} tokens${words}`);
  byId("context").classList.toggle("over", tokens >= most);
}
