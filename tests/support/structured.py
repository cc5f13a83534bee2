"""Fixtures of structured output and scores: a small model with verify_4, and a schema."""

from __future__ import annotations

import pytest

import castiron
from tests.support import served

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return served.bundle(tmp_path_factory.getbasetemp() / "structured", (4,))


@pytest.fixture(scope="module")
def model(path):
    with castiron.load(path, threads=1) as found:
        yield found
