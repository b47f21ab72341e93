// The page that GET / answers a browser with: wires tabs, settings and panels together.

import * as attachments from "./attachments.js";
import * as chat from "./chat.js";
import * as generate from "./generate.js";
import * as presets from "./presets.js";
import * as samples from "./samples.js";
import * as server from "./server.js";
import * as settings from "./settings.js";
import * as sidebar from "./sidebar.js";
import { byId } from "./dom.js";

const TABS = ["chat", "generate", "server"];
const REQUESTS = { chat: chat.request, generate: generate.request };

let shown = "chat";

function show(tab, { focus = false } = {}) {
  shown = tab;
  for (const one of TABS) {
    const button = byId(`tab-${one}`);
    button.setAttribute("aria-selected", String(one === tab));
    button.tabIndex = one === tab ? 0 : -1;
    byId(`panel-${one}`).hidden = one !== tab;
  }
  if (focus) byId(`tab-${tab}`).focus();
  settings.showFor(tab);
  byId("samples").hidden = tab === "server";
  refresh();
}

/** After a change of what would be sent. */
function refresh() {
  samples.show(REQUESTS[shown]);
}

function onTabKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const place = TABS.indexOf(shown);
  if (step) show(TABS[(place + step + TABS.length) % TABS.length], { focus: true });
  else if (event.key === "Home") show(TABS[0], { focus: true });
  else if (event.key === "End") show(TABS.at(-1), { focus: true });
  else return;
  event.preventDefault();
}

for (const tab of TABS) byId(`tab-${tab}`).addEventListener("click", () => show(tab));
document.querySelector("[role=tablist]").addEventListener("keydown", onTabKey);
document.addEventListener("keydown", (event) => {
  const key = event.ctrlKey || event.metaKey ? event.key.toLowerCase() : "";
  if (event.key === "Escape") {
    chat.stop();
    generate.stop();
  } else if (key === "o" && event.shiftKey) {
    event.preventDefault();
    show("chat");
    sidebar.startNew();
  } else if (key === "k" && sidebar.search()) {
    event.preventDefault();
  }
});

/** A question in the address, `/?q=TEXT`, waits in a new chat: a link may not have the model compute. */
function openAsked() {
  const asked = new URLSearchParams(location.search).get("q");
  if (!asked) return;
  history.replaceState(null, "", location.pathname);
  sidebar.startNew();
  chat.write(asked);
}

/** The panels at the sides: beside the work where there is room, else over it and closed at first. */
function setUpSide(id, narrow) {
  const panel = byId(id);
  const button = byId(`toggle-${id}`);
  const set = (isOpen) => {
    panel.classList.toggle("closed", !isOpen);
    button.setAttribute("aria-expanded", String(isOpen));
  };
  button.addEventListener("click", () => set(panel.classList.contains("closed")));
  panel.addEventListener("reveal", () => set(true));
  panel.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !narrow.matches) return;
    set(false);
    button.focus();
  });
  // A chat that was chosen is to be seen.
  byId("chats-list").addEventListener("click", ({ target }) => {
    if (id === "chats" && narrow.matches && target.classList.contains("chat-title")) set(false);
  });
  narrow.addEventListener("change", () => set(!narrow.matches));
  set(!narrow.matches);
}

/** After it is known what is served. */
let hasOpened = false;
function onInfo(info) {
  attachments.allowPictures(info.reads_images === true);
  settings.showDefaults(info.sampling_defaults ?? {});
  if (!hasOpened && info.has_chat_template === false) show("generate");
  hasOpened = true;
  chat.draw();
  refresh();
}

setUpSide("chats", matchMedia("(max-width: 70rem)"));
setUpSide("settings", matchMedia("(max-width: 52rem)"));
settings.setUp(refresh, chat.draw);
presets.setUp(refresh);
chat.setUp(refresh, sidebar.refresh);
generate.setUp(refresh);
samples.setUp();
show("chat");
await sidebar.setUp();
openAsked();
server.setUp(onInfo);
