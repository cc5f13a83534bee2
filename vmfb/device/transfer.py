"""Copy parts of buffers between host and device memory.

The Python API of the IREE runtime copies only complete buffers. So each GPU bundle contains
compiled functions that copy parts of buffers with operations of IREE's HAL; their MLIR is `TEXT`.
"""

from __future__ import annotations

from collections.abc import Iterator

import iree.runtime as rt
import numpy as np

from castiron.vmfb.device.cpu_device import vm_instance
from castiron.vmfb.device.program import RUNTIME_ERRORS, SessionError, release_at_exit, runtime_reason

# transfer_part: a part of a buffer. transfer_fill: zeros. transfer_copy: `count` blocks of `length` bytes; in both buffers
# one block follows the other after a stride (`..._by`). transfer_best: the argmax of each row of logits, then its logits.
# start_copy: one block; it returns before the copy is done. All offsets and lengths are in bytes.
TEXT = """
  util.func public @transfer_part(%view: !hal.buffer_view, %offset: i64, %length: i64) -> !hal.buffer {
    %o = arith.index_cast %offset : i64 to index
    %l = arith.index_cast %length : i64 to index
    %buffer = hal.buffer_view.buffer<%view : !hal.buffer_view> : !hal.buffer
    %part = hal.buffer.subspan<%buffer : !hal.buffer>[%o, %l] : !hal.buffer
    util.return %part : !hal.buffer
  }
  util.func private @await(%fence: !hal.fence) {
    %timeout = arith.constant -1 : i32
    %status = hal.fence.await until([%fence]) timeout_millis(%timeout) flags("None") : i32
    util.status.check_ok %status, "copy failed"
    util.return
  }
  util.func private @start_copy(%before: !hal.fence, %source: !hal.buffer, %source_at: index, %target: !hal.buffer,
                                %target_at: index, %length: index) -> !hal.fence {
    %zero = arith.constant 0 : index
    %any = arith.constant -1 : i64
    %device = hal.devices.get %zero : !hal.device
    %done = hal.fence.create device(%device : !hal.device) flags("None") : !hal.fence
    hal.device.queue.copy<%device : !hal.device> affinity(%any) wait(%before) signal(%done)
      source(%source : !hal.buffer)[%source_at] target(%target : !hal.buffer)[%target_at] length(%length) flags("None")
    util.return %done : !hal.fence
  }
  util.func public @transfer_fill(%view: !hal.buffer_view, %offset: i64, %length: i64) {
    %zero = arith.constant 0 : index
    %o = arith.index_cast %offset : i64 to index
    %l = arith.index_cast %length : i64 to index
    %pattern = arith.constant 0 : i8
    %any = arith.constant -1 : i64
    %device = hal.devices.get %zero : !hal.device
    %buffer = hal.buffer_view.buffer<%view : !hal.buffer_view> : !hal.buffer
    %none = util.null : !hal.fence
    %done = hal.fence.create device(%device : !hal.device) flags("None") : !hal.fence
    hal.device.queue.fill<%device : !hal.device> affinity(%any) wait(%none) signal(%done)
      target(%buffer : !hal.buffer)[%o] length(%l) pattern(%pattern : i8) flags("None")
    util.call @await(%done) : (!hal.fence) -> ()
    util.return
  }
  util.func public @transfer_copy(%from: !hal.buffer_view, %from_at: i64, %from_by: i64, %to: !hal.buffer_view, %to_at: i64,
                                  %to_by: i64, %length: i64, %count: i64) {
    %zero = arith.constant 0 : index
    %one = arith.constant 1 : index
    %n = arith.index_cast %count : i64 to index
    %l = arith.index_cast %length : i64 to index
    %source_at = arith.index_cast %from_at : i64 to index
    %source_by = arith.index_cast %from_by : i64 to index
    %target_at = arith.index_cast %to_at : i64 to index
    %target_by = arith.index_cast %to_by : i64 to index
    %source = hal.buffer_view.buffer<%from : !hal.buffer_view> : !hal.buffer
    %target = hal.buffer_view.buffer<%to : !hal.buffer_view> : !hal.buffer
    %none = util.null : !hal.fence
    %last = scf.for %i = %zero to %n step %one iter_args(%before = %none) -> (!hal.fence) {
      %source_step = arith.muli %i, %source_by : index
      %target_step = arith.muli %i, %target_by : index
      %s = arith.addi %source_at, %source_step : index
      %t = arith.addi %target_at, %target_step : index
      %done = util.call @start_copy(%before, %source, %s, %target, %t, %l)
        : (!hal.fence, !hal.buffer, index, !hal.buffer, index, index) -> !hal.fence
      scf.yield %done : !hal.fence
    }
    util.call @await(%last) : (!hal.fence) -> ()
    util.return
  }
  util.func public @transfer_best(%argmax: !hal.buffer_view, %logits: !hal.buffer_view, %host: !hal.buffer_view, %rows: i64,
                                  %vocab: i64) {
    %zero = arith.constant 0 : index
    %one = arith.constant 1 : index
    %four = arith.constant 4 : index
    %n = arith.index_cast %rows : i64 to index
    %v = arith.index_cast %vocab : i64 to index
    %ids = arith.muli %n, %four : index
    %best = hal.buffer_view.buffer<%argmax : !hal.buffer_view> : !hal.buffer
    %values = hal.buffer_view.buffer<%logits : !hal.buffer_view> : !hal.buffer
    %target = hal.buffer_view.buffer<%host : !hal.buffer_view> : !hal.buffer
    %none = util.null : !hal.fence
    %first = util.call @start_copy(%none, %best, %zero, %target, %zero, %ids)
      : (!hal.fence, !hal.buffer, index, !hal.buffer, index, index) -> !hal.fence
    util.call @await(%first) : (!hal.fence) -> ()
    %last = scf.for %i = %zero to %n step %one iter_args(%before = %none) -> (!hal.fence) {
      %at = arith.muli %i, %four : index
      %id = hal.buffer.load<%target : !hal.buffer>[%at] : i32
      %column = arith.index_cast %id : i32 to index
      %row = arith.muli %i, %v : index
      %element = arith.addi %row, %column : index
      %s = arith.muli %element, %four : index
      %t = arith.addi %ids, %at : index
      %done = util.call @start_copy(%before, %values, %s, %target, %t, %four)
        : (!hal.fence, !hal.buffer, index, !hal.buffer, index, index) -> !hal.fence
      scf.yield %done : !hal.fence
    }
    util.call @await(%last) : (!hal.fence) -> ()
    util.return
  }
"""

_HOST = int(rt.MemoryType.HOST_LOCAL) | int(rt.MemoryType.DEVICE_VISIBLE)
_USAGE = int(rt.BufferUsage.DEFAULT) | int(rt.BufferUsage.MAPPING)
# Types of host memory, the best first. Reading memory that the CPU does not cache is slow.
_HOST_TYPES = (_HOST | int(rt.MemoryType.HOST_COHERENT) | int(rt.MemoryType.HOST_CACHED), _HOST)
# Bytes of host memory through which the parts of a state are copied; a longer block gets its own length.
STAGING_BYTES = 2**24


class HostMemory:
    """Memory of the host that the GPU can access: `array` of bytes, and its HalBufferView."""

    def __init__(self, device: rt.HalDevice, nbytes: int):
        # Drivers allocate complete pages.
        nbytes = max(1, nbytes) + -nbytes % 4096
        buffer = _allocate(device.allocator, nbytes)
        # The array does not keep the mapping alive.
        self._mapped = buffer.map()
        self.array: np.ndarray = self._mapped.asarray((nbytes,), np.dtype(np.uint8))
        self.array[:] = 0
        self.view = rt.HalBufferView(buffer, (nbytes,), rt.HalElementType.UINT_8)
        release_at_exit(self, "array", "_mapped", "view")


def _allocate(allocator: rt.HalAllocator, nbytes: int) -> rt.HalBuffer:
    for memory_type in _HOST_TYPES[:-1]:
        try:
            return allocator.allocate_buffer(memory_type, _USAGE, nbytes)
        except (RuntimeError, ValueError):
            # This GPU has no such memory.
            continue
    return allocator.allocate_buffer(_HOST_TYPES[-1], _USAGE, nbytes)


class Transfer:
    """Copies parts of device buffers; offsets, strides and lengths are in bytes."""

    def __init__(self, device: rt.HalDevice, parameters: rt.VmModule, module: rt.VmModule):
        """Load the functions of `module` (device.vmfb); `parameters`: IREE's module of weights."""
        self.device, self._module = device, module
        self._context = rt.VmContext(vm_instance(), [rt.create_hal_module(vm_instance(), device), parameters, module])
        self._functions = {name: module.lookup_function(f"transfer_{name}") for name in ("part", "fill", "copy", "best")}
        self._staging = HostMemory(device, STAGING_BYTES)
        release_at_exit(self, "_staging", "_functions", "_context", "_module", "device")

    def part(self, view: rt.HalBufferView, offset: int, length: int) -> rt.HalBuffer:
        """Return a view of `length` bytes of a buffer from `offset` on; nothing is copied."""
        return self._call("part", view, offset, length).get_as_object(0, rt.HalBuffer)

    def fill(self, view: rt.HalBufferView, offset: int, length: int) -> None:
        self._call("fill", view, offset, length)

    def copy(
        self, source: rt.HalBufferView, source_at: int, source_by: int, target: rt.HalBufferView, target_at: int,
        target_by: int, length: int, count: int,
    ) -> None:  # fmt: skip
        """Copy `count` blocks of `length` bytes, from offset `_at`, one every `_by` bytes."""
        if source_by == target_by == length:
            length, count = length * count, 1
        if length and count:
            self._call("copy", source, source_at, source_by, target, target_at, target_by, length, count)

    def upload(self, data: np.ndarray, target: rt.HalBufferView, at: int, by: int) -> None:
        """Copy the rows of `data`, u8 `[rows, length]`, to offset `at`, one every `by` bytes."""
        length = data.shape[1]
        for first, rows, staging in self._chunks(*data.shape):
            staging.array[: rows * length] = data[first : first + rows].reshape(-1)
            self.copy(staging.view, 0, length, target, at + first * by, by, length, rows)

    def download(self, source: rt.HalBufferView, at: int, by: int, length: int, count: int) -> np.ndarray:
        """Return blocks as u8 `[count, length]`, from offset `at`, one every `by` bytes."""
        found = np.empty((count, length), np.uint8)
        for first, rows, staging in self._chunks(count, length):
            self.copy(source, at + first * by, by, staging.view, 0, length, length, rows)
            found[first : first + rows] = staging.array[: rows * length].reshape(rows, length)
        return found

    def best(self, argmax: rt.HalBufferView, logits: rt.HalBufferView, rows: int, vocab: int) -> list[int]:
        """Return `argmax`, i32 `[rows]`; -1 where the largest of `logits [rows, vocab]` is NaN."""
        self._call("best", argmax, logits, self._staging.view, rows, vocab)
        words = self._staging.array[: 8 * rows]
        unfit = np.isnan(words[4 * rows :].view(np.float32))
        return np.where(unfit, -1, words[: 4 * rows].view(np.int32)).tolist()

    def run(self, name: str) -> np.ndarray:
        """Call `name`, a function of device.vmfb without operands; return its result, f32 `[n]`."""
        results = rt.VmVariantList(1)
        self._invoke(self._module.lookup_function(name), rt.VmVariantList(0), results)
        view = results.get_as_object(0, rt.HalBufferView)
        nbytes = 4 * int(np.prod(view.shape))
        return self.download(view, 0, nbytes, nbytes, 1)[0].view(np.float32)

    def _chunks(self, count: int, length: int) -> Iterator[tuple[int, int, HostMemory]]:
        if not count or not length:
            return
        if length > self._staging.array.size:
            self._staging = HostMemory(self.device, length)
        step = self._staging.array.size // length
        for first in range(0, count, step):
            yield first, min(step, count - first), self._staging

    def _call(self, name: str, *arguments: rt.HalBufferView | int) -> rt.VmVariantList:
        given, results = rt.VmVariantList(len(arguments)), rt.VmVariantList(1)
        for argument in arguments:
            if isinstance(argument, int):
                given.push_int(argument)
            else:
                given.push_ref(argument)
        self._invoke(self._functions[name], given, results)
        return results

    def _invoke(self, function: rt.VmFunction, given: rt.VmVariantList, results: rt.VmVariantList) -> None:
        try:
            self._context.invoke(function, given, results)
        except RUNTIME_ERRORS as error:
            raise SessionError(
                f"the GPU failed in {function.name} ({runtime_reason(error)}); see the log of the GPU driver"
            ) from None
