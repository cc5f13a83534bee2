"""Test the path from a checkpoint to HF's tokens, with both lowerings and compilers."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest

from castiron.emitter.graph.printer import print_module
from castiron.emitter.graph.types import EmitError
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.compile.build_model import build_module
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.weight_codecs import pack_parameter
from castiron.reference import hf, tiny, xla
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.compiler.iree_compile import compiler_path
from castiron.vmfb.run.session import Session
from castiron.vmfb.targets import resolve

CONTEXT = 160
# Around the borders of every chunk width (8, 32, 128), and past them.
LENGTHS = (1, 2, 7, 8, 9, 31, 33, 40, 127, 129, 137)


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory):
    """Write a llama with grouped heads, biases, an untied output head and its own head_dim."""
    options = {"head_dim": 24, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    return tiny.tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama", **options)


@pytest.fixture(scope="session")
def oracle(checkpoint_dir):
    return hf.load(checkpoint_dir, threads=1)


@pytest.fixture(scope="session", params=["kernels", "portable"])
def bundle(request, checkpoint_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("bundle") / request.param
    options = Options(context=CONTEXT, lowering=request.param, batch=())
    return open_bundle(compile_model(checkpoint_dir, out, options).bundle)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, 211, length).tolist()


def greedy(session: Session, tokens: list[int], n: int) -> list[int]:
    found = [session.prefill(tokens)]
    while len(found) < n:
        found.append(session.step(found[-1]))
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_are_those_of_hf(bundle, oracle, length):
    expected = hf.greedy(oracle, prompt(length), 16)
    assert min(expected.margins) > 1e-4, "the model's margins do not prove anything"
    assert greedy(Session(bundle, 1), prompt(length), 16) == expected.tokens


@pytest.mark.parametrize("threads", [1, 2])
def test_logits_are_those_of_hf(bundle, oracle, threads):
    session = Session(bundle, threads)
    session.prefill(prompt(45))
    expected = hf.logits(oracle, prompt(45))
    expected = expected[-1] if expected.ndim == 2 else expected
    np.testing.assert_allclose(session.logits(), expected, atol=2e-5 * np.ptp(expected))


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_in_any_chunks_equals_token_by_token(bundle, length):
    tokens = prompt(length, seed=1)
    complete, chunked, single = (Session(bundle, 1) for _ in range(3))
    first = complete.prefill(tokens)
    for start in range(0, length, 11):
        last = chunked.prefill(tokens[start : start + 11])
    for token in tokens:
        best = single.step(token)
    assert first == last == best
    for other in (chunked, single):
        np.testing.assert_allclose(other.logits(), complete.logits(), atol=2e-5 * np.ptp(complete.logits()))


def test_the_context_works_to_its_last_position(bundle, oracle):
    tokens = prompt(CONTEXT - 5)
    assert greedy(Session(bundle, 1), tokens, 6) == hf.greedy(oracle, tokens, 6).tokens


def test_portable_text_is_exact_through_xla(checkpoint_dir, oracle):
    """XLA decodes from the printed StableHLO, with weights as arguments."""
    checkpoint = open_checkpoint(checkpoint_dir)
    module = build_module(checkpoint, Options(context=64, lowering="portable", batch=()))
    text = print_module(module, weights="arguments")
    params = {name: pack_parameter(checkpoint, param) for name, param in module.params.items() if param.source.tensors}
    programs = {
        name: (
            xla.compile_stablehlo(text, name),
            [params[op.attrs["name"]] for op in function.ops if op.attrs.get("name") in params],
        )
        for name, function in module.functions.items()
        if name in ("prefill_32", "decode_step")
    }

    def call(name, *args):
        run, weights = programs[name]
        return run([*args, *weights])

    tokens = prompt(21)
    cache = np.zeros(module.functions["decode_step"].inputs[2].shape, np.float32)
    padded = np.array(tokens + [0] * 11, np.int32)
    best, _, k, v = call("prefill_32", padded, np.int32(0), np.int32(21), cache, cache)
    found = [int(best)]
    for position in range(21, 21 + 15):
        best, _, k, v = call("decode_step", np.int32(found[-1]), np.int32(position), k, v)
        found.append(int(best))
    assert found == hf.greedy(oracle, tokens, 16).tokens


def stream_sizes(checkpoint_dir, lowering: str, cache: str, context: int, tmp_path) -> dict[str, list[int]]:
    """Return the bytes of every copy and transient allocation in the stream-level IR."""
    options = Options(context=context, lowering=lowering, kv_cache_type=cache, batch=())
    module = build_module(open_checkpoint(checkpoint_dir), options)
    source = tmp_path / f"{lowering}_{context}.mlir"
    source.write_text(print_module(module))
    flags = [*resolve("host").flags, "--compile-to=stream"]
    done = subprocess.run([compiler_path(), *flags, source, "-o", "-"], capture_output=True, text=True, check=True)
    constants = dict(re.findall(r"(%c\d+(?:_\d+)?) = arith.constant (\d+) : index", done.stdout))
    # The third operand of a copy is its length; an allocation's sizes stand in braces.
    patterns = {
        "copy": r"stream\.(?:cmd\.copy|async\.clone) \S+\[\S+\], \S+\[\S+\], (%c\w+)",
        "alloc": r"stream\.resource\.alloca? .*\{(%c\w+)\}",
    }
    assert "stream.cmd.dispatch" in done.stdout, "this is not stream-level IR"
    lines = done.stdout.splitlines()
    return {
        kind: [int(constants[match[1]]) for line in lines if (match := re.search(pattern, line))]
        for kind, pattern in patterns.items()
    }


@pytest.mark.parametrize(("cache", "item_bytes"), [("f32", 4), ("f16", 2)])
@pytest.mark.parametrize("lowering", ["kernels", "portable"])
def test_no_copy_of_the_cache(checkpoint_dir, lowering, cache, item_bytes, tmp_path):
    """Copies are smaller than a layer's cache, and kernels' allocations do not grow with it."""
    layer_bytes = 256 * 2 * 24 * item_bytes
    sizes = stream_sizes(checkpoint_dir, lowering, cache, 256, tmp_path)
    assert max(sizes["copy"], default=0) < layer_bytes and sizes["alloc"]
    if lowering == "kernels":
        shorter = stream_sizes(checkpoint_dir, lowering, cache, 128, tmp_path)
        assert sorted(sizes["alloc"]) == sorted(shorter["alloc"])


def test_a_context_over_the_models_limit_is_rejected_at_once(checkpoint_dir, tmp_path):
    with pytest.raises(EmitError, match="257.*1 to 256"):
        compile_model(checkpoint_dir, tmp_path / "out", Options(context=257))
    assert not list(tmp_path.iterdir())


def test_an_unknown_config_key_is_refused(checkpoint_dir):
    checkpoint = open_checkpoint(checkpoint_dir)
    checkpoint.config["attention_chunk_size"] = 4
    with pytest.raises(EmitError, match="'attention_chunk_size'"):
        build_module(checkpoint, Options())


def test_one_error_lists_all_tensors_that_do_not_fit(checkpoint_dir):
    checkpoint = open_checkpoint(checkpoint_dir)
    checkpoint.config["num_hidden_layers"] = 4
    checkpoint.config["attention_bias"] = False
    with pytest.raises(CheckpointError) as error:
        build_module(checkpoint, Options())
    assert re.search(r"model.layers.3.input_layernorm.weight \[64\] is missing(;.*)? and [0-9]+ more; ", str(error.value))
    assert re.search(
        r"model.layers.0.self_attn.[kq]_proj.bias \[\d+\] is left over(;.*)? and [0-9]+ more; use", str(error.value)
    )
