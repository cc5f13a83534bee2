"""The types of arguments that models write without quotes follow from the function's JSON schema."""

from __future__ import annotations

import ast
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from castiron.pipelines.text.chat_template import render
from castiron.pipelines.text.json_schema import Schema
from castiron.pipelines.text.tool_calls import Tools, read_calls
from tests.support.schemas import VALUES
from tests.support.tool_templates import FORMATS, TEMPLATES

# Texts that are also values of other types, or nearly.
TEXTS = [
    "12345", "-1", "007", " 5", "5\n", "0.5", "1e3", "1_0", "0x10", "NaN", "true", "True", "null", "None", "none", "nil", '"x"', "'x'", '"5"',
    "[1]", "[1, 'a']", '{"a": 1}', "{'a': 1}", "{1}", "b'x'", "1j", "", "x", "yes", "red", "</x>", "1 2", "Infinity", "1e999", "[NaN]",
]  # fmt: skip
ANY_VALUES = (
    st.sampled_from(TEXTS) | st.sampled_from([0, 1, 5, 12345, 0.5, 5.0, True, False, None, [], [1], {}, {"a": 1}]) | VALUES
)
DEFINITIONS = {
    "text": {"type": "string"}, "colour": {"enum": ["red", "5", 5, None]}, "count": {"type": "integer", "maximum": 10},
    "maybe": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]},
    "tree": {"anyOf": [{"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}, "required": ["a"]}, {"$ref": "#/$defs/count"}]},
    "a/b~c": {"const": "true"},
}  # fmt: skip
REFERENCES = [*(f"#/$defs/{name}" for name in ("text", "colour", "count", "maybe", "tree", "a~1b~0c")), "#/properties/other"]
KINDS = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
LEAVES = st.one_of(
    KINDS.map(lambda kind: {"type": kind}),
    st.lists(KINDS, min_size=1, max_size=3, unique=True).map(lambda kinds: {"type": kinds}),
    st.lists(ANY_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    ANY_VALUES.map(lambda value: {"const": value}),
    st.sampled_from(REFERENCES).map(lambda ref: {"$ref": ref}),
    st.sampled_from([
        True, {}, {"type": "integer", "minimum": 0, "maximum": 100}, {"type": "string", "maxLength": 2}, {"minLength": 3},
        {"type": "array", "items": {"type": "integer"}}, {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 0}, {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 1},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    ]),
)  # fmt: skip


def _combined(inner: st.SearchStrategy) -> st.SearchStrategy:
    some = st.lists(inner, min_size=1, max_size=3)
    alike = st.builds(lambda keyword, schemas: {keyword: schemas}, st.sampled_from(["anyOf", "oneOf", "allOf"]), some)
    typed = st.builds(lambda schema, kind: {**schema, "type": kind}, alike, KINDS)
    return st.integers(0, 9).flatmap(
        lambda n: inner.map(lambda schema: {"not": schema}) if not n else typed if n < 4 else alike
    )


SCHEMAS = st.recursive(LEAVES, _combined, max_leaves=5)


def function(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema, "other": {"type": ["string", "boolean"]}}, "$defs": DEFINITIONS}


def is_valid(value: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(function(schema)).is_valid({"a": value})


def expected(value: Any, schema: Any, is_python: bool) -> Any:
    """Return what the text of a valid value stands for: an unquoted string may be the text of another value.

    is_python: whether lists and objects are written as Python does.
    """
    named = {"True": True, "False": False, "None": None}
    if not isinstance(value, str) or value != value.strip():
        return value
    try:
        found = named[value] if value in named else json.loads(value)
        json.dumps(found, allow_nan=False)
    except ValueError:
        if not is_python or value[:1] not in ("[", "{"):
            return value
        try:
            found = json.loads(json.dumps(ast.literal_eval(value)))
        except (ValueError, TypeError, SyntaxError):
            return value
        if not isinstance(found, list | dict):
            return value
    return found if not isinstance(found, str) and is_valid(found, schema) else value


def same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@settings(max_examples=200)
@given(SCHEMAS, ANY_VALUES)
def test_a_schema_allows_what_jsonschema_does(schema, value):
    found = Schema(function(schema))
    assert found.allows(value, found.root["properties"]["a"]) == is_valid(value, schema)


# Whether the format marks strings, so that they never resemble other values.
MARKED = {
    "qwen-xml": False,
    "glm": False,
    "keys": False,
    "minicpm": False,
    "nested": False,
    "dsml": True,
    "gemma4": True,
    "functiongemma": True,
}


@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=40)
@given(schema=SCHEMAS, value=ANY_VALUES)
def test_a_value_that_a_template_writes_is_read_back(name, schema, value):
    # In nested tags, null and empty values have no text.
    assume(is_valid(value, schema) and not (name == "nested" and (isinstance(value, list | dict) or value in ("", None))))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": value}}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = render(TEMPLATES[name], messages, add_generation_prompt=False)
    ((called, arguments),) = read_calls(Tools(FORMATS[name], {"f": function(schema)}), text.partition("<|assistant|>")[2])
    assert called == "f"
    assert same(json.loads(arguments), {"a": value if MARKED[name] else expected(value, schema, name == "minicpm")})


@pytest.mark.parametrize(("schema", "value"), [
    ({"type": "array", "items": {"type": "string"}}, ["1", "x\n"]), ({"type": "array"}, [[1, 2], [True], [["x"]]]), ({"type": ["array", "string"]}, [5]),
    ({"type": "object"}, {"item": 1, "b": {"x": [1]}}), ({"type": "array"}, []), ({"type": "object"}, {}), ({}, {"a": [1], "b": "x<b>"}),
    ({"type": "array", "items": {"type": "object", "properties": {"x": {"type": "string"}, "n": {"type": "integer"}}}}, [{"x": "5", "n": 5}, {"x": "true"}]),
    ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/maybe"}}]}, ["5", "x"]),
    ({"allOf": [{"properties": {"x": {"type": "string"}}}, {"type": "object"}]}, {"x": "5", "y": 5}),
    ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "number"}}]}, ["x", 5]),
])  # fmt: skip
def test_values_in_nested_tags_have_the_types_of_their_schema(schema, value):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": value, "other": True}}}
    text = render(
        TEMPLATES["nested"], [{"role": "assistant", "content": "", "tool_calls": [call]}], add_generation_prompt=False
    )
    read = read_calls(Tools(FORMATS["nested"], {"f": function(schema)}), text.partition("<|assistant|>")[2])
    assert read == [("f", json.dumps({"a": value, "other": True}))]


@pytest.mark.parametrize("name", ["qwen-xml", "glm"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        *(({**each, "description": "An id."}, "12345", "12345") for each in (
            {"anyOf": [{"type": "string"}, {"type": "null"}]}, {"oneOf": [{"type": "string"}, {"type": "null"}]},
            {"$ref": "#/$defs/text"}, {"$ref": "#/$defs/maybe"}, {"allOf": [{"$ref": "#/$defs/text"}]}, {"type": ["string", "null"]},
            {"enum": ["12345", "x"]}, {"const": "12345"}, {"enum": ["12345", None]}, {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "string"}]},
        )),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12345", 12345),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "0.5", "0.5"),
        ({"enum": [5, "5"]}, "5", 5),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "string"}, "None", "None"),
        ({"type": ["boolean", "string"]}, "True", True),
        # Not the text of an allowed value as it stands.
        ({"enum": ["a", "b"]}, '"a"', "a"),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "boolean"}, "1", True),
        ({"type": ["boolean", "integer"]}, "1", 1),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "007", 7),
        ({"type": ["integer", "string"]}, "007", "007"),
        ({"type": "object"}, "{'a': (1, None)}", {"a": [1, None]}),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "integer"}, "b'x'", "b'x'"),
        # As if the function had no schema for it.
        ({}, "12345", 12345),
        ({}, "a 1", "a 1"),
        ({"type": "strin"}, "x", "x"),
        ({"type": "str"}, "12345", "12345"),
        ({"$ref": "https://example.com/x"}, "[1]", [1]),
        ({"$ref": "#/properties/a"}, "x", "x"),
    ],
)  # fmt: skip
def test_the_type_of_a_text_follows_from_the_schema(name, schema, text, value):
    form = FORMATS[name]
    written = form.write([("f", f"{form.key_begin}a{form.key_end['']}{text}{form.value_end}")])
    assert read_calls(Tools(form, {"f": function(schema)}), written) == [("f", json.dumps({"a": value}))]


@pytest.mark.parametrize("root", [
    {"$ref": "#/$defs/args"}, {"allOf": [{"$ref": "#/$defs/args"}]}, {"anyOf": [{"$ref": "#/$defs/args"}, {"properties": {"b": {}}}]},
    {"properties": {"b": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
])  # fmt: skip
def test_an_argument_that_the_schema_lists_elsewhere_has_its_type(root):
    form, args = FORMATS["glm"], {"properties": {"a": {"type": "string"}}}
    written = form.write([("f", f"{form.key_begin}a{form.key_end['']}5{form.value_end}")])
    assert read_calls(Tools(form, {"f": {**root, "$defs": {"args": args}}}), written) == [("f", '{"a": "5"}')]


def test_gemma_templates_write_null_as_python_does():
    text = '<|tool_call>call:f{a:None,b:[None, True,{c:False}],d:<|"|>[None,True]<|"|>,None:{}}<tool_call|>'
    value = {"a": None, "b": [None, True, {"c": False}], "d": "[None,True]", "None": {}}
    assert read_calls(Tools(FORMATS["gemma4"], {}), text) == [("f", json.dumps(value))]
