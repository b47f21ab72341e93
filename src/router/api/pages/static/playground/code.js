// Blocks of code: language, a button that copies, and colours by highlight.js, which is loaded when the first block comes.

import { copy, element } from "./dom.js";

// Its patterns take quadratic time on what is no code: long runs of one character, mostly.
const MOST_CHARACTERS = 50_000;
const LONGEST_LINE = 1000;
const PART = /<span class="([\w -]*)">|<\/span>|&(amp|lt|gt|quot|#x27);/g;
const CHARACTERS = { amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'" };

let highlighter = null;
let loading = null;

/** A block of code in a language, which may be empty or unknown. */
export function codeBlock(text, language) {
  const code = element("code", {}, text);
  const button = element("button", { type: "button", class: "small", onclick: () => copy(text, button) }, "Copy code");
  const name = language.split(/[\s,{]/, 1)[0].slice(0, 30);
  if (name && isHighlightable(text)) {
    if (highlighter) colour(code, text, name);
    else load().then(() => colour(code, text, name), () => {});
  }
  return element("div", { class: "code" },
    element("div", { class: "code-head" }, element("span", {}, name || "text"), button),
    element("pre", { tabindex: 0, role: "region", "aria-label": `Code: ${name || "text"}` }, code));
}

const isHighlightable = (text) => text.length <= MOST_CHARACTERS
  && text.split("\n").every((line) => line.length <= LONGEST_LINE);

function colour(code, text, language) {
  if (!highlighter.getLanguage(language)) return;
  code.replaceChildren(...elementsOf(highlighter.highlight(text, { language, ignoreIllegals: true }).value));
}

/** Text and spans of highlight.js' answer, which has nothing else in it. */
export function elementsOf(html) {
  const top = document.createDocumentFragment();
  const open = [top];
  let at = 0;
  for (const part of html.matchAll(PART)) {
    const [whole, classes, character] = part;
    if (part.index > at) open.at(-1).append(html.slice(at, part.index));
    at = part.index + whole.length;
    if (character) {
      open.at(-1).append(CHARACTERS[character]);
    } else if (classes !== undefined) {
      const span = element("span", { class: classes });
      open.at(-1).append(span);
      open.push(span);
    } else if (open.length > 1) {
      open.pop();
    }
  }
  top.append(html.slice(at));
  top.normalize();
  return top.childNodes;
}

function load() {
  loading ??= import("./vendor/highlight.js").then((module) => { highlighter = module.default; });
  return loading;
}
