"""Compile GPU kernels as one module and run them on llvmpipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import iree.runtime as rt
import numpy as np

from castiron.emitter.graph.types import BF16, TensorType
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.layers.kv_cache import CACHES
from castiron.vmfb.device.gpus import find_device, open_device
from tests.emitter.kernel_runner import INDEX, compile_kernels

_HOST = rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE
_USAGE = rt.BufferUsage.TRANSFER | rt.BufferUsage.MAPPING


@cache
def _device() -> rt.HalDevice:
    return open_device(find_device("vulkan"))


class GpuRunner:
    """GPU kernels, compiled for Vulkan and loaded on the first Vulkan device."""

    def __init__(self, kernels: Sequence[Kernel], folder: Path):
        self.device = _device()
        path = compile_kernels(kernels, folder / "kernels.vmfb", "vulkan")
        config = rt.Config(device=self.device)
        self.modules = rt.load_vm_module(rt.VmModule.copy_buffer(config.vm_instance, path.read_bytes()), config)

    def __call__(self, kernel: Kernel, operands: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Call a kernel and return its results by name; index operands are INDEX."""
        given = [self._operand(np.array(operands[name], order="C"), type_) for name, type_ in kernel.tensors.items()]
        results = self.modules[f"call_{kernel.name}"](*given)
        results = results if isinstance(results, tuple | list) else (results,)
        return {name: self._read(result) for name, result in zip(kernel.results, results, strict=True)}

    def _operand(self, array: np.ndarray, type_: TensorType) -> rt.DeviceArray | rt.HalBufferView:
        if type_.dtype is not BF16:
            return rt.asdevicearray(self.device, array)
        # NumPy has no type for bf16.
        return self.device.allocator.allocate_buffer_copy(
            memory_type=rt.MemoryType.DEVICE_LOCAL,
            allowed_usage=rt.BufferUsage.DEFAULT,
            device=self.device,
            buffer=array,
            element_type=rt.HalElementType.BFLOAT_16,
        )

    def _read(self, array: rt.DeviceArray) -> np.ndarray:
        source = array._buffer_view.get_buffer()
        size = source.byte_length()
        target = self.device.allocator.allocate_buffer(memory_type=_HOST, allowed_usage=_USAGE, allocation_size=size)
        done = rt.HalFence.create_at(self.device.create_semaphore(0), 1)
        self.device.queue_copy(source, target, rt.HalFence(0), done)
        done.wait()
        return target.map().asarray(array.shape, array.dtype).copy()


def check(run: GpuRunner, kernel: Kernel, operands: Mapping[str, np.ndarray], tolerance: float = 2e-6) -> None:
    """Compare a kernel with its definition; tolerance: error as a share of the largest result.

    The rows of q8_0 caches are compared as values.
    """
    values = lambda x: (CACHES["q8_0"].values(x) if x.dtype == np.int8 else x).astype(np.float64)
    got = run(kernel, operands)
    wanted = kernel.reference(**operands, **dict.fromkeys(kernel.indices, INDEX))
    for name, want in wanted.items():
        error = np.abs(values(got[name]) - values(want)).max()
        assert error <= tolerance * np.abs(values(want)).max(), (kernel.name, name, error)
