// What the settings ask for. An empty field is left out of the request; the server judges whether a number is allowed.

import { byId, element } from "./dom.js";

const KEY = "tercet.key";
const FIELDS = [
  { name: "max_tokens", native: "max_new_tokens", label: "Most tokens", value: 256 },
  { name: "temperature", label: "Temperature" },
  { name: "top_p", label: "Top p" },
  { name: "top_k", label: "Top k" },
  { name: "repetition_penalty", label: "Repetition penalty" },
  { name: "seed", label: "Seed", max: Number.MAX_SAFE_INTEGER }, // a larger one would be rounded
  { name: "stop", label: "Stop texts, one per line" },
];
const EXAMPLE = [{
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

/** Makes the fields; `onChange` is called after each change. */
export function setUp(onChange) {
  for (const { name, label, value = "", max = null } of FIELDS) {
    const id = `field-${name}`;
    const input = name === "stop"
      ? element("textarea", { id, rows: 1, spellcheck: "false" })
      : element("input", { id, type: "number", inputmode: "decimal", step: "any", value, max });
    byId("fields").append(element("label", { for: id }, label), input);
  }
  byId("key").value = sessionStorage.getItem(KEY) ?? "";
  byId("key").addEventListener("input", () => sessionStorage.setItem(KEY, byId("key").value));
  byId("tools-example").addEventListener("click", () => {
    byId("tools").value = JSON.stringify(EXAMPLE, null, 2);
    onChange();
  });
  byId("settings-form").addEventListener("input", () => {
    byId("key").removeAttribute("aria-invalid");
    onChange();
  });
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
}

/** Shows the settings that a tab has. */
export function showFor(tab) {
  byId("settings").hidden = tab === "server";
  for (const part of document.querySelectorAll("[data-for]")) part.hidden = part.dataset.for !== tab;
}

export const key = () => byId("key").value.trim();
export const system = () => byId("system").value.trim();

/** Shows where the key is entered. */
export function askForKey() {
  byId("key").setAttribute("aria-invalid", "true");
  reveal(byId("key"));
}

/** Whether the fields can be sent; if not, the first wrong one says so and gets the focus. */
export function check({ withTools }) {
  const wrong = [...byId("settings-form").elements]
    .find(({ validity }) => validity.badInput || validity.rangeOverflow);
  if (wrong) {
    reveal(wrong);
    wrong.reportValidity();
    return false;
  }
  byId("tools-problem").textContent = "";
  try {
    if (withTools) tools();
    return true;
  } catch (error) {
    byId("tools-problem").textContent = `Not sent: ${error.message}`;
    reveal(byId("tools"));
    return false;
  }
}

function reveal(field) {
  byId("settings").open = true;
  field.focus();
}

/** The tools as a list, undefined for none. Throws SyntaxError. */
export function tools() {
  const text = byId("tools").value.trim();
  if (!text) return undefined;
  const list = JSON.parse(text);
  if (!Array.isArray(list)) throw new SyntaxError("a list of tools is wanted: [ ... ]");
  return list.length ? list : undefined;
}

/** The sampling fields under OpenAI's names. */
export function sampling() {
  const chosen = {};
  for (const { name } of FIELDS) {
    const text = byId(`field-${name}`).value;
    if (name === "stop") {
      const stops = text.split("\n").filter((line) => line !== "");
      if (stops.length) chosen.stop = stops;
    } else if (text.trim() !== "") {
      chosen[name] = Number(text);
    }
  }
  return chosen;
}

/** The sampling fields under TGI's names, for /generate_stream. There greedy is what has no temperature. */
export function nativeSampling() {
  const chosen = sampling();
  const parameters = {};
  for (const { name, native = name } of FIELDS) {
    if (name in chosen && !(name === "temperature" && chosen[name] === 0)) parameters[native] = chosen[name];
  }
  const alternatives = Number(byId("alternatives").value);
  if (alternatives > 0) parameters.top_n_tokens = alternatives;
  return parameters;
}
