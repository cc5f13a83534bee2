"""The real checkpoints of the catalogue, once for all tests, and transformers' own reading of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from castiron.pipelines.checkpoints import Checkpoint, open_checkpoint
from castiron.pipelines.checkpoints.catalogue import fetch


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
