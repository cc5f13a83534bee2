"""Tool calls: their formats, reading them from text in pieces, and grammars of calls."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.derive_tool_format import tool_format_of
from castiron.pipelines.text.reasoning import Reasoning
from castiron.pipelines.text.text_output import text_request
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.pipelines.text.tool_calls import CallPart, Tools, joined
from castiron.pipelines.text.tool_formats import HERMES, ID, KEY
from tests.support import schemas
from tests.support.tool_templates import FORMATS, TEMPLATES

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "now": {"properties": {}}}
BOTH = [("weather", {"city": 'Sao "P", {x}', "days": 2}), ("now", {})]
# The calls of BOTH in each format, after other text where the format allows it.
WRITTEN = {
    "hermes": 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Sao \\"P\\", {x}", "days": 2}}\n</tool_call>\n<tool_call>\n'
              '{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen-xml": "Well.\n<tool_call>\n<function=weather>\n<parameter=city>\nSao \"P\", {x}\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
                "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3": '{"name": "weather", "parameters": {"city": "Sao \\"P\\", {x}", "days": 2}}; {"name": "now", "parameters": {}}',
    "mistral": 'Well.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Sao \\"P\\", {x}", "days": 2}}, {"name": "now", "arguments": {}}]',
    "mistral-args": 'Well.[TOOL_CALLS]weather[ARGS]{"city": "Sao \\"P\\", {x}", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "gemma4": 'Well.<|tool_call>call:weather{city:<|"|>Sao "P", {x}<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "functiongemma": 'Well.<start_function_call>call:weather{city:<escape>Sao "P", {x}<escape>,days:2}<end_function_call>'
                     "<start_function_call>call:now{}<end_function_call>",
    "lfm2": """Well.<|tool_call_start|>[weather(city='Sao "P", {x}', days=2), now()]<|tool_call_end|>""",
    "glm": 'Well.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Sao "P", {x}</arg_value>\n<arg_key>days</arg_key>\n'
           "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "dsml": 'Well.\n\n<|D|calls>\n<|D|invoke name="weather">\n<|D|parameter name="city" string="true">Sao "P", {x}</|D|parameter>\n'
            '<|D|parameter name="days" string="false">2</|D|parameter>\n</|D|invoke>\n<|D|invoke name="now">\n</|D|invoke>\n</|D|calls>',
    "keys": 'Well.<call name="weather"><city>Sao "P", {x}</city><days>2</days></call><call name="now"></call>',
    "minicpm": 'Well.\n<function name="weather"><param name="city">Sao "P", {x}</param><param name="days">2</param></function>\n'
               '<function name="now"></function>',
    "nested": 'Well.]<]<calls>]<]<invoke name="weather">]<]<city>Sao "P", {x}]<]</city>]<]<days>2]<]</days>]<]</invoke>\n'
              ']<]<invoke name="now">]<]</invoke>]<]</calls>',
    "kimi": 'Well.<|calls_begin|><|call_begin|>functions.weather:0<|args|>{"city": "Sao \\"P\\", {x}", "days": 2}<|call_end|>'
            "<|call_begin|>functions.now:1<|args|>{}<|call_end|><|calls_end|>",
    "harmony": '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Well.<|end|><|start|>assistant'
               '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Sao \\"P\\", {x}", "days": 2}<|call|>'
               "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
}  # fmt: skip


def reported(tools: Tools, text: str, sizes: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, answer and calls of a text that comes in pieces of these sizes."""
    reader, found, at = tools.reader(), [], 0
    for size in [*sizes, len(text)]:
        found += reader.add(text[at : at + size])
        at += size
    found += reader.finish()
    words = [piece for piece in found if isinstance(piece, str)]
    reasoning_text = "".join(word for word in words if isinstance(word, Reasoning))
    return reasoning_text, "".join(word for word in words if not isinstance(word, Reasoning)), joined(
        [piece for piece in found if isinstance(piece, CallPart)]
    )  # fmt: skip


@pytest.mark.parametrize("template", [None, "{{ messages }}", "{{ x"])
def test_a_template_that_writes_no_calls_has_no_format(template):
    assert tool_format_of(template) is None


def test_a_known_text_in_a_template_whose_calls_differ_gives_no_format():
    """Neither the known format nor one with wrong marks is taken."""
    names_last = TEMPLATES["hermes"].replace(
        '{"name": "{{ name }}", "arguments": {{ args | tojson }}}', "{{ args | tojson }} {{ name }}"
    )
    assert names_last != TEMPLATES["hermes"] and tool_format_of(names_last) is None


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), max_size=200))
def test_reads_calls_from_text_in_any_pieces(name, sizes):
    reasoning_text, generated, calls = reported(Tools(FORMATS[name], SCHEMAS), WRITTEN[name], sizes)
    assert [(called, json.loads(arguments)) for called, arguments in calls] == BOTH
    assert generated.strip() == ("" if name == "llama3" else "Well.") and reasoning_text == ("Hm." if name == "harmony" else "")


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"harmony"}))
@settings(max_examples=25)
@given(st.data())
def test_text_that_is_not_a_call_is_unchanged(name, data):
    form = FORMATS[name]
    marks = st.sampled_from([*form.triggers, form.close, '{"name', "[", "(", "x", " ", "<", "\n", form.begin[:3], "```"])
    text = data.draw(st.lists(marks, max_size=6).map("".join))
    reasoning_text, generated, calls = reported(Tools(form, SCHEMAS), text, data.draw(st.lists(st.integers(1, 3), max_size=40)))
    assert not calls and not reasoning_text and "".join(generated.split()) == "".join(text.split())
    if form.triggers and not any(mark in text for mark in form.triggers):
        assert generated == text


CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"harmony"}))
@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (CALL, "", 1),
        (f"```json\n{CALL}\n```", "", 1),
        (f"Let me look.\n\n```\n{CALL}\n```\n", "Let me look.", 1),
        (f"[{CALL}, {CALL}]", "", 2),
        (f"Well.\n```json\n{CALL}\n", "Well.", 1),
        (CALL.replace("}}", ", \"days\": null}}"), "", 1),
        (f"{CALL}\n{CALL}", "", 2),
        ('{"type": "function", "function": {"name": "weather", "parameters": {"city": "Ulm"}}}', "", 1),
        ("{'name': 'weather', 'arguments': {'city': 'Ulm'}}", "", 1),
        (CALL.replace("weather", "unknown"), CALL.replace("weather", "unknown"), 0),
        ('{"answer": {"city": "Ulm"}}', '{"answer": {"city": "Ulm"}}', 0),
        (f"As in {CALL}", f"As in {CALL}", 0),
        ("```python\nprint({})\n```", "```python\nprint({})\n```", 0),
    ],
)  # fmt: skip
def test_reads_json_without_the_formats_marks_as_calls(name, text, rest, calls):
    """Models write such calls, above all small ones; the name must be that of a function."""
    for size in (1, 5, 1000):
        _, words, found = reported(Tools(FORMATS[name], SCHEMAS), text, [size] * (len(text) // size))
        assert (words.strip(), found) == (rest, [("weather", '{"city": "Ulm"}')] * calls)


@pytest.mark.parametrize("arguments", ['{"town": "Ulm"}', '{"city": 5}', "{}", '{"city": "Ulm", "days": "2"}', "[]"])
def test_json_whose_arguments_do_not_fit_the_function_is_text(arguments):
    text = CALL.replace('{"city": "Ulm"}', arguments)
    assert reported(Tools(HERMES, SCHEMAS), text, [3] * 50) == ("", text, [])


@pytest.mark.parametrize("value", ["b'x'", "{1}", "1j", "1e999", "..."])
@pytest.mark.parametrize(("name", "call"), [
    ("lfm2", "<|tool_call_start|>[now(a={})]<|tool_call_end|>"), ("hermes", "{{'name': 'now', 'arguments': {{'a': {}}}}}"),
    ("gemma4", "<|tool_call>call:now{{a:{}}}<tool_call|>"),
])  # fmt: skip
def test_values_that_json_does_not_have_are_text(name, call, value):
    text = call.format(value)
    assert reported(Tools(FORMATS[name], SCHEMAS), text, [3] * 50) == ("", text, [])
    assert reported(Tools(FORMATS[name], {"now": {}}), call.format("1"), [3] * 50) == ("", "", [("now", '{"a": 1}')])


@pytest.mark.parametrize("name", ["hermes", "mistral", "kimi"])
def test_reads_calls_with_other_keys_between_marks(name):
    form = FORMATS[name]
    text = f"{form.triggers[0]} {CALL.replace('arguments', 'parameters')}{form.close}"
    assert reported(Tools(form, SCHEMAS), text, [4] * 60) == ("", "", [("weather", '{"city": "Ulm"}')])


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"harmony"}))
def test_patterns_do_not_divide_white_space(name):
    """Each token reads a call again; two adjacent patterns try every division of a long space."""
    reader = Tools(FORMATS[name], SCHEMAS).reader().calls
    for pattern in (reader.head.pattern, reader.argument.pattern):
        assert r"\s*\s*" not in pattern and not pattern.startswith((r"\s*", r"(?s)\s*"))


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "glm", "dsml", "kimi"])
def test_reads_calls_whose_last_marks_are_missing(name):
    form = FORMATS[name]
    tags = f"{form.key_begin}city{form.key_end.get('string', form.key_end.get(''))}Ulm{form.value_end}"
    arguments = {"json": '{"city": "Ulm"}', "tags": tags}
    written = form.write([("weather", arguments[form.style])]).replace(ID, "0")
    for left_out in (form.section_end, form.end + form.section_end, form.close):
        text = written.removesuffix(left_out)
        assert reported(Tools(form, SCHEMAS), text, [4] * 60) == ("", "", [("weather", '{"city": "Ulm"}')])


def test_arguments_come_in_pieces_and_a_single_call_ends_the_text():
    reader = Tools(FORMATS["hermes"], SCHEMAS).reader()
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    pieces = [reader.add(letter) for letter in text]
    names = [part.name for many in pieces for part in many]
    assert names[0] == "weather" and names.count(None) == len('{"city": "Ulm"}')
    for name in FORMATS.keys() - {"harmony", "llama3"}:
        reader, found = Tools(FORMATS[name], SCHEMAS, single=True).reader(), []
        for letter in WRITTEN[name]:
            found += reader.add(letter)
            if reader.full:
                break
        assert [name for name, _ in joined([p for p in found if isinstance(p, CallPart)])] == ["weather"] or name == "lfm2"


# Formats whose marks are special tokens of the vocabulary.
SPECIAL = FORMATS.keys() - {"hermes", "qwen-xml", "glm", "keys", "minicpm", "nested"}


def with_marks(name: str) -> Tokenizer:
    """Return a tokenizer with the marks of a format as special tokens."""
    form, tokenizer = FORMATS[name], schemas.tokenizer()
    marks = {mark for text in form.texts for mark in re.findall(r"<[^<>\s/=]*>|\[[A-Z_]+\]|<\|\"\|>", text)}
    if name in SPECIAL:
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(marks | {"<|D|", "</|D|"})])
    return Tokenizer(tokenizer, eos=(0,), tool_format=form)


def calls_of(text: Tokenizer, schemas: dict, parallel: bool, **more):
    """Return the grammar of a text that consists of calls."""
    return text.grammar(tools=Tools(text.tool_format, single=not parallel).grammar(schemas, **more))


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_fit_the_functions_schema(name):
    text, form, ended = with_marks(name), FORMATS[name], 0
    for seed in range(12):
        parallel = seed % 3 == 0
        generated, end = schemas.generate_text(text, calls_of(text, SCHEMAS, parallel), seed, 600)
        if end == "length":
            continue
        ended += 1
        _, rest, calls = reported(Tools(form, SCHEMAS), generated, [7] * 100)
        assert not rest and calls and (parallel or len(calls) == 1)
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), {"type": "object", **SCHEMAS[called]})
    assert ended > 2
    only = schemas.generate_text(text, calls_of(text, {"now": SCHEMAS["now"] | {"additionalProperties": False}}, False), 1)[0]
    assert reported(Tools(form, SCHEMAS), only, [])[2] == [("now", "{}")]


def test_counts_reasoning_tokens_of_channels():
    text = with_marks("harmony")
    request = text_request(text.encode("x"), 2000, text, reasoning=True, stop_tokens=())
    for token in text.encode(
        "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant<|channel|>final<|message|>Well then."
    ):
        request.advance(token, None)
    assert 0 < request.output.reasoning_tokens <= len("Hm, so.")


def test_rejects_parameters_that_a_format_cannot_enforce():
    for name, schema in (
        ("gemma4", {"anyOf": []}),
        ("lfm2", {"minProperties": 1}),
        ("qwen-xml", {"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}),
        ("qwen-xml", {"properties": {"a": {"anyOf": [{"type": "string", "format": "uri"}, {"type": "null"}]}}}),
        ("nested", {"properties": {"a": {"type": "array", "minItems": 2}}}),
        ("nested", {"properties": {"a": {"type": "object", "minProperties": 2}}}),
        # Invalid schemas.
        ("lfm2", {"properties": []}),
        ("lfm2", {"properties": {"a": {}}, "required": 5}),
        ("gemma4", {"properties": {"a": {"enum": 5}}}),
        ("qwen-xml", {"properties": {"a": {"type": "string", "enum": 5}}}),
        ("qwen-xml", {"properties": {"a": {"type": "string", "enum": [5]}}}),
    ):
        with pytest.raises(PipelineError, match="the parameters of f cannot be enforced"):
            calls_of(with_marks(name), {"f": schema}, False, strict={"f"})


ANSWER = {"type": "object", "properties": {"name": {"enum": ["w", "Ulm"]}}, "required": ["name"], "additionalProperties": False}


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"harmony"}))
def test_a_format_allows_a_call_or_an_answer(name):
    text, functions = with_marks(name), {"now": {"properties": {}, "additionalProperties": False}, "weather": WEATHER}
    call, _ = schemas.generate_text(text, calls_of(text, {"now": functions["now"]}, False), 1)
    grammar = calls_of(text, functions, False, answer=ANSWER)
    for words in (call, '{"name": "w"}', '{"name": "Ulm"}'):
        assert not follow(constraint := grammar.constraint(), text, words), words
        assert constraint.done or constraint.allows(text.eos[0])
        _, rest, calls = reported(Tools(FORMATS[name], functions), words, [7] * 20)
        assert (rest, calls) == (("", [("now", "{}")]) if "now" in words else (words, []))


def follow(constraint, text: Tokenizer, words: str) -> str:
    """Append the allowed tokens of `words`; return the rest of `words`."""
    left = words.encode()
    while left:
        allowed = [
            i
            for i in np.flatnonzero(constraint.mask(len(text.grammars.tokens)))
            if text.grammars.tokens[i] and left.startswith(text.grammars.tokens[i])
        ]
        if not allowed:
            break
        constraint.accept(int(allowed[-1]))
        left = left[len(text.grammars.tokens[allowed[-1]]) :]
    return left.decode()


CODE = """if a < b and c > "d":\n\treturn f"<p class='x'>{x}</p>" # </parameter> [é, 🚀]\\n\n"""


@pytest.mark.parametrize("value", [CODE, ""], ids=["code", "empty"])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_string_arguments_may_hold_any_text(name, value):
    form, in_json = FORMATS[name], json.dumps(value, ensure_ascii=False)
    tags = f"{form.key_begin}city{form.key_end.get('string', form.key_end.get(''))}{value}{form.value_end.replace(KEY, 'city')}"
    arguments = {
        "json": f'{{"city": {in_json}}}', "python": f"city={in_json}", "gemma": f"{{city:{form.quote}{value}{form.quote}}}", "tags": tags,
    }  # fmt: skip
    written = f'<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"city": {in_json}}}'
    if name != "harmony":
        written = form.write([("weather", arguments[form.style])]).replace(ID, "0")
    text = with_marks(name)
    constraint = calls_of(text, {"weather": WEATHER}, False).constraint()
    assert not follow(constraint, text, written) and (constraint.done or constraint.allows(text.eos[0]))
    ((called, arguments),) = reported(Tools(form, SCHEMAS), written, [7] * 100)[2]
    assert called == "weather" and json.loads(arguments) == {"city": value}


def test_a_string_that_may_be_null_has_no_quotes():
    """Templates write it so, and a grammar allows any text, because each text is a valid value."""
    schema = {"properties": {"a": {"type": ["string", "null"]}}, "required": ["a"], "additionalProperties": False}
    text, tools = with_marks("qwen-xml"), Tools(FORMATS["qwen-xml"], {"f": schema})
    written = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    for value, expected in (("null", None), ('"x"', '"x"'), ("x", "x"), ("5", "5"), ("[1]", "[1]")):
        assert reported(tools, written.format(value), [9] * 20)[2] == [("f", json.dumps({"a": expected}))]
        assert not follow(calls_of(text, {"f": schema}, False, strict={"f"}).constraint(), text, written.format(value))


@pytest.mark.parametrize("name", ["qwen-xml", "glm", "gemma4"])
def test_a_string_without_quotes_has_a_length(name):
    schema = {
        "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 12}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text, form = with_marks(name), FORMATS[name]
    grammar = calls_of(text, {"f": schema}, False, strict={"f"})
    for value, is_valid in (
        ("a", False),
        ("ab", True),
        ("</b", True),
        ("é🚀", True),
        ("</arg_value", True),
        ("a" * 12, True),
        ("a" * 13, False),
    ):
        quoted = f"{{a:{form.quote}{value}{form.quote}}}"
        tags = f"{form.key_begin}a{form.key_end.get('')}{value}{form.value_end}"
        written = form.write([("f", quoted if form.style == "gemma" else tags)])
        assert (not follow(grammar.constraint(), text, written)) == is_valid, value


PATTERNS = [
    {"pattern": "b+"}, {"pattern": "^a"}, {"pattern": "a$"}, {"pattern": "^(a|b)$"}, {"pattern": "a|b"}, {"pattern": r"a\$"}, {"pattern": r"a\\$"},
    {"pattern": "^[^|)]/\n?$"}, {"pattern": "^</p"}, {"pattern": "^a", "minLength": 2, "maxLength": 3}, {"format": "date"}, {"format": "time"},
    {"format": "date-time"}, {"format": "ipv4"}, {"format": "uuid"}, {"format": "email"}, {"format": "hostname"}, {"format": "date", "pattern": "-30$"},
]  # fmt: skip
STRINGS = [
    "a", "b", "ab", "ba", "xbbx", "abc", "abcd", "a$", "a$b", "a\\", "|/", "x/", "x/\n", "</parameter", "</p>", "", "1 2",
    "2024-02-29", "2023-02-29", "2023-11-31", "2023-11-30", "2023-13-01", "12:30:00Z", "24:00:00Z", "12:30:00.5+01:00", "12:30",
    "2023-11-30T12:30:00Z", "2023-11-30T12:30:00", "2023-11-30 12:30:00Z", "127.0.0.1", "256.0.0.1", "1.2.3", "10.100.255.249", "01.2.3.4",
    "123e4567-e89b-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000", "a.b+c@example.org", "a@b@c", "no", "example.org", "-x.org", "x_y",
]  # fmt: skip


@pytest.mark.parametrize("name", ["qwen-xml", "dsml", "gemma4", "nested"])
def test_a_string_without_quotes_matches_its_pattern_and_format(name):
    """A format takes fewer texts than its standard allows, but those of common tools."""
    text, form = with_marks(name), FORMATS[name]
    checker = jsonschema.FormatChecker()
    known = {
        "date-time": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "email": re.compile(r"[\w.+-]+@[a-z]+\.[a-z]+"),
        "hostname": re.compile(r"(?!-)(?!.*[_@/:$<|\\ +\n]).+"), "time": re.compile(r"([01]\d|2[0-3]):\d\d:\d\d(\.\d+)?(Z|[+]\d\d:\d\d)"),
    }  # fmt: skip
    for each in PATTERNS:
        part = {"type": "string", **each}
        parameters = {"properties": {"a": part}, "required": ["a"], "additionalProperties": False}
        grammar = calls_of(text, {"f": parameters}, False, strict={"f"})
        for value in STRINGS:
            pattern = known.get(each.get("format", ""))
            is_valid = (
                pattern.fullmatch(value)
                if pattern
                else jsonschema.Draft202012Validator(part, format_checker=checker).is_valid(value)
            )
            quoted = f"{{a:{form.quote}{value}{form.quote}}}"
            tags = (
                f"{form.key_begin}a{form.key_end.get('string', form.key_end.get(''))}{value}{form.value_end.replace(KEY, 'a')}"
            )
            written = form.write([("f", quoted if form.style == "gemma" else tags)])
            rest = follow(constraint := grammar.constraint(), text, written)
            assert (not rest and (constraint.done or constraint.allows(0))) == bool(is_valid), (each, value)


def test_a_call_may_repeat_keywords_of_its_schema():
    """Qwen2.5-Coder 0.5B writes calls of Codex's tools so; other unknown arguments make it text."""
    schema = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"], "additionalProperties": False}
    tools = Tools(FORMATS["hermes"], {"exec_command": schema})
    written = '```json\n{{"name": "exec_command", "arguments": {{"cmd": "ls", "required": ["cmd"], "additionalProperties": {}}}}}\n```'
    assert reported(tools, written.format("false"), [9] * 20)[1:] == ("", [("exec_command", '{"cmd": "ls"}')])
    assert reported(tools, written.format("true"), [9] * 20)[2] == []


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), max_size=100))
def test_gpt_oss_may_name_the_recipient_before_the_channel(sizes):
    """Its template writes calls so; a prompt ends in <|start|>assistant."""
    call = ' to=functions.now<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
    tools = Tools(FORMATS["harmony"], SCHEMAS)
    assert reported(tools, call, sizes) == ("", "", [("now", '{"a": 1}')])
    thinks = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert reported(tools, thinks + call, sizes) == ("Hm.", "", [("now", '{"a": 1}')])
    for plain in (" to=functions.now", " to be or not", "to", " "):
        assert reported(tools, plain, sizes) == ("", plain, [])


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"harmony", "llama3"}))
def test_free_text_is_unconstrained_and_its_calls_fit_the_schema(name):
    text, city_schema = (
        with_marks(name),
        {"type": "object", "properties": {"city": {"enum": ["Ulm", "Rom"]}}, "required": ["city"]},
    )
    grammar = calls_of(text, {"weather": city_schema, "now": {"type": "object"}}, True, free=True)
    plain = "Well, <tool_cal and {more}, 1 < 2.\n"
    assert not follow(constraint := grammar.constraint(), text, plain) and constraint.allows(text.eos[0])
    call, _ = schemas.generate_text(text, calls_of(text, {"weather": {**city_schema, "additionalProperties": False}}, False), 1)
    generated = reported(Tools(FORMATS[name], SCHEMAS), f"{plain}{call}", [5] * 100)
    assert generated[1].strip() == plain.strip() and [called for called, _ in generated[2]] == ["weather"]
    assert not follow(constraint := grammar.constraint(), text, plain + call) and (
        constraint.done or constraint.allows(text.eos[0])
    )
    begun = call[: call.index("weather") + len("weather")]
    assert follow(grammar.constraint(), text, plain + begun.replace("weather", "wether")).startswith("ther")
    wrong = call.replace("city", "town")
    assert wrong != call and follow(grammar.constraint(), text, plain + wrong).startswith("town")
