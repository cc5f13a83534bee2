"""Open a bundle on the device that it is compiled for."""

from __future__ import annotations

from pathlib import Path

from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.program import Program


def open_program(source: Bundle | Path | str, threads: int | None = None, slots: int = 1) -> Program:
    """Load a bundle, or the bundle at a path, on this machine's CPU or GPU.

    threads: for a CPU; the default is the number of physical cores. slots: the number of sequences
    whose states will be allocated, for a GPU's memory.
    """
    bundle = open_bundle(source)
    if bundle.manifest.target.driver:
        # Imported late: a CPU needs no drivers.
        from castiron.vmfb.device_program import DeviceProgram

        return DeviceProgram(bundle, slots)
    return Program(bundle, threads)
