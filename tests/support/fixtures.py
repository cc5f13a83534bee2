"""Fixtures for tests of several packages: checkpoints, a cache, a browser, batch jobs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from castiron.pipelines.checkpoints.catalogue import fetch
from castiron.pipelines.checkpoints.checkpoint import Checkpoint
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.vmfb.cache_folder import cache_folder
from tests.support.batch_jobs import Jobs
from tests.support.browser import Browser, find


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


@pytest.fixture(scope="session")
def compile_cache() -> Path:
    """The compile cache that all tests share, for tests that set another cache folder."""
    return cache_folder("compile")


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    """Use an empty cache that shares only modules compiled by other tests."""
    compiled, own = cache_folder("compile"), tmp_path / "cache"
    own.mkdir()
    (own / "compile").symlink_to(compiled)
    monkeypatch.setenv("CASTIRON_CACHE", str(own))
    return own


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """Start a browser that all tests share; each opens its own page."""
    with contextlib.closing(Browser(find(), tmp_path_factory.mktemp("chromium") / "profile")) as found:
        yield found


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> Path:
    """The small bundle of `served`; a module with another bundle overrides it."""
    # Imported late, because the import takes seconds.
    from tests.support.served import bundle

    return bundle(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def reference(path):
    """The text of the module's bundle `path`, from a session of its own."""
    from tests.support.served import ReferenceSession

    return ReferenceSession(path)


@pytest.fixture
def job(path, capsys):
    """Return a callable that runs `castiron batch` with the test module's bundle `path`."""
    return Jobs(path, capsys)
