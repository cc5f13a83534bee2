from __future__ import annotations

import pytest

from tests.vmfb import toy_bundle

CONTEXT, WIDTHS = 24, (4, 8)


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    """One compile cache for the whole run: the toy is compiled once."""
    return tmp_path_factory.mktemp("compile")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Stamps and caches of a test stay in the test's directory."""
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory, compile_cache):
    """A toy bundle that no test may change."""
    return toy_bundle.write(tmp_path_factory.mktemp("toy") / "bundle", CONTEXT, WIDTHS, cache_dir=compile_cache).path
