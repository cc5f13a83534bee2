"""The chat page of a real server in headless Chromium."""

from __future__ import annotations

import json
import struct
import urllib.request

import pytest

from castiron.pipelines.server.routes import PATHS
from tests.support.browser import needs_chromium
from tests.support.chat_page import READY, put, send, talk, texts
from tests.support.served import CONTEXT, served

# The model answers this question without markdown, so the page shows the text unchanged.
QUESTION = "Sing a song"
pytestmark = needs_chromium
DONE = f"{READY} && document.querySelector('.assistant')"
# Script that returns the stored conversations.
STORED = "Object.keys(localStorage).filter(key => key.includes(' chat ')).map(key => JSON.parse(localStorage.getItem(key)))"


@pytest.fixture(scope="module")
def server(path, tmp_path_factory):
    with served(path, tmp_path_factory.mktemp("page") / "log", "--temperature", "0") as found:
        yield found


@pytest.fixture(scope="module")
def browser(chromium):
    chromium.size(900, 700)
    chromium.call("Page.navigate", url="about:blank")
    chromium.errors.clear()
    return chromium


def expected(reference, prompt: str = f"u:{QUESTION};a:") -> str:
    """Return the model's text up to its end token."""
    tokens = reference.tokens(prompt, CONTEXT - len(prompt) + 1)
    ends = [tokens.index(end) for end in reference.text.eos if end in tokens]
    return reference.text.decode(tokens[: min(ends, default=len(tokens))])


def nodes(browser) -> list[dict]:
    (chat,) = browser.run(STORED)
    return chat["nodes"]


def filled(browser, server, *turns: str, **fields: str) -> None:
    """Open a page with a stored conversation."""
    browser.open(server.url)
    put(browser, [talk(*turns)], **fields)
    browser.open(server.url, again=True)


def test_a_question_gets_the_models_answer_and_nothing_comes_from_elsewhere(browser, server, reference, tmp_path):
    browser.open(server.url)
    browser.wait("document.getElementById('only-model').textContent === 'tiny'")
    send(browser, QUESTION)
    browser.wait(DONE)
    assert texts(browser, ".body") == [QUESTION, expected(reference)]
    browser.wait("performance.getEntriesByType('resource').length > 10")
    assert len(browser.requests) > 10 and all(url.startswith(server.url) for url in browser.requests)
    assert browser.errors == []
    # The screenshot is not empty.
    picture = browser.screenshot(tmp_path / "page.png")
    assert picture.startswith(b"\x89PNG") and struct.unpack(">I", picture[16:20])[0] > 400 and len(picture) > 10_000


def test_every_file_of_the_page_has_the_strict_policy(server):
    for name in ("", *PATHS):
        with urllib.request.urlopen(server.url.rstrip("/") + name) as reply:
            policy = reply.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
            assert reply.headers["X-Content-Type-Options"] == "nosniff" and reply.read()


def test_a_full_context_drops_the_oldest_turns_and_shows_a_note(browser, server, reference):
    """The page drops a quarter of the context when the server reports that it is full."""
    turns = ["one" * 5, "two" * 5, "three" * 3, "four" * 3, "five" * 3, "six" * 3]
    filled(browser, server, *turns, system="S")
    question = "On" * 20
    send(browser, question)
    browser.wait(f"{READY} && document.querySelectorAll('.assistant').length === 4")
    assert texts(browser, ".gone .body") == turns[:2] and "no longer sees" in texts(browser, ".note")[0]
    assert browser.run("document.querySelector('.note').previousElementSibling.querySelector('.body').textContent") == turns[1]
    stored = "".join(f"{role}:{text};" for role, text in zip("uaua", turns[2:]))
    assert nodes(browser)[-1]["content"] == expected(reference, f"s:S;{stored}u:{question};a:")
    # The page has scrolled to the end.
    assert browser.run("(box => box.scrollHeight - box.scrollTop - box.clientHeight < 2)(document.getElementById('scroll'))")
    browser.open(server.url, again=True)
    assert texts(browser, ".gone .body") == turns[:2] and len(texts(browser, ".note")) == 1


def test_a_cut_answer_is_marked_and_leaves_space_for_the_next(browser, server):
    """The page has measured the characters of a token and requests an answer that fits."""
    browser.open(server.url)
    for count in range(1, 9):
        send(browser, "Hello")
        browser.wait(f"{READY} && document.querySelectorAll('.assistant').length === {count}")
        assert not texts(browser, ".problem")
    cut = len(nodes(browser)[-1]["content"]) > CONTEXT // 4
    assert ("cut at its limit" in texts(browser, ".stats")[-1]) == cut
    assert len(texts(browser, ".user")) == 8 and texts(browser, ".gone")


def test_a_page_opens_with_damaged_storage(browser, server):
    browser.open(server.url)
    for stored in ("{", "null", "3", '{"id": 3}', '{"id": "a", "title": "", "nodes": [null, {"role": "x"}]}'):
        for name in ("chat a", "settings"):
            browser.run(f"localStorage.setItem({json.dumps('castiron / ' + name)}, {json.dumps(stored)})")
        browser.open(server.url, again=True)
        browser.wait("document.getElementById('only-model').textContent")
        assert not texts(browser, ".message"), stored


def test_the_page_prompts_for_the_key(browser, path, reference, tmp_path):
    with served(path, tmp_path / "log", "--api-key", "sesame", "--temperature", "0") as server:
        browser.open(server.url)
        browser.wait("document.getElementById('panel').open && document.activeElement.name === 'key'")
        browser.type("sesame")
        browser.press("Enter")
        browser.wait("document.getElementById('only-model').textContent && !document.getElementById('panel').open")
        send(browser, QUESTION)
        browser.wait(DONE)
        assert texts(browser, ".assistant .body") == [expected(reference)]
