"""The times of a call's kernels as one page of HTML that needs nothing else: a flame of the modules, the graph by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import jinja2

from castiron.pipelines.measuring.kernel_times import REST, of_limit, rest_ms, where


@dataclass
class Frame:
    """A module, or a kernel in it, with the milliseconds below it."""

    name: str
    ms: float = 0.0
    below: dict[str, Frame] = field(default_factory=dict)

    def add(self, names: Sequence[str], ms: float) -> None:
        self.ms += ms
        if names:
            self.below.setdefault(names[0], Frame(names[0])).add(names[1:], ms)


def flame(result: Mapping[str, Any]) -> Frame:
    """The call's time by module path, kernels at the tips; of a kernel in several modules each has an equal part."""
    root = Frame(result["function"])
    for row in result["dispatches"]:
        paths = row["paths"] or ["made by IREE"]
        for path in paths:
            # `layers.*` is one frame.
            root.add([*re.split(r"\.(?!\*)", path.removeprefix("model.")), row["kernel"]], row["ms"] / len(paths))
    root.add([REST], rest_ms(result))
    return root


def page(result: Mapping[str, Any], title: str, order: Sequence[str]) -> str:
    """The page. `order` are the function's kernels as they first run, without the `_fn` of a dispatch."""
    root = flame(result)
    before, block, after = by_layer(result["dispatches"], order)
    environment = jinja2.Environment(autoescape=True, keep_trailing_newline=True)
    template = environment.from_string(files("castiron.pipelines.measuring").joinpath("kernel_page.html").read_text("utf-8"))
    return template.render(
        result=result, title=title, root=root, total=root.ms or 1.0, rest=rest_ms(result), rest_name=REST, before=before,
        block=block, layers=max((row["calls"] // len(row["paths"]) for row in block), default=1), after=after,
        where=where, of_limit=of_limit,
    )  # fmt: skip


def by_layer(rows: Sequence[Mapping], order: Sequence[str]) -> tuple[Sequence[Mapping], Sequence[Mapping], Sequence[Mapping]]:
    """Kernels as they first run: those before the layers, those of the layers, which stand for all of them, and the rest."""
    place = {name: i for i, name in enumerate(order)}
    known = [row for row in rows if row["kernel"].removesuffix("_fn") in place]
    known.sort(key=lambda row: place[row["kernel"].removesuffix("_fn")])
    inside = [i for i, row in enumerate(known) if any("layers." in path for path in row["paths"])]
    first, end = (inside[0], inside[-1] + 1) if inside else (len(known), len(known))
    return known[:first], known[first:end], known[end:]
