// The tab for chats: the messages of the open chat, the composer, and the answers that are coming in any chat.

import * as attachments from "./attachments.js";
import * as context from "./context.js";
import * as conversation from "./conversation.js";
import * as server from "./server.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { Problem } from "./api.js";
import { Run } from "./answering.js";
import { announce, byId, element, oncePerFrame, problem, toast } from "./dom.js";
import { MessageView, copyAction } from "./messages.js";

const PATH = "v1/chat/completions";
const SAVE_EVERY_MS = 1000;
const HINT = "Ask the model something.";

const runs = new Map(); // by the chat's id
let chat = conversation.newChat();
let views = new Map(); // by the message's id
let notify = () => {};
let onKept = () => {};

/** `onChange`: after a change of what would be sent; `onSaved`: after a chat was kept. */
export function setUp(onChange, onSaved) {
  notify = onChange;
  onKept = onSaved;
  const input = byId("chat-input");
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  input.value = store.recall("draft", "");
  input.addEventListener("input", () => {
    store.keep("draft", input.value);
    grow();
    measure();
    onChange();
  });
  input.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) send();
    else if (event.key === "ArrowUp" && input.value === "") editLast();
    else return;
    event.preventDefault();
  });
  byId("chat-stop").addEventListener("click", stop);
  attachments.setUp(onChange);
  addEventListener("pagehide", () => { for (const run of runs.values()) keep(run.chat); });
  grow();
}

export const current = () => chat;
export const isRunning = (id) => runs.has(id);

/** Puts a text into the composer, before what is being written. */
export function write(text) {
  const input = byId("chat-input");
  input.value = [text, input.value].filter(Boolean).join("\n\n");
  input.dispatchEvent(new Event("input"));
}

/** Stops the answer of the open chat. */
export function stop() {
  runs.get(chat.id)?.stop();
}

/** Before a chat is deleted: its answer is not kept. */
export function forget(id) {
  const run = runs.get(id);
  if (!run) return;
  run.isForgotten = true;
  run.stop();
}

/** Shows a chat; its answer may still be coming. */
export function show(shown) {
  chat = runs.get(shown.id)?.chat ?? shown;
  for (const message of chat.messages) {
    if (message.finish === "running" && !runs.has(chat.id)) message.finish = "stopped"; // the page was closed
  }
  store.keep("open", chat.id);
  draw();
  byId("messages").scrollTop = byId("messages").scrollHeight;
  notify();
}

/** What would be sent, with the message that is being written. */
export function request() {
  const draft = byId("chat-input").value.trim();
  const turns = conversation.path(chat);
  const isNew = draft || attachments.attached().length || !turns.some(({ role }) => role === "user");
  return requestOf(isNew ? [...turns, { role: "user", content: draft, images: attachments.attached() }] : turns);
}

function requestOf(turns, { continues = false } = {}) {
  const messages = [...settings.systemTurn(), ...turns.map(conversation.asSent)];
  const body = { model: server.chosenModel(), messages, stream: true, stream_options: { include_usage: true }, ...settings.chatOptions() };
  if (continues) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return { path: PATH, body };
}

function send() {
  const input = byId("chat-input");
  const text = input.value.trim();
  if (runs.has(chat.id) || server.isBaseModel() || (!text && !attachments.attached().length)) return;
  if (!settings.check({ isChat: true })) return;
  const images = attachments.takePictures();
  conversation.add(chat, { role: "user", content: text, ...(images.length ? { images } : {}) });
  setInput("");
  answer();
}

function setInput(text) {
  byId("chat-input").value = text;
  store.keep("draft", text);
  grow();
}

/** Asks for an answer after the last message, or for more of `more`, and shows it as it comes. */
async function answer(more = null) {
  const asked = chat;
  const turns = conversation.path(chat);
  const before = more ? { content: more.content, figures: more.figures } : null;
  const message = more ?? conversation.add(chat, { role: "assistant", content: "" });
  const run = new Run(chat, message, () => redraw());
  message.finish = "running";
  runs.set(asked.id, run);
  setBusy();
  drawAll();
  byId("messages").scrollTop = byId("messages").scrollHeight;
  let keptAt = performance.now();
  const redraw = oncePerFrame(() => {
    if (chat === asked) following(() => views.get(message.id)?.show());
    if (performance.now() - keptAt > SAVE_EVERY_MS) {
      keptAt = performance.now();
      if (!run.isForgotten) keep(asked);
    }
  });
  try {
    const { path, body } = requestOf(turns, { continues: more !== null });
    await run.go(path, body, settings.key());
    announce(message.tool_calls ? `The model calls ${message.tool_calls.map((call) => call.function.name).join(", ")}` : message.content);
  } catch (error) {
    fail(error, run, asked, before);
  } finally {
    runs.delete(asked.id);
    asked.changed = Date.now();
    if (!run.isForgotten) keep(asked);
    if (chat === asked) {
      setBusy();
      following(drawAll);
      measure();
    }
    notify();
  }
}

/** After an error: what had come stays. Of a request that is refused the text goes back to where it was written. */
function fail(error, run, asked, before) {
  const { message } = run;
  if (run.wasStopped) {
    if (!message.content && !message.reasoning && !message.tool_calls) conversation.remove(asked, message);
    announce("Stopped");
    return;
  }
  const words = error instanceof Problem ? error.message : `This page failed: ${error.message}`;
  if (error.needsKey) settings.askForKey();
  if (error.isRefusal && before) Object.assign(message, before, { finish: "length" });
  const question = conversation.find(asked, message.parent);
  const isFirstAnswer = conversation.versions(asked, message).length === 1;
  if (error.isRefusal && !before && question?.role === "user" && isFirstAnswer && chat === asked) {
    conversation.remove(asked, question);
    if (!byId("chat-input").value) setInput(question.content);
    attachments.giveBack(question.images ?? []);
    const sentence = /[.!?]$/.test(words) ? words : `${words}.`;
    showProblem(`${sentence} Your message is back in the field below: change it, or edit or delete earlier messages.`);
    byId("chat-input").focus();
    return;
  }
  message.problem = words;
}

function showProblem(words) {
  byId("chat-problem").replaceChildren(...(words ? [problem(words)] : []));
}

async function keep(one) {
  if (!one.messages.length) return;
  try {
    await store.save(one);
    onKept(one);
  } catch {
    toast("The browser has no space for this chat: export it, and delete others.");
  }
}

/** After a change of the open chat by its reader. */
function changed() {
  chat.changed = Date.now();
  keep(chat);
  drawAll();
  measure();
  notify();
}

export function draw() {
  views = new Map();
  showProblem("");
  drawAll();
  setBusy();
  measure();
}

/** Draws the messages of the open chat; those that are there already are kept. */
function drawAll() {
  const shown = conversation.path(chat);
  const list = byId("messages");
  views = new Map(shown.map((message) => [message.id, views.get(message.id) ?? new MessageView(message, { isPlain: settings.isPlain })]));
  const hint = element("p", { class: "hint", id: "chat-hint" }, server.isBaseModel() ? server.BASE_MODEL_WORDS : HINT);
  const roots = shown.length ? [...views.values()].map((view) => view.root) : [hint];
  roots.forEach((root, index) => { if (list.children[index] !== root) list.insertBefore(root, list.children[index] ?? null); });
  while (list.children.length > roots.length) list.lastElementChild.remove();
  for (const view of views.values()) dress(view);
  if (runs.has(chat.id)) showProblem("");
}

function dress(view) {
  const { message } = view;
  view.show();
  const isBusy = runs.has(chat.id);
  if (message.tool_calls) view.showCalls(isBusy ? [] : conversation.openCalls(chat, message), giveResult);
  view.fail(message.problem ? problem(message.problem) : null);
  const others = conversation.versions(chat, message);
  view.offer(isBusy ? [] : actionsFor(view), isBusy ? null : {
    index: others.indexOf(message), count: others.length,
    show: (index) => { conversation.choose(chat, others[index]); changed(); },
  });
}

function actionsFor(view) {
  const { message } = view;
  const { role, content, finish } = message;
  const isLast = message.id === chat.head;
  const found = content ? [copyAction(message)] : [];
  if (role === "user") found.push(["Edit", () => editQuestion(view)]);
  if (role === "assistant") {
    found.push(["Edit", () => view.edit([["Save", (text) => { message.content = text; changed(); }]])]);
    found.push([message.problem ? "Try again" : "Regenerate", () => regenerate(message)]);
    if (isLast && content && !message.tool_calls && finish !== "stop") {
      found.push(["Continue", () => goOn(message), "The model writes on where the answer ends"]);
    }
  }
  found.push(["Delete", () => remove(message), "Also deletes what follows"]);
  return found;
}

function editQuestion(view) {
  const { message } = view;
  view.edit([
    ["Send", (text) => {
      if (runs.has(chat.id) || !settings.check({ isChat: true })) return;
      conversation.add(chat, { role: "user", content: text, ...(message.images ? { images: message.images } : {}) }, message.parent);
      answer();
    }],
    ["Save", (text) => { message.content = text; changed(); }],
  ]);
}

function editLast() {
  const last = conversation.path(chat).findLast(({ role }) => role === "user");
  if (last && !runs.has(chat.id)) editQuestion(views.get(last.id));
}

/** Another answer to the same question; one that failed is replaced. */
function regenerate(message) {
  if (runs.has(chat.id) || !settings.check({ isChat: true })) return;
  if (message.problem && !message.content && !message.reasoning) conversation.remove(chat, message);
  chat.head = message.parent;
  answer();
}

function goOn(message) {
  if (runs.has(chat.id) || !settings.check({ isChat: true })) return;
  delete message.problem;
  answer(message);
}

function remove(message) {
  if (runs.has(chat.id)) return;
  const before = { messages: [...chat.messages], head: chat.head };
  const from = chat;
  conversation.remove(chat, message);
  changed();
  if (!chat.messages.length) store.remove(chat.id).then(() => onKept(chat));
  const count = before.messages.length - chat.messages.length;
  toast(`Deleted ${count === 1 ? "a message" : `${count} messages`}.`, { label: "Undo", run: () => {
    Object.assign(from, before);
    if (chat === from) changed();
    else keep(from);
  } });
}

/** The result of one tool call; the model goes on once every call has one. */
function giveResult(call, result) {
  const asked = conversation.path(chat).findLast((message) => message.tool_calls);
  conversation.add(chat, { role: "tool", tool_call_id: call.id, name: call.function.name, content: result });
  changed();
  if (!conversation.openCalls(chat, asked).length) answer();
}

function setBusy() {
  const isBusy = runs.has(chat.id);
  byId("chat-send").disabled = isBusy || server.isBaseModel();
  byId("chat-input").disabled = server.isBaseModel();
  byId("chat-stop").hidden = !isBusy;
  byId("messages").setAttribute("aria-busy", String(isBusy));
}

/** Shows how much of the context the chat takes. */
function measure() {
  const draft = byId("chat-input").value.trim();
  context.show(conversation.path(chat).findLast(({ figures }) => figures?.context)?.figures.context ?? 0, draft ? request : null);
}

function grow() {
  const input = byId("chat-input");
  input.rows = Math.min(12, Math.max(2, input.value.split("\n").length));
}

/** Changes the conversation and stays at its end, if the reader is there. */
function following(change) {
  const list = byId("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
  change();
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}
