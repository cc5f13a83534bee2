"""A model from Python: loaded by whatever names it, and each question gets what it gets alone, whoever else asks."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

import castiron
from castiron.pipelines import model as model_file
from castiron.pipelines.casting.cast import cached_place, cast, options_of
from castiron.pipelines.casting.compile import Options
from castiron.pipelines.cli import build_parser
from castiron.pipelines.commands.options import compile_options
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.positions import stand
from castiron.pipelines.generation.sampling import Sampling
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.reference import tiny
from castiron.vmfb.bundle import open_bundle, pack_bundle
from castiron.vmfb.session import Session
from tests.pipelines import served, toy_text

PROMPTS = ["Hello", "Why is the sky blue?", "abc", "Hello there", "x", "To be, or not", "Hello you"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return served.bundle(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def alone(path):
    return served.Alone(path)


@pytest.fixture
def model(path):
    with castiron.load(path, threads=1) as model:
        yield model


@pytest.fixture
def toy(tmp_path):
    with castiron.load(toy_text.write(tmp_path / "toy"), threads=1) as model:
        yield model


def test_a_prompt_is_text_or_messages_or_token_ids(model, alone):
    ids = alone.text.encode("Hello")
    for prompt in ("Hello", ids, tuple(ids)):
        result = model.generate(prompt, max_tokens=12, stop_tokens=())
        assert result.tokens == alone.tokens("Hello", 12)
        assert (result.text, str(result), result.finish_reason) == (alone.says("Hello", 12),) * 2 + ("length",)
    expected = alone.says(served.RENDERED, 12)
    for messages in (served.MESSAGES, served.MESSAGES[0]["content"]):
        assert model.chat(messages, max_tokens=12, stop_tokens=()).text == expected
    assert model.generate(served.MESSAGES, max_tokens=12, stop_tokens=()).text == expected
    assert "".join(model.stream(served.MESSAGES, max_tokens=12, stop_tokens=())) == expected


def test_several_prompts_are_answered_in_order_and_one_at_a_time_as_they_are_done(model, alone):
    expected = [alone.tokens(prompt, 10) for prompt in PROMPTS]
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


def test_several_prompts_run_in_one_batch(model, monkeypatch):
    together = []
    batch = model._shared.scheduler.batch
    step = batch.step
    monkeypatch.setattr(batch, "step", lambda tokens: together.append(len(tokens)) or step(tokens))
    model.generate(PROMPTS[: served.SLOTS], max_tokens=20, stop_tokens=())
    assert max(together) == served.SLOTS


def test_the_models_end_is_the_end_unless_told_otherwise(toy):
    ended, on = toy.generate("a"), toy.generate("a", stop_tokens=(), max_tokens=6)
    assert ended.finish_reason == "stop" and ended.tokens == on.tokens[: len(ended.tokens)] and len(on.tokens) == 6
    assert on.tokens[len(ended.tokens)] == toy_text.EOS


def test_a_stream_is_text_as_it_comes_and_tells_how_it_ended(model, alone):
    stream = model.stream("Hello", max_tokens=8, stop_tokens=())
    assert stream.finish_reason is None
    pieces = list(stream)
    assert len(pieces) > 1 and "".join(pieces) == alone.says("Hello", 8)
    assert (stream.tokens, stream.finish_reason) == (alone.tokens("Hello", 8), "length")


def test_streams_and_questions_interleave_and_each_gets_its_own(model, alone):
    first, second = (model.stream(prompt, max_tokens=10, stop_tokens=()) for prompt in ("one", "two"))
    said = ["", ""]
    for pieces in zip(first, second, strict=True):
        said = [before + piece for before, piece in zip(said, pieces)]
        assert model.generate("three", max_tokens=2, stop_tokens=()).tokens == alone.tokens("three", 2)
    assert said == [alone.says("one", 10), alone.says("two", 10)]


@pytest.mark.parametrize("leave", ["close", "forget"])
def test_a_stream_that_is_left_gives_its_slot_back(model, alone, leave, monkeypatch):
    for _ in range(2 * served.SLOTS):
        stream = model.stream("Hello", max_tokens=100, stop_tokens=())
        next(stream)
        if leave == "close":
            stream.close()
        del stream
    scheduler, turns = model._shared.scheduler, []
    turn = scheduler.turn
    monkeypatch.setattr(scheduler, "turn", lambda: turns.append(1) or turn())
    assert model.generate("three", max_tokens=5, stop_tokens=()).tokens == alone.tokens("three", 5)
    assert scheduler.idle and len(turns) <= 5, "it waited for answers that nobody reads"


def test_several_threads_ask_one_model_and_each_gets_what_it_gets_alone(model, alone):
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
    assert found == {index: [alone.says(prompt, 10)] * 4 for index, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("where", ["prefill", "fed"])
def test_after_an_interrupt_the_model_answers_as_before(model, alone, monkeypatch, where):
    """Wherever it comes: between what a session has read and what is known of it, too."""
    model.generate("Hello there", max_tokens=3)
    scheduler = model._shared.scheduler
    target = scheduler.batch.slots[0] if where == "prefill" else scheduler.cache
    other = model.stream("Hello you", max_tokens=30, stop_tokens=())
    next(other)

    def interrupted(*arguments):
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
        assert model.generate(prompt, max_tokens=5, stop_tokens=()).tokens == alone.tokens(prompt, 5)


def test_a_slot_that_was_being_prepared_in_an_interrupt_is_forgotten(model, alone, monkeypatch):
    """It holds another slot's tokens then, and the cache still has its own on record."""
    model.generate(["Hello there", "To be, or not"], max_tokens=3)
    scheduler = model._shared.scheduler
    slots = scheduler.batch.slots
    held = {text: slot for slot in range(len(slots)) for text in ("Hello", "To be")
            if scheduler.cache.tokens[slot, : len(text)].tolist() == alone.text.encode(text)}  # fmt: skip

    def interrupted(*arguments):
        stand(slots[held["To be"]], 5, source=slots[held["Hello"]])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.cache, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate("x", max_tokens=5)
    for prompt in ("To be, you", "Hello you"):
        assert model.generate(prompt, max_tokens=5, stop_tokens=()).tokens == alone.tokens(prompt, 5)


def test_what_cannot_be_run_raises_alone_and_is_told_among_others(model):
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


def test_sampling_is_given_whole_or_by_its_fields(model):
    drawn = model.generate("Hello", max_tokens=20, stop_tokens=(), temperature=1.0, seed=5).tokens
    assert drawn == model.generate("Hello", max_tokens=20, stop_tokens=(), sampling=Sampling(1.0), seed=5).tokens
    assert drawn != model.generate("Hello", max_tokens=20, stop_tokens=()).tokens
    fields = {field.name for field in dataclasses.fields(Sampling)}
    assert set(model_file.Asking.__annotations__) == fields | model_file.LIMITS | model_file.STRUCTURES | {"sampling"}


def test_a_bundle_without_a_tokenizer_or_template_says_so(tmp_path):
    with castiron.load(toy_text.write(tmp_path / "ids", text=False), threads=1) as model:
        assert model.generate([1, 2], max_tokens=3).text is None
        with pytest.raises(PipelineError, match="no text to stream"):
            model.stream([1, 2])
        with pytest.raises(PipelineError, match="not a list of token ids|neither a list of token ids"):
            model.generate("words")


def test_a_model_says_what_it_is(model, path):
    functions = "decode_step, prefill_8, prefill_32, decode_batch_4"
    assert repr(model) == f"<castiron.Model checkpoint: llama, context 126, 1 thread, functions {functions}>"
    with pytest.raises(PipelineError, match="checkpoint gives no hidden states: compile it with --embed 128"):
        model.embed(["x"])


def test_closing_lets_go_of_the_weights_and_of_what_runs(path):
    with castiron.load(str(path), threads=1) as model:
        stream = model.stream("Hello", max_tokens=50, stop_tokens=())
        next(stream)
        program = weakref.ref(model._shared.scheduler.batch.program)
    gc.collect()
    assert program() is None
    for call in (lambda: list(stream), lambda: model.generate("x"), lambda: model.generate_many(["x"])):
        with pytest.raises(PipelineError, match="this model is closed"):
            call()
    assert "closed" in repr(model)
    model.close()


FORKED = """
import os, signal, sys
import castiron
model = castiron.load({place!r}, threads={threads})
model.generate([1, 2], max_tokens=2)
if not os.fork():
    signal.alarm(100)
    try:
        model.generate([1, 2], max_tokens=2)
    except castiron.PipelineError as error:
        print(error, flush=True)
    with castiron.load({place!r}, threads={threads}) as own:
        print(own.generate([1, 2], max_tokens=2).tokens, flush=True)
    os._exit(0)
assert os.wait()[1] == 0
print(model.generate([1, 2], max_tokens=2).tokens)
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_loads_its_own(tmp_path, threads):
    code = FORKED.format(place=str(toy_text.write(tmp_path / "toy")), threads=threads)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said, childs, parents = done.stdout.splitlines()
    assert "before the process was forked; load it in the child" in said and childs == parents


@pytest.fixture
def checkpoint(tmp_path, own_cache):
    return tiny.tiny_model("llama", tmp_path / "models" / "tiny")


SMALL = {"context": 16, "batch": None, "speculate": None, "lowering": "portable"}


def test_a_checkpoint_is_compiled_once_and_again_when_it_changes(checkpoint, tmp_path):
    stages = []
    with castiron.load(checkpoint, threads=1, progress=lambda stage, done: stages.append(stage), **SMALL) as model:
        tokens = model.generate([1, 2, 3], max_tokens=4).tokens
        place = model.bundle.path
        assert model.context == 16 and place.parent == tmp_path / "cache" / "bundles"
    assert "compile" in stages
    stages.clear()
    with castiron.load(str(checkpoint), threads=1, progress=lambda stage, done: stages.append(stage), **SMALL) as model:
        assert model.bundle.path == place and model.generate([1, 2, 3], max_tokens=4).tokens == tokens
    assert "compile" not in stages
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.5}))
    assert cast(checkpoint, options_of(threads=1, **SMALL), lambda stage, done: stages.append(stage)).path == place
    assert "compile" in stages
    # What a clearing of the cache has left.
    (place / "manifest.json").unlink()
    assert castiron.load(checkpoint, threads=1, **SMALL).bundle.path == place


def test_options_and_checkpoints_have_places_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path))
    for folder in ("a", "b"):
        (tmp_path / folder / "tiny").mkdir(parents=True)
    models = ["smollm2-135m-instruct", tmp_path / "a" / "tiny", tmp_path / "b" / "tiny"]
    options = [Options(), Options(context=16), Options(weights="f32"), Options(threads=63)]
    assert len({cached_place(model, option) for model in models for option in options}) == 12
    assert cached_place(models[0], Options()) == tmp_path / "bundles" / models[0]


@pytest.mark.parametrize("form", [str, Path])
def test_strings_and_paths_are_the_same_everywhere(checkpoint, tmp_path, form):
    bundle = castiron.compile(form(checkpoint), form(tmp_path / "out"), threads=1, **SMALL)
    place = form(bundle.path)
    packed = form(tmp_path / "packed.castiron")
    pack_bundle(bundle, packed)
    expected = castiron.load(bundle, threads=1).generate([1, 2, 3], max_tokens=4, stop_tokens=()).tokens
    assert Session(place, 1).prefill([1, 2, 3]) == expected[0]
    assert castiron.load(packed, threads=1).generate([1, 2, 3], max_tokens=4, stop_tokens=()).tokens == expected
    many = castiron.generate_many(place, [[1, 2, 3]], max_tokens=4, stop_tokens=(), threads=1)
    assert [result.tokens for result in many] == [expected]
    assert Scheduler(place, 1).bundle == castiron.open(place) == bundle
    assert castiron.load_text(form(toy_text.write(tmp_path / "toy"))).eos == (toy_text.EOS,)
    with pytest.raises(PipelineError, match="compiled already and takes no options"):
        castiron.load(place, context=8)
    with pytest.raises(TypeError, match="contxt"):
        castiron.compile(form(checkpoint), form(tmp_path / "other"), contxt=8)


def test_the_commands_options_are_those_of_compile():
    args = build_parser(["compile"]).parse_args(["compile", "x"])
    assert options_of(**dataclasses.asdict(compile_options(args))) == Options()
    assert options_of(batch=[2, 3], speculate=4) == Options(batch=(2, 3), speculate=(4,))
    assert options_of(batch=None) == Options(batch=())


def test_a_path_begins_at_home_and_nothing_at_all_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    toy_text.write(tmp_path / "toy")
    assert castiron.load("~/toy", threads=1).name == "toy"
    with pytest.raises(castiron.CheckpointError, match="nowhere is neither a file nor a directory"):
        castiron.load("nowhere")
    assert open_bundle(os.fspath(tmp_path / "toy")).path == tmp_path / "toy"


def test_an_ending_python_has_nothing_to_report(path):
    """Where something else, as torch does, keeps modules past the end too."""
    program = f"import torch, castiron; model = castiron.load({str(path)!r}); print(model.generate('x', max_tokens=1).tokens)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout and not done.stderr
