"""The chat page in headless Chromium with a stand-in for the server."""

from __future__ import annotations

import contextlib
import re

import pytest

from tests.support.browser import needs_chromium
from tests.support.chat_page import (
    BUSY,
    FOCUS,
    READY,
    WAIT,
    StandIn,
    again,
    choose,
    contents,
    focus,
    model,
    opened,
    press_button,
    refused,
    reply,
    send,
    talk,
    texts,
)

pytestmark = needs_chromium
STATUS, TOAST = "document.getElementById('status').textContent", "document.getElementById('toast').textContent"
LISTED = "#chats .open"


@pytest.fixture(scope="module")
def stand_in():
    with contextlib.closing(StandIn()) as found:
        yield found


@pytest.fixture
def server(stand_in):
    stand_in.reset()
    return stand_in


@pytest.fixture
def browser(chromium, server):
    chromium.size(1280, 800)
    opened(chromium, server)
    chromium.errors.clear()
    yield chromium
    assert chromium.errors == []


def test_an_answer_grows_with_reasoning_and_calls_and_is_announced(browser, server):
    call = {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "melt", "arguments": '{"kind":'}}]}
    more = {"tool_calls": [{"index": 0, "function": {"arguments": ' "grey"}'}}]}
    reasoning = {"reasoning_content": "Let me **see**."}
    server.replies = [reply(reasoning, WAIT, "Four", WAIT, " and *five*.", call, more, end="stop", stop_reason="repetition")]
    send(browser, "Two?")
    browser.wait("document.querySelector('.reasoning')?.open")
    assert browser.run(STATUS) == "Thinking …" and texts(browser, ".reasoning strong") == ["see"]
    assert browser.run("document.getElementById('announce').textContent") == "The model is answering."
    server.go()
    browser.wait(f"{STATUS} === 'Writing …' && document.querySelector('.assistant .body').textContent === 'Four'")
    assert browser.run(f"!document.querySelector('.reasoning').open && {BUSY}.getAttribute('aria-busy') === 'true'")
    server.go()
    browser.wait(READY)
    assert texts(browser, ".assistant .body") == ["Four and five."] and texts(browser, ".body em") == ["five"]
    assert texts(browser, ".call summary, .call pre") == ["Calls melt", '{\n  "kind": "grey"\n}']
    assert browser.run("document.getElementById('announce').textContent") == "Four and *five*."
    (line,) = texts(browser, ".stats")
    assert re.fullmatch(
        r"stopped where it repeated itself · 4 tokens, [\d,]+ tokens/s · first after [\d,]+ ms · prompt 9 \(2 cached\) "
        r"· context 13 of 4,096", line,
    )  # fmt: skip
    server.replies = [reply("Yes.")]
    send(browser, "Sure?")
    browser.wait(f"{READY} && document.querySelectorAll('.assistant').length === 2")
    assert contents(server) == ["Two?", "Four and *five*.", "Sure?"] and server.asked[0][1]["repetition_stop"] is True
    assert server.asked[0][1]["model"] == "iron"


def test_stop_continue_regenerate_and_edit_by_keyboard(browser, server):
    """Uses only the keyboard."""
    server.replies = [reply("One ", WAIT, "two"), reply("two"), reply("Three"), reply("Four")]
    browser.press("Tab")
    send(browser, "Count")
    browser.wait("document.querySelector('.assistant .body').textContent.trim() === 'One'")
    browser.press("Escape")
    browser.wait(READY)
    assert "stopped" in texts(browser, ".stats")[0]
    focus(browser, "Continue")
    browser.press("Enter")
    browser.wait(f"{READY} && document.querySelector('.assistant .body').textContent === 'One two'")
    assert server.asked[1][1]["continue_final_message"] is True and contents(server) == ["Count", "One "]
    assert browser.run("![...document.querySelectorAll('button')].some(one => one.textContent === 'Continue')")
    focus(browser, "Regenerate")
    browser.press("Enter")
    browser.wait(f"{READY} && document.querySelector('.assistant .body').textContent === 'Three'")
    assert texts(browser, ".turn span") == ["2 / 2"] and contents(server) == ["Count"]
    focus(browser, "Previous answer")
    browser.press("Enter")
    assert texts(browser, ".assistant .body") == ["One two"]
    browser.run("document.getElementById('input').focus()")
    browser.press("ArrowUp")
    assert browser.run(FOCUS) == "Edit your message"
    browser.press("Escape")
    assert not texts(browser, ".edit") and texts(browser, ".user .body") == ["Count"]
    browser.run("document.getElementById('input').focus()")
    browser.press("ArrowUp")
    browser.type(" on")
    browser.press("Enter", "Shift")
    browser.type("please")
    browser.press("Enter")
    browser.wait(f"{READY} && document.querySelector('.assistant .body').textContent === 'Four'")
    assert contents(server) == ["Count on\nplease"] and texts(browser, ".user .turn span") == ["2 / 2"]
    press_button(browser, "Previous wording")
    assert texts(browser, ".assistant .body") == ["Three"]
    again(browser, server)
    assert texts(browser, ".body") == ["Count", "Three"] and texts(browser, ".turn span") == ["1 / 2", "2 / 2"]


def test_tab_order_and_keyboard_shortcuts(browser, server):
    again(browser, server, [talk("Hello", "```py\nx = 1\n```\n\n|a|b|\n|-|-|\n|1|2|")])
    browser.run("document.activeElement.blur()")
    wanted = ["Skip to the message field", "fresh", "search", "Title", "Rename “Title”", "Delete “Title”", "menu",
              "help", "settings"]  # fmt: skip
    wanted += ["Copy", "Edit", "Copy", "py, block of code", "Table", "Copy", "Regenerate", "input", "send"]
    for name in wanted:
        browser.press("Tab")
        assert browser.run(FOCUS) == name
    browser.run("document.activeElement.blur()")
    for key, modifiers, dialog in (("?", (), "keys"), (",", ("Control",), "panel"), ("/", ("Control",), "keys")):
        browser.press(key, *modifiers)
        assert browser.run(f"document.getElementById({dialog!r}).open")
        browser.press("Escape")
        assert browser.run("!document.querySelector('dialog[open]')")
    browser.press("k", "Control")
    assert browser.run(FOCUS) == "search"
    browser.press("o", "Control", "Shift")
    assert browser.run(FOCUS) == "input" and not texts(browser, ".message")
    named = (
        "[...document.querySelectorAll('button, input, select, textarea')].filter(one => !(one.getAttribute('aria-label') || "
    )
    named += "one.textContent.trim() || one.labels?.length || one.title)).length"
    assert browser.run(named) == 0


def test_conversations_are_listed_searched_renamed_deleted_and_forgotten(browser, server):
    server.replies = [reply("Rust is red."), reply("Snow is white.")]
    for question in ("What colour has rust?", "And snow?"):
        send(browser, question)
        browser.wait(f"{READY} && document.querySelector('.assistant')")
        browser.press("o", "Control", "Shift")
    again(browser, server)
    assert texts(browser, LISTED) == ["And snow?", "What colour has rust?"]
    assert texts(browser, ".body") == ["And snow?", "Snow is white."]
    browser.run("document.getElementById('search').focus()")
    browser.type("RED")
    assert texts(browser, LISTED) == ["What colour has rust?"]
    browser.type("x")
    assert not texts(browser, LISTED) and texts(browser, "#no-chats") == ["No conversation has these words."]
    browser.run(
        "document.getElementById('search').value = ''; document.getElementById('search').dispatchEvent(new Event('input'))"
    )
    press_button(browser, "What colour has rust?")
    assert texts(browser, ".body") == ["What colour has rust?", "Rust is red."]
    press_button(browser, "Rename “What colour has rust?”")
    browser.type("Rust")
    browser.press("Enter")
    press_button(browser, "Delete “And snow?”")
    assert texts(browser, LISTED) == ["Rust"] and "“And snow?” is deleted" in browser.run(TOAST)
    again(browser, server)
    assert texts(browser, LISTED) == ["Rust"] and browser.run("document.title") == "Rust · castiron"
    press_button(browser, "Settings")
    press_button(browser, "Forget everything")
    assert browser.run("localStorage.length") == 0 and not texts(browser, LISTED) and not texts(browser, ".message")


def test_full_storage_is_reported_and_the_conversation_continues(browser, server):
    browser.run("localStorage.setItem('x', 'x'.repeat(5_242_870 - 1))")
    server.replies = [reply("Yes.")]
    send(browser, "Room?")
    browser.wait(f"{READY} && document.querySelector('.assistant')")
    assert "storage is full" in browser.run(TOAST) and texts(browser, ".body") == ["Room?", "Yes."]


def test_errors_are_shown_and_can_be_retried(browser, server):
    server.replies = [refused(503, "the queue is full"), reply("A", WAIT)[:2], reply("Done."), reply("New.")]
    send(browser, "Please")
    browser.wait("document.querySelector('.problem')")
    assert texts(browser, ".problem span") == ["the queue is full"] and texts(browser, ".body") == ["Please"]
    press_button(browser, "Retry")
    browser.wait("document.querySelector('.busy')")
    server.go()
    browser.wait("document.querySelector('.problem')")
    assert texts(browser, ".problem span") == ["The connection broke before the answer was complete."]
    assert texts(browser, ".body") == ["Please", "A"] and "broken off" in texts(browser, ".stats")[0]
    press_button(browser, "Retry")
    browser.wait(f"{READY} && !document.querySelector('.problem')")
    assert texts(browser, ".body") == ["Please", "Done."] and texts(browser, ".turn span") == ["2 / 2"]
    again(browser, server, [talk("Unheard", id="b", changed=9e15)])
    assert texts(browser, ".problem span") == ["This message has no answer yet."]
    # A question without an answer is replaced by the next.
    send(browser, "Heard")
    browser.wait(f"{READY} && document.querySelector('.assistant')")
    assert contents(server) == ["Heard"] and texts(browser, ".user .turn span") == ["2 / 2"]
    browser.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    send(browser, "Anyone?")
    browser.wait("document.querySelector('.problem')")
    browser.throttle(-1)
    assert texts(browser, ".problem span") == ["The server cannot be reached. Is it still running?"]
    # The browser logs error responses and the lost connection.
    browser.errors.clear()


def test_a_partial_answer_survives_a_reload(browser, server):
    server.replies = [reply("One", WAIT, " two")]
    send(browser, "Count")
    browser.wait("document.querySelector('.assistant .body')?.textContent === 'One'")
    opened(browser, server, again=True)
    server.go()
    assert texts(browser, ".body") == ["Count", "One"] and "broken off" in texts(browser, ".stats")[0]


def test_every_setting_is_in_the_request(browser, server):
    server.models = [model(template_variables=["enable_thinking"])]
    again(browser, server)
    values = {"system": "Be brief", "temperature": "0.5", "top_p": "0.8", "top_k": "7", "min_p": "0.1", "max_tokens": "50", "seed": "3",
              "stop": "END\nSTOP", "schema": '{"type": "object"}', "key": "sesame"}  # fmt: skip
    browser.press(",", "Control")
    for name, value in values.items():
        browser.run(f"document.querySelector('[name={name}]').focus()")
        browser.type(value)
    choose(browser, "[name=thinking]", "off")
    browser.press("Escape")
    again(browser, server)
    server.replies = [reply("{}")]
    send(browser, "Hello")
    browser.wait(f"{READY} && document.querySelector('.assistant')")
    _, body, key = server.asked[0]
    assert key == "Bearer sesame"
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert {name: body[name] for name in body if name not in ("stream", "stream_options", "repetition_stop")} == {
        "model": "iron", "temperature": 0.5, "top_p": 0.8, "top_k": 7, "min_p": 0.1, "max_tokens": 50, "seed": 3, "stop": ["END", "STOP"],
        "response_format": schema, "chat_template_kwargs": {"enable_thinking": False},
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}],
    }  # fmt: skip
    browser.run("document.querySelector('[name=schema]').value = '{'")
    send(browser, "And now?")
    browser.wait("document.querySelector('.problem')")
    assert "The JSON schema in the settings is not JSON" in texts(browser, ".problem")[0] and len(server.asked) == 1


def test_a_model_is_chosen_and_one_without_a_template_continues_text(browser, server):
    encoder = {name: fact for name, fact in model("encoder").items() if name != "sampling"}
    server.models = [
        model(),
        encoder,
        model("base", chat_template=False, context_length=600),
        model("gpt", template_variables=["reasoning_effort"]),
    ]
    again(browser, server)
    assert texts(browser, "#model option") == ["iron", "base", "gpt"]
    assert browser.run("document.getElementById('thinking').hidden")
    choose(browser, "#model", "gpt")
    assert texts(browser, "#thinking option") == ["as the model has it", "low", "medium", "high"]
    choose(browser, "#model", "base")
    again(browser, server)
    assert "no chat template" in texts(browser, "#empty-text")[0]
    completion = [{"choices": [{"text": " upon a time"}]}, {"choices": [{"text": "", "finish_reason": "length"}]}, "[DONE]"]
    server.replies = [(200, {"count": 90}), completion, (200, {"count": 95}), completion]
    send(browser, "Once")
    browser.wait(f"{READY} && document.querySelector('.assistant')")
    press_button(browser, "Continue")
    browser.wait(f"{READY} && document.querySelector('.assistant .body').textContent.includes('time upon')")
    first, second = [body for path, body, _ in server.asked if path == "/v1/completions"]
    assert (first["model"], first["prompt"], first["max_tokens"]) == ("base", "Once", 510)
    assert (second["prompt"], second["max_tokens"]) == ("Once upon a time", 505) and "messages" not in second


def test_an_answer_continues_while_an_older_conversation_is_shown(browser, server):
    again(browser, server, [talk("Old", "Older")])
    press_button(browser, "New conversation")
    server.replies = [reply("One", WAIT, " two")]
    send(browser, "Count")
    browser.wait("document.querySelector('.assistant .body')?.textContent === 'One'")
    press_button(browser, "Title")
    assert texts(browser, ".body") == ["Old", "Older"]
    server.go()
    browser.wait(READY)
    assert texts(browser, ".body") == ["Old", "Older"]
    press_button(browser, "Count")
    assert texts(browser, ".body") == ["Count", "One two"]


def test_on_a_phone_nothing_is_wider_than_the_screen(browser, server):
    browser.size(390, 844, phone=True)
    row = "|" + "|".join(["a long cell of a table"] * 9) + "|\n"
    text = f"{'x' * 300}\n\n```\n{'y' * 300}\n```\n\n{row}{'|-' * 9}|\n{row}\n- {'`' + 'z' * 200 + '`'}\n\n# {'Q' * 99}"
    again(browser, server, [talk("w" * 300, text, title="T" * 80)])
    wide = "[...document.querySelectorAll('body *')].filter(one => one.offsetParent && one.getBoundingClientRect().right > innerWidth + 0.5"
    wide += " && !one.closest('pre, .table')).map(one => one.outerHTML.slice(0, 80))"
    for opener in (None, "menu", "settings", "help"):
        if opener:
            browser.run(f"document.getElementById({opener!r}).click()")
        assert browser.run(wide) == []
        assert browser.run(
            "[document.documentElement, document.getElementById('scroll')].every(one => one.scrollWidth <= one.clientWidth)"
        )
        assert browser.run("[...document.querySelectorAll('dialog[open]')].every(one => one.scrollWidth <= one.clientWidth)")
        browser.press("Escape")
    assert browser.run("!document.body.classList.contains('side') && document.querySelector('.table').scrollWidth > innerWidth")
    # Phones zoom in on fields with smaller letters.
    fields = "[...document.querySelectorAll('input:not([type=file]), textarea, select')]"
    assert browser.run(f"{fields}.every(one => parseFloat(getComputedStyle(one).fontSize) >= 14)")


CONTRAST = """(() => {
  const one = value => { const [r, g, b] = value.match(/[\\d.]+/g).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const probe = document.body.appendChild(document.createElement('i'));
  const of = name => { probe.style.color = `var(--${name})`; return one(getComputedStyle(probe).color); };
  const pairs = [['text', 'back'], ['text', 'mine'], ['text', 'hover'], ['quiet', 'back'], ['quiet', 'mine'], ['quiet', 'side'], ['quiet', 'panel'],
    ['accent', 'back'], ['on-accent', 'accent'], ...['comment', 'string', 'number', 'word'].map(name => [`c-${name}`, 'panel'])];
  const found = pairs.map(([a, b]) => [a, b, (Math.max(of(a), of(b)) + 0.05) / (Math.min(of(a), of(b)) + 0.05)]);
  probe.remove();
  return found.filter(pair => pair[2] < 4.5);
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_themes_have_enough_contrast(browser, server, dark):
    """Contrast reaches WCAG's level AA, and nothing moves if the system reduces motion."""
    opened(browser, server, dark=dark)
    is_dark = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128"
    assert browser.run(is_dark) == dark and browser.run(CONTRAST) == []
    choose(browser, "[name=theme]", "light" if dark else "dark")
    assert browser.run(is_dark) != dark and browser.run(CONTRAST) == []
    server.replies = [reply("A", WAIT)]
    send(browser, "Still?")
    browser.wait(BUSY)
    assert browser.run("document.getAnimations().length") == 0
    browser.press("Escape")
    browser.wait(READY)
    opened(browser, server, dark=dark, again=True)
    assert browser.run(is_dark) != dark
