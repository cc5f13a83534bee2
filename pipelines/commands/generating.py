"""Options that the commands share which generate, and what they come to."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.model_sampling import model_sampling
from castiron.pipelines.generation.positions import USUAL_TOKENS
from castiron.pipelines.generation.sampling import Sampling
from castiron.pipelines.generation.stops import StopStrings
from castiron.pipelines.progress import say

if TYPE_CHECKING:
    from castiron.pipelines.generation.draft import Draft
    from castiron.pipelines.generation.prefix_store import PrefixStore
    from castiron.vmfb.bundle import Bundle
    from castiron.vmfb.manifest import Manifest

# What changes nothing where the likeliest token is always taken.
DRAWING = ("top_k", "top_p", "min_p", "seed")


def add_bundle_argument(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """The argument of `castiron.pipelines.casting.named.bundle_of`; shared by every command that generates."""
    parser.add_argument("bundle", metavar="DIR|MODEL", nargs=nargs, help="a bundle, a directory or packed; or a GGUF file, an "
                        "HF directory, a name of the catalogue, or org/name[:FILE] on the hub, which is cast first",
                        )  # fmt: skip
    parser.add_argument("--trust", choices=("once", "never"), default="once", help="hash a bundle's files when it is first "
                        "opened here, or whenever it is opened (default: once)")  # fmt: skip
    parser.add_argument("--verify-key", metavar="KEY", help="open a bundle only if the owner of the public Ed25519 key in this "
                        "PEM file signed it, by castiron pack --sign")  # fmt: skip


def trust_of(args: argparse.Namespace) -> dict[str, Any]:
    """What --trust and --verify-key say, for `castiron.pipelines.casting.named.bundle_of`."""
    return {"full_check": args.trust == "never", "verify_key": args.verify_key}


def add_length_argument(parser: argparse.ArgumentParser) -> None:
    """The option of `length_of`; shared by every command that generates."""
    parser.add_argument("-n", "--max-tokens", type=int, metavar="N", help="tokens to generate at most (default: "
                        f"{USUAL_TOKENS}, or fewer near the end of the context; -1: until the model ends or the context "
                        "is full)")  # fmt: skip


def length_of(args: argparse.Namespace) -> tuple[int | None, int | None]:
    """How many tokens were asked for, and else how many there may be if there is room; None is any number."""
    if args.max_tokens is None:
        return None, USUAL_TOKENS
    if args.max_tokens < 1 and args.max_tokens != -1:
        raise PipelineError(f"-n is {args.max_tokens}; give 1 or more tokens, or -1 to go on until the model ends")
    return (None if args.max_tokens == -1 else args.max_tokens), None


def add_sampling_arguments(parser: argparse.ArgumentParser, *, model_default: bool = False, speculates: bool = True) -> None:
    """The options of `sampling_of`; with `model_default`, for conversations, what is not given is the model's own, and an
    answer ends that goes round in a circle. `speculates`: whether the command can."""
    own = "the model's own, from its generation_config, else " if model_default else ""
    group = parser.add_argument_group(
        "sampling",
        "Without options tokens are chosen as the model's generation_config says; it is shown at the start."
        if model_default else "Greedy, whatever the model's own generation_config says, unless --temperature is given.",
    )  # fmt: skip
    group.add_argument("--temperature", type=float, metavar="T", help="how freely to draw; 0 is greedy: always the "
                       f"likeliest token (default: {own}0)")  # fmt: skip
    group.add_argument("--top-k", type=int, metavar="K", help=f"draw from the K likeliest tokens (default: {own}0, all)")
    group.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens whose probabilities add "
                       f"up to P (default: {own}1)")  # fmt: skip
    group.add_argument("--min-p", type=float, metavar="P", help="keep tokens with at least P times the top probability "
                       f"(default: {own}0)")  # fmt: skip
    group.add_argument("--repeat-penalty", type=float, metavar="X", help="make the last 64 tokens less likely to come "
                       f"again (default: {own}1, which turns it off)")  # fmt: skip
    group.add_argument("--seed", type=int, metavar="N", help="draw repeatably: equal seeds give equal text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be "
                       "repeated")  # fmt: skip
    group.add_argument("--repetition-stop", action=argparse.BooleanOptionalAction, default=model_default,
                       help="end an answer that says the same few words over and over, 8 times and more than 190 tokens "
                       f"long (default: {'on' if model_default else 'off'})")  # fmt: skip
    if speculates:
        group.add_argument("--speculate", choices=("ngram",), help="check several tokens at once where the text repeats "
                           "itself: the same tokens, sooner")  # fmt: skip
        add_draft_argument(group)


def add_draft_argument(parser: argparse._ActionsContainer) -> None:
    """The option of `draft_of`."""
    parser.add_argument("--draft", metavar="DIR|MODEL", help="a smaller model with the same vocabulary that proposes tokens, "
                        "where the text does not repeat itself; several are checked at once: the same tokens, sooner",
                        )  # fmt: skip


def draft_of(args: argparse.Namespace, target: "Bundle") -> "Draft | None":
    """The model that --draft names, opened for that in `target`; None without it."""
    if args.draft is None:
        return None
    from castiron.pipelines.casting.named import bundle_of
    from castiron.pipelines.generation.draft import open_draft

    return open_draft(bundle_of(args.draft, **trust_of(args)), target, args.threads)


def add_template_argument(parser: argparse._ActionsContainer) -> None:
    """The option of `template_args`."""
    parser.add_argument("--template-arg", action="append", default=[], type=template_arg, metavar="NAME=VALUE", help="set a "
                        "variable of the chat template, such as enable_thinking=false; the value is JSON, or text where it "
                        "is none; may be repeated")  # fmt: skip


def template_arg(text: str) -> tuple[str, Any]:
    """ "name=value" with a JSON value, which may also be plain text; argparse's error without a name."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not a variable and its value, such as enable_thinking=false")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def template_args(args: argparse.Namespace) -> dict[str, Any]:
    """What --template-arg sets; of two values for one name the last."""
    return dict(args.template_arg)


def add_special_argument(parser: argparse._ActionsContainer) -> None:
    """--parse-special, of `load_text`."""
    parser.add_argument("--parse-special", action="store_true", help="take words of messages that are spelled as control "
                        "tokens, such as <|im_end|>, for these; without it what is said is text")  # fmt: skip


def add_prefix_cache_arguments(parser: argparse._ActionsContainer) -> None:
    """The options of `prefix_store`."""
    parser.add_argument("--prefix-cache", metavar="DIR", help="keep the states of long beginnings in this "
                        "folder and go on from them: the same tokens, sooner; several processes may share it")  # fmt: skip
    parser.add_argument("--prefix-cache-size", type=float, default=4.0, metavar="GB", help="what that folder may hold; then "
                        "goes what was unused longest (default: 4)")  # fmt: skip


def prefix_store(args: argparse.Namespace, manifest: "Manifest") -> "PrefixStore | None":
    """Where --prefix-cache keeps the states of a bundle; None without it."""
    if not 0 < args.prefix_cache_size < float("inf"):
        raise PipelineError(f"--prefix-cache-size is {args.prefix_cache_size:g}; give a number of gigabytes above 0")
    if args.prefix_cache is None:
        return None
    from castiron.pipelines.generation.prefix_store import PrefixStore

    return PrefixStore(args.prefix_cache, manifest, int(args.prefix_cache_size * 1e9))


def sampling_of(args: argparse.Namespace, generation: Mapping[str, Any] | None = None) -> Sampling:
    """What the options say, over what the model's generation_config says where it is given.

    PipelineError for a value out of its range, for a stop string that is empty, and for options that need a temperature
    where there is none; beside an explicit temperature of 0 these are named on stderr.
    """
    StopStrings(args.stop)
    own = None if generation is None else model_sampling(generation)
    given = {name: getattr(args, name) for name in (*DRAWING, "temperature", "repeat_penalty")}
    given = {name: value for name, value in given.items() if value is not None}
    sampling = replace(own or Sampling(), **given)
    idle = [f"--{name.replace('_', '-')}" for name in DRAWING if name in given]
    if idle and not sampling.temperature:
        sentence = f"{' and '.join(idle)} {'changes' if len(idle) == 1 else 'change'} nothing where decoding is greedy"
        if args.temperature is None:
            raise PipelineError(f"{sentence}: add --temperature 1, or leave {'it' if len(idle) == 1 else 'them'} out")
        say(sentence)
    return sampling
