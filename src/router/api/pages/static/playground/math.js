// LaTeX in Markdown: markdown-it rules that keep formulas whole, and formulas as MathML by Temml, which is loaded when the
// first one comes. A formula that Temml cannot read stays as it was written.

import { element } from "./dom.js";

const MOST_CHARACTERS = 4000; // of one formula
const PAIRS = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"], ["$", "$"]];

let temml = null;
let loading = null;

/** Adds the rules to a markdown-it. The tokens are `math`, with the formula as content and `info` "block" or "". */
export function mathRules(md) {
  md.inline.ruler.before("escape", "math", inlineRule);
  md.block.ruler.before("fence", "math", blockRule, { alt: ["paragraph", "blockquote", "list"] });
}

function inlineRule(state, silent) {
  const { src, pos } = state;
  if (src[pos] !== "$" && src[pos] !== "\\") return false;
  const pair = PAIRS.find(([open]) => src.startsWith(open, pos));
  if (!pair) return false;
  const [open, close] = pair;
  const from = pos + open.length;
  const end = endOf(state, close, from);
  if (end < 0) return false;
  const text = src.slice(from, end);
  if (text.trim() === "" || (open === "$" && !isFormula(text, src[end + 1]))) return false;
  if (!silent) push(state, text, open === "$$" || open === "\\[" ? "block" : "", src.slice(pos, end + close.length));
  state.pos = end + close.length;
  return true;
}

/** Where a formula ends, -1 for nowhere near. A text without an end is searched once for each kind of end. */
function endOf(state, close, from) {
  const missing = (state.env.noMathEnd ??= {});
  if (missing[close] === state.src) return -1;
  const end = state.src.indexOf(close, from);
  if (end < 0) missing[close] = state.src;
  return end - from > MOST_CHARACTERS ? -1 : end;
}

/** Whether what stands between two dollars is no price: "$5 and $6". */
const isFormula = (text, next) => !/^\s|\s$|\n\n/.test(text) && !/\d/.test(next ?? "");

function blockRule(state, startLine, endLine, silent) {
  const lineOf = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
  const first = lineOf(startLine);
  const pair = PAIRS.slice(0, 2).find(([open]) => first.startsWith(open));
  if (!pair) return false;
  const [open, close] = pair;
  const lines = [first.slice(open.length)];
  let line = startLine;
  while (!lines.at(-1).trimEnd().endsWith(close)) {
    line += 1;
    if (line >= endLine || line - startLine > 100 || lineOf(line).trim() === "") return false;
    lines.push(lineOf(line));
  }
  const text = lines.join("\n").trimEnd().slice(0, -close.length);
  if (text.trim() === "" || text.length > MOST_CHARACTERS || text.includes(close)) return false;
  if (silent) return true;
  push(state, text, "block", `${open}${text}${close}`).map = [startLine, line + 1];
  state.line = line + 1;
  return true;
}

function push(state, text, info, source) {
  const token = state.push("math", "", 0);
  token.content = text.trim();
  token.markup = source;
  token.info = info;
  token.block = info === "block";
  return token;
}

/** The formula of a `math` token. Until Temml is there it is shown as it was written. */
export function formula({ content, markup, info }) {
  const shown = element("span", { class: info === "block" ? "math block" : "math" }, markup);
  if (temml) typeset(shown, content, info);
  else load().then(() => typeset(shown, content, info), () => {});
  return shown;
}

function typeset(shown, content, info) {
  const made = document.createElement("span");
  try {
    temml.render(content, made, { displayMode: info === "block", throwOnError: true, maxSize: [20, 20], maxExpand: 500 });
  } catch {
    return;
  }
  // A label must not take the place of an element of the page, and there is nothing to go to.
  for (const one of made.querySelectorAll("[id], [href]")) {
    one.removeAttribute("id");
    one.removeAttribute("href");
  }
  shown.replaceChildren(...made.childNodes);
}

function load() {
  loading ??= import("./vendor/temml.js").then((module) => { temml = module.default; });
  return loading;
}
