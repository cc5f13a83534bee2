"""The chat page in headless Chromium: what a person sees, clicks and types."""

from __future__ import annotations

import contextlib
import json
import re
import struct

import pytest

from tests.pipelines.browser import Browser, find
from tests.pipelines.served import CONTEXT, Alone, bundle, served

# The model answers it without a backtick, so that what is shown is what was said.
QUESTION = "Sing a song"
PROGRAM = find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium here: apt-get install chromium, or name one with CHROMIUM="
)
ANSWER = "document.querySelector('.assistant:last-of-type')?.textContent"
DONE = "!document.querySelector('.busy') && document.querySelectorAll('.assistant').length"


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
def browser(tmp_path_factory):
    with contextlib.closing(Browser(PROGRAM, tmp_path_factory.mktemp("chromium") / "profile")) as found:
        yield found


def expected(alone, prompt: str = f"u:{QUESTION};a:") -> str:
    """What the model says until its end of text."""
    tokens = alone.tokens(prompt, CONTEXT - len(prompt) + 1)
    ends = [tokens.index(end) for end in alone.text.eos if end in tokens]
    return alone.text.decode(tokens[: min(ends, default=len(tokens))])


def shown(text: str) -> str:
    """As the page writes it: code between backticks is code."""
    return re.sub(r"`([^`\n]+)`", r"\1", text)


def say(browser, text: str) -> None:
    browser.run("document.getElementById('input').focus()")
    browser.type(text)
    browser.press_enter()


def test_a_question_gets_the_models_answer_and_nothing_comes_from_elsewhere(browser, server, alone, tmp_path):
    browser.open(server.url)
    say(browser, QUESTION)
    browser.wait(DONE)
    assert browser.run("document.querySelector('.user').textContent") == QUESTION
    assert browser.run(ANSWER) == expected(alone)
    assert re.search(r"\d+ prompt tokens \(\d+ cached\)", browser.run("document.getElementById('status').textContent"))
    assert browser.run("document.getElementById('model').textContent")
    assert browser.requests and all(url.startswith((server.url, "data:")) for url in browser.requests)
    assert browser.errors == []
    # Seen, not only said: the picture has more than a few colours' worth of pixels.
    picture = browser.screenshot(tmp_path / "page.png")
    assert picture.startswith(b"\x89PNG") and struct.unpack(">I", picture[16:20])[0] > 400 and len(picture) > 10_000


def test_text_appears_while_it_is_written(browser, server):
    """Every length on the way is seen by an observer in the page."""
    browser.open(server.url)
    browser.run(
        "window.seen = []; new MutationObserver(() => seen.push(document.querySelector('.assistant')?.textContent.length))"
        ".observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true})"
    )
    say(browser, QUESTION)
    browser.wait(DONE)
    lengths = browser.run("window.seen.filter(n => n)")
    assert len(set(lengths)) > 10 and lengths == sorted(lengths)


def test_stop_stops_and_the_chat_goes_on(browser, server, alone):
    """Over a slow line, so that there is time to click."""
    browser.open(server.url)
    browser.throttle(4000)
    say(browser, QUESTION)
    browser.wait(f"({ANSWER} || '').length > 0")
    assert browser.run("document.getElementById('send').hidden && !document.getElementById('stop').hidden")
    browser.click("#stop")
    browser.wait(DONE)
    stopped = browser.run(ANSWER)
    assert 0 < len(stopped) < len(expected(alone)) and expected(alone).startswith(stopped)
    assert browser.run("document.getElementById('status').textContent") == "stopped"
    browser.throttle(-1)
    say(browser, "On")
    browser.wait(f"{DONE} === 2")
    follow_up = expected(alone, f"u:{QUESTION};a:{stopped};u:On;a:")
    assert browser.run("[...document.querySelectorAll('.assistant')].pop().textContent") == shown(follow_up)


def test_a_new_chat_forgets(browser, server, alone):
    browser.open(server.url)
    for _ in range(2):
        say(browser, QUESTION)
        browser.wait(DONE)
        assert browser.run(ANSWER) == expected(alone)
        browser.click("#fresh")
        assert browser.run("document.querySelectorAll('.message').length") == 0


def test_an_error_is_shown_and_the_question_kept(browser, server):
    browser.open(server.url)
    say(browser, "x" * (CONTEXT + 1))
    browser.wait("document.querySelector('.error')")
    assert f"maximum context length is {CONTEXT}" in browser.run("document.querySelector('.error').textContent")
    assert browser.run("document.getElementById('input').value") == "x" * (CONTEXT + 1)
    assert browser.run("document.querySelectorAll('.user, .assistant').length") == 0


def test_what_the_model_says_is_never_html(browser, server):
    browser.open(server.url)
    said = '<img src=x onerror=alert(1)> `<i>` and **<u>**: 2 ** 3 `` ** ```js\nlet a = "<b>";\n```\n\nend'
    browser.run(f"render(document.getElementById('log'), {json.dumps(said)})")
    assert browser.run("[...document.querySelectorAll('#log *')].map(element => element.tagName)") == ["CODE", "STRONG", "PRE"]
    assert browser.run("document.querySelector('#log pre').textContent") == 'let a = "<b>";'
    shown = '<img src=x onerror=alert(1)> <i> and <u>: 2 ** 3 `` **let a = "<b>";end'
    assert browser.run("document.getElementById('log').textContent") == shown


def test_the_settings_open_and_count(browser, server):
    browser.open(server.url)
    assert browser.run("document.getElementById('panel').offsetHeight") == 0
    browser.click("#settings")
    assert browser.run("document.getElementById('panel').offsetHeight") > 0
    browser.run("document.getElementById('temperature').value = '3'")
    say(browser, QUESTION)
    browser.wait("document.querySelector('.error')")
    assert "temperature" in browser.run("document.querySelector('.error').textContent")


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_light_or_dark_as_the_system_says_and_the_button_turns_it(browser, server, dark):
    browser.open(server.url, dark=dark)

    def is_dark() -> bool:
        return browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")

    assert is_dark() == dark
    browser.click("#theme")
    assert is_dark() != dark


def test_with_a_key_the_page_asks_for_it(browser, path, alone, tmp_path):
    with served(path, tmp_path / "log", "--api-key", "sesame", "--temperature", "0") as server:
        browser.open(server.url)
        browser.wait("document.getElementById('status').textContent.includes('API key')")
        assert browser.run("document.getElementById('panel').offsetHeight") > 0
        browser.run("document.getElementById('key').value = 'sesame'")
        say(browser, QUESTION)
        browser.wait(DONE)
        assert browser.run(ANSWER) == expected(alone)
