"""The profile of a call has all dispatches of the call."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.bundle.manifest import BundleError
from castiron.vmfb.device.profile import Dispatch, Profile, median_of, profile
from tests.vmfb.toy import CONTEXT


@pytest.mark.parametrize(("threads", "name"), [(1, "decode_step"), (2, "prefill_8")])
def test_dispatches_are_counted_and_timed(toy_dir, threads, name):
    bundle = open_bundle(toy_dir)
    function = next(f for f in bundle.manifest.functions if f.name == name)
    found = profile(bundle, function, position=3, threads=threads, repeats=4)
    assert (found.function, found.position, found.threads) == (name, 3, threads)
    assert all("_dispatch_" in dispatch.name and dispatch.calls >= 1 for dispatch in found.dispatches)
    assert 0 < sum(dispatch.seconds for dispatch in found.dispatches) < 1 and 0 < found.seconds < 1
    seconds = [dispatch.seconds for dispatch in found.dispatches]
    assert seconds == sorted(seconds, reverse=True)
    # Both layers of the toy run the same dispatches for the updates of their caches.
    assert {dispatch.calls for dispatch in found.dispatches} == {1, 2}


def test_profiles_are_merged_by_their_medians():
    def profiled(seconds, *times):
        found = tuple(Dispatch(name, 2, taken, 1) for name, taken in zip("ab", times, strict=True))
        return Profile("decode_step", 3, 1, seconds, found)

    one = median_of([profiled(3.0, 0.5, 0.1), profiled(1.0, 0.2, 0.3), profiled(2.0, 0.1, 0.4)])
    assert one == Profile("decode_step", 3, 1, 2.0, (Dispatch("b", 2, 0.3, 1), Dispatch("a", 2, 0.2, 1)))


def test_a_failing_tool_is_a_one_line_error(toy_dir, monkeypatch):
    monkeypatch.setattr(Bundle, "file", lambda self, name: Path("absent"))
    with pytest.raises(BundleError, match=r"iree-benchmark-module failed \("):
        bundle = open_bundle(toy_dir)
        profile(bundle, bundle.manifest.function("decode"), position=CONTEXT - 1, repeats=1)


def test_a_function_that_uses_amx_tiles_is_not_profiled(toy_dir, monkeypatch):
    """Without permission for tiles, Linux ends IREE's tool with SIGILL after its first lines."""
    ended = subprocess.CompletedProcess([], -signal.SIGILL, stdout="{", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    bundle = open_bundle(toy_dir)
    with pytest.raises(BundleError, match=r"uses AMX tiles.*--target x86-64-v4-bf16"):
        profile(bundle, bundle.manifest.function("decode"), repeats=1)
