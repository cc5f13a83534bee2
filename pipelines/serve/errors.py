"""Errors in the shape of OpenAI's API."""

from dataclasses import dataclass

# What OpenAI calls the kinds of failure, by status.
TYPES = {401: "authentication_error", 500: "server_error", 503: "server_error", 504: "server_error"}


@dataclass
class ApiError(Exception):
    """A request that gets `status` and one sentence; `param` is the field that is wrong, `code` a word for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def body(self) -> dict:
        """{"error": {message, type, param, code}}."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": "1"} if self.status == 503 else {}

    def __str__(self) -> str:
        return self.message
