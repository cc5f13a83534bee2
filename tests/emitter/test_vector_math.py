"""exp, tanh and lane operations in kernels: errors in ulp, limits, and every width."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.emitter.graph.types import F32, TensorType
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.body import Body, Ssa, vector_type
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.kernels.mlir.vector_math import exp, exp2, lane_max, lane_sums, transpose
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, compile_kernels

COUNT = 1 << 16
FUNCTIONS = {"exp": exp, "exp2": exp2, "tanh": lambda b, x: b.math("tanh", x)}
ERRORS = {  # name: NumPy's function, ulp, ranges of x
    "exp": (np.exp, 1.1, [(-87.3, 88.0), (-1.0, 1.0), (-20.0, 0.0), (-1e-3, 1e-3)]),
    "exp2": (np.exp2, 1.0, [(-126.0, 127.0), (-1.0, 1.0), (-30.0, 0.0), (-1e-3, 1e-3)]),
    "tanh": (np.tanh, 4.5, [(-9.0, 9.0), (-0.01, 0.01), (-1.0, 1.0)]),
}


def kernel_of(name: str, x: TensorType, out: TensorType, write) -> Kernel:
    return Kernel(name, {"x": x}, {"out": out}, 1, write, dict)


def elementwise(name: str, function, lanes: int) -> Kernel:
    types = (TensorType((COUNT,), F32),) * 2

    def write(b: Body, x: Ssa, out: Ssa) -> None:
        with b.loop(0, COUNT, lanes) as i:
            b.vstore(function(b, b.vload(x, lanes, i.index)), out, i.index)

    return kernel_of(name, *types, write)


def lanewise(name: str, rows: int, lanes: int, function) -> Kernel:
    """Return a kernel that stores the vectors of `function(body, vectors)`."""
    probe = function(Body(), [Ssa("%x", vector_type(lanes))] * rows)
    width = probe[0].width
    types = (TensorType((rows, lanes), F32), TensorType((len(probe), width), F32))

    def write(b: Body, x: Ssa, out: Ssa) -> None:
        for i, vector in enumerate(function(b, [b.vload(x, lanes, r, 0) for r in range(rows)])):
            b.vstore(vector, out, i, 0)

    return kernel_of(name, *types, write)


SHAPES = [(1 << r, 1 << w) for w in range(5) for r in range(w + 1)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    lanes = ISAS[resolve("host").isa].lanes
    kernels: dict = {name: elementwise(name, function, lanes) for name, function in FUNCTIONS.items()}
    kernels |= {(r, w): lanewise(f"sums{r}x{w}", r, w, lambda b, v: [lane_sums(b, v)]) for r, w in SHAPES}
    for w in (1, 2, 4, 8, 16):
        kernels["max", w] = lanewise(f"max{w}", 1, w, lambda b, v: [b.broadcast(lane_max(b, v[0]), 1)])
        kernels["transpose", w] = lanewise(f"transpose{w}", w, w, transpose)
    path = compile_kernels(list(kernels.values()), tmp_path_factory.mktemp("vector_math") / "host.vmfb")
    runner = Runner(path)
    return lambda which, x: runner(kernels[which], x=x)["out"]


@pytest.mark.parametrize("name", ERRORS)
def test_functions_are_within_their_error(run, name):
    function, limit, ranges = ERRORS[name]
    for low, high in ranges:
        x = np.linspace(low, high, COUNT, dtype=np.float32)
        want = function(x.astype(np.float64))
        assert np.max(np.abs(run(name, x) - want) / np.spacing(np.abs(want).astype(np.float32))) <= limit


def test_exp_has_limits(run):
    x = np.zeros(COUNT, np.float32)
    x[:7] = [-np.inf, -1e30, -127.0, -126.0, 0.0, -0.0, -3.0]
    assert run("exp2", x)[:7].tolist() == [0, 0, 0, 2.0**-126, 1, 1, 0.125]
    x[:8] = [-np.inf, -1e30, -88.0, -87.0, 0.0, -0.0, 1e30, np.inf]
    got = run("exp", x)[:8]
    assert got[0] == got[1] == got[2] == 0 and got[3] > 0
    assert got[4] == got[5] == 1
    assert np.isfinite(got[6]) and got[6] == got[7] > 1e38


@pytest.mark.parametrize("rows, lanes", SHAPES)
def test_lane_sums_keep_their_order(run, rows, lanes):
    x = np.random.default_rng(rows * lanes).integers(-1000, 1000, (rows, lanes)).astype(np.float32)
    assert np.array_equal(run((rows, lanes), x)[0], x.sum(axis=1))


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_lane_max_and_transpose(run, lanes):
    x = np.random.default_rng(lanes).standard_normal((lanes, lanes)).astype(np.float32)
    assert run(("max", lanes), x[:1]) == x[0].max()
    assert np.array_equal(run(("transpose", lanes), x), x.T)
