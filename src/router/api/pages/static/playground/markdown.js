// A small part of Markdown as elements. What is not understood stays text; HTML is text; nothing is loaded.

import { element } from "./dom.js";

const MAX_DEPTH = 8;
const MAX_LINK_TEXT = 500;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+([^]*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+([^]*)$/;
const DELIMITERS = /^\|?:?-+:?(\|:?-+:?)*\|?$/; // of a table, without spaces
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

/** The text as a fragment; an unfinished text, as it streams in, is fine. */
export function render(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const [block, next] = oneBlock(lines, at, depth);
    made.push(block);
    at = next;
  }
  return made;
}

/** The block that begins at a line, and the line after it. */
function oneBlock(lines, at, depth) {
  const line = lines[at];
  let found;
  if ((found = FENCE.exec(line))) return codeBlock(lines, at, found);
  if ((found = HEADING.exec(line))) {
    const level = Math.min(found[1].length + 2, 6); // h1 and h2 are the page's
    return [element(`h${level}`, {}, ...inline(found[2], depth)), at + 1];
  }
  if (isRule(line)) return [element("hr"), at + 1];
  if (depth < MAX_DEPTH && /^ {0,3}>/.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && (found = ITEM.exec(line))) return list(lines, at, found, depth);
  if (isTable(lines, at)) return table(lines, at, depth);
  let end = at + 1;
  while (end < lines.length && !startsBlock(lines, end)) end += 1;
  return [element("p", {}, ...inline(lines.slice(at, end).join("\n"), depth)), end];
}

function startsBlock(lines, at) {
  const line = lines[at];
  return line.trim() === "" || FENCE.test(line) || HEADING.test(line) || isRule(line) || /^ {0,3}>/.test(line)
    || ITEM.test(line) || isTable(lines, at);
}

function isRule(line) {
  const marks = line.replaceAll(" ", "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

function codeBlock(lines, at, [, fence, language]) {
  let end = at + 1;
  while (end < lines.length && !lines[end].trimStart().startsWith(fence)) end += 1;
  const code = element("code", {}, lines.slice(at + 1, end).join("\n"));
  return [element("pre", { tabindex: 0, "data-language": language || null }, code), end + 1];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return [element("blockquote", {}, ...blocks(inner, depth + 1)), end];
}

function list(lines, at, [, indent, marker], depth) {
  const isOrdered = /\d/.test(marker);
  const made = isOrdered ? element("ol", { start: parseInt(marker, 10) }) : element("ul");
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== isOrdered) break;
    const inner = [found[3]];
    end += 1;
    while (end < lines.length && belongsToItem(lines, end, indent.length)) {
      inner.push(withoutIndent(lines[end], indent.length + 2));
      end += 1;
    }
    const parts = blocks(inner, depth + 1);
    // A single paragraph needs no paragraph of its own.
    made.append(element("li", {}, ...(parts[0]?.tagName === "P" ? [...parts[0].childNodes, ...parts.slice(1)] : parts)));
    while (end < lines.length && lines[end].trim() === "" && ITEM.test(lines[end + 1] ?? "")) end += 1;
  }
  return [made, end];
}

function belongsToItem(lines, at, indent) {
  const line = lines[at];
  if (line.trim() === "") return isIndented(lines[at + 1] ?? "", indent);
  return isIndented(line, indent) || !startsBlock(lines, at);
}

const isIndented = (line, indent) => line.trim() !== "" && line.length - line.trimStart().length > indent;
const withoutIndent = (line, most) => line.slice(Math.min(most, line.length - line.trimStart().length));

function isTable(lines, at) {
  const next = lines[at + 1] ?? "";
  return lines[at].includes("|") && next.includes("|") && DELIMITERS.test(next.replace(/\s/g, ""));
}

function table(lines, at, depth) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (line, tag) => element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...inline(cell, depth))));
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const made = element("table", {}, element("thead", {}, row(lines[at], "th")), element("tbody", {}, ...body));
  return [element("div", { class: "wide", tabindex: 0 }, made), end];
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Texts and elements of a line. Each kind of mark that has no end is looked for only once: the time is linear. */
function inline(text, depth) {
  const made = [];
  const missing = new Set();
  let plain = "";
  let at = 0;
  const push = (node, next) => {
    if (plain) made.push(plain);
    plain = "";
    made.push(node);
    at = next;
  };
  while (at < text.length) {
    const found = depth < MAX_DEPTH && special(text, at, depth, missing);
    if (found) {
      push(...found);
    } else if (text[at] === "\\" && /[\\`*_{}[\]()#+.!~>|-]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      // A run of marks without an end is passed at once, so that its second half does not count as a shorter mark.
      const run = /[`*_~]+|[\s\S]/y;
      run.lastIndex = at;
      const [passed] = run.exec(text);
      plain += passed;
      at += passed.length;
    }
  }
  if (plain) made.push(plain);
  return made;
}

function special(text, at, depth, missing) {
  switch (text[at]) {
    case "`": return code(text, at, missing);
    case "*": case "_": case "~": return emphasis(text, at, depth, missing);
    case "[": return link(text, at, depth);
    case "!": return text[at + 1] === "[" ? link(text, at + 1, depth) : null;
    case "h": return bareLink(text, at);
    default: return null;
  }
}

function code(text, at, missing) {
  const [fence] = /^`+/.exec(text.slice(at, at + 64));
  const end = closing(text, fence, at + fence.length, missing);
  return end < 0 ? null : [element("code", {}, text.slice(at + fence.length, end).trim()), end + fence.length];
}

function emphasis(text, at, depth, missing) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const begin = at + mark.length;
    if (/\s/.test(text[begin] ?? " ")) continue;
    if (mark.startsWith("_") && /\w/.test(text[at - 1] ?? "")) continue; // snake_case
    const end = closing(text, mark, begin + 1, missing);
    if (end < 0 || /\s/.test(text[end - 1])) continue;
    if (mark.startsWith("_") && /\w/.test(text[end + mark.length] ?? "")) continue;
    return [element(tag, {}, ...inline(text.slice(begin, end), depth + 1)), end + mark.length];
  }
  return null;
}

function closing(text, mark, from, missing) {
  if (missing.has(mark)) return -1;
  const end = text.indexOf(mark, from);
  if (end < 0) missing.add(mark);
  return end;
}

/** `[text](address)`; of an image too, which is not loaded. */
function link(text, at, depth) {
  const near = text.slice(at, at + MAX_LINK_TEXT);
  const middle = near.indexOf("](");
  const end = middle < 0 ? -1 : near.indexOf(")", middle);
  if (end < 0) return null;
  const [target] = near.slice(middle + 2, end).trim().split(/\s/);
  const made = anchor(target, inline(near.slice(1, middle), depth + 1));
  return made && [made, at + end + 1];
}

function bareLink(text, at) {
  const address = /https?:\/\/[^\s<>"'`)\]]{1,2000}/y;
  address.lastIndex = at;
  const found = address.exec(text)?.[0].replace(/[.,;:!?]$/, "");
  const made = found && anchor(found, [found]);
  return made ? [made, at + found.length] : null;
}

/** A link that a person may follow; its address is shown on hover. Null for what is no web address. */
function anchor(target, children) {
  if (!URL.canParse(target) || !SCHEMES.has(new URL(target).protocol)) return null;
  return element("a", { href: target, title: target, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
