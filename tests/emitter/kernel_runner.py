"""Compile kernels as one module and run them under IREE, on one or two threads."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import iree.runtime as rt
import numpy as np
from iree.runtime._binding import create_hal_driver

from castiron.emitter.graph.ir import Module, current_function
from castiron.emitter.graph.printer import print_module
from castiron.emitter.kernels.kernel import Kernel, kernel_call
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.device.cpu_device import STACK_BYTES
from castiron.vmfb.targets import missing_features, resolve

THREADS = {1: "local-sync", 2: "local-task"}
# The value of every index operand, such as the number of a layer.
INDEX = 1


def module_text(kernels: Sequence[Kernel]) -> str:
    """Return a module with a function `call_{name}` for each kernel; index operands are INDEX."""
    module = Module("kernels")
    for kernel in kernels:
        with module.function(f"call_{kernel.name}", **kernel.tensors) as inputs:
            given = dict(zip(kernel.tensors, inputs, strict=True))
            results = kernel_call(kernel, **given, **dict.fromkeys(kernel.indices, INDEX))
            storage = {i: given[kernel.in_place[name]] for i, name in enumerate(results) if name in kernel.in_place}
            current_function().returns(storage, **results)
    return print_module(module)


def texts_by_name(kernels: Iterable[Kernel]) -> dict[str, str]:
    """Return the text of each kernel; fail if kernels of one name have two texts."""
    texts: dict[str, str] = {}
    for kernel in kernels:
        assert texts.setdefault(kernel.name, kernel.text) == kernel.text, kernel.name
    return texts


def compile_kernels(kernels: Sequence[Kernel], out: Path, target: str = "host") -> Path:
    compile_mlir(module_text(kernels), resolve(target), out)
    return out


def runnable(kernels: Sequence[Kernel], target: str, directory: Path, plain: Sequence[Kernel] | None = None) -> Path:
    """Compile kernels for `target`, and return a module that this CPU can run.

    If this CPU cannot run `target`, the kernels, or `plain` (their form without special
    instructions), are compiled for this CPU too: lanes, tiles and edges stay the same.
    """
    path = compile_kernels(kernels, directory / f"{target}.vmfb", target)
    if missing_features(resolve(target)):
        path = compile_kernels(plain or kernels, directory / f"{target}-here.vmfb", "host")
    return path


@cache
def _device(driver: str) -> rt.HalDevice:
    rt.flags.parse_flags("--task_topology_group_count=2", f"--task_worker_stack_size={STACK_BYTES}")
    return create_hal_driver(driver).create_default_device()


# The runtime reports devices that outlive the interpreter as leaks.
atexit.register(_device.cache_clear)


class Runner:
    """The kernels of a .vmfb file on a device with 1 or 2 threads."""

    def __init__(self, path: Path, threads: int = 1):
        self.device = _device(THREADS[threads])
        config = rt.Config(device=self.device)
        self.modules = rt.load_vm_module(rt.VmModule.mmap(config.vm_instance, str(path)), config)

    def __call__(self, kernel: Kernel, /, **operands: np.ndarray | int) -> dict[str, np.ndarray]:
        """Call a kernel and return its results by name; the caller's arrays do not change."""
        assert operands.keys() == kernel.operands.keys(), f"{kernel.name} takes {', '.join(kernel.operands)}"
        assert all(operands[name] == INDEX for name in kernel.indices), f"{kernel.name} is compiled for {INDEX}"
        given = [rt.asdevicearray(self.device, np.asarray(operands[name], order="C")) for name in kernel.tensors]
        results = self.modules[f"call_{kernel.name}"](*given)
        results = results if isinstance(results, tuple | list) else (results,)
        return {name: np.array(r.to_host()) for name, r in zip(kernel.results, results, strict=True)}
