// Blocks of code, with the language's name, a copy button and syntax colours.
import { copyButton, h } from "./dom.js";

const WORDS = new Set(`abstract and as async await bool break case catch char class const continue def default defer del do double
 elif else end enum except export extends false final finally float fn for from func function global go if impl implements
 import in int interface is lambda let local long loop match mod module mut namespace new nil none not null of or package pass
 private protected public pub raise return select self short static string struct super switch this throw trait true try type
 typeof union unless unsafe until use using var void where while with yield`.split(/\s+/));
// Languages whose comments start with #, and with --; others have // and /* */.
const HASH = /^(py|python|sh|bash|zsh|shell|console|ruby|rb|perl|yaml|yml|toml|ini|r|make|makefile|dockerfile|cmake|nix|awk)$/;
const DASH = /^(sql|lua|haskell|hs|elm|ada)$/;
const PLAIN = /^(|text|txt|plain|plaintext|output|log|markdown|md|csv|html|xml|svg)$/;
// A string or comment without an end goes on to the end of the line or text, so that every character is read once.
const rule = comment => new RegExp(
  `(${comment})|("""[^]*?(?:"""|$)|"(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'?|\`(?:\\\\[^]|[^\`\\\\])*\`?)`
  + "|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)", "g");
const RULES = { hash: rule("#[^\\n]*"), dash: rule("--[^\\n]*"), slash: rule("\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)") };
// Max characters of a block with colours.
const LONGEST = 30_000;

function colour(element, text, language) {
  if (PLAIN.test(language) || text.length > LONGEST) { element.append(text); return; }
  const kind = HASH.test(language) ? "hash" : DASH.test(language) ? "dash" : "slash";
  let at = 0;
  for (const match of text.matchAll(RULES[kind])) {
    const [found, comment, string, number, word] = match;
    const name = comment ? "comment" : string ? "string" : number ? "number" : WORDS.has(word.toLowerCase()) ? "word" : "";
    if (!name) continue;
    element.append(text.slice(at, match.index), h("span", { class: `c-${name}` }, found));
    at = match.index + found.length;
  }
  element.append(text.slice(at));
}

export function codeBlock(language, text) {
  const code = h("code");
  colour(code, text, language.toLowerCase());
  const name = language.slice(0, 30) || "code";
  return h("div", { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, name), copyButton(() => text)),
    h("pre", { tabindex: "0", role: "region", "aria-label": `${name}, block of code` }, code));
}
