"""Check a GPU before it runs a model: its results must equal those stored in the bundle.

The stored results are the bundle's known answer (`vmfb.known_answer`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import numpy as np

from castiron.vmfb.cache import cache_root, keep
from castiron.vmfb.device_program import DeviceProgram
from castiron.vmfb.drivers import DeviceError
from castiron.vmfb.known_answer import KnownAnswer


def check_device(program: DeviceProgram) -> None:
    """Raise DeviceError if the program's device does not give the bundle's known answer.

    The cache stores which devices and driver versions have passed this check. For these, later
    calls return at once.
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
    """Return how the results of a device differ from the known answer; None if they do not."""
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
