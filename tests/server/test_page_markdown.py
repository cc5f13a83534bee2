"""Markdown on the chat page in headless Chromium: complete, streamed and hostile text."""

from __future__ import annotations

import contextlib
import json
import random

import pytest

from tests.support.browser import needs_chromium
from tests.support.chat_page import StandIn

pytestmark = needs_chromium
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'

# Markdown source and HTML, without the frames that the page puts around code and tables.
CASES = [
    ("plain, 2 * 3 * 4, a_b_c and <b>", "<p>plain, 2 * 3 * 4, a_b_c and &lt;b&gt;</p>"),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("# A\n###### F #\n#no", "<h1>A</h1><h6>F</h6><p>#no</p>"),
    ("**a *b* c** _d_ ***e*** ~~f~~", "<p><strong>a <em>b</em> c</strong> <em>d</em> <em><strong>e</strong></em> <s>f</s></p>"),
    ("**open *and [not", "<p>**open *and [not</p>"),
    ("*a **b* c", "<p>*a *<em>b</em> c</p>"),
    ("`a *b*` ``c ` d`` ` e", "<p><code>a *b*</code> <code>c ` d</code> ` e</p>"),
    (r"\*not\* \# \`", "<p>*not* # `</p>"),
    ("- a\n- b\n  - c\n    - d\n- e", "<ul><li>a</li><li>b<ul><li>c<ul><li>d</li></ul></li></ul></li><li>e</li></ul>"),
    ("1. a\n   - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
    ("3) a\n4) b\n\ntext", '<ol start="3"><li>a</li><li>b</li></ol><p>text</p>'),
    ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
    ("* a\nlazy\n* [ ] b\n* [x] c", "<ul><li>a<br>lazy</li><li>☐ b</li><li>☑ c</li></ul>"),
    ("text\n- a\n1. b", "<p>text</p><ul><li>a</li></ul><ol><li>b</li></ol>"),
    ("In\n1999. It was", "<p>In<br>1999. It was</p>"),
    ("> a\nb\n> > c\n\nd", "<blockquote><p>a<br>b</p><blockquote><p>c</p></blockquote></blockquote><p>d</p>"),
    ("a\n\n---\n***\nb", "<p>a</p><hr><hr><p>b</p>"),
    ("```py\nx = 1 < 2\n\n# y\n```\nafter", "<pre>x = 1 &lt; 2\n\n# y</pre><p>after</p>"),
    ("~~~\n```\n~~~", "<pre>```</pre>"),
    ("````\n```\n````", "<pre>```</pre>"),
    ("- a\n  ```\n  b\n    c\n  ```\n- d", "<ul><li>a<pre>b\n  c</pre></li><li>d</li></ul>"),
    ("```js\nnever closed", "<pre>never closed</pre>"),
    (
        "| a | b |\n|---|--:|\n| `x` | **2** \\| 3 |\n| y |\n\nend",
        '<table><thead><tr><th>a</th><th class="right">b</th></tr></thead><tbody><tr><td><code>x</code></td>'
        '<td class="right"><strong>2</strong> | 3</td></tr><tr><td>y</td><td class="right"></td></tr></tbody></table><p>end</p>',
    ),
    ("a | b\nno | table", "<p>a | b<br>no | table</p>"),
    ("text\na|b\n-|-\n1|2", "<p>text</p><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>"),
    ("[a *b*](https://x.org/y_z_(w)?q=1 \"t\")", f'<p><a {LINK} href="https://x.org/y_z_(w)?q=1">a <em>b</em></a></p>'),
    ("see https://x.org/a_b. (http://y.org/)", f'<p>see <a {LINK} href="https://x.org/a_b">https://x.org/a_b</a>. (<a {LINK} href="http://y.org/">http://y.org/</a>)</p>'),
    ("<https://x.org/> <mail>", f'<p><a {LINK} href="https://x.org/">https://x.org/</a> &lt;mail&gt;</p>'),
    ("[https://x.org](https://y.org)", f'<p><a {LINK} href="https://y.org">https://x.org</a></p>'),
    ("a\r\nb<br>c", "<p>a<br>b<br>c</p>"),
    ("&lt;b&gt; &#60; &#x27;&nbsp;&bogus;", "<p>&lt;b&gt; &lt; '&nbsp;&amp;bogus;</p>"),
]  # fmt: skip

# The only elements that hostile text may become.
TAGS = "p h1 h2 h3 h4 h5 h6 strong em s code pre ul ol li blockquote hr table thead tbody tr th td a br div span button".split()
HOSTILE = [
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\"><svg onload=alert(1)><iframe src=https://evil.example>",
    "![pixel](https://evil.example/pixel.png) ![x](data:image/svg+xml,<svg onload=alert(1)>)",
    "[a](javascript:document.title='owned') [b](JaVaScRiPt:alert(1)) [c](\tjavascript:alert(1)) [d](data:text/html,x) [e](vbscript:x)",
    "[f](<javascript:alert(1)>) <javascript:alert(1)> [g](java\nscript:alert(1)) [h](//evil.example) [i](file:///etc/passwd)",
    '[j](https://x.org"onmouseover="alert(1)) [k](https://x.org/ "onclick=alert(1)")',
    "```\"><script>document.title='owned'</script>\ncode\n```\n```<img/src=x/onerror=alert(1)>",
    "| <script> | b |\n|---|---|\n| <img src=x onerror=alert(1)> | [x](javascript:alert(1)) |",
    "`<style>*{background:url(https://evil.example)}</style>` <link rel=stylesheet href=https://evil.example>",
    "# <base href=https://evil.example>\n<meta http-equiv=refresh content='0;url=https://evil.example'><form action=https://evil.example>",
    "&lt;script&gt; &#x3C;script&#x3E; \\<script\\> \u202e \u0000 \ud83d",
]
# Text and repetitions that cost a careless parser time or stack; tests use half as many repetitions.
LONG = [
    ("> ", 50_000), ("- ", 50_000), ("1. ", 33_000), ("*a ", 33_000), ("**a _b ", 14_000), ("[", 100_000), ("[a](", 25_000), ("]", 100_000),
    ("`" , 100_000), ("`a``b", 20_000), ("```\n", 25_000), ("|", 100_000), ("|a\n|-\n", 16_000), ("- a\n", 25_000), ("\\", 100_000),
    ("https://", 12_500), ("# ", 50_000), ("_a_ ", 25_000), ("***", 33_000), ("![", 50_000), ("<", 100_000), ("- - a\n  > ", 10_000),
    ("```js\n\"\\\"'", 10_000), ("a\n", 50_000), ("![a](https://x.org/(", 5_000),
]  # fmt: skip


@pytest.fixture(scope="module")
def page(chromium):
    with contextlib.closing(StandIn()) as server:
        chromium.open(server.url)
        chromium.run("import('/page/markdown.js').then(found => { window.Markdown = found.Markdown; })")
        chromium.run(
            "window.made = (text, cuts) => { const into = document.createElement('div'), all = new Markdown(into); "
            "for (const cut of cuts) all.update(text.slice(0, cut)); all.update(text); return into; };"
            "window.bare = into => { into.querySelectorAll('.code').forEach(code => { const pre = document.createElement('pre');"
            " pre.textContent = code.querySelector('pre').textContent; code.replaceWith(pre); });"
            " into.querySelectorAll('.table').forEach(box => box.replaceWith(box.firstChild)); return into.innerHTML; }; 0"
        )
        yield chromium, server


def test_what_models_write_becomes_these_elements(page):
    browser, _ = page
    sources = json.dumps([source for source, _ in CASES])
    found = browser.run(f"{sources}.map(text => bare(made(text, [])))")
    wrong = [(source, html, got) for (source, html), got in zip(CASES, found) if html != got]
    assert wrong == []


def test_text_that_comes_in_pieces_becomes_the_same_elements(page):
    """All cases are one text, which arrives character by character."""
    browser, _ = page
    source = json.dumps("\n\n".join(source for source, _ in CASES) + "\n" + "\n".join(source for source, _ in reversed(CASES)))
    assert browser.run(f"(text => made(text, Array.from(text, (_, i) => i)).innerHTML === made(text, []).innerHTML)({source})")


def test_finished_blocks_are_not_rebuilt_while_more_arrives(page):
    browser, _ = page
    assert browser.run(
        "(() => { const into = document.createElement('div'), all = new Markdown(into); all.update('# a\\n\\nb\\n\\nc\\n'); const kept ="
        " [...into.children]; all.update('# a\\n\\nb\\n\\nc\\nd\\n\\ne'); return [...into.children].map((one, i) => one === kept[i]); })()"
    ) == [True, True, False, False]


def test_a_hostile_answer_runs_nothing_and_loads_nothing(page):
    browser, server = page
    browser.requests, errors = [], len(browser.errors)
    text = json.dumps("\n\n".join(HOSTILE))
    found = browser.run(
        f"(text => {{ const into = made(text, Array.from(text, (_, i) => i)); document.body.append(into); const all = [...into.querySelectorAll('*')];"
        "const seen = { tags: [...new Set(all.map(one => one.localName))], links: all.filter(one => one.href).map(one => one.href),"
        " attributes: [...new Set(all.flatMap(one => one.getAttributeNames()))], text: into.textContent };"
        f" return new Promise(done => setTimeout(() => {{ into.remove(); done(seen); }}, 100)); }})({text})"
    )
    assert set(found["tags"]) <= set(TAGS)
    assert not [name for name in found["attributes"] if name.startswith("on") or name in ("style", "src", "id", "name")]
    # Links to https pages are allowed.
    assert found["links"] and all(link.startswith("https://") for link in found["links"]), found["links"]
    assert "<script>document.title='owned'</script>" in found["text"] and browser.run("document.title") == "castiron"
    assert browser.requests == [] and len(browser.errors) == errors


def test_long_and_deep_markdown_is_fast(page):
    """The limit of 10 s is ten times what the slowest case takes on a busy machine."""
    browser, _ = page
    times = browser.run(
        f"{json.dumps(LONG)}.map(([text, count]) => {{ const start = performance.now(), into = made(text.repeat(count / 2), []);"
        " let deepest = 0; for (let walk = document.createTreeWalker(into), depth; walk.nextNode();) { depth = 0;"
        " for (let one = walk.currentNode; one !== into; one = one.parentNode) depth++; deepest = Math.max(deepest, depth); }"
        " return [text, Math.round(performance.now() - start), deepest]; })"
    )
    assert [one for one in times if one[1] > 10_000 or one[2] > 60] == [], times


BITS = [
    "a", "b ", "*", "**", "_", "`", "``", "\n", "\n\n", "- ", "1. ", "> ", "# ", "  ", "    ", "```\n", "|", "|-|-|\n", "|a|b|\n",
    "[x](https://x.org)", "https://y.org ", "~~", "\\", "<b>", "&amp;", "<br>", "---\n", "[ ] ", "2) ", "![p](https://p.org/i.png)",
    "===\n", "\t",
]  # fmt: skip
# marked's own HTML, with the tags that the page uses, and the page's elements, both without attributes of links and spaces.
AS_MARKED = r"""
Promise.all([import('/page/markdown.js'), import('/page/vendor/marked.esm.js')]).then(([{ options }, { Lexer, Parser }]) => {
  const plain = html => html.replace(/<a [^>]*>/g, '<a>').replace(/\s*\n\s*/g, '').replace(/ +/g, ' ');
  window.theirs = text => plain(Parser.parse(new Lexer(options).lex(text), options)
    .replace(/&#39;/g, "'").replace(/&quot;/g, '"').replace(/<(\/?)del>/g, '<$1s>').replace(/ align="(\w+)"/g, ' class="$1"')
    .replace(/<pre><code[^>]*>([^]*?)<\/code><\/pre>/g, (_, code) => `<pre>${code.replace(/\n$/, '')}</pre>`)
    .replace(/<img [^>]*alt="([^"]*)"[^>]*>/g, '<a>$1</a>').replace(/<input [^>]*> ?/g, '☐ '));
  window.ours = text => {
    const into = made(text, []), html = bare(into);
    return plain(html.replace(/<tbody><\/tbody>/g, ''));
  };
})"""


def test_the_elements_are_those_of_marked(page):
    """Texts of random parts: their elements are marked's, also if they come in pieces."""
    browser, _ = page
    browser.run(AS_MARKED)
    drawn = random.Random(0)
    texts = json.dumps(["".join(drawn.choices(BITS, k=drawn.randint(2, 25))) for _ in range(100)])
    assert browser.run(f"{texts}.map(text => [text, ours(text), theirs(text)]).filter(([_, a, b]) => a !== b)") == []
    cuts = "Array.from(text, (_, i) => i).filter(i => i % 3)"
    assert browser.run(f"{texts}.filter(text => made(text, {cuts}).innerHTML !== made(text, []).innerHTML)") == []
