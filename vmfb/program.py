"""A bundle loaded into the IREE runtime: its functions, buffers they take and calls that are prepared once."""

from __future__ import annotations

import atexit
import contextlib
import io
import mmap
import os
import re
import struct
import threading
import time
import weakref
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import wraps
from math import isnan, prod
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import iree.runtime as rt
import numpy as np

from castiron.vmfb.archive import Part
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.cpu import physical_cores
from castiron.vmfb.device import device, give_way
from castiron.vmfb.manifest import MODEL, WEIGHTS, BundleError, EntryPoint
from castiron.vmfb.weights import WeightsError, read_irpa

# The scope of every weight: `#flow.parameter.named<"model"::"NAME">`.
SCOPE = "model"

_ELEMENTS: dict[str, tuple[np.dtype, rt.HalElementType]] = {
    "i8": (np.dtype(np.int8), rt.HalElementType.SINT_8),
    "i32": (np.dtype(np.int32), rt.HalElementType.SINT_32),
    "f32": (np.dtype(np.float32), rt.HalElementType.FLOAT_32),
    "f16": (np.dtype(np.float16), rt.HalElementType.FLOAT_16),
    # numpy has no bf16; the bits are carried.
    "bf16": (np.dtype(np.uint16), rt.HalElementType.BFLOAT_16),
}
_MEMORY = int(rt.MemoryType.DEVICE_LOCAL) | int(rt.MemoryType.HOST_VISIBLE)
_USAGE = int(rt.BufferUsage.DEFAULT) | int(rt.BufferUsage.MAPPING)
_I32, _F32 = np.dtype(np.int32), np.dtype(np.float32)


# What the runtime raises for a file that it does not take, by its kinds of status.
REFUSALS = (RuntimeError, ValueError, IndexError, KeyError, NotImplementedError)


class SessionError(Exception):
    """A request that a session refuses before doing any of it; one sentence."""


class FileChanged(SessionError):
    """The weights were written into while a program used them, which can run no more."""


class NoNumbers(SessionError):
    """What the model has found cannot be used."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not numbers: its weights or its cache's type are not fit for this text")


class Loaded:
    """A module and its weights on a device of so many threads.

    weights, module: bytes of the two files, of which those of the weights are mapped and used where they lie. `check` sees the
    module before any of its code runs. RuntimeError or ValueError where the runtime refuses them.
    """

    vocab = 0

    def __init__(self, weights: Any, module: Any, threads: int, check: Callable[[rt.VmModule], None] = lambda module: None):
        self.threads, self.device = threads, device(threads)
        # Kept, since the runtime takes memory as it is.
        self._mapped = weights
        instance, parameters = rt.VmInstance(), rt.ParameterIndex()
        parameters.load_from_file_handle(rt.FileHandle.wrap_memory(weights), "irpa")
        # Small; and the runtime reads it again when it lets go of it, which mapped it might not be there for.
        self.module = rt.VmModule.copy_buffer(instance, module)
        check(self.module)
        # Loads every weight global: here a missing or short parameter shows.
        self.context = rt.VmContext(
            instance,
            [
                rt.create_hal_module(instance, self.device),
                rt.create_io_parameters_module(instance, parameters.create_provider(scope=SCOPE)),
                self.module,
            ],
        )

    def check_files(self) -> None:
        """FileChanged if the weights are not what they were; before each call."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Buffer:
        """A buffer of zeros that Python and the module share; no page of it exists until it is written."""
        return Buffer(self, tuple(shape), dtype)


class Program(Loaded):
    """The functions of a bundle on a device; its weights are the bundle's file, mapped, not read.

    Calls of one program may not overlap in time: what makes them is `alone`.
    """

    def __init__(self, source: Bundle | Path | str, threads: int | None = None):
        """`source`: a bundle, or where one is. `threads` None means one per physical core. BundleError if the runtime refuses
        the bundle, SessionError for threads less than one."""
        if threads is not None and threads < 1:
            raise SessionError(f"threads is {threads}, and a session needs at least 1")
        bundle = open_bundle(source)
        self.manifest, self.vocab, self._place = bundle.manifest, bundle.manifest.vocab, bundle.path
        # Of the thread that runs it; what it calls may take it again.
        owned = threading.RLock()
        self.take, self.leave = owned.acquire, owned.release
        self._weights, self._sha256 = bundle.part(WEIGHTS).kept_open(), self.manifest.files[WEIGHTS].sha256
        # When somebody last wrote into them.
        self._written = _written(self._weights)
        try:
            read_irpa(weights := self._weights.map())
            # Hyperthreads share the vector units that a kernel keeps full.
            module = _checked(bundle.part(MODEL).read_bytes())
            super().__init__(weights, module, threads or physical_cores(), self._check)
        except WeightsError as error:
            raise BundleError(
                f"{bundle.path / WEIGHTS} is not as castiron writes it: {error}; compile the bundle again"
            ) from None
        except REFUSALS as error:
            raise BundleError(f"the IREE runtime refuses {bundle.path} ({_reason(error)}); compile the bundle again") from None

    def check_files(self) -> None:
        if (now := _written(self._weights)) == self._written:
            return
        # Not only touched, or written again as it was.
        if now[0] != self._written[0] or self._weights.sha256() != self._sha256:
            raise FileChanged(
                f"{self._weights} was written into while it was in use: put it back as it was or compile the bundle again, and "
                "start again"
            )
        self._written = now

    def _check(self, module: rt.VmModule) -> None:
        """BundleError unless the module's functions are those of the manifest: what they are called with is made by that."""
        exported, place = set(module.function_names), self._place / MODEL
        for entry in self.manifest.functions:
            if entry.name not in exported:
                raise BundleError(f"{place} has no function {entry.name}; compile the bundle again")
            said = module.lookup_function(entry.name).reflection.get("iree.abi.declaration", "")
            if _types(said, "input") != entry.inputs or _types(said, "output") != entry.outputs:
                raise BundleError(f"{place} has another {entry.name} than the manifest says; compile the bundle again")


def _written(part: Part) -> tuple[int, int]:
    """A file's size, and the time of the last change of its bytes."""
    status = part.stat()
    return status.st_size, status.st_mtime_ns


def _checked(module: bytes) -> bytes:
    """The module itself, if its parts are as IREE wrote them; ValueError otherwise."""
    try:
        with zipfile.ZipFile(io.BytesIO(module)) as archive:
            spoilt = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError) as error:
        raise ValueError(f"its module is no archive of parts: {error}") from None
    if spoilt is not None:
        raise ValueError(f"the part {spoilt!a} of its module is spoilt")
    return module


def _reason(error: Exception) -> str:
    """What the runtime says, of which it may say much."""
    said = " ".join(str(error).split())[:160]
    return "".join(c for c in said if c.isprintable())


def _types(declaration: str, side: str) -> tuple[str, ...]:
    """Of a function's inputs or outputs, as its module declares them: `sync func @f(%input0: tensor<8xi32>, ...) -> (...)`."""
    return tuple(re.findall(rf"%{side}\d+: tensor<([^>]*)>", declaration))


Method = TypeVar("Method", bound=Callable[..., Any])


def alone(method: Method) -> Method:
    """Makes a method of what runs `self.program` raise a SessionError while another thread is in such a method."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        program = self.program
        if not program.take(False):
            raise SessionError(
                "another thread is running this session or a fork of it; wait for that thread, or open a session of its own "
                "for each"
            )
        try:
            return method(self, *args, **options)
        finally:
            program.leave()

    return cast(Method, guarded)


class Buffer:
    """Memory seen by numpy as `array` and by the program as `view`, of `dtype` i8, i32, f32, f16 or bf16.

    `memory`: flat elements of another buffer to use instead of memory of its own.
    """

    def __init__(self, program: Loaded, shape: tuple[int, ...], dtype: str, memory: np.ndarray | None = None):
        _, element = _ELEMENTS[dtype]
        # Kept here, since a view keeps the device's handle of the memory and not the memory.
        self._flat = _fresh(prod(shape), dtype) if memory is None else memory
        self.array = self._flat.reshape(shape)
        self.view = rt.HalBufferView(
            program.device.allocator.import_host_allocation(self._flat, _MEMORY, _USAGE), shape, element
        )
        self._program, self._dtype = program, dtype

    def part(self, start: int, stop: int) -> Buffer:
        """Rows `start` to `stop` of the first dimension, the same memory."""
        row = self._flat.size // self.array.shape[0]
        shape = (stop - start, *self.array.shape[1:])
        return Buffer(self._program, shape, self._dtype, self._flat[start * row : stop * row])

    @property
    def words(self) -> memoryview:
        """The elements as plain Python numbers, flat: the cheapest way to write one."""
        return self._flat.data


def _fresh(count: int, dtype: str) -> np.ndarray:
    """Zeros straight from the system rather than from malloc: page-aligned, and zero without being touched."""
    numpy_dtype, _ = _ELEMENTS[dtype]
    # Private, or it would count as a file in shared memory.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(1, count * numpy_dtype.itemsize), **flags)
    # Where the system gives large pages unasked, the first row of every layer would take 2 MB.
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, numpy_dtype, count)


class Call:
    """One function with its operands bound; `invoke` runs it, the results stand until the next `invoke`."""

    def __init__(self, program: Loaded, entry: EntryPoint, operands: Sequence[Buffer]):
        self._operands = tuple(operands)
        self._function, self._run = program.module.lookup_function(entry.name), program.context.invoke
        self._arguments, self._results = rt.VmVariantList(len(operands)), rt.VmVariantList(len(entry.outputs))
        for operand in operands:
            self._arguments.push_ref(operand.view)
        self._name, self._check_files = entry.name, program.check_files
        self._vocab, self._workers = program.vocab, program.threads > 1
        self.seconds = 0.0
        _calls.add(self)

    def invoke(self) -> None:
        """Returns when the results are there; the states among the operands have changed in place."""
        self._check_files()
        if self._workers:
            give_way()
        try:
            self._run(self._function, self._arguments, self._results)
        except REFUSALS as error:
            raise SessionError(f"the IREE runtime fails in {self._name} ({_reason(error)}): compile the bundle again") from None

    def count_seconds(self) -> None:
        """From now on `seconds` adds up what the runtime takes; a call that was not told so pays nothing for it."""
        run = self._run

        def counted(*arguments: object) -> None:
            start = time.perf_counter()
            run(*arguments)
            self.seconds += time.perf_counter() - start

        self._run = counted

    def _result(self, index: int, dtype: np.dtype, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A result where it lies; `shape` is given where it is known, since asking for it costs time."""
        view = self._results.get_as_object(index, rt.HalBufferView)
        return view.map().asarray(tuple(view.shape) if shape is None else shape, dtype)

    def argmax(self) -> int:
        """Result 0 of a function with one; SessionError where its logit is no number."""
        best = int(self._result(0, _I32, ()))
        # Where one is none, by rounding of the states or by the weights, nearly always all are.
        if isnan(self._result(1, _F32, (self._vocab,))[best]):
            raise NoNumbers
        return best

    def argmaxes(self, count: int) -> list[int]:
        """Result 0 of a function with `count` of them; -1 where its logit is no number."""
        best = self._result(0, _I32, (count,))
        unfit = np.isnan(self._result(1, _F32, (count, self._vocab))[range(count), best])
        return np.where(unfit, -1, best).tolist()

    def logits(self, row: int | None = None) -> np.ndarray:
        """Result 1, f32 `[vocab]`, or row `row` of `[rows, vocab]`; a copy."""
        found = self._result(1, _F32, (self._vocab,)) if row is None else self._result(1, _F32)[row]
        return found.copy()

    def floats(self, index: int) -> np.ndarray:
        """Result `index`, f32; a copy."""
        return self._result(index, _F32).copy()

    def vector(self) -> np.ndarray:
        """Result 0, f32 `[features]`; a copy."""
        return self._result(0, _F32).copy()

    def rows(self, count: int) -> np.ndarray:
        """The first `count` rows of result 0, f32 `[rows, hidden]`; a copy."""
        return self._result(0, _F32)[:count].copy()


_calls: weakref.WeakSet[Call] = weakref.WeakSet()


def _refuse_fork(*_: Any) -> NoReturn:
    raise SessionError(
        "this session was made before the process was forked, and its worker threads are the parent's; make one in the child, "
        "or start the child with multiprocessing's spawn"
    )


def _forked() -> None:
    """In a forked child: its parent's workers are not here, and a call would wait for them for ever."""
    for call in _calls:
        if call._workers:
            call._run = _refuse_fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _let_go() -> None:
    """Results do not keep their device alive, and freeing one after it is a crash; an ending Python keeps no order."""
    for call in _calls:
        call._results = None
