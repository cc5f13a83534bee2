"""castiron emit: every part that it prints compiles and computes the same as in the model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from castiron.emitter.codecs import dequantise
from castiron.emitter.kernels.weights.packing import pack as pack_rows
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.build_model import build_module
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.extract import extract_layer
from castiron.pipelines.compile.named_kernel import KINDS
from castiron.pipelines.compile.weight_codecs import pack_parameter
from castiron.reference import hf, interpreter, xla
from castiron.reference.tiny import tiny_model
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.targets import resolve
from tests.emitter.golden_kernels import INSTANCES, kind
from tests.emitter.linear_cases import dot_error, raw_rows

LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model("llama", tmp_path_factory.mktemp("emit") / "llama", num_hidden_layers=LAYERS))


def printed(capsys, *argv: str) -> str:
    assert cli.main(["emit", *argv]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("name", INSTANCES)
def test_a_kernel_module_compiles(name, capsys, tmp_path):
    """For this CPU, whose instructions need not be those of the golden text."""
    text = printed(capsys, "--kernel", kind(name), *INSTANCES[name].partition(" --isa ")[0].split())
    assert text.count("stream.executable private") == 1 and text.count("flow.dispatch") == 1
    compile_mlir(text, resolve("host"), tmp_path / "kernel.vmfb")


def test_a_kernel_module_computes_its_matmul(capsys, iree):
    raw = raw_rows("q4_1", 40, 64, seed=1)
    x = np.random.default_rng(2).standard_normal((1, 64)).astype(np.float32)
    program = iree(printed(capsys, "--kernel", "gemv", "--codec", "q4_1", "--shape", "40x64"))
    (y,) = program.run("call", [x, pack_rows("q4_1", raw).view(np.int8)])
    want = x.astype(np.float64) @ dequantise("q4_1", raw).astype(np.float64).T
    assert (np.abs(y - want) <= dot_error("q4_1", x, raw) + 1e-6).all()


def test_the_vector_registers_are_those_asked_for_or_those_of_the_target(capsys):
    gemv = ("--kernel", "gemv", "--shape", "16x16")
    for asked, lanes in (("--isa avx2", 8), ("--isa avx512", 16), ("--target x86-64-v4", 16), ("--target aarch64", 4)):
        assert f"vector<{lanes}xf32>" in printed(capsys, *gemv, *asked.split())


@pytest.mark.parametrize("lowering", ["kernels", "portable"])
def test_layer_modules_in_sequence_compute_the_model(model, lowering):
    """States have their own names, values between layers the module path of their operation."""
    checkpoint = open_checkpoint(model)
    module = build_module(checkpoint, Options(lowering=lowering, context=16, threads=1))
    params = {p.name: pack_parameter(checkpoint, p) for p in module.params.values()}
    random = np.random.default_rng(3)
    for name in ("decode_step", "prefill_8"):
        function = module.functions[name]
        given = {"token": 5, "tokens": np.arange(8) + 20, "position": 6, "start": 6, "length": 8}
        values = {
            v.name: np.asarray(given[v.name], np.int32) if v.name in given else random.random(v.shape, np.float32)
            for v in function.inputs
        }
        made = {}

        def note(op, results, made=made):
            if op.operands:
                made[op.path] = results[-1]

        complete = interpreter.run(module, name, list(values.values()), params, note)
        values["model_embed_tokens"] = made["model.embed_tokens"]
        for layer in range(LAYERS):
            block = extract_layer(module, layer)
            part = block.functions[name]
            results = interpreter.run(block, name, [values[v.name] for v in part.inputs], params)
            values |= dict(zip(part.output_names, results, strict=True))
        last = f"model.layers.{LAYERS - 1}.mlp"
        np.testing.assert_array_equal(values[last.replace(".", "_")], made[last])
        for state in ("k", "v"):
            np.testing.assert_array_equal(values[state], complete[function.output_names.index(state)])


@pytest.mark.parametrize("function", ["decode_step", "prefill_8"])
def test_a_layer_module_compiles_and_writes_its_states_in_place(model, function, capsys, tmp_path):
    text = printed(capsys, model, "--layer", "1", "--function", function)
    assert "layers.1.mlp" in text and "layers.2" not in text and text.count("func.func public") == 1
    assert text.count("iree.abi.output") == 2
    compile_mlir(text, resolve("host"), tmp_path / "layer.vmfb")


def test_a_layer_module_has_every_function(model, capsys):
    complete, block = (json.loads(printed(capsys, model, *more, "--json")) for more in ((), ("--layer", "2")))
    assert block["functions"].keys() == complete["functions"].keys()
    assert {name for name in block["parameters"] if "layers." in name} == {
        name for name in complete["parameters"] if "layers.2." in name
    }


def test_a_function_module_has_the_models_text(model, capsys, tmp_path):
    complete, single = (printed(capsys, model, "--context", "16", *more) for more in ((), ("--function", "decode_step")))
    start = single.index("  func.func public @decode_step")
    assert single[start:].removesuffix("}\n") in complete and "prefill" not in single
    assert all(line in complete for line in single.splitlines() if line.startswith("util.global"))
    compile_mlir(single, resolve("host"), tmp_path / "function.vmfb")


def test_xla_runs_the_portable_text_on_the_checkpoints_own_tensors(model, capsys):
    """Arguments have the names and shapes of the checkpoint's tensors; logits are HF's."""
    tokens = [5, 17, 3, 99, 42, 8, 1, 60]
    text = printed(capsys, model, "--lowering", "portable", "--function", "prefill_8", "--context", "16")
    assert not re.search(r"\b(util|flow|iree|arith)\.", text)
    tensors = load_file(f"{model}/model.safetensors")
    (head,) = re.findall(r"func.func public @prefill_8\((.*)\) ->", text)
    given = {"tokens": np.int32(tokens), "start": np.int32(0), "length": np.int32(8)}
    arrays = [
        given[name]
        if name in given
        else tensors[name]
        if name in tensors
        else np.zeros(list(map(int, shape.split("x")[:-1])), "f4")
        for name, shape in re.findall(r"%([\w.]+): tensor<([^>]*)>", head)
    ]
    best, logits, *_ = xla.run_stablehlo(text, "prefill_8", arrays)
    expected = hf.logits(hf.load(Path(model)), tokens)[-1]
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.ptp(expected))
    assert best == expected.argmax()


def test_the_form_of_weights_follows_from_the_lowering(model, capsys):
    part = [model, "--function", "decode_step", "--context", "16"]
    globals_ = {
        words: printed(capsys, *part, *words.split()).count("util.global")
        for words in ("", "--lowering portable", "--lowering portable --weights-as parameters", "--weights-as arguments")
    }
    assert [bool(count) for count in globals_.values()] == [True, False, True, False]


def test_a_module_with_kernels_and_weights_as_arguments_is_complete(model, capsys, tmp_path):
    text = printed(capsys, model, "--layer", "0", "--function", "decode_step", "--weights-as", "arguments")
    compile_mlir(text, resolve("host"), tmp_path / "layer.vmfb")


def test_parts_are_printed_as_json_and_to_files_too(model, capsys, tmp_path):
    for words in (["--kernel", "argmax", "--shape", "100"], [model, "--layer", "0", "--function", "decode_step"]):
        text = printed(capsys, *words)
        facts = json.loads(printed(capsys, *words, "--json"))
        assert facts["text"] == text and facts["functions"]
        assert printed(capsys, *words, "-o", str(tmp_path / "part.mlir")) == ""
        assert (tmp_path / "part.mlir").read_text() == text


def test_help_lists_the_shape_of_each_kernel_and_its_example_fits(capsys):
    with pytest.raises(SystemExit):
        cli.main(["emit", "--help"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, each in KINDS.items():
        assert [name, each.shape] in [line[:2] for line in lines] and printed(capsys, "--kernel", name, "--shape", each.example)


@pytest.mark.parametrize(
    ("words", "expected_message"),
    [
        ("", "give a MODEL, or --kernel"),
        ("--kernel gemw --shape 1x1", "unknown kernel: 'gemw'; use one of gemv, gemm_few"),
        ("--kernel gemv", "--kernel gemv needs --shape"),
        ("--kernel gemv --shape 576", "--shape takes OUTxIN, such as 1536x576"),
        ("--kernel gemv --shape 0x32", "--shape takes OUTxIN"),
        ("--kernel gemv --shape 16x33 --codec q4_1", "multiple of 32"),
        ("--kernel gemv --shape 16x32 --codec q9", "unknown weight type: 'q9'"),
        ("--kernel gemv --shape 16x32 --tokens 4", "gemv does not take 4 tokens; --tokens takes 1"),
        ("--kernel gemm --shape 16x32 --tokens 8", "--tokens takes 9 and up"),
        ("--kernel argmax --shape 16 --tokens 0", "--tokens takes 1 and up"),
        ("--kernel attention_decode --shape 9x2x64", "does not fit attention_decode: 9 heads are not a multiple of 2 kv heads"),
        ("--kernel gemv --shape 16x32 --lowering portable", "are for models, not for --kernel"),
        ("MODEL --kernel gemv --shape 16x32", "--kernel cannot be combined with MODEL, --function or --layer"),
        ("MODEL --layer 3", "no layer 3; --layer takes 0 to 2"),
        ("MODEL --layer -1", "no layer -1"),
        ("MODEL --function decode", "--function takes decode_step, prefill_8"),
        ("MODEL --isa neon", "--shape, --tokens and --isa need --kernel"),
    ],
)
def test_invalid_options_end_in_one_line(model, words, expected_message, capsys):
    assert cli.main(["emit", *(model if word == "MODEL" else word for word in words.split())]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("castiron: ") and err.count("\n") == 1 and expected_message in err, err
