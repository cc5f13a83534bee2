"""Bundles and kernels for aarch64 on CPUs that qemu-user emulates: HF's tokens, canonical bits.

`make test-aarch64` fetches an aarch64 system and runs these tests, for minutes; `make test` skips
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.reference import hf
from castiron.reference.tiny import tiny_model
from castiron.vmfb.targets import TARGETS, resolve
from tests.aarch64 import Machine
from tests.emitter.kernel_calls import read_results, write_calls
from tests.emitter.kernel_runner import compile_kernels
from tests.emitter.linear_cases import Case, Experts, check, check_pairs
from tests.every_way import check_prompts, digest
from tests.test_canonical import HASHES, PROMPT, WAYS, checkpoint, compile_bundle

FOLDER = os.environ.get("CASTIRON_AARCH64")
if not FOLDER:
    pytest.skip("make test-aarch64 runs these tests under qemu", allow_module_level=True)
# CPUs of qemu, with the features that they lack for each target.
ALL = {"aarch64": "", "aarch64-i8mm": ""}
CPUS = {
    "max": ALL,
    "neoverse-n1": ALL | {"aarch64-i8mm": "bf16, i8mm"},
    "cortex-a76": ALL | {"aarch64-i8mm": "bf16, i8mm"},
    "a64fx": {"aarch64": "dotprod", "aarch64-i8mm": "bf16, dotprod, i8mm"},
    "cortex-a72": {"aarch64": "dotprod, fullfp16, lse, rdm", "aarch64-i8mm": "bf16, dotprod, fullfp16, i8mm, lse, rdm"},
}
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "falcon_h1", "qwen3_5_moe_text")
SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def machine() -> Machine:
    folder = Path(FOLDER).resolve()
    assert (folder / "root").is_dir(), f"no aarch64 system in {folder}; run make test-aarch64"
    return Machine(folder)


def answer(machine: Machine, bundle: Path, *arguments: str) -> dict:
    done = machine.run("-m", "castiron", "run", bundle, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def logits_there(machine: Machine, bundle: Path, tokens: Sequence[int]) -> np.ndarray:
    """Return the logits of a bundle there, f32 `[tokens, vocab]`, after checking all chunkings."""
    asked, out = (bundle.with_suffix(suffix) for suffix in (".json", ".npy"))
    asked.write_text(json.dumps(tokens))
    done = machine.run("-m", "tests.every_way", bundle, asked, out)
    assert done.returncode == 0, done.stderr
    return np.load(out)


def check_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    different = (found != wanted).any(axis=1)
    assert not different.any(), f"from token {different.argmax()} on, by up to {np.abs(found - wanted).max()}"


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("aarch64") / "llama")


@pytest.fixture(scope="session")
def bundles(llama) -> dict[str, Path]:
    """A small model for each target."""
    options = {"context": 64, "batch": (), "verify_widths": ()}
    return {
        target: compile_model(llama, llama.parent / target, Options(target=target, **options)).bundle
        for target in ("x86-64-v3", "aarch64", "aarch64-i8mm")
    }


@pytest.mark.parametrize("cpu", CPUS)
def test_a_bundle_needs_its_cpu_features(machine, llama, bundles, cpu):
    expected = hf.greedy(hf.load(llama, threads=1), [5, 6, 7], 8).tokens
    for target, missing in CPUS[cpu].items():
        there, tokens = Machine(machine.folder, cpu), ("--tokens", "5,6,7", "-n", "8", "--ignore-eos")
        if not missing:
            assert answer(there, bundles[target], *tokens)["tokens"] == expected, target
            continue
        done = there.run("-m", "castiron", "run", bundles[target], *tokens)
        assert done.returncode == 1 and not done.stdout
        cpus = f"({TARGETS[target].cpu}), but this CPU (aarch64) lacks {missing}; "
        assert cpus in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_rejects_a_bundle_for_x86_64(machine, bundles):
    done = machine.run("-m", "castiron", "run", bundles["x86-64-v3"], "--tokens", "1")
    assert done.returncode == 1 and "is compiled for x86_64, but this machine is aarch64" in done.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_hf(machine, tmp_path, family):
    made = tiny_model(family, tmp_path / "checkpoint")
    prompt = np.random.default_rng(3).integers(3, 200, 21).tolist()
    expected = hf.greedy(hf.load(made, threads=1), prompt, 12)
    assert min(expected.margins) > 1e-4, "the model's margins do not prove anything"
    for numerics in ("exact", "canonical"):
        path = tmp_path / numerics
        options = Options(context=48, batch=(), verify_widths=(), numerics=numerics, target="aarch64")
        compile_model(made, path, options)
        tokens = ",".join(map(str, prompt))
        found = answer(machine, path, "--tokens", tokens, "-n", "12", "--ignore-eos")
        assert found["tokens"] == expected.tokens, numerics


@pytest.mark.parametrize("way", WAYS)
def test_canonical_logits_have_the_common_hash(machine, tmp_path, way):
    options, _ = WAYS[way]
    bundle = compile_bundle(checkpoint(tmp_path / "checkpoint"), tmp_path / "bundle", target="aarch64", **options)
    assert digest(logits_there(machine, bundle, PROMPT)) == json.loads(HASHES.read_text())[way]


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "nemotron_h", "hunyuan_v1_dense", "qwen3", "lfm2"])
def test_canonical_logits_have_the_bits_of_the_host(machine, tmp_path, family):
    made = tiny_model(family, tmp_path / "checkpoint")
    prompt = np.random.default_rng(2).integers(3, 200, 28).tolist()
    here, there = (
        compile_bundle(made, tmp_path / target, context=48, batch=(), verify_widths=(), target=target)
        for target in ("host", "aarch64")
    )
    check_bits(logits_there(machine, there, prompt), check_prompts(here, prompt))


def test_smollm2_gives_the_text_of_the_host(machine, tmp_path):
    options = {"context": 64, "batch": (), "verify_widths": ()}
    here, there = (compile_model(SMOLLM2, tmp_path / t, Options(target=t, **options)).bundle for t in ("host", "aarch64"))
    asked = ("--raw", "-p", "The capital of France is", "-n", "8")
    command = [sys.executable, "-m", "castiron", "run", here, *asked, "--json"]
    wanted = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    found = answer(machine, there, *asked)
    assert found["text"] == wanted["text"] and found["tokens"] == wanted["tokens"]
    assert len(wanted["tokens"]) == 8


def kernels_of(target: str) -> list[Case]:
    """Return matmuls of every codec and instruction of the target, for 1, 7 and 19 tokens."""
    given = {"bias": True, "residual": True, "glu": "silu"}
    shapes = {1: given, 7: given | {"length": True}, 19: given | {"length": True}}
    of = lambda codec, tokens, numerics: Case(Matmul(codec, tokens, 40, 512, numerics=numerics, **shapes[tokens]))
    found = [of(codec, tokens, "int8") for codec in CODECS if CODECS[codec].quantised for tokens in (7, 19)]
    if target == "aarch64-i8mm":
        return found + [of("bf16", tokens, "bf16_pairs") for tokens in (7, 19)]
    exact = lambda codec: "int24" if CODECS[codec].quantised and CODECS[codec].has_integers else "f32"
    return found + [of(codec, tokens, exact(codec)) for codec in CODECS for tokens in (1, 7, 19)]


# One expert has so many of the 80 pairs without padding that its kernel packs panels.
EXPERTS = [
    Experts(Matmul(codec, 160, 40, 256, experts=3, per_row=2, length=True, numerics=numerics))
    for codec, numerics in (("q4_k", "int24"), ("bf16", "f32"), ("q4_1", "int8"), ("q6_k", "int8"))
]


def run_there(machine: Machine, cases: Sequence[Case], target: str, directory: Path) -> list[tuple]:
    """Run the kernels of `cases` on the machine, as `linear_cases.run_all` does on this one."""
    directory.mkdir()
    kernels = [case.kernel(ISAS[resolve(target).isa]) for case in cases]
    given = [case.arguments() for case in cases]
    module, calls, out = directory / "kernels.vmfb", directory / "calls.npz", directory / "out.npz"
    compile_kernels(list({kernel.name: kernel for kernel in kernels}.values()), module, target)
    write_calls(calls, [(f"call_{k.name}", [own[name] for name in k.operands]) for k, own in zip(kernels, given, strict=True)])
    done = machine.run("-m", "tests.emitter.kernel_calls", module, calls, out)
    assert done.returncode == 0, done.stderr
    wanted = [kernel.reference(**own)["y"] for kernel, own in zip(kernels, given, strict=True)]
    return list(zip(cases, given, read_results(out), wanted, strict=True))


@pytest.mark.parametrize("target", ["aarch64", "aarch64-i8mm"])
def test_every_matmul_instruction_matches_its_definition(machine, tmp_path, target):
    check(run_there(machine, kernels_of(target), target, tmp_path / "matmuls"))
    check_pairs(run_there(machine, EXPERTS, target, tmp_path / "experts"))
