"""Test the Python API: a request gets the same tokens by itself and among others."""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import json
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Literal

import pydantic
import pytest

import castiron
from castiron.emitter.graph.types import EmitError
from castiron.pipelines import model as model_file
from castiron.pipelines.cli.main import command_parser
from castiron.pipelines.cli.options import compile_options
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.open_model import cached_path, open_or_compile, options_of
from castiron.pipelines.engine.sampling import Sampling
from castiron.pipelines.errors import PipelineError
from castiron.reference import tiny
from castiron.vmfb.bundle.bundle import pack_bundle
from castiron.vmfb.compiler.iree_compile import CompileError
from castiron.vmfb.run.session import Session, move_to
from tests.support import served, toy_text

PROMPTS = ["Hello", "Why is the sky blue?", "abc", "Hello there", "x", "To be, or not", "Hello you"]


@pytest.fixture
def model(path):
    with castiron.load(path, threads=1) as model:
        yield model


def test_a_prompt_is_text_or_messages_or_token_ids(model, reference):
    ids = reference.text.encode("Hello")
    for prompt in ("Hello", ids, tuple(ids)):
        result = model.generate(prompt, max_tokens=12, stop_tokens=())
        assert result.tokens == reference.tokens("Hello", 12)
        assert (result.text, str(result), result.finish_reason) == (reference.generate("Hello", 12),) * 2 + ("length",)
    expected = reference.generate(served.RENDERED, 12)
    for messages in (served.MESSAGES, served.MESSAGES[0]["content"]):
        assert model.chat(messages, max_tokens=12, stop_tokens=()).text == expected
    assert model.generate(served.MESSAGES, max_tokens=12, stop_tokens=()).text == expected
    assert "".join(model.stream(served.MESSAGES, max_tokens=12, stop_tokens=())) == expected


def test_a_list_of_prompts_is_answered_in_order_or_as_done(model, reference):
    expected = [reference.tokens(prompt, 10) for prompt in PROMPTS]
    results = model.generate(PROMPTS, max_tokens=10, stop_tokens=())
    assert [(result.index, result.tokens) for result in results] == list(enumerate(expected))
    assert model.generate(iter(PROMPTS[:2]), max_tokens=10, stop_tokens=()) == results[:2]
    assert model.generate([]) == []

    taken = []
    ahead = model.generate_many((taken.append(p) or p for p in PROMPTS), max_tokens=10, stop_tokens=())
    assert not taken
    first = next(ahead)
    assert len(taken) <= served.SLOTS and first.tokens == expected[first.index]
    assert {result.index: result.tokens for result in ahead} | {first.index: first.tokens} == dict(enumerate(expected))


def test_a_stream_yields_text_and_has_a_finish_reason(model, reference):
    stream = model.stream("Hello", max_tokens=8, stop_tokens=())
    assert stream.finish_reason is None
    pieces = list(stream)
    assert len(pieces) > 1 and "".join(pieces) == reference.generate("Hello", 8)
    assert (stream.tokens, stream.finish_reason) == (reference.tokens("Hello", 8), "length")


def test_streams_and_prompts_interleave(model, reference):
    first, second = (model.stream(prompt, max_tokens=10, stop_tokens=()) for prompt in ("one", "two"))
    generated = ["", ""]
    for pieces in zip(first, second, strict=True):
        generated = [before + piece for before, piece in zip(generated, pieces)]
        assert model.generate("three", max_tokens=2, stop_tokens=()).tokens == reference.tokens("three", 2)
    assert generated == [reference.generate("one", 10), reference.generate("two", 10)]


@pytest.mark.parametrize("leave", ["close", "forget"])
def test_an_abandoned_stream_frees_its_slot(model, reference, leave, monkeypatch):
    for _ in range(2 * served.SLOTS):
        stream = model.stream("Hello", max_tokens=100, stop_tokens=())
        next(stream)
        if leave == "close":
            stream.close()
        del stream
    scheduler, turns = model._engine.scheduler, []
    turn = scheduler.turn
    monkeypatch.setattr(scheduler, "turn", lambda: turns.append(1) or turn())
    assert model.generate("three", max_tokens=5, stop_tokens=()).tokens == reference.tokens("three", 5)
    assert scheduler.idle and len(turns) <= 5, "it computed an answer that nobody reads"


def test_threads_share_a_model_and_get_their_own_tokens(model, reference):
    found: dict[int, list] = {}

    def ask(index: int) -> None:
        prompt = PROMPTS[index]
        found[index] = [model.generate(prompt, max_tokens=10, stop_tokens=()).text for _ in range(3)]
        found[index].append("".join(model.stream(prompt, max_tokens=10, stop_tokens=())))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: [reference.generate(prompt, 10)] * 4 for index, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("where", ["prefill", "appended"])
def test_after_an_interrupt_the_model_answers_as_before(model, reference, monkeypatch, where):
    """The interrupt may come after a session has read tokens and before the cache records them."""
    model.generate("Hello there", max_tokens=3)
    scheduler = model._engine.scheduler
    target = scheduler.batch.slots[0] if where == "prefill" else scheduler.cache
    other = model.stream("Hello you", max_tokens=30, stop_tokens=())
    next(other)

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for session in scheduler.batch.slots if where == "prefill" else ():
            patch.setattr(session, "prefill", interrupted)
        patch.setattr(target, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate("Hello there, you", max_tokens=5, stop_tokens=())
    with pytest.raises(PipelineError, match="the model failed"):
        list(other)
    for prompt in ("Hello there, you", "Hello there", "Hello you"):
        assert model.generate(prompt, max_tokens=5, stop_tokens=()).tokens == reference.tokens(prompt, 5)


def test_an_interrupt_while_a_slot_is_prepared_drops_its_cache(model, reference, monkeypatch):
    """The slot has another slot's states by then, but the cache still records its old tokens."""
    model.generate(["Hello there", "To be, or not"], max_tokens=3)
    scheduler = model._engine.scheduler
    slots = scheduler.batch.slots
    stored = {text: slot for slot in range(len(slots)) for text in ("Hello", "To be")
            if scheduler.cache.tokens[slot, : len(text)].tolist() == reference.text.encode(text)}  # fmt: skip

    def interrupted(*arguments, **options):
        move_to(slots[stored["To be"]], 5, source=slots[stored["Hello"]])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.cache, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate("x", max_tokens=5)
    for prompt in ("To be, you", "Hello you"):
        assert model.generate(prompt, max_tokens=5, stop_tokens=()).tokens == reference.tokens(prompt, 5)


def test_an_invalid_prompt_raises_an_error_but_a_list_returns_it(model):
    with pytest.raises(PipelineError, match="context is 126"):
        model.generate("x" * 200)
    with pytest.raises(PipelineError, match="no tokens"):
        model.stream("")
    bad, good = model.generate(["x" * 200, "x"], max_tokens=2)
    assert bad.finish_reason == "error" and "126" in str(bad.error) and good.error is None
    with pytest.raises(TypeError, match="temprature"):
        model.generate("x", temprature=1.0)
    with pytest.raises(PipelineError, match="top-p is 2"):
        model.generate_many([], top_p=2.0)


def test_sampling_is_a_record_or_its_fields(model):
    drawn = model.generate("Hello", max_tokens=20, stop_tokens=(), temperature=1.0, seed=5).tokens
    assert drawn == model.generate("Hello", max_tokens=20, stop_tokens=(), sampling=Sampling(1.0), seed=5).tokens
    assert drawn != model.generate("Hello", max_tokens=20, stop_tokens=()).tokens
    fields = {field.name for field in dataclasses.fields(Sampling)}
    limits = {"max_tokens", "stop_strings", "stop_tokens", "template_args", "compact_json", "receipt"}
    assert set(model_file.GenerationOptions.__annotations__) == fields | limits | model_file.STRUCTURES | {"sampling"}


@pytest.mark.parametrize(("call", "message"), [
    (lambda model: model.generate("x", max_new_tokens=2), "unknown option: max_new_tokens; did you mean max_tokens"),
    (lambda model: model.stream("x", temprature=1.0), "unknown option: temprature; did you mean temperature"),
    (lambda model: castiron.load(model.bundle, n_ctx=64), "unknown option: n_ctx; did you mean context"),
    (lambda model: castiron.compile("x", "y", weight="q8_0"), "unknown option: weight; did you mean weights"),
    (lambda model: castiron.compile("x", "y", qqq=1), "unknown option: qqq$"),
    (lambda model: model.chat([{"role": "usr", "content": "x"}]), "unknown role: 'usr'; did you mean user"),
    (lambda model: model.score([{"role": "bot", "content": "x"}]), "unknown role: 'bot'; did you mean assistant"),
    (lambda model: model.chat([{"content": "x"}]), "unknown role: 'None'; use system, developer, user, assistant, tool"),
])  # fmt: skip
def test_a_wrong_role_or_keyword_names_the_right_one(model, call, message):
    with pytest.raises(TypeError if "option" in message else PipelineError, match=message):
        call(model)


# Values of which each argument of a generation takes only some.
VALUES = ["hot", 1.5, None, [1], {"a": 1}, {"1": "x"}, b"x", object(), float("nan"), True, -1, 10**30, ["x", 5], Path, int]


@pytest.mark.parametrize("name", sorted(model_file.GenerationOptions.__annotations__))
def test_an_option_of_a_wrong_type_is_an_error_in_one_line(model, name):
    errors = []
    for value in VALUES:
        try:
            model.generate("x", **{"max_tokens": 1, name: value})
        except PipelineError as error:
            errors.append(str(error))
    assert errors and not any("\n" in error for error in errors)
    assert any(re.search(f"^{name.replace('_', '[-_]')} is ", error) for error in errors)


@pytest.mark.parametrize("prompts", [5, None, 1.5, b"text", {"role": "user", "content": "x"}, object(), int, {}])
@pytest.mark.parametrize("method", ["generate", "chat", "stream", "score", "generate_many"])
def test_what_is_no_prompt_is_an_error(model, method, prompts):
    with pytest.raises(PipelineError, match="invalid prompt: .*; give text, messages or a list of token ids"):
        found = getattr(model, method)(prompts)
        raise next(found).error


def test_a_text_is_one_prompt_for_each_method(model):
    (result,) = model.generate_many("Hello", max_tokens=3, stop_tokens=())
    assert result.tokens == model.generate("Hello", max_tokens=3, stop_tokens=()).tokens


@pytest.mark.parametrize(("name", "value"), [
    ("model", 5), ("model", None), ("model", b"x"), ("threads", "2"), ("threads", 1.5), ("context", "a"), ("context", 1.5),
    ("prefix_cache", 5), ("draft", 5),
])  # fmt: skip
def test_load_names_an_argument_of_a_wrong_type(path, name, value):
    with pytest.raises(PipelineError, match=rf"^{name} is {re.escape(repr(value))}; it must be a"):
        castiron.load(**{"model": path, name: value})


def test_a_schema_may_be_a_pydantic_class(model):
    class City(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        name: str = pydantic.Field(max_length=5)
        size: Literal["large", "small"] | None

    generated = model.generate("x", json_schema=City, temperature=1.0, seed=1)
    assert generated == model.generate("x", json_schema=City.model_json_schema(), temperature=1.0, seed=1)
    City.model_validate_json(generated.text)


def test_a_bundle_without_a_tokenizer_takes_ids_only(tmp_path):
    with castiron.load(toy_text.write(tmp_path / "ids", text=False), threads=1) as model:
        assert model.generate([1, 2], max_tokens=3).text is None
        with pytest.raises(PipelineError, match="cannot stream text"):
            model.stream([1, 2])
        with pytest.raises(PipelineError, match="give a list of token ids"):
            model.generate("words")


def test_a_model_has_a_repr(model, path):
    functions = "decode_step, prefill_8, prefill_32, decode_batch_4"
    assert repr(model) == f"<castiron.Model checkpoint: llama, context 126, 1 thread, functions {functions}>"
    with pytest.raises(PipelineError, match="checkpoint has no embed functions; compile it with --embed 128"):
        model.embed(["x"])


def test_closing_releases_weights_and_ends_requests(path):
    with castiron.load(str(path), threads=1) as model:
        stream = model.stream("Hello", max_tokens=50, stop_tokens=())
        next(stream)
        program = weakref.ref(model._engine.scheduler.batch.program)
    gc.collect()
    assert program() is None
    for call in (lambda: list(stream), lambda: model.generate("x"), lambda: model.generate_many(["x"])):
        with pytest.raises(PipelineError, match="is closed; load it again"):
            call()
    assert "closed" in repr(model)
    model.close()


def test_a_forked_child_must_load_the_model_again(model, reference, monkeypatch):
    with monkeypatch.context() as child:
        child.setattr("os.getpid", lambda: -1)
        with pytest.raises(PipelineError, match="before the process was forked; load it in the child"):
            model.generate("Hello")
    assert model.generate("Hello", max_tokens=5, stop_tokens=()).tokens == reference.tokens("Hello", 5)


@pytest.fixture
def checkpoint(tmp_path, own_cache):
    return tiny.tiny_model("llama", tmp_path / "models" / "tiny")


SMALL = {"context": 16, "batch": None, "verify_widths": None, "lowering": "portable"}


def test_a_changed_checkpoint_is_compiled_again(checkpoint, tmp_path):
    stages = []
    with castiron.load(checkpoint, threads=1, progress=lambda stage, done: stages.append(stage), **SMALL) as model:
        tokens = model.generate([1, 2, 3], max_tokens=4).tokens
        location = model.bundle.path
        assert model.context == 16 and location.parent == tmp_path / "cache" / "bundles"
    assert "compile" in stages
    stages.clear()
    with castiron.load(str(checkpoint), threads=1, progress=lambda stage, done: stages.append(stage), **SMALL) as model:
        assert model.bundle.path == location and model.generate([1, 2, 3], max_tokens=4).tokens == tokens
    assert "compile" not in stages
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.5}))
    options = options_of(threads=1, **{name: value for name, value in SMALL.items() if name != "context"})
    assert open_or_compile(checkpoint, options, lambda stage, done: stages.append(stage)).path == location
    assert "compile" in stages
    # A bundle without a manifest, as after clearing a part of the cache.
    (location / "manifest.json").unlink()
    assert castiron.load(checkpoint, threads=1, **SMALL).bundle.path == location


def test_the_complete_bundle_follows_the_one_of_the_first_answer(checkpoint, tmp_path):
    """`castiron run` compiles what it needs; other commands compile the rest and pack nothing."""
    options = options_of(threads=1, context=64, prefill=(8, 32), batch=2, verify_widths=4)
    first = open_or_compile(checkpoint, options, one_sequence=True)
    assert [function.name for function in first.manifest.functions] == ["decode_step", "prefill_32"]
    with castiron.load(first, threads=1) as model:
        tokens = model.generate(list(range(1, 12)), max_tokens=8, stop_tokens=()).tokens
    weights = (first.path / "weights.irpa").stat().st_ino
    assert open_or_compile(checkpoint, options, one_sequence=True).path == first.path
    complete = open_or_compile(checkpoint, options)
    assert len(complete.manifest.functions) == 5 and complete.manifest.modules == (
        "model.vmfb", "tokens_2.vmfb", "tokens_32.vmfb", "tokens_4.vmfb", "tokens_8.vmfb",
    )  # fmt: skip
    assert (complete.path / "weights.irpa").stat().st_ino == weights and not first.path.exists()
    with castiron.load(complete, threads=1) as model:
        assert model.generate(list(range(1, 12)), max_tokens=8, stop_tokens=()).tokens == tokens
    assert open_or_compile(checkpoint, options, one_sequence=True).path == complete.path
    # Other numbers in the checkpoint are packed again.
    tiny.tiny_model("llama", checkpoint, seed=1)
    assert (open_or_compile(checkpoint, options).path / "weights.irpa").stat().st_ino != weights


def test_a_cached_bundle_runs_without_the_compiler(checkpoint, monkeypatch):
    """An unchanged checkpoint has the bundle; a changed one would need the compiler."""
    with castiron.load(checkpoint, threads=1, **SMALL) as model:
        tokens = model.generate([1, 2, 3], max_tokens=4).tokens
    version = importlib.metadata.version

    def without_compiler(name):
        if name == "iree-base-compiler":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("importlib.metadata.version", without_compiler)
    with castiron.load(checkpoint, threads=1, **SMALL) as model:
        assert model.generate([1, 2, 3], max_tokens=4).tokens == tokens
    tiny.tiny_model("llama", checkpoint, seed=1)
    with pytest.raises(CompileError, match="has changed since .* was compiled, and the IREE compiler is not installed"):
        castiron.load(checkpoint, threads=1, **SMALL)
    with pytest.raises(CompileError, match="^the IREE compiler is not installed; pip install iree-base-compiler$"):
        castiron.load(checkpoint, threads=1, context=8)


def test_bundles_are_cached_by_checkpoint_and_options(tmp_path, monkeypatch):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path))
    for folder in ("a", "b"):
        (tmp_path / folder / "tiny").mkdir(parents=True)
    models = ["smollm2-135m-instruct", tmp_path / "a" / "tiny", tmp_path / "b" / "tiny"]
    options = [Options(), Options(context=16), Options(weights="f32"), Options(threads=63)]
    assert len({cached_path(model, option) for model in models for option in options}) == 12
    assert cached_path(models[0], Options()) == tmp_path / "bundles" / models[0]


@pytest.mark.parametrize("form", [str, Path])
def test_strings_and_paths_are_the_same_everywhere(checkpoint, tmp_path, form):
    bundle = castiron.compile(form(checkpoint), form(tmp_path / "out"), threads=1, **SMALL)
    location = form(bundle.path)
    packed = form(tmp_path / "packed.castiron")
    pack_bundle(bundle, packed)
    expected = castiron.load(bundle, threads=1).generate([1, 2, 3], max_tokens=4, stop_tokens=()).tokens
    assert Session(location, 1).prefill([1, 2, 3]) == expected[0]
    assert castiron.load(packed, threads=1).generate([1, 2, 3], max_tokens=4, stop_tokens=()).tokens == expected
    assert castiron.Engine(location, 1).manifest == castiron.open(location).manifest and castiron.open(location) == bundle
    assert castiron.load_tokenizer(form(toy_text.write(tmp_path / "toy"))).eos == (toy_text.EOS,)
    with pytest.raises(
        PipelineError,
        match="is already compiled; remove the compiler options, or give the checkpoint",
    ):
        castiron.load(location, batch=4)
    assert castiron.load(location, threads=1, context=8).context == 8
    with pytest.raises(TypeError, match="contxt"):
        castiron.compile(form(checkpoint), form(tmp_path / "other"), contxt=8)


def test_python_and_the_command_line_have_the_same_default_options():
    args = command_parser("compile").parse_args(["x"])
    assert options_of(**dataclasses.asdict(compile_options(args))) == Options()
    assert options_of(batch=[2, 3], verify_widths=4) == Options(batch=(2, 3), verify_widths=(4,))
    assert options_of(batch=None) == Options(batch=())


def test_former_names_of_options_mean_the_new_ones(tmp_path):
    assert options_of(cache="f16", speculate=None) == Options(kv_cache_type="f16", verify_widths=())
    with pytest.raises(EmitError, match="unknown kv_cache_type: 'f8'"):
        castiron.compile("x", tmp_path, cache="f8")


def test_load_expands_home_and_rejects_a_missing_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    toy_text.write(tmp_path / "toy")
    assert castiron.load("~/toy", threads=1).name == "toy"
    with pytest.raises(castiron.CheckpointError, match="nowhere: no such file or directory"):
        castiron.load("nowhere")


def test_python_exits_without_messages(path):
    """torch keeps modules alive until the end of the process."""
    program = f"import torch, castiron; model = castiron.load({str(path)!r}); print(model.generate('x', max_tokens=1).tokens)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout and not done.stderr
