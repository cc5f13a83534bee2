"""Whether a chat template takes notice of what a request says: what it would drop in silence is refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.serve.errors import ApiError

# Fields that a template need not show. Thoughts that a client sends back stay out where the model's makers leave them out of
# the history; the id of a call only links two messages.
PASSED_OVER = {"role", "content", "reasoning_content", "reasoning", "tool_call_id"}

Render = Callable[[Sequence[Mapping[str, Any]]], str]


def check_noticed(render: Render, messages: Sequence[Mapping[str, Any]]) -> None:
    """ApiError 400 for a field of a message without which `render` gives the same text, and for a role besides user and
    assistant whose words do not show in it; of each role one message is looked at."""
    seen = {"user", "assistant"}
    for index, message in enumerate(messages):
        before, after = messages[:index], messages[index + 1 :]
        for name in message.keys() - PASSED_OVER:
            less = {key: value for key, value in message.items() if key != name}
            if message[name] not in (None, [], "") and _same(render, messages, [*before, less, *after]):
                _refuse(f"messages.{index}.{name}", f"the field {name!r} of messages")
        if message["role"] not in seen and message["content"]:
            seen.add(message["role"])
            # Left out, it might be what a template says where there is none.
            other = {**message, "content": message["content"] + "x"}
            if _same(render, messages, [*before, other, *after]):
                _refuse(f"messages.{index}.role", f"messages of role {message['role']!r}")


def _same(render: Render, messages: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> bool:
    try:
        return render(messages) == render(others)
    except PipelineError:
        # A template that misses it has noticed it; one that takes neither says so when it is asked in earnest.
        return False


def _refuse(param: str, what: str) -> None:
    message = f"{param}: this model's chat template ignores {what}; leave it out"
    raise ApiError(400, message, param, "unsupported_parameter")
