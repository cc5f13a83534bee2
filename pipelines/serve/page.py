"""The chat page: the files of the folder `page`, as they are, under a policy that lets nothing else run or load."""

from collections.abc import Callable
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HOME = "chat.html"
PARTS = (
    "answer.js", "chat.css", "chat.js", "code.js", "dom.js", "icon.svg", "list.js", "markdown.js", "message.js", "request.js",
    "server.js", "settings.js", "store.js",
)  # fmt: skip
# Where the page's files are.
PATHS = tuple(f"/page/{name}" for name in PARTS)
# Scripts, styles and answers come from this server alone, nothing else is loaded, and no text ever becomes HTML or code.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A server that is newer than the last has a newer page.
    "Cache-Control": "no-cache",
}


@cache
def _data(name: str) -> bytes:
    return files("castiron.pipelines.serve").joinpath("page", name).read_bytes()


def page(name: str = HOME) -> Response:
    """One file of the page, by default the page itself."""
    return Response(_data(name), media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)


def page_routes() -> list[Route]:
    """Where the files are that the page names."""

    def route(path: str) -> Callable:
        async def part(_: Request) -> Response:
            return page(path.rpartition("/")[2])

        return part

    return [Route(path, route(path)) for path in PATHS]
