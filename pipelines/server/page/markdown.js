// Make elements from Markdown; all other text, such as HTML, stays text.
import { codeBlock } from "./code.js";
import { h } from "./dom.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DELIMITERS = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
// Max depth of quotes, lists and emphasis, because a browser's stack is limited; deeper ones stay text.
const DEEPEST = 12;

const blank = line => !line.trim();
const indent = line => line.length - line.trimStart().length;
const strip = (line, most) => line.slice(Math.min(indent(line), most));

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}

function isTable(lines, at) {
  const next = lines[at + 1] ?? "";
  return lines[at].includes("|") && next.includes("|") && DELIMITERS.test(next) && cells(lines[at]).length === cells(next).length;
}

// Returns whether a line ends the paragraph before it.
function begins(lines, at) {
  const line = lines[at], item = ITEM.exec(line);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)
    || (item && item[0].length < line.length && /^([-*+]|1[.)])$/.test(item[2])) || isTable(lines, at);
}

// Returns the blocks of some lines: where each starts, and a function that makes its element.
function parse(lines, depth = 0) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (blank(lines[at])) { at++; continue; }
    const read = depth < DEEPEST && (container(lines, at, depth)) || leaf(lines, at);
    found.push({ start: at, make: read.make, paragraph: read.paragraph });
    at = read.end;
  }
  return found;
}

function leaf(lines, at) {
  const line = lines[at], fence = FENCE.exec(line), heading = HEADING.exec(line);
  let end = at + 1;
  if (fence) {
    const [, before, mark, info] = fence, body = [];
    const closes = other => other.trim().startsWith(mark) && !other.trim().replaceAll(mark[0], "") && indent(other) < 4;
    for (; end < lines.length && !closes(lines[end]); end++) body.push(strip(lines[end], before.length));
    return { end: end + 1, make: () => codeBlock(info.trim().split(/\s/)[0], body.join("\n")) };
  }
  if (heading) {
    const text = (heading[2] ?? "").trimEnd().replace(/(^|[ \t])#+$/, "");
    return { end, make: () => inline(h(`h${heading[1].length}`), text.trim()) };
  }
  if (RULE.test(line)) return { end, make: () => h("hr") };
  if (isTable(lines, at)) {
    for (end++; end < lines.length && !blank(lines[end]) && lines[end].includes("|"); end++);
    return { end, make: () => table(lines.slice(at, end)) };
  }
  while (end < lines.length && !blank(lines[end]) && !begins(lines, end)) end++;
  const text = lines.slice(at, end).map(part => part.trim()).join("\n");
  return { end, paragraph: text, make: () => inline(h("p"), text) };
}

// Returns the quote or list at a line, or null.
function container(lines, at, depth) {
  if (RULE.test(lines[at])) return null;
  let end = at;
  if (QUOTE.test(lines[at])) {
    // A line without > continues the paragraph before it.
    while (end < lines.length && (QUOTE.test(lines[end]) || end > at && !blank(lines[end]) && !blank(lines[end - 1].replace(QUOTE, ""))
      && !begins(lines, end))) end++;
    const inner = lines.slice(at, end).map(line => line.replace(QUOTE, ""));
    return { end, make: () => fill(h("blockquote"), parse(inner, depth + 1)) };
  }
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const kind = mark => mark.replace(/\d+/, ""), items = [];
  let loose = false;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || kind(item[2]) !== kind(first[2]) || RULE.test(lines[end])) break;
    const width = Math.max(item[0].length, item[1].length + 2), body = [lines[end].slice(item[0].length)];
    for (end++; end < lines.length; end++) {
      const line = lines[end];
      if (blank(line)) body.push("");
      else if (indent(line) >= item[1].length + 2) body.push(strip(line, width));
      // A line without indent continues the paragraph before it, unless it is an item.
      else if (!blank(body.at(-1)) && !begins(lines, end) && !ITEM.test(line)) body.push(line.trim());
      else break;
    }
    const text = body.join("\n").trimEnd(), next = ITEM.exec(lines[end] ?? "");
    const more = next && kind(next[2]) === kind(first[2]);
    loose ||= /\n\n(?! )/.test(text) || (more && blank(body.at(-1)) && body.length > 1);
    items.push(text.split("\n"));
  }
  const number = parseInt(first[2]);
  const list = () => h(Number.isNaN(number) ? "ul" : "ol", { start: number > 1 && number });
  const make = () => items.reduce((made, item) => {
    made.append(fill(h("li"), parse(item.map((line, i) => (i ? line : line.replace(/^\[[ xX]\] /, box))), depth + 1), !loose));
    return made;
  }, list());
  return { end, make };
}

const box = mark => (mark === "[ ] " ? "☐ " : "☑ ");

// Appends blocks to an element; in a tight list, paragraphs have no element of their own.
function fill(element, found, tight = false) {
  for (const { make, paragraph } of found) {
    if (tight && paragraph !== undefined) inline(element, paragraph);
    else element.append(make());
  }
  return element;
}

function table([head, delimiters, ...rows]) {
  const sides = cells(delimiters).map(cell => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
  const row = (tag, line) => {
    const given = cells(line);
    return h("tr", {}, ...sides.map((side, i) => inline(h(tag, { class: side }), given[i] ?? "")));
  };
  return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, ...rows.map(line => row("td", line)))));
}

const TOKEN = /\\([!-/:-@[-`{-~])|(`+)|(!?\[)|(\])|(\*+|_+|~~)|<(https?:\/\/[^\s<>]{1,2000})>|(https?:\/\/[^\s<>"'`*\]]{1,2000})|(\n|<br ?\/?>)/g;
const LINK = /\((?:<([^<>\n]{1,2000})>|([^\s()<>]{1,2000}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,200}){0,5}))(?:[ \t]+"[^"\n]{0,500}")?\)/y;
const LETTER = /[\p{L}\p{N}]/u;

// Returns the address if a link may have it: a web page or a mail address; otherwise null.
function safe(address) {
  try {
    const { protocol, href } = new URL(address);
    return ["http:", "https:", "mailto:"].includes(protocol) ? href : null;
  } catch { return null; }
}

const anchor = { target: "_blank", rel: "noopener noreferrer nofollow" };

// Appends text with code, emphasis, links and line breaks to `root`, in one pass. Marks that are never closed stay text.
function inline(root, text) {
  const open = [], unclosed = new Set();
  let into = root, at = 0;
  const enter = (mark, tag) => {
    if (open.length === DEEPEST) unwrap(0);
    const element = h(tag);
    into.append(element);
    open.push({ mark, element });
    into = element;
  };
  const unwrap = index => {
    const [{ mark, element }] = open.splice(index, 1);
    element.before(mark);
    while (element.firstChild) element.before(element.firstChild);
    if (into === element) into = element.parentNode;
    element.remove();
  };
  const leave = index => {
    while (open.length > index + 1) unwrap(open.length - 1);
    const { element } = open.pop();
    into = element.parentNode;
    return element;
  };
  const last = mark => open.findLastIndex(one => one.mark === mark);
  const emphasis = (run, before, after) => {
    const word = run[0] === "_";
    const opens = /\S/.test(after) && !(word && LETTER.test(before)), closes = /\S/.test(before) && !(word && LETTER.test(after));
    while (run) {
      const one = run[0], two = one + one, top = open.at(-1)?.mark;
      const order = one === "~" ? [two] : run.length > 2 && top?.[0] === one ? [top] : run.length > 1 ? [two, one] : [one];
      const index = closes ? order.map(last).find(found => found >= 0) ?? -1 : -1;
      let mark = run;
      if (index >= 0) { mark = open[index].mark; leave(index); }
      else if (opens && run.length < 4) { mark = run.slice(0, 2); enter(mark, one === "~" ? "s" : mark.length > 1 ? "strong" : "em"); }
      else into.append(run);
      run = run.slice(mark.length);
    }
  };
  const link = () => {
    const index = open.findLastIndex(one => one.mark.endsWith("["));
    LINK.lastIndex = TOKEN.lastIndex;
    const target = index >= 0 && LINK.exec(text), href = target && safe(target[1] ?? target[2]);
    if (!href) {
      if (index >= 0) unwrap(index);
      into.append("]");
      return 0;
    }
    const element = leave(index);
    // A link inside a link becomes text.
    for (const inner of element.querySelectorAll("a")) inner.replaceWith(inner.textContent);
    if (!element.textContent) element.append(href);
    Object.entries({ ...anchor, href }).forEach(pair => element.setAttribute(...pair));
    return target[0].length;
  };
  for (let match; TOKEN.lastIndex = at, (match = TOKEN.exec(text));) {
    const [found, escaped, ticks, bracket, closing, run, pointed, address] = match;
    into.append(text.slice(at, match.index));
    at = TOKEN.lastIndex;
    if (escaped) into.append(escaped);
    else if (ticks) {
      let end = unclosed.has(found) ? -1 : text.indexOf(found, at);
      while (end >= 0 && (text[end + found.length] === "`")) {
        for (end += found.length; text[end] === "`"; end++);
        end = text.indexOf(found, end);
      }
      if (end < 0) { unclosed.add(found); into.append(found); continue; }
      into.append(h("code", {}, text.slice(at, end).replaceAll("\n", " ").replace(/^ (.*\S.*) $/, "$1")));
      at = end + found.length;
    } else if (bracket) enter(bracket, "a");
    else if (closing) at += link();
    else if (run) emphasis(run, text[match.index - 1] ?? " ", text[at] ?? " ");
    else if (pointed ?? address) {
      // A full stop or bracket after an address is not part of it.
      const target = pointed ?? address.replace(/[.,;:!?]+$/, ""), shown = !pointed && !target.includes("(") ? target.replace(/\)+[.,;:!?]*$/, "") : target;
      const href = safe(shown);
      into.append(href ? h("a", { ...anchor, href }, shown) : shown);
      if (!pointed) at = match.index + shown.length;
    } else into.append(h("br"));
  }
  into.append(text.slice(at));
  while (open.length) unwrap(open.length - 1);
  return root;
}

// A Markdown text in an element; when the text grows, finished blocks are not rebuilt.
export class Markdown {
  constructor(element) {
    this.element = element;
    this.settled = { characters: 0, blocks: 0 };
  }

  update(text) {
    const lines = text.replaceAll("\r\n", "\n").slice(this.settled.characters).split("\n");
    while (this.element.childElementCount > this.settled.blocks) this.element.lastElementChild.remove();
    // Complete lines define their blocks, except for the last block, which may continue.
    const blocks = parse(lines.slice(0, -1)), start = blocks.at(-1)?.start ?? 0;
    fill(this.element, blocks.slice(0, -1));
    this.settled.blocks += Math.max(0, blocks.length - 1);
    this.settled.characters += lines.slice(0, start).reduce((sum, line) => sum + line.length + 1, 0);
    fill(this.element, parse(lines.slice(start)));
  }
}
