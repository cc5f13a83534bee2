"""What all tests share: the tiers, one thread for NumPy and torch, no hub, repeatable generation, programs through IREE."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A name that looks like one on the hub is asked for nowhere.
os.environ["HF_HUB_OFFLINE"] = "1"

import atexit
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import iree.runtime as rt
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from iree.runtime import HalElementType

from castiron.emitter.graph.types import DTYPES, TensorType
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.device.cpu_device import device, vm_instance
from castiron.vmfb.targets import TARGETS
from tests import curl
from tests.tiers import MODELS, is_full, is_in

pytest_plugins = ["tests.support.fixtures"]

# A shell's background jobs start with Ctrl-C ignored, and so would the programs that are tested on it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser):
    parser.addoption(
        "--tier",
        choices=("quick", "full", "all", "models"),
        default="all",
        help="quick: all but tests/tiers.py; full: only those; models: only tests/models, which all leaves out",
    )


def pytest_configure():
    if shutil.which("curl") is None:
        folder = tempfile.TemporaryDirectory(prefix="castiron-curl-")
        atexit.register(folder.cleanup)
        curl.put_on_path(Path(folder.name))


def pytest_ignore_collect(collection_path, config):
    tier, path = config.getoption("--tier"), collection_path.relative_to(ROOT).as_posix()
    is_left_out = tier == "quick" and is_full(path) or tier != "models" and path.startswith(MODELS)
    return True if is_left_out else None


def pytest_collection_modifyitems(config, items):
    left_out = {item for item in items if not is_in(item.nodeid, config.getoption("--tier"))}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


settings.register_profile("castiron", derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
# A mutant is caught by any failing example: do not look for a smaller one.
settings.register_profile("mutants", parent=settings.get_profile("castiron"), phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("CASTIRON_HYPOTHESIS", "castiron"))

_ELEMENT_TYPES = {
    "f32": HalElementType.FLOAT_32,
    "f16": HalElementType.FLOAT_16,
    "bf16": HalElementType.BFLOAT_16,
    "i1": HalElementType.BOOL_8,
    "i8": HalElementType.INT_8,
    "i32": HalElementType.INT_32,
}


class IreeProgram:
    """A compiled module: `run` calls a function with NumPy arrays, stored as `DType.numpy` says (bf16 as uint16)."""

    def __init__(self, vmfb: Path):
        self._device = device(1)
        self._module = rt.VmModule.mmap(vm_instance(), str(vmfb))
        self._context = rt.VmContext(vm_instance(), [rt.create_hal_module(vm_instance(), self._device), self._module])

    def run(self, function: str, args: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Outputs of `function`; arguments that outputs live in are copied first and stay as they were."""
        code = self._module.lookup_function(function)
        inputs, outputs = _signature(code.reflection["iree.abi.declaration"])
        assert len(inputs) == len(args), f"{function} takes {len(inputs)} arguments, got {len(args)}"
        arguments, results = rt.VmVariantList(len(args)), rt.VmVariantList(len(outputs))
        for array, type_ in zip(args, inputs):
            arguments.push_ref(self._view(np.asarray(array), type_))
        self._context.invoke(code, arguments, results)
        return [_array(results.get_as_object(i, rt.HalBufferView), t) for i, t in enumerate(outputs)]

    def _view(self, array: np.ndarray, type_: TensorType) -> rt.HalBufferView:
        assert array.shape == type_.shape and array.nbytes == type_.nbytes, f"{array.dtype}{array.shape} is not {type_}"
        return self._device.allocator.allocate_buffer_copy(
            memory_type=rt.MemoryType.DEVICE_LOCAL | rt.MemoryType.HOST_VISIBLE,
            allowed_usage=rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING,
            device=self._device,
            buffer=np.ascontiguousarray(array).reshape(array.shape),
            element_type=_ELEMENT_TYPES[type_.dtype.name],
        )


def _array(view: rt.HalBufferView, type_: TensorType) -> np.ndarray:
    assert tuple(view.shape) == type_.shape
    return np.array(view.map().asarray([type_.nbytes], np.dtype(np.uint8))).view(type_.dtype.numpy).reshape(type_.shape)


def _signature(declaration: str) -> tuple[list[TensorType], list[TensorType]]:
    """Input and output types in a function's own words; those of unsigned integers are given as an encoding."""
    found: dict[str, list[TensorType]] = {"input": [], "output": []}
    for side, plain, attrs in re.findall(r"%(input|output)\d+: tensor<([^>]*)>(?: \{([^}]*)\})?", declaration):
        encoded = re.search(r"encoding = tensor<([^>]*)>", attrs)
        *shape, element = (encoded[1] if encoded else plain).split("x")
        found[side].append(TensorType(tuple(map(int, shape)), DTYPES[element]))
    return found["input"], found["output"]


@pytest.fixture(scope="session")
def iree(tmp_path_factory) -> Callable[..., IreeProgram]:
    """`iree(text) -> IreeProgram`: the product's own compiler driver and flags for this machine."""

    def load(text: str) -> IreeProgram:
        vmfb = tmp_path_factory.mktemp("program") / "model.vmfb"
        compile_mlir(text, TARGETS["host"], vmfb)
        return IreeProgram(vmfb)

    return load
