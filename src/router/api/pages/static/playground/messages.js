// How one message of the chat looks, and what can be done with it.

import { copy, element } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };
const REASONS = {
  length: "ended at the most tokens", stop: "", tool_calls: "calls a tool", stopped: "stopped", failed: "",
  running: "", content_filter: "filtered",
};

/** The element of a message. `show` draws what has changed, `offer` sets the buttons below it. */
export class MessageView {
  #body = element("div", { class: "body" });
  #facts = element("p", { class: "facts" });
  #actions = element("div", { class: "actions", role: "group" });
  #problem = element("div");
  #calls = element("div");
  #markdown = new MarkdownView(this.#body);
  #reasoning = null;

  constructor(message, { isPlain = () => false } = {}) {
    this.message = message;
    this.isPlain = isPlain;
    const name = NAMES[message.role];
    this.#actions.setAttribute("aria-label", `${name}: actions`);
    this.root = element("article", { class: `message ${message.role}`, "aria-label": name },
      element("p", { class: "who" }, message.role === "tool" ? `Result of ${message.name}` : name), ...this.#pictures(),
      this.#body, this.#calls, this.#problem, this.#facts, this.#actions);
  }

  show() {
    const { role, content, finish, figures } = this.message;
    if (this.message.reasoning) this.#showReasoning();
    if (role !== "assistant" || this.isPlain()) this.#body.textContent = content;
    else this.#markdown.show(content);
    this.#body.classList.toggle("plain", role === "assistant" && this.isPlain());
    this.root.setAttribute("aria-busy", String(finish === "running"));
    if (role === "assistant") this.#facts.textContent = [...ratesOf(figures), REASONS[finish] ?? finish].filter(Boolean).join(" · ");
  }

  /** The reasoning, folded; it can be opened while it comes, and stays as the reader has it. */
  #showReasoning() {
    if (!this.#reasoning) {
      const body = element("div", { class: "body" });
      const summary = element("summary");
      const root = element("details", { class: "reasoning" }, summary, body);
      this.#reasoning = { summary, view: new MarkdownView(body), root };
      root.addEventListener("toggle", () => this.#drawReasoning());
      this.#body.before(root);
    }
    const isThinking = this.message.finish === "running" && !this.message.content && !this.message.tool_calls;
    const seconds = ((this.message.thought_ms ?? 0) / 1000).toFixed(1);
    const words = isThinking ? `Thinking… ${seconds} s` : `Thought${this.message.thought_ms ? ` for ${seconds} s` : ""}`;
    this.#reasoning.summary.textContent = words;
    this.#drawReasoning();
  }

  #drawReasoning() {
    if (this.#reasoning.root.open) this.#reasoning.view.show(this.message.reasoning);
  }

  #pictures() {
    const { images = [] } = this.message;
    if (!images.length) return [];
    return [element("div", { class: "pictures" }, ...images.map((url, index) => (
      element("img", { src: url, alt: `Picture ${index + 1}` }))))];
  }

  /** Buttons: pairs of a label and what it does. `versions`: index, count and what shows another one. */
  offer(buttons, versions = null) {
    const made = buttons.map(([label, run, hint]) => (
      element("button", { type: "button", class: "small", title: hint ?? null, onclick: ({ target }) => run(target) }, label)));
    if (versions && versions.count > 1) {
      const step = (text, label, index) => element("button", {
        type: "button", class: "small", "aria-label": label, disabled: index < 0 || index >= versions.count,
        onclick: () => versions.show(index),
      }, text);
      made.push(element("span", { class: "versions" }, step("‹", "Earlier version", versions.index - 1),
        ` ${versions.index + 1} / ${versions.count} `, step("›", "Later version", versions.index + 1)));
    }
    this.#actions.replaceChildren(...made);
  }

  /** Calls of tools, with a field for the result of each that has none yet. */
  showCalls(open, onResult) {
    this.#calls.replaceChildren(...(this.message.tool_calls ?? []).map((call) => (
      toolCallView(call, open.includes(call) ? (result) => onResult(call, result) : null))));
  }

  fail(node) {
    this.#problem.replaceChildren(...(node ? [node] : []));
  }

  /** Puts a text field in place of the text. `saves`: pairs of a label and what is done with the text. */
  edit(saves) {
    const input = element("textarea", { rows: Math.min(12, this.message.content.split("\n").length + 1), "aria-label": "Edited text" });
    input.value = this.message.content;
    const close = () => { form.remove(); this.#body.hidden = this.#actions.hidden = false; };
    const buttons = saves.map(([label, save], index) => element("button", {
      type: "button", class: index === 0 ? "primary" : null, onclick: () => { close(); save(input.value); },
    }, label));
    const form = element("div", { class: "edit" }, input,
      element("div", { class: "buttons" }, ...buttons, element("button", { type: "button", onclick: close }, "Cancel")));
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) buttons[0].click();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.#body.hidden = this.#actions.hidden = true;
    this.#body.after(form);
    input.focus();
  }
}

/** A button that copies what the message says. */
export const copyAction = (message) => ["Copy", (button) => copy(message.content, button)];

/** The figures of an answer. */
function ratesOf(figures) {
  if (!figures) return [];
  const { tokens, rate, first_ms: first, prompt, cached } = figures;
  return [
    prompt === null || prompt === undefined ? `${tokens} tokens`
      : `${prompt} tokens in${cached ? ` (${cached} from the cache)` : ""}, ${tokens} out`,
    rate === null || rate === undefined ? "" : `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`,
    first ? `first after ${(first / 1000).toFixed(2)} s` : "",
  ];
}

function toolCallView(call, onResult) {
  const shown = element("div", { class: "tool-call" },
    element("p", { class: "who" }, "Calls ", element("code", {}, call.function.name)),
    element("pre", { tabindex: 0, role: "region", "aria-label": "Arguments" }, element("code", {}, pretty(call.function.arguments))));
  if (!onResult) return shown;
  const id = `result-${crypto.getRandomValues(new Uint32Array(1))[0]}`;
  const input = element("textarea", { id, rows: 2 });
  shown.append(element("form", { class: "tool-result", onsubmit: (event) => {
    event.preventDefault();
    onResult(input.value);
  } },
    element("label", { for: id }, `Result of ${call.function.name}`), input,
    element("button", { type: "submit" }, "Send the result")));
  return shown;
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
