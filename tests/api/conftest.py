"""Fixtures of the API tests."""

import pytest

from tests.support import talking


@pytest.fixture(scope="session")
def talking_path(tmp_path_factory):
    """The bundle of a model that reasons and calls tools."""
    return talking.bundle(tmp_path_factory.getbasetemp())
