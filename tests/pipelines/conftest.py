"""The real checkpoints of the catalogue, what was compiled, and a browser, once for all tests."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from castiron.pipelines.checkpoints import Checkpoint, open_checkpoint
from castiron.pipelines.checkpoints.catalogue import fetch
from castiron.vmfb.cache import cache_folder
from tests.pipelines.browser import Browser, find


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2(smollm2_path) -> Checkpoint:
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return fetch("gemma-3-270m")


@pytest.fixture(scope="session")
def gemma3(gemma3_path) -> Checkpoint:
    return open_checkpoint(gemma3_path)


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    """A cache that has nothing yet, but for what iree-compile made of the modules of other tests."""
    compiled, own = cache_folder("compile"), tmp_path / "cache"
    own.mkdir()
    (own / "compile").symlink_to(compiled)
    monkeypatch.setenv("CASTIRON_CACHE", str(own))
    return own


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """One browser, in which each test opens a page of its own."""
    with contextlib.closing(Browser(find(), tmp_path_factory.mktemp("chromium") / "profile")) as found:
        yield found
