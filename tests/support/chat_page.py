"""The chat page with a stand-in for the server; tests set its answers and when they arrive."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from castiron.pipelines.server.routes import HEADERS, HOME, PATHS, page

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.0}
# The stand-in waits here for `StandIn.go`.
WAIT = object()
BUSY = "document.querySelector('.busy')"
FOCUS = "document.activeElement.id || document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
READY = "!document.querySelector('.busy') && document.getElementById('stop').hidden"


def model(name: str = "iron", **facts) -> dict:
    """Return a model's record as /v1/models lists it."""
    usual = {"context_length": 4096, "sampling": SAMPLING, "chat_template": True, "template_variables": []}
    return {"id": name, "object": "model", **usual, **facts}


def reply(*parts, end: str = "stop", **ends) -> list:
    """Return the events of an answer: strings are text, dicts other deltas, WAIT pauses it."""
    choices = [part if part is WAIT else {"delta": {"content": part} if isinstance(part, str) else part} for part in parts]
    choices.append({"delta": {}, "finish_reason": end, **ends})
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 2}}
    events = [choice if choice is WAIT else {"choices": [choice]} for choice in choices]
    return [*events, {"choices": [], "usage": usage}, "[DONE]"]


def refused(status: int, message: str, code: str | None = None) -> tuple[int, dict]:
    return status, {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


class StandIn:
    """A server with `models`; it appends each request to `asked` and sends the next of `replies`.

    A reply is a list of the events of a stream, or (status, object).
    """

    def __init__(self):
        self.models, self.asked, self.replies, self.gate = [model()], [], [], threading.Semaphore(0)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def go(self) -> None:
        """Continue the answer that waits, or the next one that will wait."""
        self.gate.release()

    def reset(self) -> None:
        self.models, self.asked, self.replies, self.gate = [model()], [], [], threading.Semaphore(0)

    def _handler(stand_in):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def answer(self, status: int, data: bytes, **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                if self.path == "/v1/models":
                    self.answer(200, json.dumps({"data": stand_in.models}).encode())
                elif self.path == "/" or self.path in PATHS:
                    found = page(HOME if self.path == "/" else self.path.removeprefix("/page/"))
                    self.answer(200, found.body, **HEADERS, **{"Content-Type": found.headers["content-type"]})
                else:
                    self.answer(404, b"")

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.asked.append((self.path, body, self.headers.get("Authorization")))
                reply = stand_in.replies.pop(0)
                if isinstance(reply, tuple):
                    self.answer(reply[0], json.dumps(reply[1]).encode())
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.end_headers()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    for event in reply:
                        if event is WAIT:
                            stand_in.gate.acquire(timeout=20)
                        else:
                            text = event if isinstance(event, str) else json.dumps(event)
                            self.wfile.write(f"data: {text}\n\n".encode())
                            self.wfile.flush()

        return Handler

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def texts(browser, selector: str) -> list[str]:
    """Return the text of every element that matches the selector."""
    return browser.run(f"[...document.querySelectorAll({selector!r})].map(element => element.textContent)")


def send(browser, text: str) -> None:
    browser.run("document.getElementById('input').focus()")
    browser.type(text)
    browser.press("Enter")


def press_button(browser, label: str) -> None:
    """Click the last visible button with this text or name."""
    browser.run(
        "[...document.querySelectorAll('button')].findLast(b => b.offsetParent && [b.textContent.trim(), "
        f"b.getAttribute('aria-label')].includes({label!r})).click()"
    )


def put(browser, chats: list[dict], **fields: str) -> None:
    """Store conversations and settings in the page's storage, as an earlier visit would."""
    entries = {f"castiron / chat {chat['id']}": chat for chat in chats} | ({"castiron / settings": fields} if fields else {})
    browser.run(
        f"Object.entries({json.dumps(entries)}).forEach(([key, value]) => localStorage.setItem(key, JSON.stringify(value)))"
    )


def talk(*turns: str, id: str = "one", title: str = "Title", changed: int = 1) -> dict:
    """Return the stored form of a conversation: question, answer, question, and so on."""
    nodes = [{"role": ("user", "assistant")[i % 2], "content": text, "parent": i - 1} for i, text in enumerate(turns)]
    nodes = [{**node, "end": "stop"} if node["role"] == "assistant" else node for node in nodes]
    return {"id": id, "title": title, "changed": changed, "nodes": nodes, "head": len(nodes) - 1, "from": -1}


def choose(browser, selector: str, value: str) -> None:
    browser.run(
        f"(one => {{ one.value = {value!r}; one.dispatchEvent(new Event('input', {{bubbles: true}})); "
        f"one.dispatchEvent(new Event('change', {{bubbles: true}})); }})(document.querySelector({selector!r}))"
    )


def focus(browser, label: str) -> None:
    """Press Tab until the button with this name has the focus; fail if the focus is not visible."""
    for _ in range(60):
        browser.press("Tab")
        if browser.run(FOCUS) == label:
            assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            return
    raise AssertionError(f"Tab never came to {label}")


def opened(browser, server, **how) -> None:
    browser.open(server.url, **how)
    browser.wait("document.getElementById('only-model').textContent || !document.getElementById('model').hidden")


def again(browser, server, chats=(), **fields) -> None:
    """Open the page again with the storage of an earlier visit."""
    put(browser, list(chats), **fields)
    opened(browser, server, again=True)


def contents(server, at: int = -1) -> list[str]:
    return [message["content"] for message in server.asked[at][1]["messages"]]
