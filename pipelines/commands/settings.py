"""What /set shows and changes in a chat."""

import argparse
from dataclasses import replace

from castiron.pipelines.commands.generating import DRAWING, length_of
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.chat import Chat
from castiron.pipelines.generation.sampling import Sampler
from castiron.pipelines.progress import say

# Of Sampling's fields, those that have an option.
SAMPLING = {"temperature": float, "top-k": int, "top-p": float, "min-p": float, "repeat-penalty": float, "seed": int}
NAMES = (*SAMPLING, "max-tokens", "system")
NONE = "none"


def settings(chat: Chat, name: str = "") -> dict[str, str]:
    """Every setting by its name, as /set takes it, or only the one named; PipelineError if there is none of this name."""
    found = {known: getattr(chat.sampler.sampling, _field(known)) for known in SAMPLING}
    found |= {"max-tokens": chat.max_tokens or chat.usual_tokens or -1, "system": chat.system}
    told = {known: NONE if held is None else f"{held:g}" if isinstance(held, float) else str(held)
            for known, held in found.items()}  # fmt: skip
    if name and name not in told:
        raise _unknown(name)
    return {name: told[name]} if name else told


def change(chat: Chat, name: str, value: str) -> None:
    """Counts from the next answer on; PipelineError for a name or a value that is none."""
    if name == "system":
        chat.instruct(None if value == NONE else value)
    elif name == "max-tokens":
        chat.max_tokens, chat.usual_tokens = length_of(argparse.Namespace(max_tokens=_number(name, value, int)))
    elif name in SAMPLING:
        number = None if name == "seed" and value == NONE else _number(name, value, SAMPLING[name])
        sampling = replace(chat.sampler.sampling, **{_field(name): number})
        chat.sampler = Sampler(sampling)
        if _field(name) in DRAWING and number is not None and not sampling.temperature:
            say(f"{name} counts once a temperature is set: /set temperature 0.7")
    else:
        raise _unknown(name)


def _unknown(name: str) -> PipelineError:
    return PipelineError(f"{name} is not a setting; there are {', '.join(NAMES)}")


def _field(name: str) -> str:
    return name.replace("-", "_")


def _number(name: str, value: str, kind: type) -> float:
    try:
        return kind(value)
    except ValueError:
        raise PipelineError(f"{name} is a {'whole ' if kind is int else ''}number, not {value!r}") from None
