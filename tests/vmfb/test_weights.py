"""Parameter archives are read back by IREE's own reader."""

from __future__ import annotations

import hashlib
import weakref
from types import SimpleNamespace

import iree.runtime as rt
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.vmfb import file_errors
from castiron.vmfb.bundle.irpa import WeightsError, write_irpa


def read(path) -> dict[str, tuple[int, bytes]]:
    """Return the offset in the file and the bytes of every parameter."""
    index = rt.ParameterIndex()
    index.load(str(path), format="irpa")
    found = {}
    for name, stored in index.items():
        found[name] = (stored.file_storage[1], bytes(stored.file_view)) if stored.length else (0, b"")
    return found


def entry(name, array):
    return name, array, (array.shape, array.dtype)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
        st.tuples(
            st.sampled_from(["int8", "uint8", "float16", "uint16", "float32", "int32"]),
            st.lists(st.integers(0, 9), max_size=3),
        ),
        max_size=6,
    )
)
def test_iree_reads_what_was_written(tmp_path_factory, tensors):
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("w") / "w.irpa"
    # Transposed views too, which are written in order.
    arrays = {name: rng.integers(0, 99, shape).astype(dtype).T for name, (dtype, shape) in tensors.items()}
    written = write_irpa(path, [entry(name, array) for name, array in arrays.items()])
    found = read(path)
    assert {name: data for name, (_, data) in found.items()} == {name: a.tobytes() for name, a in arrays.items()}
    assert all(offset % 64 == 0 for offset, _ in found.values())
    assert written == hashlib.sha256(path.read_bytes()).hexdigest()


def test_no_more_than_two_tensors_are_in_memory(tmp_path):
    alive = []

    def make(n):
        # The previous tensor may still be written.
        assert sum(ref() is not None for ref in alive) <= 1
        array = np.full((1000,), n, np.uint8)
        alive.append(weakref.ref(array))
        return array

    seen = []
    entries = ((f"t{n}", lambda n=n: make(n), ((1000,), np.uint8)) for n in range(5))
    write_irpa(tmp_path / "w.irpa", entries, lambda done, total: seen.append((done, total)))
    assert len(alive) == 5 and seen == [(1000 * n, 5000) for n in range(1, 6)]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry("a", np.zeros(3)), entry("a", np.zeros(3))], "duplicate parameter: 'a'"),
        ([("a", lambda: np.zeros((2, 3), np.float32), ((3, 2), np.float32))], r"float32\[2, 3\], not float32\[3, 2\]"),
        ([("a", lambda: np.zeros(4, np.float16), ((4,), np.float32))], r"float16\[4\], not float32\[4\]"),
    ],
)
def test_invalid_tensors_leave_no_file(tmp_path, entries, message):
    with pytest.raises(WeightsError, match=message):
        write_irpa(tmp_path / "w.irpa", entries)
    assert not (tmp_path / "w.irpa").exists()


@pytest.mark.parametrize("sizes", [[0, 5, 64, 1, 63], [200, 1], [63, 1, 128], [130, 130, 130], [1] * 130, []])
def test_a_large_page_writer_writes_aligned_multiples(monkeypatch, sizes):
    """All writes but the last are whole pages, so that each page of the file is written at once."""
    monkeypatch.setattr(file_errors, "LARGE_PAGE", 64)
    written = []
    data = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8).tobytes()
    out, start = file_errors.LargePageWriter(SimpleNamespace(write=lambda part: written.append(bytes(part)))), 0
    for size in sizes:
        out.write(memoryview(data)[start : start + size])
        start += size
    out.flush()
    assert b"".join(written) == data
    assert all(len(part) % 64 == 0 for part in written[:-1]) and len(written[-1]) < 64
