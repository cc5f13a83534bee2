from __future__ import annotations

import pytest

from tests.support import served


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    """The bundle of a small random model."""
    return served.bundle(tmp_path_factory.getbasetemp())
