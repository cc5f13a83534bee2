"""A bundle loaded on a GPU: states stay in device memory; tokens and logits are copied.

Before a GPU runs a bundle, `check_device` runs a few fixed inputs on this GPU, and compares the
results with the expected results in the bundle's manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

import iree.runtime as rt
import numpy as np

from castiron.emitter.abi import Function
from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.bundle.irpa import read_irpa
from castiron.vmfb.bundle.manifest import DEVICE, WEIGHTS, BundleError, KnownAnswer
from castiron.vmfb.cache_folder import cache_root, keep
from castiron.vmfb.device.cpu_device import vm_instance
from castiron.vmfb.device.gpus import LESS_MEMORY, DeviceError, allocating, find_device, open_device
from castiron.vmfb.device.program import ELEMENTS, Buffer, Call, NanLogitsError, Program, release_at_exit
from castiron.vmfb.device.transfer import HostMemory, Transfer
from castiron.vmfb.device.upload import Upload

_LOCAL = int(rt.MemoryType.DEVICE_LOCAL)
_USAGE = int(rt.BufferUsage.DEFAULT)


class DeviceProgram(Program):
    """A bundle loaded on a GPU: `bundle.device`, or else the first GPU of the bundle's driver."""

    def __init__(self, bundle: Bundle, slots: int = 1):
        """Open the device, and upload the weights.

        slots: number of sequences whose states must fit in the memory. DeviceError if the device is
        absent or lacks memory.
        """
        self._bundle, manifest = bundle, bundle.manifest
        self.info = find_device(manifest.target.driver, bundle.device)
        needed = manifest.files[WEIGHTS].size + slots * sum(state.nbytes for state in manifest.states)
        if self.info.memory is not None and needed > self.info.memory:
            raise DeviceError(
                f"too little memory on {self.info.id} ({self.info.name}): {self.info.memory / 1e9:.2f} GB, but the model needs "
                f"{needed / 1e9:.2f} GB; {LESS_MEMORY}"
            )
        self._upload: Upload | None = None
        try:
            super().__init__(bundle, 1)
        except BundleError:
            if self._upload and self._upload.error:
                raise self._upload.error from None
            raise
        assert self._upload
        self._upload.finish()
        # The weights are in device memory.
        self._mapped = None

    def _open(self, threads: int) -> rt.HalDevice:
        return open_device(self.info)

    def _parameters(self, weights: Any) -> Callable[[], rt.VmModule]:
        self._upload = upload = Upload(self.info, self.device, read_irpa(weights), self._bundle.progress)
        module = rt.VmModule.copy_buffer(vm_instance(), self._bundle.part(DEVICE).read_bytes())
        self.transfer = Transfer(self.device, upload.module, module)
        release_at_exit(self, "transfer", "_upload")
        return lambda: upload.module

    def zeros(self, shape: Sequence[int], dtype: str) -> Buffer:
        return HostBuffer(self, tuple(shape), dtype)

    def state(self, shape: Sequence[int], dtype: str) -> Buffer:
        return DeviceBuffer(self, tuple(shape), dtype)

    def call(self, entry: Function, operands: Sequence[Buffer]) -> Call:
        return DeviceCall(self, entry, operands)


class HostBuffer(Buffer):
    """Host memory for token ids and positions, which the GPU reads."""

    def __init__(self, program: DeviceProgram, shape: tuple[int, ...], dtype: str):
        numpy_dtype, element = ELEMENTS[dtype]
        self._memory = HostMemory(program.device, prod(shape) * numpy_dtype.itemsize)
        self._flat = self._memory.array[: prod(shape) * numpy_dtype.itemsize].view(numpy_dtype)
        self.array = self._flat.reshape(shape)
        self._register(self._memory.view.get_buffer(), shape, element)


class DeviceBuffer(Buffer):
    """Device memory for a state; `array` is a `DeviceArray` instead of a NumPy array."""

    def __init__(self, program: DeviceProgram, shape: tuple[int, ...], dtype: str, array: DeviceArray | None = None):
        numpy_dtype, element = ELEMENTS[dtype]
        self._owner, self._dtype, nbytes = program, dtype, prod(shape) * numpy_dtype.itemsize
        if array is None:
            memory = DeviceMemory(program, nbytes)
            array = DeviceArray(memory, 0, nbytes // shape[0], shape, numpy_dtype)
            memory.transfer.fill(memory.view, 0, nbytes)
        self.array = array
        self._register(array.memory.transfer.part(array.memory.view, array.offset, nbytes), shape, element)

    def part(self, start: int, stop: int) -> Buffer:
        return DeviceBuffer(self._owner, (stop - start, *self.array.shape[1:]), self._dtype, self.array[start:stop])


class DeviceMemory:
    """Memory of a GPU, which several arrays may share; `view` is its HalBufferView."""

    def __init__(self, program: DeviceProgram, nbytes: int):
        with allocating(nbytes, program.info):
            buffer = program.device.allocator.allocate_buffer(_LOCAL, _USAGE, nbytes)
        self.view = rt.HalBufferView(buffer, (nbytes,), rt.HalElementType.UINT_8)
        self.transfer = program.transfer
        release_at_exit(self, "view")


class DeviceArray:
    """An array in device memory, with the few operations of NumPy arrays that states need.

    `array[a:b]` and `array[a:b, :c]` share the memory. A NumPy array that is assigned to a part is
    uploaded, a `DeviceArray` is copied on the device. `copy` and `numpy.asarray` download.
    """

    def __init__(self, memory: DeviceMemory, offset: int, stride: int, shape: tuple[int, ...], dtype: np.dtype):
        """Create an array in existing memory.

        offset: bytes before the first element. stride: bytes from one index of dimension 0 to the
        next; within an index, elements are contiguous.
        """
        self.memory, self.offset, self._stride, self.shape, self.dtype = memory, offset, stride, shape, dtype
        self.size = prod(shape)
        self.nbytes = self.size * dtype.itemsize
        # Bytes of an element of dimension 0, which are adjacent.
        self._block = prod(shape[1:]) * dtype.itemsize

    def __getitem__(self, index: slice | tuple[slice, slice]) -> DeviceArray:
        first, second = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = first.indices(self.shape[0])
        shape = (stop - start, *self.shape[1:])
        if second != slice(None):
            begin, end, _ = second.indices(self.shape[1])
            assert begin == 0, "a part of a state begins at its first position"
            shape = (shape[0], end, *shape[2:])
        return DeviceArray(self.memory, self.offset + start * self._stride, self._stride, shape, self.dtype)

    def __setitem__(self, index: slice | tuple[slice, slice], value: DeviceArray | np.ndarray | int) -> None:
        own = self[index]
        view, transfer = own.memory.view, own.memory.transfer
        if isinstance(value, DeviceArray):
            assert value.shape == own.shape, f"shape {value.shape} differs from {own.shape}"
            source = value.memory.view, value.offset, value._stride
            transfer.copy(*source, view, own.offset, own._stride, own._block, own.shape[0])
            return
        rows = np.ascontiguousarray(np.broadcast_to(np.asarray(value, own.dtype), own.shape))
        transfer.upload(rows.reshape(-1).view(np.uint8).reshape(own.shape[0], own._block), view, own.offset, own._stride)

    def copy(self) -> np.ndarray:
        memory = self.memory
        data = memory.transfer.download(memory.view, self.offset, self._stride, self._block, self.shape[0])
        return data.reshape(-1).view(self.dtype).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.copy() if dtype is None else self.copy().astype(dtype)


class DeviceCall(Call):
    """A compiled function on a GPU with its operands; reading a result copies it to the host."""

    def __init__(self, program: DeviceProgram, entry: Function, operands: Sequence[Buffer]):
        super().__init__(program, entry, operands)
        self._transfer = program.transfer
        # A forked child cannot use the device.
        self._workers = True

    def _result(self, index: int, dtype: np.dtype, shape: tuple[int, ...] | None = None) -> np.ndarray:
        view = self._results.get_as_object(index, rt.HalBufferView)
        shape = tuple(view.shape)
        nbytes = prod(shape) * dtype.itemsize
        return self._transfer.download(view, 0, nbytes, nbytes, 1).reshape(-1).view(dtype).reshape(shape)

    def argmax(self) -> int:
        (best,) = self.argmaxes(1)
        if best < 0:
            raise NanLogitsError
        return best

    def argmaxes(self, count: int) -> list[int]:
        argmax, logits = (self._results.get_as_object(index, rt.HalBufferView) for index in (0, 1))
        return self._transfer.best(argmax, logits, count, self._vocab)

    def logits(self, row: int | None = None) -> np.ndarray:
        view, nbytes = self._results.get_as_object(1, rt.HalBufferView), 4 * self._vocab
        return self._transfer.download(view, (row or 0) * nbytes, nbytes, nbytes, 1)[0].view(np.float32)


def check_device(program: DeviceProgram) -> None:
    """Raise DeviceError if the GPU's results differ from the known answer in the manifest.

    The cache records which bundle has passed on which GPU and driver.
    """
    info, manifest = program.info, program.manifest
    answer = manifest.known_answer
    if answer is None:
        return
    files = [(name, file.sha256) for name, file in sorted(manifest.files.items())]
    key = hashlib.sha256(json.dumps([files, asdict(info), asdict(answer)]).encode()).hexdigest()
    passed = cache_root() / "devices" / f"{key}.json"
    if passed.exists():
        return
    if problem := find_difference(program, answer):
        raise DeviceError(
            f"{info.id} ({info.name}, driver {info.version}) computes wrong results: {problem}; "
            "update the driver, choose another --device, or compile with another --target"
        )
    keep(passed, json.dumps(asdict(info)).encode())


def find_difference(program: DeviceProgram, answer: KnownAnswer) -> str | None:
    """Describe the first wrong result of the GPU; None if all are right."""
    for codec, expected in answer.matmuls.items():
        if found := _difference(program.transfer.run(f"matmul_{codec}"), expected, answer.tolerance):
            return f"a matmul with {codec} weights {found}"
    if decode := answer.decode:
        manifest = program.manifest
        token, position = program.zeros((), "i32"), program.zeros((), "i32")
        states = [program.state(state.shape, state.dtype) for state in manifest.states]
        call = program.call(manifest.function("decode"), (token, position, *states))
        for step, (given, expected) in enumerate(zip(decode.tokens, decode.logits, strict=True)):
            token.words[0], position.words[0] = given, step
            call.invoke()
            if found := _difference(call.logits()[list(decode.ids)], expected, answer.tolerance):
                return f"decode_step at position {step} {found}"
    return None


def _difference(found: np.ndarray, expected: tuple[float, ...], tolerance: float) -> str | None:
    wanted = np.asarray(expected, np.float32)
    # Written so that NaN is a difference.
    wrong = ~(np.abs(found.reshape(-1) - wanted) <= tolerance * np.abs(wanted).max())
    if not wrong.any():
        return None
    first = int(wrong.argmax())
    return f"gives {found.reshape(-1)[first]:.6g} instead of {wanted[first]:.6g}"
