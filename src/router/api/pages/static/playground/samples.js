// The request that the page would send, as curl, Python and JavaScript. The key is never shown: a variable stands for it.

import { address } from "./api.js";
import { byId, copy } from "./dom.js";
import * as settings from "./settings.js";

const OPENAI_OWN = new Set(["model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed",
  "stop", "tools", "presence_penalty", "frequency_penalty", "response_format", "reasoning_effort"]);
const MOST_OF_A_PICTURE = 60; // characters of a data URL that are shown
// What huggingface_hub's text_generation takes.
const HUBS = new Set(["max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "frequency_penalty", "seed",
  "stop", "details", "top_n_tokens", "grammar", "adapter_id"]);
const WRITERS = { curl, python, javascript };

let language = "curl";
let current = null;

export function setUp() {
  const buttons = document.querySelectorAll("[data-language]");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      language = button.dataset.language;
      for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
      write();
    });
  }
  byId("samples-copy").addEventListener("click", ({ target }) => copy(byId("samples-code").textContent, target));
  byId("samples").addEventListener("toggle", write);
}

/** `request` answers what would be sent; undefined on a tab without a request. */
export function show(request) {
  current = request;
  write();
}

function write() {
  if (!current || !byId("samples").open) return;
  try {
    const { path, body } = withoutPictures(current());
    byId("samples-code").textContent = WRITERS[language](path, body, settings.key() !== "");
  } catch (error) {
    byId("samples-code").textContent = `The settings cannot be sent: ${error.message}`;
  }
}

/** The request with a word in place of the bytes of each picture, which nobody reads. */
function withoutPictures(request) {
  return JSON.parse(JSON.stringify(request, (name, value) => (
    name === "url" && value.length > MOST_OF_A_PICTURE ? value.replace(/(?<=;base64,).*/s, "BASE64_OF_THE_PICTURE") : value)));
}

function curl(path, body, hasKey) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = hasKey ? "  -H \"Authorization: Bearer $TERCET_API_KEY\" \\\n" : "";
  return `curl -N '${address(path)}' \\\n  -H 'Content-Type: application/json' \\\n${key}  -d '${json}'`;
}

function javascript(path, body, hasKey) {
  const headers = ['"Content-Type": "application/json"'];
  if (hasKey) headers.push("Authorization: `Bearer ${process.env.TERCET_API_KEY}`");
  return [
    `const response = await fetch(${JSON.stringify(address(path))}, {`,
    '  method: "POST",',
    `  headers: { ${headers.join(", ")} },`,
    `  body: JSON.stringify(${indented(JSON.stringify(body, null, 2), "  ")}),`,
    "});",
    "for await (const text of response.body.pipeThrough(new TextDecoderStream())) console.log(text);",
  ].join("\n");
}

function python(path, body, hasKey) {
  const key = hasKey ? 'os.environ["TERCET_API_KEY"]' : null;
  const imports = hasKey ? ["import os", ""] : [];
  if (path !== "generate_stream") return [...imports, ...openaiClient(body, key)].join("\n");
  const isHubs = Object.keys(body.parameters).every((name) => HUBS.has(name));
  return [...imports, ...(isHubs ? hubClient(body, key) : standardLibrary(path, body, key))].join("\n");
}

function openaiClient({ stream_options: _, ...body }, key) {
  const own = Object.entries(body).filter(([name]) => OPENAI_OWN.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI_OWN.has(name)));
  if (Object.keys(extra).length) own.push(["extra_body", extra]);
  return [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(address("v1"))}, api_key=${key ?? '"-"'})`,
    `stream = client.chat.completions.create(\n${keywords(own)})`,
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    '        print(choice.delta.tool_calls or choice.delta.content or "", end="", flush=True)',
  ];
}

function hubClient({ inputs, parameters }, key) {
  const own = [...Object.entries(parameters), ["stream", true]];
  return [
    "from huggingface_hub import InferenceClient",
    "",
    `client = InferenceClient(${literal(address("."))}${key ? `, api_key=${key}` : ""})`,
    `stream = client.text_generation(\n    ${literal(inputs)},\n${keywords(own)})`,
    "for event in stream:",
    "    print(event.token.text, event.token.logprob)",
  ];
}

function standardLibrary(path, body, key) {
  const headers = { "Content-Type": "application/json" };
  return [
    "import json",
    "import urllib.request",
    "",
    `body = ${literal(body)}`,
    `headers = ${literal(headers)}`,
    ...(key ? [`headers["Authorization"] = f"Bearer {${key.replaceAll('"', "'")}}"`] : []),
    `request = urllib.request.Request(${literal(address(path))}, json.dumps(body).encode(), headers)`,
    "for line in urllib.request.urlopen(request):",
    '    if line.startswith(b"data:"):',
    '        print(json.loads(line[5:])["token"]["text"], end="", flush=True)',
  ];
}

const keywords = (pairs) => pairs.map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`).join("");

/** A JSON value in Python's words. */
function literal(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `;
  const parts = Array.isArray(value)
    ? value.map((one) => literal(one, deeper))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, deeper)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  if (!parts.length) return open + close;
  return `${open}\n${parts.map((part) => `${deeper}${part},\n`).join("")}${indent}${close}`;
}

const indented = (text, indent) => text.replaceAll("\n", `\n${indent}`);
