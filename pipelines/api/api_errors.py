"""Errors in the formats of OpenAI's, Anthropic's and Ollama's APIs."""

from dataclasses import dataclass

from castiron.pipelines.engine.scheduler import ModelFailed
from castiron.pipelines.errors import PipelineError

# OpenAI's error types, by HTTP status; other statuses have the type invalid_request_error.
TYPES = {
    401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 502: "server_error", 503: "server_error",
    504: "server_error",
}  # fmt: skip
# Anthropic's error types, by the HTTP status of an `ApiError`.
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 502: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
# Paths that clients add to their base URL.
ENDPOINTS = ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings", "/models")
# Max characters of a message and of a field's name, because both may quote megabytes of a request.
MAX_MESSAGE, MAX_PARAM = 1000, 200


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 + 3 :]}"


@dataclass
class ApiError(Exception):
    """An error that the server returns as the response to a request.

    status: HTTP status in OpenAI's API. param: path of a field, as in messages.0.role.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        self.message = _shortened(self.message, MAX_MESSAGE)
        self.param = self.param and _shortened(self.param, MAX_PARAM)

    @property
    def body(self) -> dict:
        """The JSON body in OpenAI's format: {"error": {message, type, param, code}}."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict:
        """The JSON body in Anthropic's format: {"type": "error", "error": {type, message}}."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        # With these details Anthropic's clients retry with the complete conversation instead of a thread.
        is_thread = self.code == "thread_unsupported_request"
        details = {"details": {"error_code": self.code, "unsupported": [self.param]}} if is_thread else {}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}}

    def response(self, path: str) -> tuple[int, dict]:
        """Return the HTTP status and the JSON body for the API to which the URL path belongs."""
        if is_ollama(path):
            return self.status, {"error": self.message}
        if is_anthropic(path):
            # Anthropic's status of an overloaded server is 529.
            return 529 if self.status == 503 else self.status, self.anthropic_body
        return self.status, self.body

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that belong to this status, such as Retry-After for 429 and 503."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": "1"} if self.status in (429, 503) else {}

    def __str__(self) -> str:
        return self.message


def is_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")


def is_ollama(path: str) -> bool:
    return path.startswith("/api/")


def invalid(param: str | None, message: str) -> ApiError:
    """Return an ApiError 400 for an invalid value of a request's field `param`."""
    return ApiError(400, message, param, "invalid_value")


def unsupported(param: str, reason: str) -> ApiError:
    """Return an ApiError 400 for a request's field `param`, whose value is not supported."""
    return ApiError(400, f"{param}: {reason}", param, "unsupported_parameter")


class QueueFull(PipelineError):
    """Raised if the queue has no space for a request."""


class Stopping(PipelineError):
    """Raised for a request that arrives or runs while the server shuts down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


# Error -> (HTTP status, error code), for errors that the request did not cause.
FAILURES: dict[type[PipelineError], tuple[int, str]] = {
    QueueFull: (503, "queue_full"), Stopping: (503, "shutting_down"), ModelFailed: (500, "model_failure"),
}  # fmt: skip


def api_error(error: PipelineError) -> ApiError:
    """Convert a PipelineError to an ApiError, with status 400 unless `FAILURES` has it."""
    status, code = FAILURES.get(type(error), (400, None))
    return ApiError(status, str(error), code=code)


def http_error(status: int, detail: str, path: str) -> ApiError:
    """Return an ApiError for an HTTP error of the web framework; it states the right base URL."""
    message = {404: "no such path on this server", 405: "this path does not support that method"}.get(status, detail)
    if status == 404 and path in ENDPOINTS:
        message += f"; end the base URL in /v1, so that it is /v1{path}"
    elif status == 404 and path.startswith("/v1/v1/"):
        message += f"; leave /v1 out of the base URL, so that it is {path.removeprefix('/v1')}"
    return ApiError(status, message)
