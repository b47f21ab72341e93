// The tab for one prompt: /generate_stream with details, each token with its probability.

import { Problem, events } from "./api.js";
import { announce, byId, element, problem } from "./dom.js";
import * as server from "./server.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

let running = null;
let tokens = [];
let firstAt = 0;

export function setUp(onChange) {
  byId("prompt").value = store.recall("prompt", byId("prompt").value);
  byId("prompt").addEventListener("input", () => {
    store.keep("prompt", byId("prompt").value);
    onChange();
  });
  byId("generate-form").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
  });
  byId("generate-stop").addEventListener("click", stop);
  byId("generate-append").addEventListener("click", () => {
    byId("prompt").value += tokens.filter(({ special }) => !special).map(({ text }) => text).join("");
    byId("prompt").dispatchEvent(new Event("input"));
    byId("prompt").focus();
  });
  const list = byId("tokens");
  list.addEventListener("keydown", onKey);
  list.addEventListener("pointerover", ({ target }) => showDetails(target));
  list.addEventListener("focusin", ({ target }) => showDetails(target));
  list.addEventListener("click", ({ target }) => { if (target.classList.contains("token")) target.focus(); });
}

export function stop() {
  running?.abort();
}

/** What would be sent. */
export function request() {
  const parameters = { ...settings.nativeParameters(), details: true };
  if (server.chosenAdapter() !== null) parameters.adapter_id = server.chosenAdapter();
  return { path: `${server.pathPrefix()}generate_stream`, body: { inputs: byId("prompt").value, parameters } };
}

async function generate() {
  if (running || !settings.check({ isChat: false })) return;
  const abort = running = new AbortController();
  setBusy(true);
  tokens = [];
  byId("tokens").replaceChildren();
  byId("token-details").replaceChildren();
  byId("generate-result").replaceChildren();
  byId("generate-result").classList.remove("failed");
  const { path, body } = request();
  const options = { key: settings.key(), signal: abort.signal, isLast: (event) => event.generated_text !== null };
  try {
    for await (const event of events(path, body, options)) {
      add(event);
      if (event.generated_text !== null) finish(event);
    }
  } catch (error) {
    failed(error, abort);
  } finally {
    running = null;
    setBusy(false);
  }
}

function add({ token, top_tokens: alternatives = [] }) {
  if (!tokens.length) firstAt = performance.now();
  tokens.push({ ...token, alternatives });
  byId("tokens").append(element("span", {
    class: `token ${shade(token.logprob)}${token.special ? " special" : ""}`,
    role: "option",
    "aria-selected": "false",
    tabindex: tokens.length === 1 ? 0 : -1,
    "data-index": tokens.length - 1,
    "aria-label": `${visible(token.text)}, ${percent(token.logprob)}`,
  }, token.text === "" ? "·" : token.text));
}

function finish({ details, generated_text: text }) {
  const reasons = { length: "the most tokens were reached", eos_token: "the model ended", stop_sequence: "a stop text" };
  const seconds = (performance.now() - firstAt) / 1000;
  const facts = [
    `${details.generated_tokens} tokens`,
    ...(details.generated_tokens > 1 && seconds > 0 ? [`${Math.round((details.generated_tokens - 1) / seconds)} tokens/s`] : []),
    `ended: ${reasons[details.finish_reason] ?? details.finish_reason}`,
    `prompt: ${details.input_length} tokens`,
  ];
  if (details.seed !== null) facts.push(`seed ${details.seed}`);
  byId("generate-result").textContent = facts.join(" · ");
  announce(`Generated: ${text}`);
}

function failed(error, abort) {
  const result = byId("generate-result");
  if (abort.signal.aborted) {
    result.textContent = `Stopped after ${tokens.length} tokens.`;
    announce("Stopped");
    return;
  }
  result.replaceChildren(problem(error instanceof Problem ? error.message : `This page failed: ${error.message}`));
  if (error.needsKey) settings.askForKey();
}

function setBusy(isBusy) {
  byId("generate-start").disabled = isBusy;
  byId("generate-stop").hidden = !isBusy;
  byId("generate-append").hidden = isBusy || !tokens.length;
  byId("tokens").setAttribute("aria-busy", String(isBusy));
}

/** The arrow keys move between tokens. */
function onKey(event) {
  const place = Number(event.target.dataset.index ?? -1);
  const next = {
    ArrowRight: place + 1, ArrowDown: place + 1, ArrowLeft: place - 1, ArrowUp: place - 1,
    Home: 0, End: tokens.length - 1,
  }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  byId("tokens").children[Math.min(Math.max(next, 0), tokens.length - 1)]?.focus();
}

function showDetails(target) {
  const token = tokens[target.dataset?.index];
  if (!token) return;
  for (const one of byId("tokens").querySelectorAll("[aria-selected=true]")) one.setAttribute("aria-selected", "false");
  target.setAttribute("aria-selected", "true");
  const rows = [{ ...token, isChosen: true }, ...token.alternatives.filter(({ id }) => id !== token.id)];
  byId("token-details").replaceChildren(
    element("table", {},
      element("caption", {}, `Token ${Number(target.dataset.index) + 1} of ${tokens.length}`),
      element("thead", {}, element("tr", {},
        ...["Token", "Probability", "Id"].map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, ...rows.map(row))));
}

function row({ id, text, logprob, isChosen }) {
  const meter = element("meter", { min: 0, max: 1, value: Math.exp(logprob), "aria-hidden": "true" });
  return element("tr", { class: isChosen ? "chosen" : null },
    element("td", {}, element("code", {}, visible(text)), isChosen ? " chosen" : ""),
    element("td", {}, meter, " ", percent(logprob)), element("td", {}, String(id)));
}

/** A token's text with white space that can be seen. */
const visible = (text) => (text === "" ? "(part of a character)"
  : text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥"));

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share < 0.1 ? "< 0.1 %" : `${share.toFixed(1)} %`;
}

function shade(logprob) {
  const share = Math.exp(logprob);
  return `p${[0.9, 0.6, 0.3, 0.1].filter((edge) => share < edge).length}`;
}
