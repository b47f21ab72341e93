// Presets: named settings. Some come with the page, others a person has saved in this browser.

import * as settings from "./settings.js";
import * as store from "./store.js";
import { byId, element, toast } from "./dom.js";

const OWN = {
  "Defaults": {},
  "Precise": { "field-temperature": "0" },
  "Balanced": { "field-temperature": "0.7", "field-top_p": "0.95" },
  "Creative": { "field-temperature": "1", "field-min_p": "0.05" },
};
const SAMPLING = settings.FIELDS.map(({ name }) => `field-${name}`);

let saved = {};

export function setUp(onChange) {
  saved = store.recall("presets", {});
  draw("");
  byId("preset").addEventListener("change", () => {
    const name = byId("preset").value;
    if (!name) return;
    // Those of the page are about sampling; a saved one is about everything.
    const rest = Object.fromEntries(Object.entries(settings.values()).filter(([id]) => !SAMPLING.includes(id)));
    settings.fill(name in OWN ? { ...rest, ...OWN[name] } : saved[name]);
    store.keep("settings", settings.values());
    byId("preset-delete").hidden = name in OWN;
    onChange();
  });
  byId("preset-save").addEventListener("click", () => {
    byId("preset-new").hidden = false;
    byId("preset-name").focus();
  });
  byId("preset-name").addEventListener("keydown", (event) => {
    if (event.key === "Escape") byId("preset-new").hidden = true;
    else if (event.key === "Enter") save();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  byId("preset-keep").addEventListener("click", save);
  byId("preset-delete").addEventListener("click", () => {
    const name = byId("preset").value;
    delete saved[name];
    store.keep("presets", saved);
    draw("");
    toast(`Deleted the preset ${name}.`);
  });
  byId("settings-form").addEventListener("input", ({ target }) => {
    if (!target.id.startsWith("preset")) draw("");
  });
}

function save() {
  const name = byId("preset-name").value.trim();
  if (!name || Object.hasOwn(OWN, name)) {
    toast(name ? "That name is taken." : "A preset needs a name.");
    return;
  }
  saved = { ...saved, [name]: settings.values() };
  store.keep("presets", saved);
  byId("preset-name").value = "";
  byId("preset-new").hidden = true;
  draw(name);
}

function draw(chosen) {
  const option = (name) => element("option", { value: name, selected: name === chosen }, name || "as set below");
  byId("preset").replaceChildren(option(""), ...Object.keys(OWN).map(option), ...Object.keys(saved).map(option));
  byId("preset").value = chosen;
  byId("preset-delete").hidden = !Object.hasOwn(saved, chosen);
}
