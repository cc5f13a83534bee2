from __future__ import annotations

import pytest

from tests.vmfb import toy


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache for each test."""
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory, compile_cache):
    """A toy bundle that no test may change."""
    return toy.write(tmp_path_factory.mktemp("toy") / "bundle", cache_dir=compile_cache).path
