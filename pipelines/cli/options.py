"""Options that several commands share, and functions that convert their values."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castiron.emitter.abi import LOWERINGS, NUMERICS, STORAGE, WEIGHTS
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.locate import HubName, model_name
from castiron.pipelines.terminal import print_message
from castiron.vmfb.cache_folder import cache_path

if TYPE_CHECKING:
    from castiron.pipelines.compile.compile_options import Options
    from castiron.pipelines.engine.prefix_store import PrefixStore
    from castiron.pipelines.engine.sampling import Sampling
    from castiron.vmfb.bundle.manifest import Manifest

# Metavars of arguments that cannot be empty; a text may be.
PATHS_AND_NAMES = ("MODEL", "DIR|MODEL", "MODEL|DIR", "DIR", "FILE", "PATH", "IN", "OUT", "BASE", "NAME", "NxN")
# Options that have no effect in greedy decoding.
DRAWING = ("top_k", "top_p", "min_p", "seed")
PENALTY = ("repeat_penalty", "repeat_last_n")


def token_ids(text: str) -> list[int]:
    """Parse token ids such as "1,2,3"."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids or min(ids) < 0:
        raise argparse.ArgumentTypeError(f"invalid token ids: {text!r}; give numbers such as 1,2,3")
    return ids


def template_arg(text: str) -> tuple[str, Any]:
    """Parse "name=value" into (name, value); a value that is not valid JSON is returned as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"invalid variable: {text!r}; give NAME=VALUE, such as enable_thinking=false")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def sizes(text: str) -> tuple[int, ...]:
    """Parse numbers such as "4,8"; the text "none" gives ()."""
    try:
        return () if text == "none" else tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid sizes: {text!r}; give numbers such as 4,8, or the word none") from None


def target_name(text: str) -> str:
    """Check a value of --target, such as "x86-64-v4" or "cuda:sm_80"."""
    from castiron.vmfb.targets import GPUS, TARGETS, is_gpu

    if text not in TARGETS and not is_gpu(text):
        raise argparse.ArgumentTypeError(f"unknown target: {text!r}; choose from {', '.join((*TARGETS, *GPUS))}")
    return text


def device_name(text: str) -> str:
    """Check a value of --device, such as "cpu" or "vulkan:1"."""
    from castiron.vmfb.targets import TARGET_OF_DRIVER

    if text.partition(":")[0] not in ("cpu", *TARGET_OF_DRIVER):
        raise argparse.ArgumentTypeError(f"unknown device: {text!r}; run castiron devices to list the devices")
    return text


# Flags -> arguments of add_argument. Parsing must not import the emitter's kernels or NumPy.
SHARED: dict[str, dict[str, Any]] = {
    "--json": {"action": "store_true", "help": "print one JSON object"},
    "--threads": {"type": int, "metavar": "N", "help": "CPU threads (default: one per physical core)"},
    "--checkpoint": {"metavar": "PATH", "help": "the bundle's checkpoint, if it moved (default: its recorded path)"},
    "--trust": {"choices": ("once", "never"), "default": "once", "metavar": "WHEN",
                "help": "once (default): check a bundle's hashes at its first use; never: at each use"},
    "-n --max-tokens": {"type": int, "metavar": "N",
                        "help": "maximum number of tokens to generate (default: 1024; -1: no limit)"},
    "--raw": {"action": "store_true", "help": "do not apply the chat template"},
    "--ignore-eos": {"action": "store_true", "help": "continue after the end-of-text token"},
    "--template-arg": {"action": "append", "default": [], "type": template_arg, "metavar": "NAME=VALUE",
                       "help": "set a chat template variable, as in enable_thinking=false; may be repeated"},
    "--parse-special": {"action": "store_true", "help": "parse special tokens, such as <|im_end|>, in messages"},
    "--prefix-cache": {"metavar": "DIR", "help": "store and reuse states of long prefixes in this folder; none: nowhere"},
    "--prefix-cache-size": {"type": float, "default": 4.0, "metavar": "GB",
                            "help": "size limit of that folder; deletes the least recently used (default: 4)"},
    "--json-schema": {"metavar": "FILE", "help": "generate JSON that matches the JSON schema in a file"},
    "--draft-model": {"metavar": "DIR|MODEL", "help": "smaller model with the same vocabulary that proposes tokens"},
    "--prompt-name": {"metavar": "NAME", "help": "put the model's prompt NAME before each text (castiron inspect lists them)"},
    "--dimensions": {"type": int, "metavar": "N", "help": "return only the first N numbers of each vector (default: all)"},
    "--adapter": {"metavar": "DIR", "help": "merge a PEFT LoRA adapter into the weights"},
    "--calibrate": {"metavar": "FILE", "help": "sample text that makes quantisation more accurate"},
    "--ignore-key": {"action": "append", "default": [], "dest": "ignore_keys", "metavar": "KEY",
                     "help": "ignore an unsupported config or GGUF key; may be repeated"},
    "--weights": {"choices": WEIGHTS, "default": "native", "metavar": "TYPE",
                  "help": "type of the weight matrices (default: native, the checkpoint's own)"},
    "--requantise": {"action": "store_true", "help": "convert weights that are already quantised, if that makes them smaller"},
    "-c --context": {"type": int, "metavar": "N", "help": "positions for prompt and answer (default: the bundle's)"},
    "--context": {"type": int, "metavar": "N", "help": "default context (default: the model's, at most 8192)"},
    "--max-context": {"type": int, "metavar": "N", "help": "largest context of run -c (default: the model's limit)"},
    "--kv-cache-type": {"choices": tuple(STORAGE), "default": "f32", "metavar": "TYPE",
                        "help": f"type of the KV cache: {', '.join(STORAGE)} (default: f32; others may change tokens)"},
    "--numerics": {"choices": NUMERICS, "default": "exact", "metavar": "TYPE",
                   "help": "exact (default): HF's tokens; canonical: same bits everywhere; fast, draft: rounded"},
    "--batch": {"type": sizes, "default": (4, 8), "metavar": "B[,B]",
                "help": "batch sizes for serve and batch, or none (default: 4,8)"},
    "--verify-widths": {"type": sizes, "default": (2, 4, 8), "metavar": "T[,T]",
                    "help": "numbers of tokens that speculation checks at once, or none (default: 2,4,8)"},
    "--embed": {"type": sizes, "default": (), "metavar": "T[,T]",
                "help": "add functions that return hidden states of T tokens (default: none)"},
    "--target": {"type": target_name, "default": "host", "metavar": "NAME",
                 "help": "x86-64-v3, aarch64, vulkan, cuda:sm_80, rocm:gfx942, metal, ... (default: host)"},
    "--device": {"type": device_name, "metavar": "NAME",
                 "help": "GPU that runs the bundle, as castiron devices lists it (default: the first)"},
    "--lowering": {"choices": LOWERINGS, "default": "", "metavar": "NAME",
                   "help": "kernels: castiron's own for CPUs; gpu: those for GPUs; portable: StableHLO only"},
}  # fmt: skip


def add_options(parser: argparse._ActionsContainer, *options: str, **changes: Any) -> None:
    """Add options of `SHARED`, with `changes` of their arguments of add_argument."""
    for flags in options:
        parser.add_argument(*flags.split(), **SHARED[flags] | changes)


def add_checkpoint(parser: argparse.ArgumentParser, **changes: str) -> None:
    arguments = {"metavar": "MODEL", "help": "GGUF file, HF directory, catalogue name, or org/name on the hub"}
    add_model(parser, "model", **arguments | changes)


def model_first(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Move the value of -m or --model to the start, as a positional argument."""
    models: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words if "-m" in parser._option_string_actions else ():
        name, equals, value = word.partition("=")
        if word == "--":
            others.append(word)
            break
        if name not in ("-m", "--model"):
            others.append(word)
        elif (value := value if equals else next(words, None)) is None:
            parser.error(f"argument {name} has no value; give the path or the name of a model after it")
        else:
            models.append(value)
    return [*models, *others, *words]


def note_ignored(args: argparse.Namespace) -> None:
    if getattr(args, "n_gpu_layers", "0") != "0":
        print_message(f"no effect: -ngl {args.n_gpu_layers}; to use a GPU, run castiron compile --target vulkan")


def check_not_empty(args: argparse.Namespace) -> None:
    """Raise a usage error for an empty path or name, which an unset variable of a script gives."""
    for action in args.parser._actions:
        value = getattr(args, action.dest, None)
        if (
            value != action.default
            and action.metavar in PATHS_AND_NAMES
            and "" in (value if isinstance(value, list) else [value])
        ):
            name = "/".join(action.option_strings) or action.metavar
            args.parser.error(f"argument {name} is empty; give a value{', or leave it out' * bool(action.option_strings)}")


def check_models_exist(args: argparse.Namespace) -> None:
    """Check the arguments that name models, and correct the case of catalogue names."""
    for name in ("model", "bundle", "draft_model"):
        value = getattr(args, name, None)
        if isinstance(value, list):
            setattr(args, name, [existing_model(each) for each in value])
        elif value is not None:
            setattr(args, name, existing_model(value))


def existing_model(model: str) -> str:
    """Return a path, or a name in its right case; CheckpointError for anything else."""
    if Path(model).exists() or HubName.read(model):
        return model
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE, canonical_name, not_found

    if (known := canonical_name(model)) not in CATALOGUE:
        raise not_found(model)
    return known


def check_threads(args: argparse.Namespace) -> None:
    """Raise PipelineError if --threads exceeds the CPUs of this machine, which uses them."""
    threads, cpus = getattr(args, "threads", None), os.cpu_count() or 1
    elsewhere = getattr(args, "target", "host") != "host" or getattr(args, "ray", None) not in (None, "local")
    if args.command != "emit" and not elsewhere and threads is not None and threads > cpus:
        raise PipelineError(f"--threads is {threads}, but this machine has {cpus} CPUs; give at most {cpus}")


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--weights", "--requantise", "--context", "--kv-cache-type", "--numerics")
    group = parser.add_argument_group("what is compiled")
    add_options(group, "--max-context", "--adapter", "--calibrate", "--batch", "--verify-widths", "--embed", "--ignore-key")
    group = parser.add_argument_group("how it is compiled")
    add_options(group, "--target")
    add_options(group, "--threads", help="threads to divide kernels for (default: physical cores)")
    add_options(group, "--lowering")


def compile_options(args: argparse.Namespace) -> "Options":
    from castiron.pipelines.compile.compile_options import Options

    names = (
        "context", "max_context", "weights", "requantise", "adapter", "calibrate", "numerics", "kv_cache_type", "lowering",
        "target", "batch", "verify_widths", "embed", "threads",
    )  # fmt: skip
    return Options(
        **{name: getattr(args, name) for name in names},
        tuned=not getattr(args, "no_tuned", False),
        ignore_keys=tuple(args.ignore_keys),
        iree_flags=tuple(getattr(args, "iree_flag", ())),
    )


def default_bundle(model: str) -> Path:
    """Return build/NAME, the default path for the bundle of a model."""
    hub = None if Path(model).exists() else HubName.read(model)
    return Path("build") / (hub.short if hub else model_name(Path(model)))


def add_model(parser: argparse.ArgumentParser, name: str = "bundle", **changes: str) -> None:
    """Add the argument MODEL, which is stored as `name`; the command also accepts -m MODEL."""
    arguments = {"metavar": "DIR|MODEL", "help": "bundle, GGUF file, HF directory, catalogue name, or org/name on the hub"}
    parser.add_argument(name, **arguments | changes)
    # For the help only: `model_first` replaces -m before the parser reads the arguments.
    parser.add_argument("-m", "--model", dest=argparse.SUPPRESS, default=argparse.SUPPRESS, metavar="MODEL",
                        help="the model, as in llama.cpp")  # fmt: skip


def add_loading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loading")
    add_options(group, "--threads", "--device", "--trust")
    group.add_argument(
        "-ngl", "--n-gpu-layers", default="0", metavar="N", help="ignored: --target of castiron compile selects a GPU"
    )


def answer_limit(max_tokens: int | None) -> int | None:
    """Return the max tokens that --max-tokens sets; None: no limit."""
    from castiron.pipelines.engine.request import DEFAULT_MAX_TOKENS

    if max_tokens is None:
        return DEFAULT_MAX_TOKENS
    if max_tokens < 1 and max_tokens != -1:
        raise PipelineError(f"-n is {max_tokens}; give at least 1, or -1 for no limit")
    return None if max_tokens == -1 else max_tokens


def add_sampling_options(parser: argparse.ArgumentParser, *, model_default: bool = False, speculates: bool = True) -> None:
    """Add the options of sampling; `model_default`: defaults are the model's own."""
    own = "the model's, else " if model_default else ""
    group = parser.add_argument_group("sampling", None if model_default else "Greedy unless --temperature is given.")
    for flag, kind, metavar, text in (
        ("--temperature --temp", float, "T", f"randomness; 0 is greedy (default: {own}0)"),
        ("--temperature-schedule", str, "S", "change it: linear:T:N or cosine:T:N to T over N tokens"),
        ("--top-k", int, "K", f"sample from the K most likely tokens (default: {own}0, all)"),
        ("--top-p", float, "P", f"sample from the top tokens of total probability P (default: {own}1)"),
        ("--min-p", float, "P", f"drop tokens below P times the top probability (default: {own}0)"),
        ("--repeat-penalty", float, "X", f"penalise the last tokens (default: {own}1, off)"),
        ("--repeat-last-n", int, "N", f"how many tokens this counts; -1 is all (default: {own}64)"),
        ("--seed", int, "N", "seed of the random numbers, for repeatable text"),
    ):
        group.add_argument(*flag.split(), type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated")
    group.add_argument("--repetition-stop", action=argparse.BooleanOptionalAction, default=model_default,
                       help=f"stop a repetition loop (default: {'on' if model_default else 'off'})")  # fmt: skip
    if speculates:
        group = parser.add_argument_group("speculative decoding (faster, with the same tokens)")
        group.add_argument("--speculative", choices=("ngram",), help="propose tokens where the text repeats itself")
        add_options(group, "--draft-model")


def sampling_of(args: argparse.Namespace, generation: Mapping[str, Any] | None = None) -> "Sampling":
    """Return the `Sampling` of the options, with defaults of a generation_config; None: greedy."""
    from castiron.pipelines.engine.sampling import Sampling, model_sampling
    from castiron.pipelines.text.text_output import StopStrings

    StopStrings(args.stop)
    own = None if generation is None else model_sampling(generation)
    given = {name: getattr(args, name) for name in (*DRAWING, "temperature", "temperature_schedule", *PENALTY)}
    given = {name: value for name, value in given.items() if value is not None}
    sampling = (own or Sampling()).with_options(**given)
    idle = [f"--{name.replace('_', '-')}" for name in DRAWING if name in given]
    if idle and not sampling.is_random:
        names = ", ".join(idle)
        if args.temperature is None:
            raise PipelineError(f"no effect in greedy decoding: {names}; add --temperature 1, or remove {names}")
        print_message(f"no effect in greedy decoding: {names}")
    return sampling


def prefix_store(args: argparse.Namespace, manifest: "Manifest", is_automatic: bool = False) -> "PrefixStore | None":
    """Return the store of --prefix-cache; if `is_automatic`, by default one of long prefixes."""
    if not 0 < args.prefix_cache_size < float("inf"):
        raise PipelineError(f"--prefix-cache-size is {args.prefix_cache_size:g}; give a number of gigabytes above 0")
    if args.prefix_cache == "none" or args.prefix_cache is None and not is_automatic:
        return None
    from castiron.pipelines.engine.prefix_store import LONG_PREFIX, PrefixStore

    max_bytes = int(args.prefix_cache_size * 1e9)
    if args.prefix_cache is not None:
        return PrefixStore(args.prefix_cache, manifest, max_bytes)
    try:
        return PrefixStore(cache_path("prefixes"), manifest, max_bytes, LONG_PREFIX)
    except PipelineError as error:
        print_message(f"{error}; long prompts are computed again at the next start")
        return None


def read_schema(path: str | None) -> Any:
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise PipelineError(f"{path} is not JSON: {error}; correct the file") from None
