// The page that GET / answers a browser with: wires tabs, settings and panels together.

import * as chat from "./chat.js";
import * as generate from "./generate.js";
import * as samples from "./samples.js";
import * as server from "./server.js";
import * as settings from "./settings.js";
import { byId } from "./dom.js";

const TABS = ["chat", "generate", "server"];
const REQUESTS = { chat: chat.request, generate: generate.request };
const NARROW = matchMedia("(max-width: 52rem)");

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
  if (event.key === "Escape") {
    chat.stop();
    generate.stop();
  }
});
byId("settings").open = !NARROW.matches;
NARROW.addEventListener("change", () => { byId("settings").open = !NARROW.matches; });

settings.setUp(refresh);
chat.setUp(refresh);
generate.setUp(refresh);
samples.setUp();
server.setUp();
show("chat");
