"""Every operation: the interpreter, IREE and XLA give the same, and wrong operands are refused in a useful sentence."""

from __future__ import annotations

import inspect
from collections import defaultdict

import numpy as np
import pytest

from emitter import ops
from emitter.ir import Module, current_function, scope
from emitter.printer import _PRINT, print_module
from emitter.types import F16, F32, I1, I8, I32, DType, EmitError, TensorType, to_f32
from reference.interpreter import run
from reference.xla import run_stablehlo
from tests.emitter.cases import Case, all_cases, joined, module_of

BY_KIND: dict[str, list[int]] = defaultdict(list)
for _index, _case in enumerate(all_cases()):
    BY_KIND[_case.kind].append(_index)

# Unit in the last place at 1.
ULP = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}


def difference(got: np.ndarray, want: np.ndarray, dtype: DType, ulps: float, floor: float) -> str:
    """Why `got` is not `want` within the tolerance of a Case; empty if it is."""
    if got.shape != want.shape:
        return f"shape {got.shape} is not {want.shape}"
    if dtype.kind != "float":
        wrong = got != want
    else:
        got, want = (to_f32(a, dtype).astype(np.float64) for a in (got, want))
        with np.errstate(invalid="ignore"):
            near = np.abs(got - want) <= ulps * ULP[dtype.name] * np.maximum(np.abs(want), floor)
        signs = (np.signbit(got) == np.signbit(want)) | (ulps > 0)
        wrong = ~(((got == want) & signs) | near | (np.isnan(got) & np.isnan(want)))
    if not wrong.any():
        return ""
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {wrong.size} differ, first at {first}: {got[first]} is not {want[first]}"


def check(case: Case, index: int, got: list[np.ndarray], want: list[np.ndarray], where: str) -> None:
    types = [v.type for v in module_of([case]).functions["case_0"].outputs]
    for i, (g, w, type_) in enumerate(zip(got, want, types, strict=True)):
        problem = difference(g, w, type_.dtype, case.ulps, case.floor)
        assert not problem, f"{where}: case {index}, {case}, output {i} {type_}: {problem}"


@pytest.fixture(scope="module")
def wanted() -> list[list[np.ndarray]]:
    """What the interpreter gives for every case."""
    module = module_of(all_cases())
    return [run(module, f"case_{i}", [a for _, a in case.inputs]) for i, case in enumerate(all_cases())]


@pytest.fixture(scope="module")
def program(iree):
    """Every case as one module, compiled once."""
    return iree(print_module(module_of(all_cases())))


def test_every_operation_has_a_case():
    """A new operation without generated cases, or a function without an operation, fails here."""
    assert set(BY_KIND) == set(_PRINT) - {"parameter", "kernel"}
    public = {f.__name__ for f in vars(ops).values() if inspect.isfunction(f) and f.__module__ == ops.__name__}
    public = {name.rstrip("_") for name in public if not name.startswith("_")} - {"kernel_call"}
    names = {"gather_rows": "gather"}
    assert {names.get(name, name) for name in public} == set(BY_KIND)


@pytest.mark.parametrize("kind", BY_KIND)
def test_iree_agrees(kind, program, wanted):
    for i in BY_KIND[kind]:
        case = all_cases()[i]
        check(case, i, program.run(f"case_{i}", [a for _, a in case.inputs]), wanted[i], "IREE")


@pytest.mark.parametrize("kind", BY_KIND)
def test_xla_agrees(kind, wanted):
    cases = [all_cases()[i] for i in BY_KIND[kind]]
    text = print_module(joined(cases), weights="arguments")
    got = iter(run_stablehlo(text, "joined", [a for case in cases for _, a in case.inputs]))
    for i, case in zip(BY_KIND[kind], cases):
        check(case, i, [next(got) for _ in wanted[i]], wanted[i], "XLA")
