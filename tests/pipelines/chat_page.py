"""The chat page with a stand-in for the server, whose answers are made up and come when a test lets them."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from castiron.pipelines.serve.page import HEADERS, HOME, PATHS, page

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.0}
# What a test goes on from with `StandIn.go`.
WAIT = object()
BUSY = "document.querySelector('.busy')"
READY = "!document.querySelector('.busy') && document.getElementById('stop').hidden"


def model(name: str = "iron", **facts) -> dict:
    """As /v1/models describes it."""
    usual = {"context_length": 4096, "sampling": SAMPLING, "chat_template": True, "template_variables": []}
    return {"id": name, "object": "model", **usual, **facts}


def said(*parts, end: str = "stop", **ends) -> list:
    """The events of an answer: strings are its text, objects other deltas, and WAIT is WAIT."""
    choices = [part if part is WAIT else {"delta": {"content": part} if isinstance(part, str) else part} for part in parts]
    choices.append({"delta": {}, "finish_reason": end, **ends})
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 2}}
    events = [choice if choice is WAIT else {"choices": [choice]} for choice in choices]
    return [*events, {"choices": [], "usage": usage}, "[DONE]"]


def refused(status: int, message: str, code: str | None = None) -> tuple[int, dict]:
    return status, {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


class StandIn:
    """`models` are listed; each request is put into `asked` and gets the next of `replies`: the events of a stream, or a
    status with an object."""

    def __init__(self):
        self.models, self.asked, self.replies, self.gate = [model()], [], [], threading.Semaphore(0)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def go(self) -> None:
        """Lets the answer go on that waits, or the next that will."""
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
                    found = page(HOME if self.path == "/" else self.path.rpartition("/")[2])
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
    """What stands in every element that the selector finds."""
    return browser.run(f"[...document.querySelectorAll({selector!r})].map(element => element.textContent)")


def say(browser, text: str) -> None:
    browser.run("document.getElementById('input').focus()")
    browser.type(text)
    browser.press("Enter")


def press_button(browser, label: str, within: str = "body", last: bool = True) -> None:
    """Clicks the button with this text or name, the last of several."""
    browser.run(
        f"[...document.querySelectorAll({within + ' button'!r})].filter(b => b.offsetParent && [b.textContent.trim(), "
        f"b.getAttribute('aria-label')].includes({label!r})).at({-1 if last else 0}).click()"
    )


def put(browser, chats: list[dict], **fields: str) -> None:
    """What an earlier visit has kept; the page shows it once it is opened again."""
    entries = {f"castiron / chat {chat['id']}": chat for chat in chats} | ({"castiron / settings": fields} if fields else {})
    browser.run(
        f"Object.entries({json.dumps(entries)}).forEach(([key, value]) => localStorage.setItem(key, JSON.stringify(value)))"
    )


def talk(*said: str, id: str = "one", title: str = "Title", changed: int = 1) -> dict:
    """A conversation of question, answer, and so on."""
    nodes = [{"role": ("user", "assistant")[i % 2], "content": text, "parent": i - 1} for i, text in enumerate(said)]
    nodes = [{**node, "end": "stop"} if node["role"] == "assistant" else node for node in nodes]
    return {"id": id, "title": title, "changed": changed, "nodes": nodes, "head": len(nodes) - 1, "from": -1}
