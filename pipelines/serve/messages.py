"""Whether a chat template takes notice of what a request says: what it would drop in silence is refused."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.serve.errors import ApiError

# Fields that a template need not show. Thoughts that a client sends back stay out where the model's makers leave them out of
# the history; the id of a call only links two messages, beginnings that prompts share are computed once in any case, and
# litellm's clients send back what it noted of the server.
PASSED_OVER = {"role", "reasoning_content", "reasoning", "tool_call_id", "cache_control", "provider_specific_fields"}

# Values that ask for nothing.
EMPTY: tuple[Any, ...] = (None, [], "")
# Each costs a rendering of the whole conversation, and no template reads as many.
MOST_FIELDS = 24

Render = Callable[[Sequence[Mapping[str, Any]]], str]


def check_noticed(render: Render, messages: Sequence[Mapping[str, Any]]) -> None:
    """ApiError 400 for a field of a message without which `render` gives the same text, and for a role besides user and
    assistant whose words do not show in it; of what several messages of a role have the first is looked at."""
    # The call that a result answers names its function too.
    seen: set[tuple[str, str]] = {("user", "content"), ("assistant", "content"), ("tool", "name")}
    whole: str | None = None
    for index, message in enumerate(messages):
        role = message["role"]
        for name, value in message.items():
            if (role, name) in seen or value in EMPTY or name in PASSED_OVER:
                continue
            seen.add((role, name))
            if name == "name" and all(other.get("name") == value for other in messages if other["role"] == role):
                # It would tell this one from others of the role, and there are none.
                continue
            # Words that are left out might be what a template says where there are none.
            other = {key: value for key, value in message.items() if key != name} | (
                {name: f"{value}x"} if name == "content" else {}
            )
            try:
                whole = render(messages) if whole is None else whole
                ignored = render([*messages[:index], other, *messages[index + 1 :]]) == whole
            except PipelineError:
                # A template that misses it has noticed it; one that takes neither says so when it is asked in earnest.
                ignored = False
            if name == "content" and ignored:
                _refuse(f"messages.{index}.role", f"messages of role {role!r}")
            if ignored or len(seen) > MOST_FIELDS:
                _refuse(f"messages.{index}.{name}", f"the field {name[:40]!r} of messages")


def placed(render: Render, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages, with all that the system says in one at the beginning if the template has no place for it further on."""
    other = [
        {**message, "content": f"{message['content']}x"} if index and message["role"] == "system" else message
        for index, message in enumerate(messages)
    ]
    if other == messages:
        return messages
    with contextlib.suppress(PipelineError):
        if render(other) != render(messages):
            return messages
    words = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    return [{"role": "system", "content": words}, *(message for message in messages if message["role"] != "system")]


def _refuse(param: str, what: str) -> None:
    message = f"{param[:60]}: this model's chat template ignores {what}; leave it out"
    raise ApiError(400, message, param[:60], "unsupported_parameter")
