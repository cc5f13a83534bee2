"""The interpreter, IREE and XLA agree on every operation, and errors name wrong operands."""

from __future__ import annotations

import inspect
from collections import defaultdict

import numpy as np
import pytest

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Module, current_function, scope
from castiron.emitter.graph.printer import print_module
from castiron.emitter.graph.stablehlo import LOWERED
from castiron.emitter.graph.types import BF16, F16, F32, I1, I8, I32, DType, EmitError, TensorType, to_f32
from castiron.emitter.kernels.kernel import kernel_call
from castiron.reference.interpreter import run
from castiron.reference.xla import run_stablehlo
from tests.emitter.cases import Case, all_cases, joined, module_of
from tests.emitter.small import append_kernel

BY_KIND: dict[str, list[int]] = defaultdict(list)
for _index, _case in enumerate(all_cases()):
    BY_KIND[_case.kind].append(_index)

# Unit in the last place at 1.
ULP = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}


def difference(got: np.ndarray, want: np.ndarray, dtype: DType, ulps: float, floor: float) -> str:
    """Return how `got` differs from `want` beyond the tolerance; empty if it does not."""
    if got.shape != want.shape:
        return f"shape {got.shape} is not {want.shape}"
    if dtype.kind != "float":
        wrong = got != want
    else:
        with np.errstate(invalid="ignore"):
            got, want = (to_f32(a, dtype).astype(np.float64) for a in (got, want))
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
    """The interpreter's results for every case."""
    module = module_of(all_cases())
    return [run(module, f"case_{i}", [a for _, a in case.inputs]) for i, case in enumerate(all_cases())]


@pytest.fixture(scope="module")
def program(iree):
    """Every case as one module, compiled once."""
    return iree(print_module(module_of(all_cases())))


def test_every_operation_has_a_case():
    """Every function of `ops` has an operation, and every operation has generated cases."""
    assert set(BY_KIND) == set(LOWERED) - {"parameter", "kernel"}
    public = {f.__name__ for f in vars(ops).values() if inspect.isfunction(f) and f.__module__ == ops.__name__}
    public = {name.rstrip("_") for name in public if not name.startswith("_")}
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


F4, F5, I4, M23 = (TensorType(shape, d) for shape, d in (((4,), F32), ((5,), F32), ((4,), I32), ((2, 3), F32)))
B4, H4, S = TensorType((4,), I1), TensorType((4,), F16), TensorType((), I32)

# The operation, a call of it, and invalid types of operands.
REFUSED = [
    ("add", ops.add, F4, F5),
    ("multiply", ops.multiply, F4, H4),
    ("maximum", ops.maximum, B4, B4),
    ("negate", ops.negate, I4),
    ("and", ops.and_, F4, F4),
    ("or", ops.or_, B4, I4),
    ("compare", lambda a, b: ops.compare("LT", a, b), F4, F5),
    ("compare", lambda a, b: ops.compare("<", a, b), F4, F4),
    ("select", ops.select, F4, F4, F4),
    ("select", ops.select, TensorType((5,), I1), F4, F4),
    ("convert", lambda a: ops.convert(a, BF16), I4),
    ("bitcast_convert", lambda a: ops.bitcast_convert(a, I1), F4),
    ("bitcast_convert", lambda a: ops.bitcast_convert(a, F32), H4),
    ("broadcast_in_dim", lambda a: ops.broadcast_in_dim(a, (5, 4), (0,)), F4),
    ("broadcast_in_dim", lambda a: ops.broadcast_in_dim(a, (3, 2), (1, 0)), M23),
    ("reshape", lambda a: ops.reshape(a, (7,)), M23),
    ("transpose", lambda a: ops.transpose(a, (0, 0)), M23),
    ("concatenate", lambda a, b: ops.concatenate((a, b), 0), F4, H4),
    ("concatenate", lambda a, b: ops.concatenate((a, b), 1), M23, TensorType((3, 3), F32)),
    ("concatenate", lambda a, b: ops.concatenate((a, b), 1), F4, F4),
    ("slice", lambda a: ops.slice_(a, (0,), (5,)), F4),
    ("slice", lambda a: ops.slice_(a, (2,), (2,)), F4),
    ("dynamic_slice", lambda a, s: ops.dynamic_slice(a, (s,), (2, 2)), M23, S),
    ("dynamic_slice", lambda a, s: ops.dynamic_slice(a, (s,), (2,)), F4, F4),
    ("dynamic_update_slice", lambda a, u, s: ops.dynamic_update_slice(a, u, (s,)), F4, F5, S),
    ("dynamic_update_slice", lambda a, u, s: ops.dynamic_update_slice(a, u, (s,)), F4, I4, S),
    ("dot_general", lambda a, b: ops.dot_general(a, b, ((1,), (0,))), M23, F4),
    ("dot_general", lambda a, b: ops.dot_general(a, b, ((0,), (1,))), F4, F4),
    ("dot_general", lambda a, b: ops.dot_general(a, b, ((0,), (0,)), ((0,), (0,))), M23, M23),
    ("reduce", lambda a: ops.reduce("multiply", a, (0,)), F4),
    ("reduce", lambda a: ops.reduce("add", a, (0,)), I4),
    ("argmax", ops.argmax, M23),
    ("gather", ops.gather_rows, F4, I4),
    ("gather", ops.gather_rows, M23, F4),
    ("append_row", lambda row, pos: kernel_call(append_kernel(), row=row, position=pos, layer=0), F4, S),
]


@pytest.mark.parametrize(
    "kind, call, types", [(k, c, t) for k, c, *t in REFUSED], ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)]
)
def test_an_error_names_operation_operands_and_path(kind, call, types):
    module = Module("m")
    with pytest.raises(EmitError) as error, module.function("f", **{f"x{i}": t for i, t in enumerate(types)}) as inputs:
        with scope("layers.3"), scope("attn.q"):
            call(*inputs)
    message = str(error.value)
    assert message.startswith(f"{kind}(") and " in layers.3.attn.q: " in message and "\n" not in message
    named = [str(t) for i, t in enumerate(types) if f"x{i}: {t}" in message]
    # Start indices are named only if they are wrong.
    assert named == [str(t) for t in types if t is not S or str(S) in named]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: ops.constant([1, 2], F32, (3,)), "constant"),
        (lambda: ops.iota((2, 3), 2), "iota"),
        (lambda: ops.iota((2, 3), 0, BF16), "iota"),
        (lambda: ops.iota((2,), 0, I1), "iota"),
        (lambda: ops.concatenate((), 0), "concatenate"),
        (lambda: ops.constant(300, I8), "constant"),
        (lambda: ops.constant(2**31, I32), "constant"),
    ],
)
def test_an_error_names_an_operation_without_operands(call, words):
    with pytest.raises(EmitError, match=rf"{words}\(\) in layers.1: "), Module("m").function("f"), scope("layers.1"):
        call()


def test_an_identity_is_not_appended():
    module = Module("m")
    with module.function("f", x=F4, s=TensorType((), F32)) as (x, s):
        assert ops.convert(x, F32) is x and ops.reshape(x, (4,)) is x and ops.dynamic_slice(s, (), ()) is s
        assert current_function().ops == []
        current_function().returns(x=x, s=s)
