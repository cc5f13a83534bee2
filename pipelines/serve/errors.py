"""Errors in the shape of OpenAI's API."""

from dataclasses import dataclass

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.engine import QueueFull, Stopping
from castiron.pipelines.generation.scheduler import ModelFailed
from castiron.pipelines.serve.clients import TooMuch

# What OpenAI calls the kinds of failure, by status.
TYPES = {
    401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 502: "server_error", 503: "server_error",
    504: "server_error",
}  # fmt: skip

# What clients add to the base URL that they are given.
ENDPOINTS = ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings", "/models")

# What Anthropic calls them, by the status that it has for them.
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 502: "api_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


# Characters of a sentence, and of the name of a field.
LONGEST, LONGEST_PARAM = 1000, 200


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 + 3 :]}"


@dataclass
class ApiError(Exception):
    """A request that gets `status` and one sentence; `param` is the field that is wrong, `code` a word for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        # What it quotes may have been said in megabytes.
        self.message = _cut(self.message, LONGEST)
        self.param = self.param and _cut(self.param, LONGEST_PARAM)

    @property
    def body(self) -> dict:
        """{"error": {message, type, param, code}}."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_status(self) -> int:
        return 529 if self.status == 503 else self.status

    @property
    def anthropic_body(self) -> dict:
        """{"type": "error", "error": {type, message}}, as Anthropic's API has it; of a thread, its details too."""
        kind = ANTHROPIC_TYPES.get(self.anthropic_status, "invalid_request_error")
        refused = self.code == "thread_unsupported_request"
        details = {"details": {"error_code": self.code, "unsupported": [self.param]}} if refused else {}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}}

    def told(self, path: str) -> tuple[int, dict]:
        """Status and body, in the shape of the API that has the path."""
        if speaks_anthropic(path):
            return self.anthropic_status, self.anthropic_body
        return self.status, self.body

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": "1"} if self.status in (429, 503) else {}

    def __str__(self) -> str:
        return self.message


def speaks_anthropic(path: str) -> bool:
    """Whether what is refused at `path` is refused in Anthropic's shape."""
    return path.startswith("/v1/messages")


# Status and code of what may go wrong behind the HTTP; anything else is the request's fault.
FAILURES: dict[type[PipelineError], tuple[int, str]] = {
    QueueFull: (503, "queue_full"),
    TooMuch: (429, "too_many_bytes"),
    Stopping: (503, "shutting_down"),
    ModelFailed: (500, "model_failure"),
}


def http_error(status: int, detail: str, path: str) -> ApiError:
    """An unknown path, where a base URL that is not quite right leads, or a method that a path does not have."""
    words = {404: "there is no such path on this server", 405: "this path does not take that method"}
    message = words.get(status, detail)
    if status == 404 and path in ENDPOINTS:
        message += f"; end the base URL in /v1, so that it is /v1{path}"
    elif status == 404 and path.startswith("/v1/v1/"):
        message += f"; leave /v1 out of the base URL, so that it is {path.removeprefix('/v1')}"
    return ApiError(status, message)


def api_error(error: PipelineError) -> ApiError:
    """What a client is told of `error`."""
    status, code = FAILURES.get(type(error), (400, None))
    return ApiError(status, str(error), code=code)
