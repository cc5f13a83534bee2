"""The formats in which models write tool calls, as data for the parser and for grammars."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from castiron.pipelines.errors import PipelineError
from castiron.vmfb.manifest import Manifest
from castiron.vmfb.record import RecordError, from_json, short

# Placeholders in the texts of a format: a call's id or index, and an argument's key.
ID, KEY = "⟨id⟩", "⟨key⟩"
STYLES = ("json", "tags", "python", "gemma", "harmony")
# Keys of `ToolFormat.key_end`: the types of JSON, or "" for any.
KINDS = ("", "string", "integer", "number", "boolean", "null", "array", "object")
# Matches marks such as <tool_call> or [TOOL_CALLS] at the start of a text, and the word after them.
_MARKS = re.compile(r"(?:<[^<>\s]+>|\[[A-Z_/]+\])+\w*")


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a model writes tool calls.

    The text of calls is: `section_begin`, the calls separated by `separator`, `section_end`. A call
    is: `begin`, the function's name, `head`, the arguments, `end`. The placeholder
    `ID` in these texts stands for an identifier that the model chooses.

    Args:
        style: format of arguments. "json": an object. "tags": keys and values between marks.
            "python": keyword arguments. "gemma": JSON with `quote` around strings and without
            quotes around keys. "harmony": the messages of gpt-oss; the other fields are unused.
        key_begin: in tags, the text before a key.
        key_end: in tags, the text between a key and its value, by the value's JSON type. A text
            that does not depend on the type has the key "".
        value_end: in tags, the text after a value; the placeholder `KEY` in it stands for the key.
    """

    style: str
    begin: str = ""
    head: str = ""
    end: str = ""
    separator: str = ""
    section_begin: str = ""
    section_end: str = ""
    key_begin: str = ""
    key_end: dict[str, str] = field(default_factory=dict)
    value_end: str = ""
    quote: str = '"'

    @staticmethod
    def of(manifest: Manifest) -> ToolFormat | None:
        """Return the tool format of a bundle; PipelineError for an invalid format."""
        try:
            form = from_json(ToolFormat | None, manifest.tool_format, "tool_format")
            if form and form.style not in STYLES:
                raise RecordError(f"tool_format.style is {short(repr(form.style))}, not one of {', '.join(STYLES)}")
            if form and (unknown := sorted(form.key_end.keys() - set(KINDS))):
                raise RecordError(f"tool_format.key_end has the unknown type {short(repr(unknown[0]))}")
        except RecordError as error:
            raise PipelineError(f"{manifest.name} has an invalid manifest: {error}; compile the bundle again") from None
        return form

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that start calls; empty if a call is JSON without any text before it."""
        found = (_trigger(text) for text in (self.section_begin + self.begin, self.begin))
        return tuple(dict.fromkeys(text for text in found if text))

    @property
    def close(self) -> str:
        """The mark that ends calls; "" if calls end at the end of the text."""
        return "".join((self.section_end if self.section_begin else self.end).lstrip(" \n]})").split()[-1:])

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the format, which may contain special tokens."""
        if self.style == "harmony":
            return HARMONY_MARKS
        return (
            self.section_begin, self.begin, self.head, self.end, self.separator, self.section_end, self.key_begin,
            *self.key_end.values(), self.value_end, self.quote,
        )  # fmt: skip

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of `calls`, each (name, text of the arguments), in this format."""
        written = [f"{self.begin}{name}{self.head}{arguments}{self.end}" for name, arguments in calls]
        return self.section_begin + self.separator.join(written) + self.section_end

    def example(self) -> str:
        """Return an example of a call in this format, on one line, to show to users."""
        if self.style == "harmony":
            return "<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}"
        tags = f"{self.key_begin}key{next(iter(self.key_end.values()), '')}value{self.value_end}"
        text = self.write([("name", tags if self.style == "tags" else "{…}" if self.style != "python" else "…")])
        return " ".join(text.replace(KEY, "key").replace(ID, "id").split())


def _trigger(text: str) -> str:
    """Return the start of `text` by which a call is recognised.

    These are its first marks, such as "<tool_call>". Without marks, it is the part before the
    first JSON object or placeholder `ID`.
    """
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
# Formats that cannot be derived, because the template writes no calls or writes them differently:
# (a text in the template that identifies it, the format). Sources: the models' cards and llama.cpp's common/chat.cpp.
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
