// The list of chats: open, search, rename, delete, export, import.

import * as chat from "./chat.js";
import * as conversation from "./conversation.js";
import * as store from "./store.js";
import { byId, download, element, toast } from "./dom.js";

let heads = [];

/** Opens the chat that was open before, or a new one. */
export async function setUp() {
  byId("chat-new").addEventListener("click", startNew);
  byId("chats-search").addEventListener("input", draw);
  byId("chats-export").addEventListener("click", exportAll);
  byId("chats-import").addEventListener("click", () => byId("import-input").click());
  byId("import-input").addEventListener("change", ({ target }) => {
    importFiles([...target.files]);
    target.value = "";
  });
  document.addEventListener("click", ({ target }) => closeMenus(target.closest?.(".menu")));
  byId("chats-list").addEventListener("keydown", ({ key, target }) => {
    const menu = target.closest(".menu[open]");
    if (key !== "Escape" || !menu) return;
    menu.open = false;
    menu.firstElementChild.focus();
  });
  store.onForeignChange(foreignChange);
  if (!await store.open()) byId("chats-note").textContent = "This browser keeps nothing: chats end with this page.";
  await refresh();
  const last = await store.load(store.recall("open", ""));
  chat.show(last ?? conversation.newChat());
  draw();
}

/** After a chat was kept. */
export async function refresh() {
  heads = await store.list();
  draw();
}

export function startNew() {
  chat.show(conversation.newChat());
  draw();
  byId("chat-input").focus();
}

/** Goes to the field that searches; returns whether there is one. */
export function search() {
  const field = byId("chats-search");
  if (field.hidden) return false;
  byId("chats").dispatchEvent(new Event("reveal"));
  field.focus();
  return true;
}

async function foreignChange(id) {
  await refresh();
  if (id !== chat.current().id || chat.isRunning(id)) return;
  const changed = await store.load(id);
  if (changed) chat.show(changed);
}

function draw() {
  const wanted = byId("chats-search").value.trim().toLowerCase();
  const shown = heads.filter(({ title }) => title.toLowerCase().includes(wanted));
  byId("chats-list").replaceChildren(...shown.map(item));
  byId("chats-search").hidden = heads.length < 5;
}

function item(head) {
  const isOpen = head.id === chat.current().id;
  const title = head.title || "Chat";
  const open = element("button", {
    type: "button", class: "chat-title", "aria-current": isOpen ? "true" : null, title, onclick: () => openChat(head),
  }, title);
  const action = (label, run) => element("button", { type: "button", class: "small", onclick: () => {
    menu.open = false;
    run();
  } }, label);
  const menu = element("details", { class: "menu" },
    element("summary", { "aria-label": `Actions for ${title}` }, "⋯"),
    element("div", { class: "menu-items" },
      action("Rename", () => rename(head, row)),
      action("Export as JSON", () => exportOne(head, "json")), action("Export as Markdown", () => exportOne(head, "md")),
      action("Delete", () => remove(head))));
  menu.addEventListener("toggle", () => { if (menu.open) closeMenus(menu); });
  const row = element("li", { class: isOpen ? "open" : null }, open, menu);
  return row;
}

function closeMenus(kept = null) {
  for (const menu of document.querySelectorAll(".menu[open]")) if (menu !== kept) menu.open = false;
}

async function openChat(head) {
  const loaded = await store.load(head.id);
  if (loaded) chat.show(loaded);
  draw();
}

function rename(head, row) {
  const input = element("input", { value: head.title, "aria-label": "Title", maxlength: 60 });
  const done = async (isKept) => {
    input.onblur = null;
    if (isKept && input.value.trim()) {
      const loaded = head.id === chat.current().id ? chat.current() : await store.load(head.id);
      loaded.title = input.value.trim();
      await store.save(loaded);
    }
    await refresh();
  };
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === "Escape") {
      event.stopPropagation();
      done(event.key === "Enter");
    }
  });
  input.onblur = () => done(true);
  row.replaceChildren(input);
  input.focus();
  input.select();
}

async function remove(head) {
  const loaded = await store.load(head.id);
  const wasOpen = head.id === chat.current().id;
  chat.forget(head.id);
  await store.remove(head.id);
  if (wasOpen) chat.show(conversation.newChat());
  await refresh();
  toast("Deleted a chat.", { label: "Undo", run: async () => {
    await store.save(loaded);
    if (wasOpen) chat.show(loaded);
    await refresh();
  } });
}

async function exportOne(head, kind) {
  const loaded = await store.load(head.id);
  const name = (head.title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
  if (kind === "json") download(`${name}.json`, conversation.toExport([loaded]), "application/json");
  else download(`${name}.md`, conversation.toMarkdown(loaded), "text/markdown");
}

async function exportAll() {
  const chats = await Promise.all(heads.map(({ id }) => store.load(id)));
  download(`chats-${new Date().toISOString().slice(0, 10)}.json`, conversation.toExport(chats.filter(Boolean)), "application/json");
}

async function importFiles(files) {
  for (const file of files) {
    try {
      const read = conversation.fromExport(await file.text());
      for (const one of read) await store.save(one);
      await refresh();
      if (read.length) chat.show(read.at(-1));
      draw();
      toast(`Imported ${read.length === 1 ? "a chat" : `${read.length} chats`}.`);
    } catch (error) {
      toast(`${file.name}: ${error.message}`);
    }
  }
}
