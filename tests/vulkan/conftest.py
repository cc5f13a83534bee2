"""Tests on llvmpipe, Mesa's Vulkan device on the CPU; `make test-vulkan` fetches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.reference.tiny import tiny_model
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.device.gpus import DeviceError, devices_of


@pytest.fixture(scope="session", autouse=True)
def llvmpipe() -> str:
    """Skip the tests without llvmpipe; return the id of its device."""
    try:
        found = [device.id for device in devices_of("vulkan") if "llvmpipe" in device.name]
    except DeviceError:
        found = []
    if not found:
        pytest.skip("no llvmpipe; make test-vulkan fetches it")
    return found[0]


@dataclass(frozen=True)
class Bundles:
    """A model, compiled for this CPU and for Vulkan."""

    checkpoint: Path
    cpu: Bundle
    gpu: Bundle


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Callable[..., Bundles]:
    """Return a function that compiles a tiny model of a family; equal arguments share it."""
    made: dict[str, Bundles] = {}

    def compile_both(family: str, config: dict | None = None, **options) -> Bundles:
        key = repr((family, config, options))
        if key not in made:
            folder = tmp_path_factory.mktemp("vulkan")
            checkpoint = tiny_model(family, folder / "checkpoint", **(config or {}))
            cpu, gpu = (
                open_bundle(compile_model(checkpoint, folder / target, Options(target=target, **options)).bundle)
                for target in ("host", "vulkan")
            )
            made[key] = Bundles(checkpoint, cpu, gpu)
        return made[key]

    return compile_both
