"""Open a bundle on the device that it is compiled for."""

from __future__ import annotations

from pathlib import Path

from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.device.program import Program


def open_program(source: Bundle | Path | str, threads: int | None = None, slots: int = 1) -> Program:
    """Load a bundle on this machine's CPU or GPU.

    threads: of the CPU; None for one per physical core.
    slots: number of sequences that will run at once, to check the memory of a GPU.

    DeviceError if there is no GPU for the bundle, or if it lacks memory or computes wrong results.
    """
    bundle = open_bundle(source)
    if bundle.manifest.target.driver:
        # Imported late: a CPU needs no drivers.
        from castiron.vmfb.device.gpu_program import DeviceProgram, check_device

        program = DeviceProgram(bundle, slots)
        check_device(program)
        return program
    return Program(bundle, threads)
