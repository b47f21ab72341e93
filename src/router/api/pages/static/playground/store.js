// What the browser keeps: chats in IndexedDB, settings in localStorage. A page below another prefix has its own.

const PLACE = new URL(".", document.baseURI).pathname;
const NAME = `tercet:${PLACE}`;
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(NAME) : null;

let database = null;
const unkept = new Map(); // where the browser keeps nothing

/** Opens the store. False: the browser keeps nothing, and chats end with the page. */
export async function open() {
  try {
    database = await new Promise((resolve, reject) => {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("chats", { keyPath: "id" });
        request.result.createObjectStore("heads", { keyPath: "id" });
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = request.onblocked = () => reject(request.error);
    });
    return true;
  } catch {
    database = null;
    return false;
  }
}

/** Id, title and times of every chat, the last changed first. */
export async function list() {
  const heads = database ? await done(stores("readonly").heads.getAll()) : [...unkept.values()];
  return heads.sort((one, other) => other.changed - one.changed);
}

export async function load(id) {
  return (database ? await done(stores("readonly").chats.get(id)) : unkept.get(id)) ?? null;
}

/** Keeps a chat. Throws where there is no space for it. */
export async function save(chat) {
  if (!database) {
    unkept.set(chat.id, chat);
    return;
  }
  const { chats, heads, transaction } = stores("readwrite");
  const { id, title, created, changed } = chat;
  chats.put(chat);
  heads.put({ id, title, created, changed });
  await finished(transaction);
  channel?.postMessage(id);
}

export async function remove(id) {
  unkept.delete(id);
  if (!database) return;
  const { chats, heads, transaction } = stores("readwrite");
  chats.delete(id);
  heads.delete(id);
  await finished(transaction);
  channel?.postMessage(id);
}

/** Calls `listener` with a chat's id after another tab has changed the chat. */
export function onForeignChange(listener) {
  channel?.addEventListener("message", ({ data }) => listener(data));
}

function stores(mode) {
  const transaction = database.transaction(["chats", "heads"], mode);
  return { transaction, chats: transaction.objectStore("chats"), heads: transaction.objectStore("heads") };
}

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const finished = (transaction) => new Promise((resolve, reject) => {
  transaction.oncomplete = resolve;
  transaction.onerror = transaction.onabort = () => reject(transaction.error);
});

/** A value that was kept under a name, or `other`. */
export function recall(name, other) {
  try {
    return JSON.parse(localStorage.getItem(`${NAME}:${name}`)) ?? other;
  } catch {
    return other;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(`${NAME}:${name}`, JSON.stringify(value));
  } catch {
    // The browser keeps nothing, or no more: the value holds until the page closes.
  }
}
