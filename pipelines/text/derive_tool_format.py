"""Derive the tool format of a chat template from the text that it renders for tool calls.

As in llama.cpp's autoparser, the template renders conversations that differ in one detail, and the
rendered texts are compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.chat_template import render
from castiron.pipelines.text.reasoning import Marks, marks_of
from castiron.pipelines.text.tool_calls import Tools, read_calls
from castiron.pipelines.text.tool_formats import ID, KEY, KNOWN, ToolFormat

USER, ANSWER = "question_one?", "answer_one."
NAMES, ARGUMENTS = ("get_alpha", "get_beta"), {"k_one": "v_one", "k_two": 4711}
IDS = ("idcall001", "idcall002")
# By style, except tags: a pattern of how templates write ARGUMENTS.
STYLES = {
    "json": re.compile(r'\{\s*"k_one"\s*:\s*"v_one"\s*,\s*"k_two"\s*:\s*4711\s*\}'),
    "python": re.compile(r"k_one=(['\"])v_one\1, k_two=4711"),
    "gemma": re.compile(r"\{k_one:(?P<quote>[^v]+)v_one(?P=quote),k_two:4711\}"),
}
# By JSON type: a value, and a pattern of how templates write it.
VALUES = {
    "string": ("v_one", "v_one"), "integer": (4711, "4711"), "number": (0.5, "0[.]5"), "boolean": (True, "(?i:true)"),
    "null": (None, "null|None"), "array": ([7, 8], r"\[7, ?8\]"), "object": ({"a": 7}, r"""\{["']a["']: ?7\}"""),
}  # fmt: skip
# Arguments for which a derived format is checked: they must be equal after rendering and parsing.
DIFFICULT = ({"k_one": 'Say "<b>" & {x}, [y]\nÜber', "k_two": 12}, {"k_one": "", "k_two": -1}, {})
# Units in which texts are compared: marks, words, white space and other characters.
_TOKEN = re.compile(rf"<[^<>\s]*>|\[[A-Z_/]+\]|\s+|{ID}|\w+|.", re.DOTALL)


def tool_format_of(template: str | None, special_tokens: Mapping[str, str] = {}) -> ToolFormat | None:
    """Return the format in which a chat template writes tool calls; None if it is unknown.

    It is derived from rendered calls, else the first of KNOWN whose text is in the template.
    Parsing the rendered calls must give them back.
    """
    if not template:
        return None
    probe = _Probe(template, special_tokens)
    known = next((form for sign, form in KNOWN if sign in template), None)
    if known and known.style == "harmony":
        return known
    form = probe.derive()
    if form and probe.gives_back(form) and not probe.prompts_call(form):
        return form
    # If the template writes calls, the known format must parse them.
    return known if known and (not probe.writes_calls or probe.gives_back(known)) else None


class _Probe:
    """A chat template with methods that render test conversations with tool calls."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]):
        self.template, self.special_tokens, self.marks = template, special_tokens, marks_of(template, ())
        # Some templates take arguments as a mapping, others as JSON text.
        self.as_text = False
        self.writes_calls = False

    def render(self, message: Mapping[str, Any] | None, **variables: Any) -> str | None:
        properties = {key: {"type": kind, "description": "d"} for key, kind in (("k_one", "string"), ("k_two", "integer"))}
        schema = {"type": "object", "properties": properties, "required": []}
        tools = [{"type": "function", "function": {"name": n, "description": "d", "parameters": schema}} for n in NAMES]
        messages = [{"role": "user", "content": USER}, *([message] if message else [])]
        try:
            given = {"tools": tools, "add_generation_prompt": False, **variables}
            return render(self.template, messages, special_tokens=self.special_tokens, **given)
        except PipelineError:
            return None

    def calls(self, arguments: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the part of a rendered message that is its calls; None if there are none."""
        given = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(each) if self.as_text else each}}
            for id_, name, each in zip(IDS, NAMES, arguments)
        ]
        plain = self.render({"role": "assistant", "content": ANSWER})
        after_user, _, tail = (plain or "").rpartition(ANSWER)
        header = after_user.rpartition(USER)[2]
        for content in (ANSWER, "", None):
            text = self.render({"role": "assistant", "content": content, "tool_calls": given})
            if text is None or USER not in text:
                continue
            text = text.rpartition(USER)[2]
            text, before = (text.partition(ANSWER)[2], tail) if content == ANSWER else (text, header)
            if all(name in text for name in NAMES[: len(given)]):
                # Some templates start another turn for calls.
                for known in (before, header.lstrip()):
                    text = text[len(_common_prefix(text, known)) :]
                ends = [end for end in (tail.strip(), self.special_tokens.get("eos_token")) if end]
                return _without_turn(text, ends, tail, self.marks)
        return None

    def derive(self) -> ToolFormat | None:
        for self.as_text in (False, True):
            one = self.calls([ARGUMENTS])
            self.writes_calls |= one is not None and all(text in one for text in ("v_one", "4711"))
            if one and (parts := _split(one)):
                two = self.calls([ARGUMENTS, ARGUMENTS])
                return self._form(*parts, (two or "").partition(NAMES[0])[2])
        return None

    def _form(self, style: str, before: str, head: str, body: str, after: str, rest: str) -> ToolFormat:
        """Compare the text of one call with that of two.

        rest: two calls from the end of the first one's name on; "" if only one call is allowed.
        """
        fields: dict[str, Any] = {}
        if style == "tags":
            head, after, fields = self._tags(head, body, after)
        elif style == "gemma":
            fields["quote"] = STYLES["gemma"].fullmatch(body)["quote"]
        begin, section_begin, end, separator, section_end = before.lstrip(), "", after.rstrip(), "", ""
        if NAMES[1] in rest:
            between, _, last = rest.partition(NAMES[1])
            between, last = _after_arguments(between, fields), _after_arguments(last, fields)
            begin = _common_suffix(before, between)
            section_begin, between = before[: len(before) - len(begin)], between[: len(between) - len(begin)]
            end = _common_prefix(between, last)
            separator, section_end = between[len(end) :], last[len(end) :].rstrip()
            space = begin[: len(begin) - len(begin.lstrip())]
            section_begin, separator, begin = (section_begin + space).lstrip(), separator + space, begin.lstrip()
            section_end = section_end if section_begin else ""
        return ToolFormat(style, begin, head, end, separator, section_begin, section_end, **fields)

    def _tags(self, head: str, body: str, after: str) -> tuple[str, str, dict[str, Any]]:
        """Return `head` and `after` without the tags of arguments, and the tags as fields."""
        first, _, rest = (head + body + after).partition("k_one")
        key_end, _, rest = rest.partition("v_one")
        between, _, rest = rest.partition("k_two")
        second_end, _, last = rest.partition("4711")
        between, last = between.replace("k_one", KEY), last.replace("k_two", KEY)
        key_begin = _common_suffix(first, between)
        value_end = between[: len(between) - len(key_begin)]
        key_ends = {"": key_end}
        if key_end != second_end:
            key_ends = {}
            for kind, (value, written) in VALUES.items():
                text = (self.calls([{"k_one": value}]) or "").partition("k_one")[2]
                if found := [*re.finditer(written, text)]:
                    key_ends[kind] = text[: found[-1].start()]
        in_list, in_object = (
            (self.calls([{"k_one": VALUES[kind][0]}]) or "").partition("k_one")[2] for kind in ("array", "object")
        )
        # In nested tags, an item of a list has a key.
        item = re.search(rf"{re.escape(key_begin)}([^\s<>]+){re.escape(key_end)}7", in_list)
        fields = {
            "key_begin": key_begin, "key_end": key_ends, "value_end": value_end,
            "item": item[1] if item and len(key_ends) == 1 else "", "is_python": "{'a': 7}" in in_object,
        }  # fmt: skip
        return first[: len(first) - len(key_begin)], last.removeprefix(value_end), fields

    def prompts_call(self, form: ToolFormat) -> bool:
        prompt = self.render(None, add_generation_prompt=True) or ""
        return prompt.rstrip().endswith(form.triggers or ("\0",))

    def gives_back(self, form: ToolFormat) -> bool:
        """Return whether parsing the rendered test calls with `form` gives the original calls."""
        schema = {"properties": {"k_one": {"type": "string"}, "k_two": {"type": "integer"}}}
        tools = Tools(form, dict.fromkeys(NAMES, schema))
        for arguments in ([ARGUMENTS], *([each] for each in DIFFICULT), [ARGUMENTS, DIFFICULT[0]]):
            text = self.calls(arguments)
            if text is None:
                if len(arguments) == 1 and arguments[0]:
                    return False
                continue
            expected = list(zip(NAMES, arguments))
            found = [(name, json.loads(values)) for name, values in read_calls(tools, text)]
            if found != expected:
                return False
        return True


def _split(text: str) -> tuple[str, str, str, str, str] | None:
    """Return (style, text before the name, text after it, arguments, text after them), or None."""
    before, _, rest = text.partition(NAMES[0])
    before = _with_ids(before)
    for style, pattern in STYLES.items():
        if found := pattern.search(rest):
            head, after = _with_ids(rest[: found.start()]), _with_ids(rest[found.end() :])
            return style, before, head, found[0], after
    if re.search("k_one.*v_one.*k_two.*4711", rest, re.DOTALL) and "\\" not in rest:
        start, end = rest.index("k_one"), rest.index("4711") + 4
        return "tags", before, _with_ids(rest[:start]), rest[start:end], rest[end:]
    return None


def _after_arguments(text: str, fields: Mapping[str, Any]) -> str:
    for pattern in STYLES.values():
        if found := pattern.search(text):
            return _with_ids(text[found.end() :])
    return text.partition("4711")[2].replace("k_two", KEY).removeprefix(fields.get("value_end", ""))


def _with_ids(text: str) -> str:
    """Replace ids and indices of calls, which differ between calls, by the placeholder `ID`."""
    return re.sub("|".join(IDS) + r"|(?<!\w)\d+(?!\w)", ID, text)


def _without_turn(text: str, ends: Sequence[str], tail: str, marks: Marks) -> str:
    """Remove reasoning and the end of the turn from the text of a turn with tool calls."""
    start = text.index(NAMES[0])
    for _, end in marks:
        text = text[:start].rpartition(end)[2] + text[start:]
        start = text.index(NAMES[0])
    last = max(text.rfind(name) for name in NAMES)
    for end in ends:
        if end in text[last:]:
            return text[: text.index(end, last)]
    return text[: len(text) - len(_common_suffix(text, tail))]


def _common_prefix(one: str, other: str) -> str:
    return "".join(commonprefix([_TOKEN.findall(text) for text in (one, other)]))


def _common_suffix(one: str, other: str) -> str:
    return "".join(commonprefix([_TOKEN.findall(text)[::-1] for text in (one, other)])[::-1])
