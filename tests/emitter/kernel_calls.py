"""Kernels called with the runtime alone, as on a CPU that has no compiler.

`python -m tests.emitter.kernel_calls VMFB CALLS OUT`: CALLS is an .npz file whose entries are
operands, those of one call after another, `N/FUNCTION/operand`; OUT gets the first result of each
call, as `N`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import iree.runtime as rt
import numpy as np


def write_calls(path: Path, calls: Sequence[tuple[str, Sequence[np.ndarray]]]) -> None:
    """Functions and their operands, in order."""
    numbered = enumerate(calls)
    np.savez(path, **{f"{n}/{name}/{i}": x for n, (name, given) in numbered for i, x in enumerate(given)})


def read_results(path: Path) -> list[np.ndarray]:
    with np.load(path) as found:
        return list(found.values())


def main(vmfb: str, calls: str, out: str) -> None:
    rt.flags.parse_flags("--task_topology_group_count=2", "--task_worker_stack_size=1048576")
    device = rt.get_driver("local-task").create_default_device()
    config = rt.Config(device=device)
    modules = rt.load_vm_module(rt.VmModule.mmap(config.vm_instance, vmfb), config)
    results = {}
    with np.load(calls) as given:
        for call, names in groupby(given.files, lambda name: name.rsplit("/", 1)[0]):
            number, function = call.split("/")
            results[number] = modules[function](*[rt.asdevicearray(device, given[name]) for name in names]).to_host()
    np.savez(out, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
