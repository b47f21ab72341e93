// Markdown as elements, made from the tokens of markdown-it: no text is ever read as HTML, and nothing is loaded.

import MarkdownIt from "./vendor/markdown-it.js";
import { codeBlock } from "./code.js";
import { element } from "./dom.js";
import { formula, mathRules } from "./math.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const TASK = /^\[([ xX])\]\s+/;
const SMALL_TAG = /<(?:(br)\s*\/?|(sub|sup|kbd)>([^<>\n]{1,200})<\/\2)>/y;
const HEADINGS = { h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6" }; // h1 and h2 are the page's

const md = new MarkdownIt({ html: false, linkify: true });
md.validateLink = (address) => URL.canParse(address) && SCHEMES.has(new URL(address).protocol);
md.inline.ruler.before("html_inline", "small_tag", smallTag);
mathRules(md);

/** `<br>`, and a text in `<sub>`, `<sup>` or `<kbd>`: the tags that models write where Markdown has no mark. */
function smallTag(state, silent) {
  SMALL_TAG.lastIndex = state.pos;
  const found = state.src[state.pos] === "<" && SMALL_TAG.exec(state.src);
  if (!found) return false;
  const [whole, isBreak, tag, text] = found;
  if (!silent) {
    const token = state.push(isBreak ? "hardbreak" : "small_tag", tag ?? "br", 0);
    token.content = text ?? "";
  }
  state.pos += whole.length;
  return true;
}

/** The text as a fragment; an unfinished text, as it streams in, is fine. */
export function render(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...build(md.parse(text, {})));
  return fragment;
}

/** Markdown that grows: of a longer text only the blocks that have changed are made anew. */
export class MarkdownView {
  #root;
  #blocks = [];

  constructor(root) {
    this.#root = root;
  }

  show(text) {
    const env = {};
    const lines = text.split("\n");
    const groups = topLevel(md.parse(text, env));
    const numReferences = Object.keys(env.references ?? {}).length;
    let index = 0;
    for (const tokens of groups) {
      const [from, to] = tokens[0].map ?? [0, 0];
      const key = `${numReferences} ${tokens[0].type} ${lines.slice(from, to).join("\n")}`;
      if (this.#blocks[index]?.key !== key) {
        this.#cut(index);
        const nodes = build(tokens);
        this.#root.append(...nodes);
        this.#blocks.push({ key, nodes });
      }
      index += 1;
    }
    this.#cut(index);
  }

  #cut(index) {
    for (const { nodes } of this.#blocks.splice(index)) for (const node of nodes) node.remove();
  }
}

/** The tokens of each block of the outermost level. */
function topLevel(tokens) {
  const groups = [];
  let group = [];
  let depth = 0;
  for (const token of tokens) {
    group.push(token);
    depth += token.nesting;
    if (depth > 0) continue;
    groups.push(group);
    group = [];
  }
  return groups;
}

function build(tokens) {
  const top = [];
  const open = [];
  const append = (...nodes) => { if (open.length) open.at(-1).append(...nodes); else top.push(...nodes); };
  tokens.forEach((token, index) => {
    if (token.hidden) return; // the paragraph of an item in a list without blank lines
    if (token.nesting === 1) {
      const made = opened(token);
      append(made.outer);
      open.push(made.inner);
    } else if (token.nesting === -1) {
      open.pop();
    } else if (token.type === "inline") {
      append(...inline(token, tokens[index - 2]?.type === "list_item_open"));
    } else {
      append(single(token));
    }
  });
  return top;
}

/** The element that a token opens: what goes into its parent, and where its children go. */
function opened({ tag, type, attrs }) {
  const attributes = Object.fromEntries(attrs ?? []);
  if (type === "table_open") {
    const table = element("table");
    return { outer: element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" }, table), inner: table };
  }
  let made;
  if (type === "link_open") made = anchor(attributes.href);
  else if (type === "ordered_list_open") made = element("ol", { start: attributes.start ?? 1 });
  else if (tag === "th" || tag === "td") made = element(tag, { class: /(left|center|right)/.exec(attributes.style ?? "")?.[1] ?? null });
  else made = element(HEADINGS[tag] ?? tag);
  return { outer: made, inner: made };
}

/** A link that a person may follow; its address is shown on hover. */
const anchor = (address, ...children) => element("a", {
  href: address, title: address, target: "_blank", rel: "noopener noreferrer nofollow",
}, ...children);

function inline({ children }, isItem) {
  const task = isItem && children[0]?.type === "text" && TASK.exec(children[0].content);
  if (!task) return build(children);
  children[0].content = children[0].content.slice(task[0].length);
  const isDone = task[1] !== " ";
  const box = element("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": isDone ? "done" : "to do" });
  return [box, " ", ...build(children)];
}

function single(token) {
  switch (token.type) {
    case "code_inline": return element("code", {}, token.content);
    case "fence": case "code_block": return codeBlock(token.content.replace(/\n$/, ""), token.info);
    case "softbreak": return "\n";
    case "hardbreak": return element("br");
    case "hr": return element("hr");
    case "image": return anchor(token.attrGet("src"), token.content || token.attrGet("src")); // not loaded
    case "math": return formula(token);
    case "small_tag": return element(token.tag, {}, token.content);
    default: return token.content;
  }
}
