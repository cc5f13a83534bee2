"""Fixtures of tests that compile kernels."""

import pytest


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    """A temporary directory of one test module."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])


@pytest.fixture(params=["host", "x86-64-v3", "x86-64-v4", "aarch64"])
def target(request) -> str:
    """This CPU, and CPUs of each number of lanes; the full suite runs the latter."""
    return request.param
