"""Grammars of calls enforce what a strict function's schema says, and reject no schema of another."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.tool_calls import Tools, read_calls
from tests.support import schemas
from tests.support.hostile_grammars import HOSTILE
from tests.support.tool_templates import FORMATS
from tests.text.test_argument_types import SCHEMAS, function
from tests.text.test_tool_calls import calls_of, follow, with_marks

# A format of each style.
STYLES = ["hermes", "qwen-xml", "nested", "dsml", "gemma4", "lfm2", "harmony"]
TEXTS = {name: with_marks(name) for name in STYLES}


def generated(name: str, schema: Any, is_strict: bool, seed: int = 1) -> dict[str, Any] | None:
    """Return the arguments of a generated call of a function; None if the text did not end."""
    text = TEXTS[name]
    grammar = calls_of(text, {"f": schema}, False, strict={"f"} if is_strict else ())
    written, end = schemas.generate_text(text, grammar, seed, 150)
    # JSON has numbers that are too large for a float, such as 1e999.
    if end == "length" or re.search(r"(?i)\de\+?\d{3}", written):
        return None
    ((called, arguments),) = read_calls(Tools(FORMATS[name], {"f": schema}), written)
    assert called == "f"
    return json.loads(arguments)


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=15, deadline=None)
@given(schema=SCHEMAS, is_strict=st.booleans(), seed=st.integers(0, 1000))
def test_arguments_match_a_strict_schema_and_no_other_schema_is_rejected(name, schema, is_strict, seed):
    parameters = {**function(schema), "required": ["a"], "additionalProperties": False}
    try:
        arguments = generated(name, parameters, is_strict, seed)
    except PipelineError:
        assert is_strict
    else:
        if is_strict and arguments is not None:
            jsonschema.validate(arguments, parameters)


# Schemas of a parameter with something that no grammar, or that of some format, can enforce.
UNENFORCEABLE: dict[str, Any] = {
    "format": {"type": "string", "format": "phone"}, "pattern": {"type": "string", "pattern": "(?!a)b"}, "type": {"type": "strin"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$ref": {"$ref": "#/x"}, "remote": {"$ref": "https://example.com/x"},
    "enum": {"enum": []}, "not a schema": 5, "required": {"type": "object", "required": 5},
    **{keyword: {keyword: value} for keyword, value in schemas.LACKING.items()},
}  # fmt: skip


@pytest.mark.parametrize("keyword", UNENFORCEABLE)
@pytest.mark.parametrize("name", STYLES)
def test_what_cannot_be_enforced_is_ignored_unless_the_function_is_strict(name, keyword):
    parameters = {
        "properties": {"a": UNENFORCEABLE[keyword], "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    text, other = TEXTS[name], {"g": {"properties": {"c": {"enum": ["x"]}}, "required": ["c"], "additionalProperties": False}}
    for more in ({}, {"answer": {"enum": ["yes"]}}, *([{"free": True}] if FORMATS[name].triggers else [])):
        assert calls_of(text, {"f": parameters, **other}, True, strict={"g"}, **more)
    found = [generated(name, parameters, False, seed) for seed in range(2)]
    for arguments in filter(None, found):
        assert arguments.keys() == {"a", "b"} and isinstance(arguments["b"], bool)
    with pytest.raises(PipelineError, match="tools: "):
        calls_of(text, {"f": parameters, **other}, True, strict={"f"})


@pytest.mark.parametrize("keyword", ["format", "oneOf", *schemas.LACKING])
def test_the_rest_of_a_schema_is_enforced(keyword):
    parameters = {
        "properties": {"a": UNENFORCEABLE[keyword], "b": {"enum": [3]}},
        "required": ["b"],
        "additionalProperties": False,
    }
    found = [generated(name, parameters, False, seed) for name in ("hermes", "gemma4") for seed in range(2)]
    assert any(found) and all(arguments["b"] == 3 for arguments in found if arguments)


@pytest.mark.parametrize("parameters", [
    {"type": "object", "properties": []}, {"properties": {"a": {}}, "required": 5}, {"$schema": "foo"}, {"type": ["object", "null"]},
    {"anyOf": []}, {"minProperties": 1}, {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"$ref": "#"}, {"properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
])  # fmt: skip
@pytest.mark.parametrize("name", STYLES)
def test_no_function_makes_the_others_unusable(name, parameters):
    text, other = TEXTS[name], {"properties": {"c": {"enum": ["x"]}}, "required": ["c"], "additionalProperties": False}
    grammar = calls_of(text, {"f": parameters, "g": other}, False, strict={"g"})
    written, _ = schemas.generate_text(text, calls_of(text, {"g": other}, False), 1)
    assert not follow(constraint := grammar.constraint(), text, written) and (constraint.done or constraint.allows(text.eos[0]))
    wrong = written.replace("x", "y") if name == "harmony" else written.replace("c", "d")
    assert follow(grammar.constraint(), text, wrong)


def test_a_schema_over_a_limit_is_ignored_unless_the_function_is_strict():
    parameters = HOSTILE["patternProperties"]["json_schema"]
    test_no_function_makes_the_others_unusable("hermes", parameters)
    with pytest.raises(PipelineError, match="tools: the definition is too complex"):
        calls_of(TEXTS["hermes"], {"f": parameters}, False, strict={"f"})


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "glm", "minicpm", "dsml", "gemma4", "lfm2"])
def test_a_function_without_listed_properties_takes_any_arguments(name):
    form, text = FORMATS[name], with_marks(name)
    tags = f"{form.key_begin}any_1{form.key_end.get('integer', form.key_end.get(''))}5{form.value_end}"
    written = form.write([("f", {"json": '{"any_1": 5}', "python": "any_1=5", "gemma": "{any_1:5}", "tags": tags}[form.style])])
    for parameters, is_allowed in (({"type": "object"}, True), ({"additionalProperties": {"type": "integer"}}, True),
                                   ({"properties": {}, "additionalProperties": False}, False)):  # fmt: skip
        for strict in (set(), {"f"}):
            assert (
                not follow(calls_of(text, {"f": parameters}, False, strict=strict).constraint(), text, written)
            ) == is_allowed
