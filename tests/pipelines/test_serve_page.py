"""The chat page of a real server in headless Chromium: what the model says is what a person sees."""

from __future__ import annotations

import json
import struct
import urllib.request

import pytest

from castiron.pipelines.serve.page import PATHS
from tests.pipelines.browser import find
from tests.pipelines.chat_page import READY, press_button, put, say, talk, texts
from tests.pipelines.served import CONTEXT, Alone, bundle, served

# The model answers it without markdown, so that what is shown is what was said.
QUESTION = "Sing a song"
PROGRAM = find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium here: apt-get install chromium, or name one with CHROMIUM="
)
DONE = f"{READY} && document.querySelector('.assistant')"
PROBLEM = "document.querySelector('.problem')"
# What a test reads is the text as it was kept, whatever became of it as markdown.
KEPT = "Object.keys(localStorage).filter(key => key.includes(' chat ')).map(key => JSON.parse(localStorage.getItem(key)))"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return bundle(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def alone(path):
    return Alone(path)


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


def expected(alone, prompt: str = f"u:{QUESTION};a:") -> str:
    """What the model says until its end of text."""
    tokens = alone.tokens(prompt, CONTEXT - len(prompt) + 1)
    ends = [tokens.index(end) for end in alone.text.eos if end in tokens]
    return alone.text.decode(tokens[: min(ends, default=len(tokens))])


def nodes(browser) -> list[dict]:
    (chat,) = browser.run(KEPT)
    return chat["nodes"]


def filled(browser, server, *said: str, **fields: str) -> None:
    """A page with a conversation that was kept."""
    browser.open(server.url)
    put(browser, [talk(*said)], **fields)
    browser.open(server.url, again=True)


def test_a_question_gets_the_models_answer_and_nothing_comes_from_elsewhere(browser, server, alone, tmp_path):
    browser.open(server.url)
    browser.wait("document.getElementById('only-model').textContent === 'checkpoint'")
    say(browser, QUESTION)
    browser.wait(DONE)
    assert texts(browser, ".body") == [QUESTION, expected(alone)]
    browser.wait("performance.getEntriesByType('resource').length > 10")
    assert len(browser.requests) > 10 and all(url.startswith(server.url) for url in browser.requests)
    assert browser.errors == []
    # Seen, not only said: the picture has more than a few colours' worth of pixels.
    picture = browser.screenshot(tmp_path / "page.png")
    assert picture.startswith(b"\x89PNG") and struct.unpack(">I", picture[16:20])[0] > 400 and len(picture) > 10_000


def test_every_file_has_the_strict_policy_and_none_is_left_out(server):
    for name in ("", *PATHS):
        with urllib.request.urlopen(server.url.rstrip("/") + name) as reply:
            policy = reply.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
            assert reply.headers["X-Content-Type-Options"] == "nosniff" and reply.read()


def test_an_answer_that_was_cut_goes_on_as_if_it_had_not_been(browser, server, alone):
    browser.open(server.url)
    browser.run("document.querySelector('[name=max_tokens]').value = '10'")
    say(browser, QUESTION)
    for count in (10, 20):
        browser.wait(DONE)
        answer = nodes(browser)[1]
        assert answer["content"] == expected(alone)[:count] and answer["end"] == "length"
        if count == 10:
            press_button(browser, "Continue")


def test_a_message_that_is_too_long_is_refused_in_words_and_can_be_edited(browser, server):
    browser.open(server.url)
    say(browser, "x" * (CONTEXT + 1))
    browser.wait(PROBLEM)
    assert f"maximum context length is {CONTEXT}" in texts(browser, ".problem")[0]
    press_button(browser, "Edit")
    browser.run("document.querySelector('.edit textarea').value = 'Hello'")
    browser.press("Enter")
    browser.wait(DONE)
    assert texts(browser, ".user .body") == ["Hello"] and not texts(browser, ".problem, .gone, .note")


def test_a_full_context_drops_the_oldest_turns_and_says_so(browser, server, alone):
    """A quarter at once, when the server says that it is full."""
    said = ["one" * 5, "two" * 5, "three" * 3, "four" * 3, "five" * 3, "six" * 3]
    filled(browser, server, *said, system="S")
    question = "On" * 20
    say(browser, question)
    browser.wait(f"{READY} && document.querySelectorAll('.assistant').length === 4")
    assert texts(browser, ".gone .body") == said[:2] and "no longer sees" in texts(browser, ".note")[0]
    assert browser.run("document.querySelector('.note').previousElementSibling.querySelector('.body').textContent") == said[1]
    kept = "".join(f"{role}:{text};" for role, text in zip("uaua", said[2:]))
    assert nodes(browser)[-1]["content"] == expected(alone, f"s:S;{kept}u:{question};a:")
    # The end of it is what is seen.
    assert browser.run("(box => box.scrollHeight - box.scrollTop - box.clientHeight < 2)(document.getElementById('scroll'))")
    browser.open(server.url, again=True)
    assert texts(browser, ".gone .body") == said[:2] and len(texts(browser, ".note")) == 1


def test_an_answer_that_is_cut_says_so_and_leaves_room_for_the_next(browser, server):
    """The page knows by now how many characters a token has, and asks for no more than fits."""
    browser.open(server.url)
    for count in range(1, 9):
        say(browser, "Hello")
        browser.wait(f"{READY} && document.querySelectorAll('.assistant').length === {count}")
        assert not texts(browser, ".problem")
    cut = len(nodes(browser)[-1]["content"]) > CONTEXT // 4
    assert ("cut at its limit" in texts(browser, ".stats")[-1]) == cut
    assert len(texts(browser, ".user")) == 8 and texts(browser, ".gone")


def test_a_page_opens_whatever_the_browser_kept(browser, server):
    browser.open(server.url)
    for kept in ("{", "null", "3", '{"id": 3}', '{"id": "a", "title": "", "nodes": [null, {"role": "x"}]}'):
        for name in ("chat a", "settings"):
            browser.run(f"localStorage.setItem({json.dumps('castiron / ' + name)}, {json.dumps(kept)})")
        browser.open(server.url, again=True)
        browser.wait("document.getElementById('only-model').textContent")
        assert not texts(browser, ".message"), kept


def test_with_a_key_the_page_asks_for_it(browser, path, alone, tmp_path):
    with served(path, tmp_path / "log", "--api-key", "sesame", "--temperature", "0") as server:
        browser.open(server.url)
        browser.wait("document.getElementById('panel').open && document.activeElement.name === 'key'")
        browser.type("sesame")
        browser.press("Enter")
        browser.wait("document.getElementById('only-model').textContent && !document.getElementById('panel').open")
        say(browser, QUESTION)
        browser.wait(DONE)
        assert texts(browser, ".assistant .body") == [expected(alone)]
