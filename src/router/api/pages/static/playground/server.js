// What is served, from /info and /v1/models, and how it is doing, from /metrics every three seconds while the page is
// visible.

import { get } from "./api.js";
import { byId, element } from "./dom.js";

const EVERY_MS = 3000;
const NUM_SHOWN = 60;
const FACTS = [
  ["model_id", "Model"], ["model_sha", "Revision"], ["model_dtype", "Type of the weights"],
  ["quantization", "Quantization"], ["kv_cache_dtype", "Type of the KV cache"], ["model_device_type", "Device"],
  ["max_input_tokens", "Longest prompt, tokens"], ["max_total_tokens", "Prompt and answer, tokens"],
  ["max_batch_total_tokens", "Tokens of a running batch"], ["max_concurrent_requests", "Requests at once"],
  ["tercet_version", "Version of Tercet"], ["version", "Compatible with TGI"],
];
export const BASE_MODEL_WORDS = "This model has no chat template: it continues texts, and does not chat. Use the tab "
  + "Generate, or serve a model whose name ends in -Instruct, -it or -chat.";

const rates = [];
let last = null;
let info = null;
let models = [];
let notify = () => {};

/** `onInfo`: after it is known what is served. */
export function setUp(onInfo) {
  notify = onInfo;
  refresh();
  setInterval(() => { if (document.visibilityState === "visible") refresh(); }, EVERY_MS);
  document.addEventListener("visibilitychange", () => { last = null; });
  byId("model-choice").addEventListener("change", () => {
    if (hasSeveral()) {
      info = null; // each of several models has its own
      refresh();
    } else {
      notify(info);
    }
  });
}

/** Tokens that a prompt and its answer may have together; 0 as long as that is not known. */
export const contextTokens = () => info?.max_total_tokens ?? 0;
export const isBaseModel = () => info?.has_chat_template === false;

/** The name that requests send as `model`. */
export const chosenModel = () => byId("model-choice").value || (models[0]?.id ?? "tgi");

/** The LoRA adapter that is chosen, null for the model itself. */
export const chosenAdapter = () => models.find(({ id, parent }) => id === chosenModel() && parent)?.id ?? null;

/** Whether the server loads several models on demand, each with a state. */
const hasSeveral = () => models.some(({ status }) => status);

/** What a route of TGI's begins with, so that it reaches the chosen one of several models. */
export const pathPrefix = () => {
  if (!hasSeveral()) return "";
  const name = models.find(({ id }) => id === chosenModel())?.parent ?? chosenModel();
  return `models/${name.split("/").map(encodeURIComponent).join("/")}/`;
};

/** The facts of one model; of several, one that is not loaded is not loaded to ask it. */
async function infoOf(listed) {
  const { data } = listed;
  if (!data.some(({ status }) => status)) return get("info");
  const before = byId("model-choice").value;
  const generating = data.filter(({ task }) => task === "generate");
  const isLoaded = ({ status }) => status.value === "loaded";
  const one = generating.find(({ id }) => id === before) ?? generating.find(isLoaded) ?? generating[0] ?? data[0];
  listed.data = [one, ...data.filter((other) => other !== one)];
  return isLoaded(one) ? get(`info?model=${encodeURIComponent(one.id)}`) : { model_id: one.id, isUnloaded: true };
}

async function refresh() {
  try {
    if (!info || info.isUnloaded) {
      const listed = await get("v1/models");
      showInfo(await infoOf(listed), listed);
    }
    showMetrics(parsed(await get("metrics", "text")));
  } catch (error) {
    last = null;
    info = null; // another server may answer when one does again
    showState("bad", error.message);
  }
}

function showInfo(answered, { data }) {
  info = answered;
  models = data;
  // Names of one model: only the first. Its adapters are others, as are several models.
  const choices = hasSeveral() ? data.filter(({ task }) => task === "generate") : [data[0], ...data.filter(({ parent }) => parent)];
  if (!choices.length) choices.push(data[0]);
  const before = byId("model-choice").value;
  byId("model-choice").replaceChildren(...choices.map(({ id }) => element("option", { value: id, selected: id === before }, id)));
  byId("model-choice").hidden = choices.length < 2;
  byId("model").textContent = choices.length < 2 ? choices[0].id : "";
  byId("quantization").textContent = info.quantization ?? "";
  byId("quantization").hidden = !info.quantization;
  document.title = `${choices[0].id} – Tercet`;
  byId("facts").replaceChildren(...FACTS.filter(([name]) => info[name] !== null && info[name] !== undefined)
    .flatMap(([name, label]) => [element("dt", {}, label), element("dd", {}, shown(info[name]))]));
  notify(info);
}

/** Name → value, of series without labels; what has labels is added up under the bare name, and `stopped` by clients. */
function parsed(text) {
  const values = {};
  for (const line of text.split("\n")) {
    if (line.startsWith("#") || line.includes("_bucket")) continue;
    const space = line.lastIndexOf(" ");
    const name = line.slice(0, space).split("{")[0];
    const value = Number(line.slice(space + 1));
    values[name] = (values[name] ?? 0) + value;
    if (line.includes('err="dropped"')) values.stopped = (values.stopped ?? 0) + value;
  }
  return values;
}

function showMetrics(values) {
  const of = (name) => values[name] ?? 0;
  const running = of("tgi_batch_current_size");
  const queued = of("tgi_queue_size");
  const live = of("tgi_kv_blocks_live");
  const blocks = live + of("tgi_kv_blocks_free");
  const rate = tokenRate(of("tgi_request_inter_token_duration_count")
    + of("tgi_request_time_to_first_token_duration_count"));
  const figures = [
    ["Running requests", number(running)],
    ["Queued requests", number(queued)],
    ["Tokens per second", number(rate)],
    ["KV cache in use", blocks ? `${Math.round((100 * live) / blocks)} %` : "–", blocks ? live / blocks : null],
    ["Finished", number(of("tgi_request_success"))],
    ["Failed", number(of("tgi_request_failure") - of("stopped"))],
  ];
  byId("figures").replaceChildren(...figures.map(([label, value, share]) => element("div", {},
    element("dt", {}, label),
    element("dd", {}, value, ...(share === null || share === undefined ? []
      : [element("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" })])))));
  showState("good", `${number(running)} running · ${number(queued)} queued · ${number(rate)} tokens/s`);
}

/** Tokens a second since the last look; draws them. */
function tokenRate(total) {
  const now = performance.now();
  const rate = last && total >= last.total ? Math.round((1000 * (total - last.total)) / (now - last.at)) : 0;
  last = { total, at: now };
  rates.push(rate);
  if (rates.length > NUM_SHOWN) rates.shift();
  const most = Math.max(1, ...rates);
  const points = rates.map((one, index) => {
    const x = 600 - ((rates.length - 1 - index) * 600) / (NUM_SHOWN - 1);
    return `${x.toFixed(1)},${(85 - (80 * one) / most).toFixed(1)}`;
  });
  byId("chart").firstElementChild.setAttribute("points", points.join(" "));
  byId("chart").setAttribute("aria-label", `Generated tokens per second: now ${rate}, at most ${Math.max(...rates)}`);
  return rate;
}

function showState(kind, text) {
  byId("dot").className = kind;
  byId("state-text").textContent = text;
}

const number = (value) => value.toLocaleString("en");
const shown = (value) => (typeof value === "number" ? number(value) : value.replace(/^torch\./, ""));
