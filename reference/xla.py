"""Run StableHLO text with XLA on the CPU, to check castiron's StableHLO with a second compiler.

jax is imported inside functions, so that tests that do not call them run without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import ml_dtypes
import numpy as np

from castiron.emitter.graph.types import DTYPES


def run_stablehlo(text: str, function: str, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run `function` of the MLIR module `text` on `args`; return its results.

    Arrays of bf16, in arguments and results, have the dtype uint16. An i8 argument may be uint8.
    """
    return compile_stablehlo(text, function)(args)


@lru_cache(maxsize=64)
def compile_stablehlo(text: str, function: str) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """Compile `function` of an MLIR module; arguments and results are as in `run_stablehlo`."""
    import jax
    from jaxlib import xla_client

    text, types = _entry(text, function)
    device = jax.local_devices(backend="cpu")[0]
    options = xla_client.CompileOptions()
    # Only results matter here, not speed: LLVM's optimisations take more than half of the time.
    options.executable_build_options.debug_options.xla_backend_optimization_level = 0
    executable = device.client.compile_and_load(text, xla_client.DeviceList((device,)), options)

    def call(args: Sequence[np.ndarray]) -> list[np.ndarray]:
        if len(args) != len(types):
            raise ValueError(f"function {function} takes {len(types)} arguments, got {len(args)}; give an array for each")
        arrays = [jax.device_put(_given(np.asarray(a), *t), device) for a, t in zip(args, types)]
        return [_stored(np.asarray(result)) for result in executable.execute(arrays)]

    return call


def _entry(text: str, function: str) -> tuple[str, list[tuple[tuple[int, ...], np.dtype]]]:
    """Return the text with `function` renamed to `main`, and (shape, dtype) of each argument."""
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context

    with make_ir_context():
        try:
            module = ir.Module.parse(text)
        except ir.MLIRError as error:
            raise ValueError(f"cannot parse the StableHLO module: {error}; correct its text") from None
        found = None
        for op in list(module.body.operations):
            if op.attributes["sym_name"].value == function:
                found = op
            elif "sym_visibility" not in op.attributes or op.attributes["sym_visibility"].value != "private":
                op.erase()
        if found is None:
            raise ValueError(f"the StableHLO module has no function {function!r}; give the name of one that it defines")
        found.attributes["sym_name"] = ir.StringAttr.get("main")
        inputs = [ir.RankedTensorType(t) for t in ir.FunctionType(found.attributes["function_type"].value).inputs]
        return str(module), [(tuple(t.shape), _NUMPY[str(t.element_type)]) for t in inputs]


def _given(array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if (array.dtype, dtype) in _SAME_BITS:
        array = array.view(dtype)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"argument is an array of {array.dtype}{list(array.shape)}; it must be {dtype}{list(shape)}")
    return array


def _stored(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype == _BF16 else array


_BF16 = np.dtype(ml_dtypes.bfloat16)
_SAME_BITS = {(np.dtype(np.uint16), _BF16), (np.dtype(np.uint8), np.dtype(np.int8))}
_NUMPY = {name: dtype.numpy for name, dtype in DTYPES.items()} | {"bf16": _BF16}
