"""The GPUs that the IREE runtime can use on this machine: list, describe and open them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import iree.runtime as rt
from iree.runtime._binding import create_hal_driver

from castiron.vmfb.device.cpu_device import shared_device
from castiron.vmfb.device.program import RUNTIME_ERRORS

# Drivers of the runtime for GPUs, and what is missing if the driver cannot be loaded.
DRIVERS = {
    "vulkan": "the Vulkan loader libvulkan.so.1 and a driver (ICD) of the GPU",
    "cuda": "NVIDIA's driver with libcuda.so",
    "hip": "AMD's ROCm with libamdhip64.so",
    "metal": "macOS on an Apple GPU, and a runtime with Metal",
}
LESS_MEMORY = "use a smaller model or --weights, --context or --batch with smaller values"
# Kernel modules whose version is part of a GPU driver's version.
_VERSIONS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


class DeviceError(Exception):
    """Raised for a device that does not exist, lacks memory, or computes wrong results."""


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU as its driver describes it.

    id: driver and number, such as "vulkan:0". memory: bytes; None if the driver does not report it.
    features: names of the GPU's features and, if known, of its architecture.
    """

    id: str
    driver: str
    name: str
    memory: int | None
    version: str
    features: tuple[str, ...]


def devices_of(driver: str) -> tuple[DeviceInfo, ...]:
    """Return the GPUs of a driver such as "vulkan"; raise DeviceError if it cannot be used."""
    with device_errors(f"cannot use {driver}", f"it needs {DRIVERS[driver]}"):
        loaded = create_hal_driver(driver)
        return tuple(
            _describe(driver, number, device["name"], loaded.dump_device_info(device["device_id"]))
            for number, device in enumerate(loaded.query_available_devices())
        )


def find_device(driver: str, chosen: str | None = None) -> DeviceInfo:
    """Return the GPU `chosen`, such as "cuda:1" or "cuda", or else the driver's first GPU.

    DeviceError if there is no such GPU.
    """
    number = (chosen or driver).partition(":")[2]
    found = {device.id: device for device in devices_of(driver)}
    if not found:
        raise DeviceError(f"no {driver} device on this machine; run castiron devices to list its devices")
    if (wanted := f"{driver}:{number or 0}") not in found:
        raise DeviceError(f"unknown device: {chosen}; choose one of {', '.join(found)}")
    return found[wanted]


def open_device(info: DeviceInfo) -> rt.HalDevice:
    """Return a GPU as an IREE device, always the same; DeviceError if the driver cannot."""

    def create() -> rt.HalDevice:
        driver = create_hal_driver(info.driver)
        return driver.create_device(driver.query_available_devices()[int(info.id.partition(":")[2])])

    with device_errors(f"cannot open {info.id}", "update the driver, or choose another --device"):
        return shared_device(info.id, create)


@contextmanager
def device_errors(failure: str, remedy: str) -> Iterator[None]:
    """Turn an exception of the runtime into a DeviceError: `failure` (reason); `remedy`."""
    try:
        yield
    except RUNTIME_ERRORS as error:
        reason = " ".join(str(error).split("; ", 1)[-1].split())[:160]
        raise DeviceError(f"{failure} ({reason}); {remedy}") from None


def allocating(nbytes: int, info: DeviceInfo) -> AbstractContextManager[None]:
    """Return a context manager that turns a failed allocation of `nbytes` into a DeviceError."""
    return device_errors(f"cannot allocate {nbytes / 1e9:.2f} GB on {info.id}", LESS_MEMORY)


def _describe(driver: str, number: int, name: str, text: str) -> DeviceInfo:
    # `text` is the driver's description of the device, with lines of `key: value`.
    fields = dict(re.findall(r"^[- ]*([\w-]+): (.+)$", text, re.MULTILINE))
    # Flag 1 of a heap of Vulkan: the heap is the device's own memory.
    heaps = [int(size) for size in re.findall(r"\] size=(\d+) flags=0x\d*[13579bdf]$", text, re.MULTILINE)]
    versions = [fields[key] for key in ("api", "driver", "driver_info") if key in fields]
    architecture = [fields[key] for key in ("gpu-arch-name", "gpu-compute-capability") if key in fields]
    features = re.findall(r"(\w+)=yes", fields.get("features", "")) + architecture
    memory, version = _cuda_facts(number) if driver == "cuda" else (max(heaps, default=None), "")
    for path in _VERSIONS:
        with suppress(OSError):
            versions.append(path.read_text().splitlines()[0].strip())
    return DeviceInfo(
        f"{driver}:{number}", driver, name, memory, ", ".join(filter(None, [*versions, version])), tuple(features)
    )


def _cuda_facts(number: int) -> tuple[int | None, str]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        version, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        calls = (
            lambda: cuda.cuInit(0),
            lambda: cuda.cuDriverGetVersion(ctypes.byref(version)),
            lambda: cuda.cuDeviceGet(ctypes.byref(device), number),
            lambda: cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device),
        )
        failed = any(call() for call in calls)
    except (OSError, AttributeError):
        failed = True
    return (None, "") if failed else (size.value, f"CUDA {version.value // 1000}.{version.value % 1000 // 10}")
