"""Tiles worth a try for a product: the default with one or several of its fields changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace

from castiron.emitter.kernels.products.choosing import default_tiles, kernel_of
from castiron.emitter.kernels.products.frame import Tiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import Isa

Steps = Callable[[int], Iterable[int]]
_SCALED: Steps = lambda value: (value // 2, value * 2)
_NEXT: Steps = lambda value: (value - 1, value + 1)
# What is a number of registers goes by ones, what is a size by halves and doubles.
_STEPS: dict[str, Steps] = {"together": _NEXT, "chains": _NEXT, "rows": _NEXT}


def neighbours(product: Product, isa: Isa, threads: int) -> Iterator[Tiles]:
    """Tiles that differ from the default in one field and whose kernels differ in code."""
    default = default_tiles(product, isa, threads)
    seen = {None, _code(product, isa, threads, default)}
    for field in fields(default):
        for value in _STEPS.get(field.name, _SCALED)(getattr(default, field.name)):
            tiles = replace(default, **{field.name: value})
            if (code := _code(product, isa, threads, tiles)) not in seen:
                seen.add(code)
                yield tiles


def combined(product: Product, isa: Isa, threads: int, better: Iterable[tuple[float, Tiles]]) -> Tiles | None:
    """The default with every field at the best of the values that alone were `better` (gain, tiles); None if that fits
    no kernel, or is none but the best of them."""
    default, values = default_tiles(product, isa, threads), {}
    for _, tiles in sorted(better, key=lambda pair: pair[0]):
        values |= {f.name: getattr(tiles, f.name) for f in fields(tiles) if getattr(tiles, f.name) != getattr(default, f.name)}
    tiles = replace(default, **values)
    return tiles if len(values) > 1 and _code(product, isa, threads, tiles) else None


def _code(product: Product, isa: Isa, threads: int, tiles: Tiles) -> str | None:
    """The kernel's text but for its name; None for tiles that do not fit."""
    try:
        kernel = kernel_of(product, isa, threads, tiles)
    except ValueError:
        return None
    return kernel.text.replace(kernel.name, "")
