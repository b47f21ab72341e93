// The chat: streamed from /v1/chat/completions. `history` is what the next request sends.

import { Problem, events } from "./api.js";
import { announce, byId, element, oncePerFrame, problem } from "./dom.js";
import * as settings from "./settings.js";
import { messageView, toolCallView } from "./messages.js";

let history = [];
let running = null;
let notify = () => {};

export function setUp(onChange) {
  notify = onChange;
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("chat-input").addEventListener("input", onChange);
  byId("chat-input").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("chat-stop").addEventListener("click", stop);
  byId("chat-clear").addEventListener("click", clear);
}

export function stop() {
  running?.abort();
}

/** What would be sent, with the message that is being written. */
export function request() {
  const draft = byId("chat-input").value.trim();
  const isNew = draft || !history.some(({ role }) => role === "user");
  return requestOf(isNew ? [...history, { role: "user", content: draft }] : history);
}

function requestOf(turns) {
  const system = settings.system();
  const messages = system ? [{ role: "system", content: system }, ...turns] : [...turns];
  const body = { model: "tgi", messages, stream: true, stream_options: { include_usage: true }, ...settings.sampling() };
  const tools = settings.tools();
  if (tools) body.tools = tools;
  return { path: "v1/chat/completions", body };
}

function clear() {
  stop();
  history = [];
  byId("messages").replaceChildren(byId("chat-hint") ?? element("p", { class: "hint", id: "chat-hint" },
    "Ask the model something."));
  byId("chat-input").focus();
  notify();
}

function send() {
  const text = byId("chat-input").value.trim();
  if (running || !text || !settings.check({ withTools: true })) return;
  byId("chat-hint")?.remove();
  history.push({ role: "user", content: text });
  byId("chat-input").value = "";
  const view = messageView("user");
  view.show(text);
  byId("messages").append(view.root);
  answer();
}

/** Asks for the answer to the history, and shows it as it comes. */
async function answer() {
  for (const one of byId("messages").querySelectorAll(".again, .tool-result")) one.remove();
  const abort = running = new AbortController();
  setBusy(true);
  const view = messageView("assistant");
  byId("messages").append(view.root);
  byId("messages").scrollTop = byId("messages").scrollHeight;
  const got = { content: "", calls: [], reason: null, usage: null, began: performance.now(), first: null };
  const draw = oncePerFrame(() => following(() => view.show(got.content)));
  draw();
  try {
    const { path, body } = requestOf(history);
    const options = { key: settings.key(), signal: abort.signal, isLast: () => false };
    for await (const chunk of events(path, body, options)) {
      take(chunk, got);
      draw();
    }
    following(() => finish(got, view));
  } catch (error) {
    // A new chat has neither the question nor a place for the answer.
    if (view.root.isConnected) following(() => fail(error, got, view, abort.signal.aborted));
  } finally {
    running = null;
    setBusy(false);
    notify();
  }
}

/** Adds what a chunk brings. Parts of a tool call come by its index, each text of them in pieces. */
function take({ choices = [], usage }, got) {
  got.usage = usage ?? got.usage;
  for (const { delta, finish_reason: reason } of choices) {
    got.first ??= performance.now();
    got.content += delta.content ?? "";
    got.reason = reason ?? got.reason;
    for (const part of delta.tool_calls ?? []) {
      const call = (got.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      call.id += part.id ?? "";
      call.function.name += part.function?.name ?? "";
      call.function.arguments += part.function?.arguments ?? "";
    }
  }
}

function finish(got, view) {
  view.show(got.content);
  const calls = got.calls.filter(Boolean);
  history.push(calls.length
    ? { role: "assistant", content: got.content || null, tool_calls: calls }
    : { role: "assistant", content: got.content });
  const reasons = { length: "ended at the most tokens", stop: "", tool_calls: "calls a tool" };
  view.facts([...rates(got), reasons[got.reason] ?? got.reason]);
  for (const call of calls) view.root.append(toolCallView(call, (result) => giveResult(call, result)));
  if (!calls.length) view.root.append(againButton(() => history.pop()));
  announce(calls.length ? `The model calls ${calls.map((call) => call.function.name).join(", ")}` : got.content);
}

/** The figures of an answer: how many tokens, how fast after the first. */
function rates({ usage, began, first }) {
  if (!usage) return [];
  const seconds = (performance.now() - (first ?? began)) / 1000;
  const rate = usage.completion_tokens > 1 && seconds > 0 ? Math.round((usage.completion_tokens - 1) / seconds) : null;
  return [`${usage.prompt_tokens} tokens in, ${usage.completion_tokens} out`, rate === null ? "" : `${rate} tokens/s`];
}

/** The result of one tool call; the model goes on once every call has one. */
function giveResult(call, result) {
  history.push({ role: "tool", tool_call_id: call.id, name: call.function.name, content: result });
  const asked = history.findLast((message) => message.tool_calls);
  const given = new Set(history.filter(({ role }) => role === "tool").map((message) => message.tool_call_id));
  if (!running && asked.tool_calls.every(({ id }) => given.has(id))) answer();
}

function fail(error, got, view, isStopped) {
  view.show(got.content);
  if (isStopped) {
    view.facts(["stopped"]);
    if (got.content) history.push({ role: "assistant", content: got.content });
    view.root.append(againButton(() => { if (got.content) history.pop(); }));
    announce("Stopped");
    return;
  }
  view.root.append(problem(error instanceof Problem ? error.message : `This page failed: ${error.message}`));
  view.root.append(againButton(() => {}));
  if (error.needsKey) settings.askForKey();
}

function againButton(takeBack) {
  return element("button", { type: "button", class: "again", onclick: ({ target }) => {
    if (running) return;
    takeBack();
    target.closest(".message").remove();
    answer();
  } }, "Try again");
}

function setBusy(isBusy) {
  byId("chat-send").disabled = isBusy;
  byId("chat-stop").hidden = !isBusy;
  byId("messages").setAttribute("aria-busy", String(isBusy));
}

/** Changes the conversation and stays at its end, if the reader is there. */
function following(change) {
  const list = byId("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
  change();
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}
