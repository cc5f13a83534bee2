"""A bundle loaded into the IREE runtime: its functions, their buffers, and prepared calls."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import mmap
import os
import re
import struct
import sys
import threading
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from math import isnan, prod
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import iree.runtime as rt
import numpy as np

from castiron.emitter.abi import Function
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.bundle.irpa import WeightsError, read_irpa
from castiron.vmfb.bundle.json_record import short
from castiron.vmfb.bundle.manifest import WEIGHTS, BundleError, Manifest
from castiron.vmfb.cpu_features import physical_cores
from castiron.vmfb.device.cpu_device import device, lower_priority, release_devices, vm_instance
from castiron.vmfb.file_errors import LARGE_PAGE

# The scope of every weight: `#flow.parameter.named<"model"::"NAME">`.
SCOPE = "model"

ELEMENTS: dict[str, tuple[np.dtype, rt.HalElementType]] = {
    "i8": (np.dtype(np.int8), rt.HalElementType.SINT_8),
    "i32": (np.dtype(np.int32), rt.HalElementType.SINT_32),
    "f32": (np.dtype(np.float32), rt.HalElementType.FLOAT_32),
    "f16": (np.dtype(np.float16), rt.HalElementType.FLOAT_16),
    # numpy has no bf16; these are its bits.
    "bf16": (np.dtype(np.uint16), rt.HalElementType.BFLOAT_16),
}
_MEMORY = int(rt.MemoryType.DEVICE_LOCAL) | int(rt.MemoryType.HOST_VISIBLE)
_USAGE = int(rt.BufferUsage.DEFAULT) | int(rt.BufferUsage.MAPPING)
# No machine has more; IREE cannot count as many as Python.
MAX_THREADS = 1 << 16
_I32, _F32 = np.dtype(np.int32), np.dtype(np.float32)
# The address space of states may exceed the memory, because only the positions that are used get pages. Python has a name
# for this Linux flag only since version 3.13.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
# Exceptions that the runtime raises for an invalid file, one for each kind of status.
RUNTIME_ERRORS = (RuntimeError, ValueError, IndexError, KeyError, NotImplementedError)


# How the IREE runtime reports that memory, or the number of threads, has run out.
EXHAUSTED = ("RESOURCE_EXHAUSTED", "thread creation failed")


class SessionError(Exception):
    """Raised for invalid arguments, or if the IREE runtime fails.

    Invalid arguments are rejected before any work, so the session can still be used.
    """


class NanLogitsError(SessionError):
    def __init__(self) -> None:
        super().__init__("the model's logits are NaN; its weights are damaged, or compile it with --kv-cache-type f32")


class Loaded:
    """Compiled modules and the weights that they share, loaded on a device."""

    vocab = 0

    def __init__(
        self,
        weights: Any,
        modules: Mapping[str, Any],
        threads: int,
        check: Callable[[str, rt.VmModule], None] = lambda name, module: None,
    ):
        """Load weights and modules; one of `RUNTIME_ERRORS` if the runtime rejects a file.

        weights: the bytes of a weights file, which are not copied.
        modules: the bytes of compiled modules by file name.
        check: called with (file name, module) before any code of the module runs.
        """
        self.threads, self.device = threads, self._open(threads)
        # The runtime has no reference to the memory, so this attribute keeps it alive.
        self._mapped = weights
        instance = vm_instance()
        # Copied, because the runtime reads a module again when it releases it.
        self.modules = {name: rt.VmModule.copy_buffer(instance, data) for name, data in modules.items()}
        for name, module in self.modules.items():
            check(name, module)
        parameters = self._parameters(weights)
        # This loads every weight, and fails if one is missing or too short.
        self.contexts = {
            name: rt.VmContext(instance, [rt.create_hal_module(instance, self.device), parameters(), module])
            for name, module in self.modules.items()
        }
        _programs.add(self)

    def _open(self, threads: int) -> rt.HalDevice:
        return device(threads)

    def _parameters(self, weights: Any) -> Callable[[], rt.VmModule]:
        """Return a function that creates the IREE module of weights that each VmContext needs."""
        parameters = rt.ParameterIndex()
        parameters.load_from_file_handle(rt.FileHandle.wrap_memory(_immortal_view(weights)), "irpa")
        return lambda: rt.create_io_parameters_module(vm_instance(), parameters.create_provider(scope=SCOPE))

    def function(self, name: str) -> tuple[rt.VmFunction, Callable]:
        """Return the function `name` and the `invoke` method that calls it; KeyError if absent."""
        for file, module in self.modules.items():
            if name in module.function_names:
                return module.lookup_function(name), self.contexts[file].invoke
        raise KeyError(name)

    def zeros(self, shape: Sequence[int], dtype: str) -> Buffer:
        """Allocate a buffer of zeros that Python can write; unwritten pages use no memory."""
        return Buffer(self, tuple(shape), dtype)

    def state(self, shape: Sequence[int], dtype: str) -> Buffer:
        """Allocate a buffer of zeros in device memory for a state, such as a KV cache."""
        return self.zeros(shape, dtype)

    def call(self, entry: Function, operands: Sequence[Buffer]) -> Call:
        """Return a call of a function of the manifest, to invoke many times with these operands."""
        return Call(self, entry, operands)


def _immortal_view(memory: Any) -> ctypes.Array:
    """Return an array object over the bytes of `memory` that Python never frees.

    The runtime drops its references to it without the GIL, in worker threads, even after a call has
    returned. It has no reference to `memory`, so the caller must keep `memory` alive.
    """
    data = np.frombuffer(memory, np.uint8)
    view = (ctypes.c_char * data.size).from_address(data.ctypes.data)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(view))
    return view


class Program(Loaded):
    """A bundle loaded on a device; one thread at a time may call it (see `exclusive`)."""

    def __init__(self, source: Bundle | Path | str, threads: int | None = None):
        """Load a bundle that is compiled for a CPU.

        threads: None for one per physical core. SessionError if it is below 1; BundleError if the
        runtime rejects the bundle.
        """
        if threads is not None and not (isinstance(threads, Integral) and threads <= MAX_THREADS):
            raise SessionError(f"threads is {short(repr(threads))}; it must be an integer of at most {MAX_THREADS}")
        if threads is not None and threads < 1:
            raise SessionError(f"threads is {threads}; it must be at least 1")
        bundle = open_bundle(source)
        self.manifest, self.vocab, self._path = bundle.manifest, bundle.manifest.vocab, bundle.path
        # Reentrant: an `exclusive` method may call another one.
        self.lock = threading.RLock()
        try:
            read_irpa(weights := bundle.part(WEIGHTS).map())
            # Not logical cores: hyperthreads share the vector units.
            modules = {name: _checked(bundle.path / name, bundle.part(name).read_bytes()) for name in self.manifest.modules}
            super().__init__(weights, modules, threads or physical_cores(), self._check)
        except WeightsError as error:
            raise BundleError(f"invalid weights: {bundle.path / WEIGHTS} ({error}); compile the bundle again") from None
        except RUNTIME_ERRORS as error:
            why = runtime_reason(error)
            if any(text in why for text in EXHAUSTED):
                advice = "close other programs, or raise the limits (ulimit -v, ulimit -u)"
                raise SessionError(f"out of memory or threads for {bundle.path} ({why}); {advice}") from None
            raise BundleError(f"the IREE runtime rejects {bundle.path} ({why}); compile the bundle again") from None

    def _check(self, name: str, module: rt.VmModule) -> None:
        functions = [entry for entry in self.manifest.functions if self.manifest.module_of(entry) == name]
        check_functions(self._path / name, module, self.manifest, functions, "compile the bundle again")


def check_functions(path: Path, module: rt.VmModule, manifest: Manifest, functions: Iterable[Function], remedy: str) -> None:
    """Raise BundleError unless `module` exports `functions` with the types of the manifest.

    path, remedy: the module's file, and what the user can do, for the error message.
    """
    exported = set(module.function_names)
    for function in functions:
        if function.name not in exported:
            raise BundleError(f"{path} has no function {function.name}, which the manifest lists; {remedy}")
        # As `sync func @f(%input0: tensor<8xi32>, ...) -> (%output0: ...)`.
        declaration = module.lookup_function(function.name).reflection.get("iree.abi.declaration", "")
        signature = manifest.signature(function)
        for side, tensors in (("input", signature.operands), ("output", signature.results)):
            wanted, found = list(map(str, tensors)), re.findall(rf"%{side}\d+: tensor<([^>]*)>", declaration)
            if found != wanted:
                raise BundleError(
                    f"{path}: function {function.name} has {side}s ({short(', '.join(found))}), but the manifest lists "
                    f"({short(', '.join(wanted))}); {remedy}"
                )


def _checked(path: Path, module: bytes) -> bytes:
    # A module is a zip archive with checksums.
    try:
        with zipfile.ZipFile(io.BytesIO(module)) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError) as error:
        raise BundleError(f"{path} is damaged ({error}); compile the bundle again") from None
    if damaged is not None:
        raise BundleError(f"{path} is damaged (zip member {damaged!a}); compile the bundle again")
    return module


def runtime_reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:160]
    return "".join(c for c in text if c.isprintable())


Method = TypeVar("Method", bound=Callable[..., Any])


def exclusive(method: Method) -> Method:
    """Make a method raise SessionError while another thread uses `self.program`."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        lock = self.program.lock
        if not lock.acquire(False):
            raise SessionError(
                "another thread is using this session or its fork; wait for that thread, or open one session per thread"
            )
        try:
            return method(self, *args, **options)
        finally:
            lock.release()

    return cast(Method, guarded)


class Buffer:
    """Memory that Python and the runtime share.

    array: as a NumPy array. view: as a HalBufferView of the runtime.
    """

    array: Any

    def __init__(self, program: Loaded, shape: tuple[int, ...], dtype: str, memory: np.ndarray | None = None):
        """Allocate zeros of a dtype in `ELEMENTS`, or use a flat slice of another buffer."""
        _, element = ELEMENTS[dtype]
        # Stored in an attribute, because the view does not own the memory.
        self._flat = new_zeros(prod(shape), dtype) if memory is None else memory
        self.array = self._flat.reshape(shape)
        self._program, self._dtype = program, dtype
        self._register(program.device.allocator.import_host_allocation(self._flat, _MEMORY, _USAGE), shape, element)

    def _register(self, buffer: rt.HalBuffer, shape: tuple[int, ...], element: rt.HalElementType) -> None:
        self.view = rt.HalBufferView(buffer, shape, element)
        _buffers.add(self)

    def part(self, start: int, stop: int) -> Buffer:
        """Return rows `start` to `stop` - 1 (of dimension 0) as a buffer in the same memory."""
        row = self._flat.size // self.array.shape[0]
        shape = (stop - start, *self.array.shape[1:])
        return Buffer(self._program, shape, self._dtype, self._flat[start * row : stop * row])

    @property
    def words(self) -> memoryview:
        """Return a flat view of the elements; writing to it is faster than writing to `array`."""
        return self._flat.data


def new_zeros(count: int, dtype: str, large_pages: bool = False) -> np.ndarray:
    """Return an array of `count` zeros, whose pages use memory only once they are written.

    large_pages: whether Linux may use pages of 2 MB, which kernels read faster.
    """
    numpy_dtype, _ = ELEMENTS[dtype]
    # Private: shared memory would be accounted as a file.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE} if hasattr(mmap, "MAP_PRIVATE") else {}
    size = max(1, count * numpy_dtype.itemsize)
    if large_pages and size > LARGE_PAGE:
        # Otherwise the end would be in small pages.
        size = -(-size // LARGE_PAGE) * LARGE_PAGE
    memory = mmap.mmap(-1, size, **flags)
    # With large pages the first row of every layer's state would take 2 MB.
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, numpy_dtype, count)


class Call:
    """A compiled function with its operands; its results are valid until the next `invoke`."""

    def __init__(self, program: Loaded, entry: Function, operands: Sequence[Buffer]):
        self._operands = tuple(operands)
        self._function, self._run = program.function(entry.name)
        self._arguments, self._results = rt.VmVariantList(len(operands)), rt.VmVariantList(len(operands))
        for operand in operands:
            self._arguments.push_ref(operand.view)
        self._name = entry.name
        self._vocab, self._workers = program.vocab, program.threads > 1
        _calls.add(self)

    def invoke(self) -> None:
        """Run the function. It updates states among the operands, such as KV caches, in place."""
        if self._workers:
            lower_priority()
        try:
            self._run(self._function, self._arguments, self._results)
        except RUNTIME_ERRORS as error:
            raise SessionError(
                f"the IREE runtime failed in {self._name} ({runtime_reason(error)}); compile the bundle again"
            ) from None

    def _result(self, index: int, dtype: np.dtype, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Return a result without a copy; a known `shape` saves time."""
        view = self._results.get_as_object(index, rt.HalBufferView)
        return view.map().asarray(tuple(view.shape) if shape is None else shape, dtype)

    def argmax(self) -> int:
        """Return the argmax of the only row of logits; NanLogitsError if that logit is NaN."""
        best = int(self._result(0, _I32, ()))
        # Checking one logit is enough: if one is NaN, nearly always all are.
        if isnan(self._result(1, _F32, (self._vocab,))[best]):
            raise NanLogitsError
        return best

    def argmaxes(self, count: int) -> list[int]:
        """Return the argmax of each of `count` rows of logits; -1 if that logit is NaN."""
        best = self._result(0, _I32, (count,))
        unfit = np.isnan(self._result(1, _F32, (count, self._vocab))[range(count), best])
        return np.where(unfit, -1, best).tolist()

    def logits(self, row: int | None = None) -> np.ndarray:
        """Return a copy of the logits, f32 `[vocab]`, or of one of several rows."""
        found = self._result(1, _F32, (self._vocab,)) if row is None else self._result(1, _F32)[row]
        return found.copy()

    def floats(self, index: int) -> np.ndarray:
        """Return a copy of a result, f32."""
        return self._result(index, _F32).copy()


_calls: weakref.WeakSet[Call] = weakref.WeakSet()
_buffers: weakref.WeakSet[Buffer] = weakref.WeakSet()
_programs: weakref.WeakSet[Loaded] = weakref.WeakSet()
# Other owners of runtime objects, and their attributes in the order in which to free them.
_others: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


def release_at_exit(owner: Any, *attributes: str) -> None:
    """When the process exits, set attributes of `owner` to None, in the given order.

    Results of calls come first and the device last; otherwise the runtime crashes.
    """
    _others[owner] = attributes


def _refuse_fork(*_: Any) -> NoReturn:
    raise SessionError(
        "cannot use this session after a fork: its worker threads are in the parent process; open a session in the child, "
        "or start the child with multiprocessing's spawn"
    )


def _forked() -> None:
    """Make calls in a forked child raise an error instead of waiting forever for workers."""
    for call in _calls:
        if call._workers:
            call._run = _refuse_fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _release() -> None:
    """Free the runtime's objects, results before devices; the opposite order crashes."""
    for call in _calls:
        call._results = None
    for other, attributes in _others.items():
        for name in attributes:
            setattr(other, name, None)
    for owners, names in (
        (_calls, ("_arguments", "_function", "_run")),
        (_buffers, ("view",)),
        (_programs, ("contexts", "modules", "device")),
    ):
        for owner in owners:
            for name in names:
                setattr(owner, name, None)
    release_devices()
