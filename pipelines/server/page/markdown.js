// Make elements from Markdown: marked reads the text, and DOMPurify checks the elements. No text is ever parsed as HTML.
import "./vendor/purify.min.js"; // It sets the global DOMPurify.
import { Lexer, Marked, Tokenizer } from "./vendor/marked.esm.js";
import { codeBlock } from "./code.js";
import { h } from "./dom.js";

// Max depth of quotes and lists, because a browser's stack is limited. Max characters of a paragraph with marks, because
// marked takes quadratic time for some texts. What is beyond stays text.
const DEEPEST = 12, LONGEST = 4000;
const TAGS = { strong: "strong", em: "em", del: "s", blockquote: "blockquote", paragraph: "p" };
const ANCHOR = { target: "_blank", rel: "noopener noreferrer nofollow" };

DOMPurify.setConfig({
  IN_PLACE: true, TRUSTED_TYPES_POLICY: null, ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOWED_TAGS: ["p", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "code", "pre", "ul", "ol", "li", "blockquote", "hr", "br",
    "table", "thead", "tbody", "tr", "th", "td", "a", "div", "span", "button", "#text"],
  ALLOWED_ATTR: ["href", "target", "rel", "class", "start", "tabindex", "role", "type"],
  ADD_URI_SAFE_ATTR: ["target", "rel", "start", "tabindex", "type"],
});

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const decoded = text => text.replace(/&(?:#(\d{1,6})|#x([\da-f]{1,5})|(amp|lt|gt|quot|apos|nbsp));/gi,
  (_, decimal, hex, name) => (name ? ENTITIES[name.toLowerCase()] : String.fromCodePoint(decimal ?? parseInt(hex, 16))));

let depth = 0;
const nested = name => function nested(source) {
  if (depth === DEEPEST) return undefined;
  depth++;
  try { return Tokenizer.prototype[name].call(this, source); } finally { depth--; }
};
// HTML and definitions of links stay text; definitions would change blocks that are shown already.
export const options = new Marked({ breaks: true, tokenizer: {
  html() {}, def() {}, blockquote: nested("blockquote"), list: nested("list"),
  tag(source) {
    const [raw] = /^<br ?\/?>/.exec(source) ?? [];
    return raw && { type: "br", raw };
  },
} }).defaults;

class Reader extends Lexer {
  inlineTokens(source, tokens = []) {
    if (source.length <= LONGEST) return super.inlineTokens(source, tokens);
    tokens.push({ type: "text", raw: source, text: source });
    return tokens;
  }
}

const nodes = (tokens, loose) => tokens.flatMap(token => node(token, loose));

// Returns the elements and texts of a token; in a loose list, a text is a paragraph.
function node(token, loose) {
  switch (token.type) {
    case "space": return [];
    case "br": case "hr": return h(token.type);
    case "heading": return h(`h${token.depth}`, {}, ...nodes(token.tokens));
    case "code": return codeBlock((token.lang ?? "").split(/\s/)[0], token.text);
    case "codespan": return h("code", {}, token.text);
    case "checkbox": return token.checked ? "☑ " : "☐ ";
    // A picture would be loaded from elsewhere.
    case "link": case "image": return h("a", { ...ANCHOR, href: token.href }, ...(token.tokens?.length ? nodes(token.tokens) : [token.text || token.href]));
    case "list": return h(token.ordered ? "ol" : "ul", { start: token.start > 1 && token.start },
      ...token.items.map(item => h("li", {}, ...nodes(item.tokens, item.loose))));
    case "table": return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, h("table", {},
      h("thead", {}, row("th", token.header)), h("tbody", {}, ...token.rows.map(cells => row("td", cells)))));
    case "text":
      if (!token.tokens) return decoded(token.text);
      return loose ? h("p", {}, ...nodes(token.tokens)) : nodes(token.tokens);
    default: return TAGS[token.type] ? h(TAGS[token.type], {}, ...nodes(token.tokens)) : token.text ?? token.raw;
  }
}

const row = (tag, cells) => h("tr", {}, ...cells.map(({ tokens, align }) => h(tag, { class: align }, ...nodes(tokens))));

// A Markdown text in an element; when the text grows, finished blocks are not rebuilt.
export class Markdown {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.blocks = [];
  }

  update(text) {
    text = text.replaceAll("\r\n", "\n");
    // More text can change the last block only.
    const kept = text.startsWith(this.text) ? this.blocks.slice(0, -2) : [];
    for (const { element } of this.blocks.slice(kept.length)) element?.remove();
    const start = kept.at(-1)?.end ?? 0;
    let end = start;
    this.text = text;
    this.blocks = [...kept, ...new Reader(options).lex(text.slice(start)).map(token => {
      const [element] = nodes([token], true);
      if (element) this.element.append(DOMPurify.sanitize(typeof element === "string" ? h("p", {}, element) : element));
      return { element, end: (end += token.raw.length) };
    })];
  }
}
