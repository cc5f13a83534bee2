"""Arguments that several commands share."""

import argparse
import os
from pathlib import Path

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.hub_name import HubName, with_options
from castiron.pipelines.places import model_name
from castiron.pipelines.sizes import megabytes as megabytes

QUANTISED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "q4_k_m", "q5_k_m")
WEIGHTS = ("native", "f32", "bf16", "f16", *QUANTISED)
TARGETS = (
    "host", "x86-64-v3", "x86-64-v3-vnni", "x86-64-v4", "x86-64-v4-vnni", "x86-64-v4-bf16", "sapphirerapids", "aarch64",
    "aarch64-i8mm",
)  # fmt: skip


def add_model(parser: argparse.ArgumentParser, **more: str) -> None:
    """MODEL, and what chooses from a repository on the hub; `choose_on_hub` puts them together. `more` is for argparse."""
    words = {"metavar": "MODEL", "help": "GGUF file, HF directory, catalogue name, or org/name on the hub"}
    parser.add_argument("model", **words | more)
    parser.add_argument("--file", metavar="NAME", help="of a repository on the hub this GGUF file, or the one whose name ends "
                        "so, as Q4_K_M; also org/name:NAME")  # fmt: skip
    parser.add_argument("--revision", metavar="NAME", help="of a repository on the hub this branch, tag or commit; also "
                        "org/name@NAME (default: main)")  # fmt: skip


def choose_on_hub(args: argparse.Namespace) -> None:
    """Puts --file and --revision into the MODEL of the command that has them: `open_checkpoint` takes one string."""
    if hasattr(args, "revision"):
        args.model = with_options(args.model, args.file, args.revision)


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    """What `castiron.pipelines.casting.compile.Options` takes; read back with `compile_options`."""
    # The choices stand here, not in an import, because parsing must not load the emitter; Options checks them again.
    parser.add_argument("--context", type=int, metavar="N", help="positions of the KV cache (default: the model's limit, "
                        "at most 8192)")  # fmt: skip
    parser.add_argument("--weights", choices=WEIGHTS, default="native", help="number format of the weight matrices; native "
                        "keeps the checkpoint's own, q4_k_m and q5_k_m mix types as llama.cpp does")  # fmt: skip
    add_adapter(parser)
    add_calibrate(parser)
    parser.add_argument("--numerics", choices=("exact", "canonical", "fast"), default="exact",
                        help="exact: activations and sums in f32, greedy tokens equal HF transformers'; canonical: the same "
                        "with one order of all sums, so that logits have the same bits on every CPU and in every batch; "
                        "fast: activations rounded to bytes or bf16 in prompts and batches, tokens may differ")  # fmt: skip
    parser.add_argument("--cache", choices=("f32", "f16", "q8_0"), default="f32",
                        help="number format of the KV cache; f16: half the memory and reading, q8_0: about a quarter; tokens "
                        "may differ")  # fmt: skip
    parser.add_argument("--lowering", choices=("kernels", "portable"), default="kernels",
                        help="kernels: castiron's own; portable: StableHLO alone")  # fmt: skip
    parser.add_argument("--target", choices=TARGETS, default="host", help="the CPU that will run the bundle")
    parser.add_argument("--threads", type=int, metavar="N", help="threads that will run the bundle (default: one per "
                        "physical core here, 2 for other targets); it runs on any number")  # fmt: skip
    parser.add_argument("--batch", type=_sizes, default=(4, 8), metavar="B[,B]", help="how many sequences "
                        "castiron serve can decode at once (default: 4,8; none turns it off)")  # fmt: skip
    parser.add_argument("--speculate", type=_sizes, default=(4, 8), metavar="T[,T]", help="how many proposed tokens "
                        "run --speculate can check at once (default: 4,8; none turns it off)")  # fmt: skip
    parser.add_argument("--embed", type=_sizes, default=(), metavar="T[,T]", help="add functions that give the hidden states "
                        "of so many tokens a call, such as 128, for Model.embed in Python (default: none)")  # fmt: skip
    add_ignore_key(parser)


def add_adapter(parser: argparse.ArgumentParser) -> None:
    """--adapter, merged into the weights."""
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter as peft saves it, merged into the weights before they "
                        "are converted")  # fmt: skip


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """--calibrate, for quantised weights."""
    parser.add_argument("--calibrate", metavar="FILE", help="a text such as the model will see: columns of the weights that it "
                        "makes large are quantised with less error")  # fmt: skip


def add_ignore_key(parser: argparse.ArgumentParser) -> None:
    """--ignore-key, once for each key."""
    parser.add_argument("--ignore-key", action="append", default=[], dest="ignore_keys", metavar="KEY",
                        help="leave a key out of the checkpoint's config or GGUF metadata that castiron refuses; verify then "
                        "tells whether it mattered")  # fmt: skip


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither numbers such as 4,8 nor none") from None


def compile_options(args: argparse.Namespace):
    from castiron.pipelines.casting.compile import Options

    names = "context weights adapter calibrate numerics cache lowering target batch speculate embed threads".split()
    return Options(
        **{name: getattr(args, name) for name in names},
        tuned=not getattr(args, "no_tuned", False),
        ignore_keys=tuple(args.ignore_keys),
        iree_flags=tuple(getattr(args, "iree_flag", ())),
    )


def check_threads(args: argparse.Namespace) -> None:
    """PipelineError for more --threads than this machine has CPUs, in a command whose threads would run here."""
    threads, cpus = getattr(args, "threads", None), os.cpu_count() or 1
    elsewhere = getattr(args, "target", "host") != "host" or getattr(args, "ray", None) not in (None, "local")
    here = args.command != "emit" and not elsewhere
    if here and threads is not None and threads > cpus:
        raise PipelineError(
            f"--threads is {threads} and this machine has {cpus} CPU{'s' * (cpus != 1)}; give at most {cpus}, or leave it "
            "out for one a physical core"
        )


def default_bundle(model: str) -> Path:
    """build/NAME, where NAME is the model's name or the last part of its path without .gguf."""
    hub = None if Path(model).exists() else HubName.read(model)
    return Path("build") / (hub.short if hub else model_name(Path(model)))
