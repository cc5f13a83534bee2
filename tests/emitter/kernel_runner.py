"""Compile kernels as one module and run them under IREE, on one or two threads."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import iree.runtime as rt
import numpy as np
from iree.runtime._binding import create_hal_driver

from castiron.emitter.kernels.kernel import Kernel
from castiron.vmfb.compiler import compile_mlir
from castiron.vmfb.targets import Target, missing_features, resolve

THREADS = {1: "local-sync", 2: "local-task"}


def module_text(kernels: Sequence[Kernel]) -> str:
    """Return a module with a function `call_{name}` for each kernel; index operands are i32 arguments."""
    functions = []
    for kernel in kernels:
        arguments, casts = [], []
        names = {name: f"%n_{name}" if name in kernel.indices else f"%a_{name}" for name in kernel.operands}
        for name, operand in kernel.operands.items():
            if name in kernel.indices:
                arguments.append(f"%a_{name}: i32")
                casts.append(f"    %n_{name} = arith.index_cast %a_{name} : i32 to index\n")
                continue
            outputs = [i for i, result in enumerate(kernel.results) if kernel.in_place.get(result) == name]
            attribute = f" {{iree.abi.output = {outputs[0]} : index}}" if outputs else ""
            arguments.append(f"%a_{name}: {operand}{attribute}")
        results = [names[kernel.in_place[n]] if n in kernel.in_place else str(t) for n, t in kernel.results.items()]
        result = f"({', '.join(results)})" if len(results) > 1 else results[0]
        returned = ", ".join(f"%r#{i}" if len(results) > 1 else "%r" for i in range(len(results)))
        plain = ", ".join(map(str, kernel.results.values()))
        types = ", ".join(map(str, kernel.operands.values()))
        functions.append(
            f"  func.func @call_{kernel.name}({', '.join(arguments)}) -> ({plain}) {{\n{''.join(casts)}"
            f"    %r{f':{len(results)}' if len(results) > 1 else ''} = flow.dispatch @{kernel.name}::@{kernel.name}_fn"
            f"({', '.join(names.values())}) : ({types}) -> {result}\n    return {returned} : {plain}\n  }}\n"
        )
    return "module @kernels {\n" + "".join(k.text for k in kernels) + "".join(functions) + "}\n"


def compile_kernels(kernels: Sequence[Kernel], out: Path, target: str | Target = "host", flags: Sequence[str] = ()) -> Path:
    target = resolve(target) if isinstance(target, str) else target
    compile_mlir(module_text(kernels), target, out, extra_flags=flags)
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
    rt.flags.parse_flags("--task_topology_group_count=2")
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
        given = [operands[name] for name in kernel.operands]
        assert len(given) == len(operands), f"{kernel.name} takes {', '.join(kernel.operands)}"
        given = [a if isinstance(a, int) else rt.asdevicearray(self.device, np.asarray(a, order="C")) for a in given]
        results = self.modules[f"call_{kernel.name}"](*given)
        results = results if isinstance(results, tuple | list) else (results,)
        return {name: np.array(r.to_host()) for name, r in zip(kernel.results, results, strict=True)}
