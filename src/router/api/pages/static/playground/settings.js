// What the settings ask for. An empty field is left out of the request.

import { byId, element } from "./dom.js";

const KEY = "tercet.key";
const FIELDS = [
  { name: "max_tokens", native: "max_new_tokens", label: "Most tokens", min: 1, step: 1, value: 256 },
  { name: "temperature", label: "Temperature", min: 0, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: 1, step: 1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, step: 0.05 },
  { name: "seed", label: "Seed", min: 0, step: 1 },
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
  for (const { name, label, value = "", ...limits } of FIELDS) {
    const id = `field-${name}`;
    const input = name === "stop"
      ? element("textarea", { id, rows: 1, spellcheck: "false" })
      : element("input", { id, type: "number", inputmode: "decimal", value, ...limits, step: "any" });
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
  byId("settings").open = true;
  byId("key").setAttribute("aria-invalid", "true");
  byId("key").focus();
}

/** The tools as a list, undefined for none; throws SyntaxError after saying what is wrong beside the field. */
export function tools() {
  const text = byId("tools").value.trim();
  byId("tools-problem").textContent = "";
  if (!text) return undefined;
  try {
    const list = JSON.parse(text);
    if (!Array.isArray(list)) throw new SyntaxError("a list of tools is wanted: [ ... ]");
    return list.length ? list : undefined;
  } catch (error) {
    byId("tools-problem").textContent = `Not sent: ${error.message}`;
    throw error;
  }
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
