"""Every argument of the Python API gets values of wrong types: errors are castiron's."""

from __future__ import annotations

import dataclasses

import pytest

import castiron
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.errors import error_message
from castiron.pipelines.model import GenerationOptions
from castiron.vmfb.compiler.iree_compile import CompileError
from tests.support import toy_text
from tests.support.tiny_gguf import write_llama

VALUES = [
    5, -1, 2.5, "x", "", None, [], ["x"], [1.5], [None], {}, {"a": 1}, b"x", object(), True, float("nan"), 10**30, (1, "a"),
    [[1]], lambda: 0, {1, 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    location = tmp_path_factory.mktemp("types")
    toy_text.write(location / "toy")
    write_llama(location / "tiny.gguf")
    return location


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    def stop(*_, **__):
        raise CompileError("stopped")

    monkeypatch.chdir(folder)
    monkeypatch.setenv("CASTIRON_CACHE", str(folder / "cache"))
    monkeypatch.setattr("castiron.pipelines.compile.compile_model.compile_modules", stop)


def walk(call) -> None:
    """Call with every value; fail for an error that is not for the user."""
    for value in VALUES:
        try:
            found = call(value)
            if hasattr(found, "__next__"):
                list(found)
        except Exception as error:
            message = error_message(error)
            assert message and "\n" not in message, f"{value!r}: {type(error).__name__}: {error}"


def test_arguments_of_a_model(folder):
    with castiron.load("toy") as model:
        for name in GenerationOptions.__annotations__:
            walk(lambda value: model.generate("a", **{"max_tokens": 1, name: value}))
        for method in (model.generate, model.chat, model.stream):
            walk(lambda value: method(value, max_tokens=1))
        walk(lambda value: model.chat([{"role": "user", "content": value}], max_tokens=1))
        walk(lambda value: model.chat([{"role": value, "content": "a"}], max_tokens=1))
        for method in (model.score, model.embed, lambda value: model.score("a", top=value), lambda v: model.rerank(v, ["a"])):
            walk(method)


def test_arguments_that_load(folder):
    for name in ("threads", "context", "progress", "prefix_cache", "draft", "parse_special"):
        walk(lambda value: castiron.load("toy", **{name: value}))
    for function in (castiron.load, castiron.open, castiron.load_tokenizer, castiron.Session):
        walk(function)
    walk(lambda value: castiron.Session("toy", value))


def test_arguments_that_compile(folder):
    for field in dataclasses.fields(Options):
        walk(lambda value: castiron.compile("tiny.gguf", "out", **{field.name: value}))
    walk(lambda value: castiron.compile(value, "out"))
    walk(lambda value: castiron.compile("tiny.gguf", value))


def test_values_of_other_classes_are_converted(folder):
    """Paths, lists and integers of NumPy are as good as strings, tuples and ints."""
    import numpy as np

    given = Options(adapter=folder / "lora", batch=[4, np.int64(8)], threads=np.int32(2), ignore_keys="key")
    assert given == Options(adapter=str(folder / "lora"), batch=(4, 8), threads=2, ignore_keys=("key",))
