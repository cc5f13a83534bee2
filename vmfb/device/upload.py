"""Upload the weights of a bundle to a GPU, for all modules of the bundle, with progress."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Mapping

import iree.runtime as rt
import numpy as np
from iree.runtime._binding import PyModuleInterface

from castiron.vmfb.device.gpus import DeviceError, DeviceInfo, allocating

# The runtime's module through which compiled modules load parameters, and its function with its calling convention:
# (device, affinity, wait fence, signal fence, scope, affinity, memory type, usage, key table, keys, spans) -> buffers.
MODULE, FUNCTION, CONVENTION = "io_parameters", "load", "0rIrrrIiirrr_r"
# Offset and length of a key in the text of all keys; offset in the parameter, offset in the buffer, and length.
_KEY, _SPAN = struct.Struct("<II"), struct.Struct("<QQQ")


class Upload:
    """Uploads the weights of a bundle to device memory, once for all its compiled modules.

    The runtime's own parameter module uploads them once per module, without progress.
    """

    def __init__(
        self,
        info: DeviceInfo,
        device: rt.HalDevice,
        tensors: Mapping[str, memoryview],
        progress: Callable[[int, int], None] | None = None,
    ):
        """Upload `tensors` when compiled modules are loaded.

        progress: called with (bytes uploaded, total) after every tensor.
        """
        self._info, self._device, self._tensors, self._progress = info, device, tensors, progress
        self._total, self._done = sum(map(len, tensors.values())), 0
        self._buffers: dict[tuple[str, int, int], rt.HalBuffer] = {}
        # The error of `_load`, which the runtime turns into an error of its own.
        self.error: DeviceError | None = None
        # Not `self`: the runtime's objects do not take part in garbage collection.
        own = weakref.ref(self)
        self._interface = PyModuleInterface(MODULE, lambda interface: own())
        self._interface.export(FUNCTION, CONVENTION, Upload._load)
        self.module = self._interface.create()

    def finish(self) -> None:
        """Drop the references to all memory; compiled modules keep the device buffers alive."""
        self._tensors = {}
        self._buffers.clear()

    def _load(
        self, device, affinity, wait, signal, scope, target_affinity, memory_type, usage, key_table, keys, spans
    ) -> rt.VmRef:  # fmt: skip
        """Upload the weights of a compiled module; return a list of their device buffers."""
        try:
            table, text, extents = (bytes(memoryview(ref.deref(rt.VmBuffer))) for ref in (key_table, keys, spans))
            found = rt.VmVariantList(len(table) // _KEY.size)
            for (at, length), (start, _, size) in zip(_KEY.iter_unpack(table), _SPAN.iter_unpack(extents), strict=True):
                found.push_ref(self._buffer(text[at : at + length].decode(), start, size, memory_type, usage))
            signal.deref(rt.HalFence).signal()
            return found.ref
        except DeviceError as error:
            self.error = error
            raise

    def _buffer(self, name: str, start: int, size: int, memory_type: int, usage: int) -> rt.HalBuffer:
        key = name, start, size
        if key not in self._buffers:
            data = self._tensors[name][start : start + size]
            if len(data) != size:
                raise ValueError(
                    f"parameter {name} has {len(self._tensors[name])} bytes, but the model reads {start + size}; "
                    "compile the bundle again"
                )
            with allocating(size, self._info):
                self._buffers[key] = self._device.allocator.allocate_buffer_copy(
                    memory_type=memory_type,
                    allowed_usage=usage | int(rt.BufferUsage.TRANSFER),
                    device=self._device,
                    buffer=np.frombuffer(data, np.uint8),
                )
            self._done += size
            if self._progress:
                self._progress(min(self._done, self._total), self._total)
        return self._buffers[key]
