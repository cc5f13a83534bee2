"""The formats in which models write tool calls, as data: reader and grammar follow from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Stand for text that differs from call to call: a call's id or index, and an argument's key.
ID, KEY = "⟨id⟩", "⟨key⟩"
# Marks such as <tool_call> or [TOOL_CALLS] at the start of a text, and the word after them.
_MARKS = re.compile(r"(?:<[^<>\s]+>|\[[A-Z_/]+\])+\w*")


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    Calls are `section_begin`, calls with `separator` between them, `section_end`. A call is
    `begin`, the function's name, `head`, the arguments, `end`. ID in these texts stands for an
    identifier that the model chooses.

    Args:
        style: how arguments are written: "json", an object; "tags", keys and values between marks;
            "python", keywords; "gemma", JSON with `quote` around strings and no quotes around keys;
            "harmony", the messages of gpt-oss, for which all other fields are unused.
        key_begin: text before a key, in tags.
        key_end: text between a key and its value, in tags, by the value's JSON type; with the one
            key "" if types do not matter.
        value_end: text after a value, in tags; KEY in it stands for the key.
    """

    style: str
    begin: str = ""
    head: str = ""
    end: str = ""
    separator: str = ""
    section_begin: str = ""
    section_end: str = ""
    key_begin: str = ""
    key_end: Mapping[str, str] = field(default_factory=dict)
    value_end: str = ""
    quote: str = '"'

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts of which one starts calls; none if a call is JSON without a mark before it."""
        found = (_trigger(text) for text in (self.section_begin + self.begin, self.begin))
        return tuple(dict.fromkeys(text for text in found if text))

    @property
    def close(self) -> str:
        """The mark after the calls that a trigger starts; "" if the end of the text ends them."""
        return "".join((self.section_end if self.section_begin else self.end).lstrip(" \n]})").split()[-1:])

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the format, which may contain special tokens of the model's vocabulary."""
        if self.style == "harmony":
            return HARMONY_MARKS
        return (
            self.section_begin, self.begin, self.head, self.end, self.separator, self.section_end, self.key_begin,
            *self.key_end.values(), self.value_end, self.quote,
        )  # fmt: skip

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls (name, arguments in JSON) as the model writes them, in the style "json"."""
        written = [f"{self.begin}{name}{self.head}{arguments}{self.end}" for name, arguments in calls]
        return self.section_begin + self.separator.join(written) + self.section_end

    def example(self) -> str:
        """Return a call as the model writes it, in one line, to show to users."""
        if self.style == "harmony":
            return "<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}"
        tags = f"{self.key_begin}key{next(iter(self.key_end.values()), '')}value{self.value_end}"
        text = self.write([("name", tags if self.style == "tags" else "{…}" if self.style != "python" else "…")])
        return " ".join(text.replace(KEY, "key").replace(ID, "id").split())


def _trigger(text: str) -> str:
    """Return the marks at the start of a text, or all of it before an id or JSON if it has none."""
    marks = _MARKS.match(text)
    return marks[0] if marks else re.split(rf"{ID}|(?<!\w)\[?\{{|\{{", text)[0].rstrip()


HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
HERMES = ToolFormat("json", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")
_PYTHON = ToolFormat(
    "python", "", "(", ")", ", ", section_begin="<|tool_call_start|>[", section_end="]<|tool_call_end|>"
)  # fmt: skip
_DEEPSEEK = ToolFormat(
    "json", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", "\n",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
_GRANITE = ToolFormat("json", '{"name": "', '", "arguments": ', "}", ", ", "<|tool_call|>[", "]")
_KIMI = ToolFormat(
    "json", "<|tool_call_begin|>functions.", f":{ID}<|tool_call_argument_begin|>", "<|tool_call_end|>", "",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
)  # fmt: skip
_COMMAND_R = ToolFormat(
    "json", '{\n        "tool_name": "', '",\n        "parameters": ', "\n    }", ",\n    ",
    "Action: ```json\n[\n    ", "\n]```",
)  # fmt: skip
_FUNCTOOLS = ToolFormat("json", '{"name": "', '", "arguments": ', "}", ", ", "functools[", "]")
# Formats of templates that do not write calls, or only in other forms: a text in the template that
# identifies it, and its format. Sources: the models' cards and llama.cpp's common/chat.cpp.
KNOWN = (
    ("<|channel|>analysis", ToolFormat("harmony")),
    ("<|tool_call_start|>", _PYTHON),
    ("<|tool_list_start|>", _PYTHON),
    ("<|tool_response_start|>", _PYTHON),
    ("List of tools: [", _PYTHON),
    ("<｜tool▁calls▁begin｜>", _DEEPSEEK),
    ("<|tool_calls_section_begin|>", _KIMI),
    ("<|tool_call|>", _GRANITE),
    ("Action: ```json", _COMMAND_R),
    ("functools[", _FUNCTOOLS),
    ("<tool_call>", HERMES),
)
