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
FIELDS = "['system', 'temperature', 'key']"
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


def texts(browser, selector: str) -> list[str]:
    """What stands in every element that the selector finds."""
    return browser.run(f"[...document.querySelectorAll({selector!r})].map(element => element.textContent)")


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


def test_an_error_is_shown_and_the_question_kept(browser, server, alone):
    """What is too long by itself takes nothing of the conversation with it."""
    browser.open(server.url)
    for said in ([], [QUESTION, shown(expected(alone))]):
        say(browser, "x" * (CONTEXT + 1))
        browser.wait("document.querySelector('.error')")
        assert f"maximum context length is {CONTEXT}" in browser.run("document.querySelector('.error').textContent")
        assert browser.run("document.getElementById('input').value") == "x" * (CONTEXT + 1)
        assert texts(browser, ".user, .assistant") == said and not texts(browser, ".gone, .note")
        browser.run("document.querySelector('.error').remove(); document.getElementById('input').value = ''")
        say(browser, QUESTION)
        browser.wait(DONE)


def fill(browser, server, said: list[str], system: str = "") -> None:
    """A page with a conversation that was kept: question, answer, and so on."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(said)]
    browser.open(server.url)
    browser.run(f"messages = {json.dumps(messages)}; document.getElementById('system').value = {json.dumps(system)}; keep()")
    browser.open(server.url, again=True)


@pytest.mark.parametrize("known", [False, True])
def test_a_full_context_drops_the_oldest_turns_and_says_so(browser, server, alone, known):
    """A quarter at once; whether the server says that it is full, or the page knows by how full it was."""
    said = ["one" * 5, "two" * 5, "three" * 3, "four" * 3, "five" * 3, "six" * 3]
    fill(browser, server, said, system="S")
    question = "On" if known else "On" * 20
    if known:
        browser.wait("context")
        browser.run("rate = 0.6")
    say(browser, question)
    browser.wait(f"!running && {DONE}")
    assert texts(browser, ".gone") == said[:2] and "no longer sees" in texts(browser, ".note")[0]
    assert browser.run("document.querySelector('.note').previousElementSibling.textContent") == said[1]
    kept = "".join(f"{role}:{text};" for role, text in zip("uaua", said[2:]))
    answer = expected(alone, f"s:S;{kept}u:{question};a:")
    assert texts(browser, ".assistant")[-1] == shown(answer) and texts(browser, ".user")[-1] == question
    # The end of it is what is seen.
    assert browser.run("(box => box.scrollHeight - box.scrollTop - box.clientHeight < 2)(document.getElementById('scroll'))")
    browser.open(server.url, again=True)
    assert texts(browser, ".gone") == said[:2] and len(texts(browser, ".note")) == 1


def test_an_answer_that_is_cut_says_so_and_leaves_room_for_the_next(browser, server, alone):
    browser.open(server.url)
    for _ in range(8):
        say(browser, "Hello")
        browser.wait(f"!running && {DONE}")
        assert not texts(browser, ".error")
    status = "document.getElementById('status').textContent"
    assert ("cut at its limit" in browser.run(status)) == (len(texts(browser, ".assistant")[-1]) > CONTEXT // 4)
    assert len(texts(browser, ".user")) == 8 and texts(browser, ".gone")


def test_a_reload_keeps_the_conversation_and_the_settings(browser, server):
    browser.open(server.url)
    values = {"system": "Be brief", "temperature": "0", "key": "sesame"}
    browser.click("#settings")
    for name, value in values.items():
        browser.run(f"document.getElementById('{name}').focus()")
        browser.type(value)
    browser.click("#theme")
    say(browser, QUESTION)
    browser.wait(f"!running && {DONE}")
    said = texts(browser, ".user, .assistant")
    browser.open(server.url, again=True)
    assert texts(browser, ".user, .assistant") == said and browser.run(f"{FIELDS}.map(id => $(id).value)") == [*values.values()]
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    assert browser.run("document.getElementById('empty').hidden") and browser.run("messages.length") == 2
    browser.click("#fresh")
    browser.open(server.url, again=True)
    assert not texts(browser, ".message") and browser.run("document.getElementById('key').value") == "sesame"


def test_what_is_being_written_survives_a_reload_and_an_unanswered_question_is_back(browser, server, alone):
    browser.open(server.url)
    browser.throttle(4000)
    say(browser, QUESTION)
    browser.wait(f"({ANSWER} || '').length > 0")
    browser.throttle(-1)
    browser.open(server.url, again=True)
    assert texts(browser, ".user") == [QUESTION] and expected(alone).startswith(texts(browser, ".assistant")[0])
    fill(browser, server, [QUESTION])
    assert not texts(browser, ".message") and browser.run("document.getElementById('input').value") == QUESTION


def test_forget_leaves_nothing_in_the_browser(browser, server):
    fill(browser, server, [QUESTION, "la"], system="Be brief")
    browser.run("document.getElementById('key').value = 'sesame'; keep()")
    browser.click("#settings")
    browser.click("#forget")
    assert browser.run("localStorage.length") == 0
    for again in (False, True):
        assert not texts(browser, ".message") and browser.run(f"{FIELDS}.map(id => $(id).value).join('')") == ""
        if not again:
            browser.open(server.url, again=True)


@pytest.mark.parametrize(
    "kept", ["{", "null", "3", '{"messages": 3, "fields": 3}', '{"messages": [null, {"role": "x"}], "dropped": 9}']
)
def test_a_page_opens_whatever_the_browser_kept(browser, server, kept):
    browser.open(server.url)
    browser.run(f"localStorage.setItem(KEPT, {json.dumps(kept)})")
    browser.open(server.url, again=True)
    browser.wait("document.getElementById('model').textContent")
    assert not texts(browser, ".message")


def test_what_the_model_says_is_never_html(browser, server):
    browser.open(server.url)
    said = '<img src=x onerror=alert(1)> `<i>` and **<u>**: 2 ** 3 `` ** ```js\nlet a = "<b>";\n```\n\nend'
    said += "\n## <b> x\n# not"
    browser.run(f"render(document.getElementById('log'), {json.dumps(said)})")
    assert browser.run("[...document.querySelectorAll('#log *')].map(element => element.tagName)") == [
        "CODE",
        "STRONG",
        "PRE",
        "STRONG",
        "STRONG",
    ]
    assert browser.run("document.querySelector('#log pre').textContent") == 'let a = "<b>";'
    shown = '<img src=x onerror=alert(1)> <i> and <u>: 2 ** 3 `` **let a = "<b>";end\n<b> x\nnot'
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


SAID = [
    {"delta": {"role": "assistant", "content": ""}},
    {"delta": {"reasoning_content": "Let me "}},
    {"delta": {"reasoning_content": "see."}},
    {"delta": {"content": "Four."}},
    {"delta": {}, "finish_reason": "stop", "stop_reason": "repetition"},
]


def test_thoughts_are_shown_apart_and_never_sent_back(browser, server):
    """With a server's answers made up in the page, since no small model thinks."""
    browser.open(server.url)
    chunks = [{"choices": [{"index": 0, "finish_reason": None, **choice}]} for choice in SAID]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4,
                                            "prompt_tokens_details": {"cached_tokens": 0}}})  # fmt: skip
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    browser.run(
        "window.asked = []; window.fetch = async (url, options) => { asked.push(JSON.parse(options.body)); "
        f"return new Response({json.dumps(stream)}); }}"
    )
    for _ in range(2):
        say(browser, QUESTION)
        browser.wait(DONE)
    assert texts(browser, ".thoughts") == ["Let me see."] * 2 and texts(browser, ".assistant") == ["Four."] * 2
    first, second = browser.run("window.asked")
    assert first["repetition_stop"] is True
    assert [message["content"] for message in second["messages"]] == [QUESTION, "Four.", QUESTION]
    assert "stopped where it repeated itself" in browser.run("document.getElementById('status').textContent")
