// How one message of the chat looks.

import { copy, element } from "./dom.js";
import { render } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model" };

/** An empty message: `root` is its element, `show` sets its text, `facts` the line below it. */
export function messageView(role) {
  const body = element("div", { class: "body" });
  const facts = element("p", { class: "facts" });
  let text = "";
  const button = element("button", { type: "button", class: "copy", hidden: true, onclick: () => copy(text, button) },
    "Copy");
  const root = element("article", { class: `message ${role}`, "aria-label": NAMES[role] },
    element("p", { class: "who" }, NAMES[role], " ", button), body, facts);
  return {
    root,
    show(shown) {
      text = shown;
      button.hidden = text === "";
      if (role === "user") body.textContent = text;
      else body.replaceChildren(render(text));
    },
    facts(parts) {
      facts.textContent = parts.filter(Boolean).join(" · ");
    },
  };
}

/** A call of a tool, and a field for what it results in. */
export function toolCallView(call, onResult) {
  const id = `result-${crypto.getRandomValues(new Uint32Array(1))[0]}`;
  const input = element("textarea", { id, rows: 2 });
  const form = element("form", { class: "tool-result", onsubmit: (event) => {
    event.preventDefault();
    const result = input.value;
    form.replaceWith(element("pre", { class: "result", tabindex: 0 }, element("code", {}, result)));
    onResult(result);
  } },
    element("label", { for: id }, `Result of ${call.function.name}`), input,
    element("button", { type: "submit" }, "Send the result"));
  return element("div", { class: "tool-call" },
    element("p", { class: "who" }, "Calls ", element("code", {}, call.function.name)),
    element("pre", { tabindex: 0 }, element("code", {}, pretty(call.function.arguments))), form);
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
