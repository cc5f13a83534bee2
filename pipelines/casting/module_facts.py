"""What a manifest says of the module that was compiled: its functions, and what their kernels do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from castiron.emitter.ir import Function, Module, Value
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import ISAS
from castiron.vmfb.manifest import EntryPoint
from castiron.vmfb.targets import Target


def products_of(module: Module) -> list[Product]:
    """The products that the module has kernels for, in order, each once."""
    kernels = [op.attrs["kernel"] for f in module.functions.values() for op in f.ops if op.kind == "kernel"]
    return list(dict.fromkeys(kernel.product for kernel in kernels if kernel.product))


def arithmetic_of(products: Sequence[Product], target: Target) -> dict[str, int]:
    """How many of the products do what to x, and by which instruction; those that multiply f32 are left out."""
    if not target.isa:
        return {}
    isa = ISAS[target.isa]
    ways = {
        "bytes": f"x rounded to bytes by {isa.dot}",
        "pairs": f"x rounded to bf16 by {isa.pairs}",
        "matrix": f"x and weights rounded to bf16 by {isa.matrix}",
        "pieces": f"x in exact pieces of bf16 by {isa.matrix}",
    }
    return dict(Counter(ways[product.numerics] for product in products if product.numerics in ways))


def work_of(function: Function, context: int) -> dict[str, dict]:
    """What each kernel of a function does in one call of the function, for `castiron explain` and `castiron bench`.

    By kernel name what `castiron.vmfb.facts.KernelWork` has, layer numbers in paths as `*`: work grows with the position
    until a window is full.
    """
    found: dict[str, dict] = {}
    weights = {value for op in function.ops if op.kind == "parameter" for value in op.results}
    for op in function.ops:
        if op.kind != "kernel":
            continue
        kernel = op.attrs["kernel"]
        entry = found.setdefault(kernel.name, {"paths": [], "calls": 0})
        path = re.sub(r"\.\d+(?=\.|$)", ".*", op.path) or "output"
        if path not in entry["paths"]:
            entry["paths"].append(path)
        entry["calls"] += 1
        if entry["calls"] == 1:
            first, second, last = (kernel.work(p) for p in (0, 1, context - 1))
            for unit, start, step, end in zip(("flops", "bytes"), first, second, last):
                entry[unit] = [start, step - start, end]
            # Of a table of embeddings or of experts less is read than there is; what grows with the position is a state.
            held = sum(value.type.nbytes for value in op.operands if value in weights)
            entry["weights"] = 0 if second[1] > first[1] else min(held, first[1])
            if kernel.product:
                entry["tokens"] = kernel.product.tokens
    return found


def entry_point(function: Function) -> EntryPoint:
    """How the manifest describes a function of a module."""

    def spelled(values: Sequence[Value]) -> tuple[str, ...]:
        return tuple(str(v.type).removeprefix("tensor<").removesuffix(">") for v in values)

    return EntryPoint(function.role, function.name, function.width, spelled(function.inputs), spelled(function.outputs))
