"""Join the chat templates of a checkpoint."""

from typing import Any


def join_templates(default: Any, tool_use: Any) -> str | None:
    """Return one template that renders `tool_use` for requests with tools, otherwise `default`.

    What is not a string is missing; the result is None without both.
    """
    if not isinstance(tool_use, str) or tool_use == default:
        return default if isinstance(default, str) else None
    if not isinstance(default, str):
        default = "{{ raise_exception('the model has a chat template only for requests with tools') }}"
    # Jinja removes a newline at the end of a template or after a block, and white space before a block.
    ends = [text.removesuffix("\n") + "{{ '' }}" for text in (tool_use, default)]
    return f"{{% if tools %}}\n{ends[0]}{{% else %}}\n{ends[1]}{{% endif %}}"
