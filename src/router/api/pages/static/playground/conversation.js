// A chat as data: a tree of messages, of which one path is shown. Nothing here touches the page.
//
// chat: { id, title, created, changed, head, messages }. A message: { id, parent, role, content } and, where there are
// some, reasoning, images, tool_calls, tool_call_id, name, finish, figures. Messages with one parent are versions of one
// another; `head` is the last message of the path that is shown.

const MOST_TITLE = 60;
const ROLES = new Set(["user", "assistant", "tool"]);
const PICTURE = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/;

export const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(3)), (part) => part.toString(36)).join("");

export function newChat() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, changed: now, head: null, messages: [] };
}

/** Adds a message after `parent`, by default after the last that is shown, and shows it. */
export function add(chat, message, parent = chat.head) {
  const added = { ...message, id: newId(), parent };
  chat.messages.push(added);
  chat.head = added.id;
  chat.title ||= titleOf(added);
  return added;
}

const titleOf = ({ role, content }) => (role === "user" ? content.trim().split("\n", 1)[0].slice(0, MOST_TITLE) : "");

export const find = (chat, id) => chat.messages.find((message) => message.id === id) ?? null;

/** The messages that are shown, the first one first; only those before and with `last` if it is given. */
export function path(chat, last = chat.head) {
  const byId = new Map(chat.messages.map((message) => [message.id, message]));
  const found = [];
  for (let one = byId.get(last); one && found.length <= chat.messages.length; one = byId.get(one.parent)) found.push(one);
  return found.reverse();
}

/** A message and what has been put in its place, in the order in which they came. */
export const versions = (chat, message) => chat.messages.filter(({ parent, role }) => (
  parent === message.parent && role === message.role));

/** Shows another version, with what followed it. */
export function choose(chat, message) {
  let last = message;
  for (;;) {
    const next = chat.messages.findLast(({ parent }) => parent === last.id);
    if (!next) break;
    last = next;
  }
  chat.head = last.id;
}

/** Takes a message and all that follows it out; shows the version beside it if there is one. */
export function remove(chat, message) {
  const others = versions(chat, message).filter((one) => one !== message);
  const gone = new Set([message.id]);
  for (const { id, parent } of chat.messages) if (gone.has(parent)) gone.add(id); // parents come before their children
  chat.messages = chat.messages.filter(({ id }) => !gone.has(id));
  if (!gone.has(chat.head)) return;
  chat.head = message.parent;
  if (others.length) choose(chat, others.at(-1));
}

/** A message as the API reads it. */
export function asSent({ role, content, reasoning, images, tool_calls: calls, tool_call_id: callId, name }) {
  const sent = { role, content };
  if (images?.length) {
    sent.content = [
      ...images.map((url) => ({ type: "image_url", image_url: { url } })), ...(content ? [{ type: "text", text: content }] : []),
    ];
  }
  if (reasoning) sent.reasoning_content = reasoning;
  if (calls?.length) Object.assign(sent, { content: content || null, tool_calls: calls });
  if (callId) Object.assign(sent, { tool_call_id: callId, name });
  return sent;
}

/** Which of a message's calls have no result in the path that is shown. */
export function openCalls(chat, message) {
  const given = new Set(path(chat).filter(({ role }) => role === "tool").map((result) => result.tool_call_id));
  return (message.tool_calls ?? []).filter(({ id }) => !given.has(id));
}

/** The path that is shown, for people. */
export function toMarkdown(chat) {
  const names = { user: "You", assistant: "Model", tool: "Result of a tool" };
  const parts = path(chat).map(({ role, content, reasoning, images, tool_calls: calls }) => [
    `## ${names[role]}`,
    ...(reasoning ? [`> ${reasoning.trim().replaceAll("\n", "\n> ")}`] : []),
    ...(images?.length ? [`(${images.length} ${images.length === 1 ? "picture" : "pictures"})`] : []),
    ...(content ? [content.trim()] : []),
    ...(calls ?? []).map((call) => `Calls \`${call.function.name}\`: \`${call.function.arguments}\``),
  ].join("\n\n"));
  return `# ${chat.title || "Chat"}\n\n${parts.join("\n\n")}\n`;
}

export const toExport = (chats) => JSON.stringify({ format: "tercet-chats", version: 1, chats }, null, 2);

/** The chats of a file: an export of this page, or a list of messages as the API takes them. Throws Error with words. */
export function fromExport(text) {
  let read;
  try {
    read = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (read?.format === "tercet-chats" && Array.isArray(read.chats)) return read.chats.map(chatFrom);
  const messages = Array.isArray(read) ? read : read?.messages;
  if (!Array.isArray(messages)) throw new Error("The file has neither chats of this page nor a list of messages.");
  const chat = newChat();
  for (const message of messages) {
    if (message?.role === "system" || message?.role === "developer") continue; // the settings have the system prompt
    add(chat, messageFrom(message), chat.head);
  }
  return [chat];
}

function chatFrom(read) {
  const chat = newChat();
  const renamed = new Map();
  if (!Array.isArray(read?.messages)) throw new Error("A chat of the file has no messages.");
  for (const message of read.messages) {
    const parent = renamed.get(message?.parent) ?? null;
    renamed.set(message?.id, add(chat, messageFrom(message), parent).id);
  }
  chat.head = renamed.get(read.head) ?? chat.messages.at(-1)?.id ?? null;
  if (typeof read.title === "string") chat.title = read.title.slice(0, MOST_TITLE);
  for (const time of ["created", "changed"]) if (Number.isFinite(read[time])) chat[time] = read[time];
  return chat;
}

/** What a file says of a message, of which only known fields of the right type are taken. */
function messageFrom(read) {
  if (!ROLES.has(read?.role)) throw new Error(`A message of the file has the role ${JSON.stringify(read?.role)}.`);
  const message = { role: read.role, content: textOf(read.content) };
  const reasoning = read.reasoning ?? read.reasoning_content;
  if (typeof reasoning === "string" && reasoning) message.reasoning = reasoning;
  const images = (read.images ?? partsOf(read.content, "image_url").map(({ image_url: image }) => image?.url));
  if (Array.isArray(images) && images.length) message.images = images.filter((url) => PICTURE.test(url));
  if (Array.isArray(read.tool_calls) && read.tool_calls.length) message.tool_calls = read.tool_calls.map(callFrom);
  if (typeof read.tool_call_id === "string") message.tool_call_id = read.tool_call_id;
  if (typeof read.name === "string") message.name = read.name;
  if (typeof read.finish === "string") message.finish = read.finish;
  return message;
}

function callFrom(read) {
  const { name, arguments: given } = read?.function ?? {};
  const text = typeof given === "string" ? given : JSON.stringify(given ?? {});
  return { id: String(read?.id ?? newId()), type: "function", function: { name: String(name ?? ""), arguments: text } };
}

const partsOf = (content, type) => (Array.isArray(content) ? content.filter((part) => part?.type === type) : []);
const textOf = (content) => (typeof content === "string" ? content
  : partsOf(content, "text").map(({ text }) => String(text)).join(""));
