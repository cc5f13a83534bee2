"""Golden texts of one small instance of each kernel.

`python -m tests.emitter.golden_kernels` writes them. A file has the command that prints its kernel,
the hash of the complete text, and the text. Of a long text it has the inner loop with the most
multiplications, and the hash covers the rest.
"""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

from castiron.emitter.kernels.kernel import Kernel
from castiron.pipelines.compile.named_kernel import named_kernel

FOLDER = Path(__file__).parent / "golden"
MAX_LINES, HEAD, TAIL = 60, 40, 15  # lines
# The options of `castiron emit --kernel` for each instance.
INSTANCES = {
    "gemv": "--shape 32x64 --codec q4_1",
    "gemm_few": "--shape 16x64 --codec q4_0 --tokens 2",
    "gemm": "--shape 16x64 --codec bf16 --tokens 9",
    "gemm_int24": "--shape 16x64 --codec q4_1 --tokens 9 --isa avxvnni",
    "gemm_few_int8": "--shape 16x64 --codec q5_0 --tokens 2 --numerics fast",
    "gemm_int8": "--shape 16x64 --codec q4_1 --tokens 9 --numerics fast",
    "quantise_x": "--shape 64 --codec q4_1 --tokens 2",
    "gemm_bf16": "--shape 16x64 --codec bf16 --tokens 9 --numerics fast --isa avx512bf16",
    "gemm_matrix": "--shape 16x64 --codec q4_1 --tokens 9 --isa amx",
    "split_x": "--shape 64 --codec q4_1 --tokens 2 --isa amx",
    "experts": "--shape 2x16x64 --codec bf16 --tokens 2",
    "experts_grouped": "--shape 2x16x64 --codec bf16 --tokens 9",
    "experts_grouped_int8": "--shape 2x16x64 --codec q4_1 --tokens 9 --numerics fast",
    "attention_decode": "--shape 4x2x16 --context 64",
    "attention_prefill": "--shape 4x2x16 --context 64 --tokens 8",
    "rope_append": "--shape 4x2x16 --context 64 --tokens 8",
    "attention_decode_f16": "--shape 4x2x16 --context 64 --kv-cache-type f16",
    "attention_prefill_f16": "--shape 4x2x16 --context 64 --tokens 8 --kv-cache-type f16",
    "rope_append_f16": "--shape 4x2x16 --context 64 --tokens 8 --kv-cache-type f16",
    "attention_decode_q8_0": "--shape 4x2x16 --context 64 --kv-cache-type q8_0",
    "attention_prefill_q8_0": "--shape 4x2x16 --context 64 --tokens 8 --kv-cache-type q8_0",
    "rope_append_q8_0": "--shape 4x2x16 --context 64 --tokens 8 --kv-cache-type q8_0",
    "causal_conv": "--shape 16x3 --tokens 4",
    "gated_delta": "--shape 1x2x16x16 --tokens 4",
    "selective_scan": "--shape 1x2x16x16 --tokens 4",
    "rms_norm": "--shape 16 --tokens 4",
    "layer_norm": "--shape 16 --tokens 4",
    "embed": "--shape 16x8 --codec bf16",
    "argmax": "--shape 512",
}


def kernel(name: str) -> Kernel:
    words = shlex.split(INSTANCES[name])
    given = {key.removeprefix("--").replace("-", "_"): value for key, value in zip(words[::2], words[1::2], strict=True)}
    numbers = {key: int(given.pop(key)) for key in ("tokens", "context") if key in given}
    return named_kernel(kind(name), given.pop("shape"), threads=2, **numbers, **{"isa": "avx2", **given})


def kind(name: str) -> str:
    for suffix in ("_f16", "_q8_0", "_int8", "_bf16", "_int24", "_matrix", "_grouped"):
        name = name.removesuffix(suffix)
    return name


def golden(name: str) -> str:
    """Return the text of an instance's file."""
    text = kernel(name).text
    lines, isa = text.splitlines(), "" if "--isa" in INSTANCES[name] else " --isa avx2"
    shown = lines if len(lines) <= MAX_LINES else _cut(_busiest(lines))
    command = f"// castiron emit --kernel {kind(name)} {INSTANCES[name]}{isa} --threads 2"
    facts = f"// {len(lines)} lines, sha256 {hashlib.sha256(text.encode()).hexdigest()}"
    return "\n".join([command, facts, *shown, ""])


def _busiest(lines: list[str]) -> list[str]:
    """Return the innermost loop with the most multiplications."""
    loops = []
    for start, line in enumerate(lines):
        if "scf.for" in line:
            end = lines.index(line[: len(line) - len(line.lstrip())] + "}", start)
            loops.append(lines[start : end + 1])
    innermost = [loop for loop in loops if sum("scf.for" in line for line in loop) == 1]
    return max(innermost, key=lambda loop: (sum("math.fma" in line or "call_intrinsic" in line for line in loop), len(loop)))


def _cut(lines: list[str]) -> list[str]:
    left = len(lines) - HEAD - TAIL
    return lines if left <= 1 else [*lines[:HEAD], f"// {left} lines more", *lines[-TAIL:]]


if __name__ == "__main__":
    for each in INSTANCES:
        (FOLDER / f"{each}.mlir").write_text(golden(each))
