// What the settings ask for. An empty field has the value that its grey text shows: the server's or the model's default,
// or this page's where they have none. The server judges whether a number is allowed. All but the key are kept.

import * as store from "./store.js";
import { byId, element } from "./dom.js";

const KEY = "tercet.key";
export const FIELDS = [
  { name: "max_tokens", native: "max_new_tokens", label: "Most tokens", empty: "what fits" },
  { name: "temperature", label: "Temperature", page: 0.7 },
  { name: "top_p", label: "Top p", page: 0.95, empty: "off" },
  { name: "top_k", label: "Top k", empty: "off" },
  { name: "min_p", label: "Min p", page: 0.05, empty: "off" },
  { name: "repetition_penalty", label: "Repetition penalty", empty: "off" },
  { name: "presence_penalty", label: "Presence penalty", native: null, empty: "off" },
  { name: "frequency_penalty", label: "Frequency penalty", empty: "off" },
  { name: "seed", label: "Seed", max: Number.MAX_SAFE_INTEGER, empty: "random" }, // a larger one would be rounded
];
const KEPT = ["system", "effort", "field-stop", "tools", "schema", ...FIELDS.map(({ name }) => `field-${name}`)];
const TOOLS_EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the current weather",
    parameters: {
      type: "object",
      properties: { location: { type: "string", description: "The city" } },
      required: ["location"],
    },
  },
}];
const SCHEMA_EXAMPLE = {
  type: "object",
  properties: { city: { type: "string" }, population: { type: "integer" } },
  required: ["city", "population"],
};

let defaults = {};
let hasModelDefaults = false;

/** Makes the fields; `onChange` is called after each change. */
export function setUp(onChange, onLook) {
  for (const { name, native, label, max = null } of FIELDS) {
    const id = `field-${name}`;
    const only = native === null ? "chat" : null;
    byId("fields").append(element("label", { for: id, "data-for": only }, label),
      element("input", { id, type: "number", inputmode: "decimal", step: "any", max, "data-for": only }));
  }
  byId("fields").append(element("label", { for: "field-stop" }, "Stop texts, one per line"),
    element("textarea", { id: "field-stop", rows: 1, spellcheck: "false" }));
  fill(store.recall("settings", {}));
  byId("plain").checked = store.recall("plain", false);
  byId("plain").addEventListener("change", () => { store.keep("plain", byId("plain").checked); onLook(); });
  byId("key").value = sessionStorage.getItem(KEY) ?? "";
  byId("key").addEventListener("input", () => sessionStorage.setItem(KEY, byId("key").value));
  for (const [id, example] of [["tools", TOOLS_EXAMPLE], ["schema", SCHEMA_EXAMPLE]]) {
    byId(`${id}-example`).addEventListener("click", () => {
      byId(id).value = JSON.stringify(example, null, 2);
      changed(onChange);
    });
  }
  byId("settings-form").addEventListener("input", () => changed(onChange));
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  showDefaults({});
}

function changed(onChange) {
  byId("key").removeAttribute("aria-invalid");
  store.keep("settings", values());
  onChange();
}

/** The texts of all fields that are kept; without those that are empty. */
export const values = () => Object.fromEntries(KEPT.map((id) => [id, byId(id).value]).filter(([, value]) => value !== ""));

export function fill(texts) {
  for (const id of KEPT) byId(id).value = typeof texts[id] === "string" ? texts[id] : "";
}

/** Shows in the empty fields what holds for them. `ofServer`: the sampling parameters that the model comes with. */
export function showDefaults(ofServer) {
  hasModelDefaults = Object.keys(ofServer).length > 0;
  defaults = hasModelDefaults ? ofServer
    : Object.fromEntries(FIELDS.filter(({ page }) => page !== undefined).map(({ name, page }) => [name, page]));
  for (const { name, empty = "" } of FIELDS) byId(`field-${name}`).placeholder = defaults[name] ?? empty;
  byId("defaults-help").textContent = hasModelDefaults
    ? "Grey values come from the model's own settings. Temperature 0 takes the most likely token."
    : "Grey values are this page's, since the model brings none. Temperature 0 takes the most likely token.";
}

/** Shows the settings that a tab has. */
export function showFor(tab) {
  byId("settings").hidden = tab === "server";
  for (const part of document.querySelectorAll("[data-for]")) part.hidden = part.dataset.for !== tab;
}

export const key = () => byId("key").value.trim();
export const isPlain = () => byId("plain").checked;

/** The system prompt as messages: one or none. */
export function systemTurn() {
  const text = byId("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}

/** Shows where the key is entered. */
export function askForKey() {
  byId("key").setAttribute("aria-invalid", "true");
  reveal(byId("key"));
}

/** Whether the fields can be sent; if not, the first wrong one says so and gets the focus. */
export function check({ isChat }) {
  const wrong = [...byId("settings-form").elements]
    .find(({ validity }) => validity.badInput || validity.rangeOverflow);
  if (wrong) {
    reveal(wrong);
    wrong.reportValidity();
    return false;
  }
  for (const [id, read] of [["tools", isChat ? tools : null], ["schema", schema]]) {
    byId(`${id}-problem`).textContent = "";
    try {
      read?.();
    } catch (error) {
      byId(`${id}-problem`).textContent = `Not sent: ${error.message}`;
      reveal(byId(id));
      return false;
    }
  }
  return true;
}

function reveal(field) {
  byId("settings").dispatchEvent(new CustomEvent("reveal"));
  const fold = field.closest("details");
  if (fold) fold.open = true;
  field.focus();
}

/** The tools as a list, undefined for none. Throws SyntaxError. */
function tools() {
  const text = byId("tools").value.trim();
  if (!text) return undefined;
  const list = JSON.parse(text);
  if (!Array.isArray(list)) throw new SyntaxError("a list of tools is wanted: [ ... ]");
  return list.length ? list : undefined;
}

/** The JSON schema of the answer, undefined for none. Throws SyntaxError. */
function schema() {
  const text = byId("schema").value.trim();
  if (!text) return undefined;
  const read = JSON.parse(text);
  if (typeof read !== "object" || read === null || Array.isArray(read)) throw new SyntaxError("a schema is an object: { ... }");
  return read;
}

/** What is entered in the sampling fields, under OpenAI's names. */
function entered() {
  const chosen = {};
  for (const { name } of FIELDS) {
    const text = byId(`field-${name}`).value;
    if (text.trim() !== "") chosen[name] = Number(text);
  }
  const stops = byId("field-stop").value.split("\n").filter((line) => line !== "");
  if (stops.length) chosen.stop = stops;
  return chosen;
}

/** What is entered, and the defaults of what is not. Greedy decoding needs no others. */
function withDefaults(chosen) {
  return chosen.temperature === 0 ? chosen : { ...defaults, ...chosen };
}

/** The fields of a chat's body, under OpenAI's names. The server knows the model's defaults itself. */
export function chatOptions() {
  const options = hasModelDefaults ? entered() : withDefaults(entered());
  const listed = tools();
  if (listed) options.tools = listed;
  const wanted = schema();
  if (wanted) options.response_format = { type: "json_schema", json_schema: { name: "answer", schema: wanted } };
  if (byId("effort").value) options.reasoning_effort = byId("effort").value;
  return options;
}

/** The parameters of /generate_stream, under TGI's names. There greedy is what has no temperature. */
export function nativeParameters() {
  const chosen = withDefaults(entered());
  const parameters = {};
  for (const { name, native = name } of FIELDS) {
    if (name in chosen && native && !(name === "temperature" && chosen[name] === 0)) parameters[native] = chosen[name];
  }
  if (chosen.stop) parameters.stop = chosen.stop;
  const wanted = schema();
  if (wanted) parameters.grammar = { type: "json", value: wanted };
  const alternatives = Number(byId("alternatives").value);
  if (alternatives > 0) parameters.top_n_tokens = alternatives;
  return parameters;
}
