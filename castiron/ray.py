"""castiron on a cluster of Ray: rows of datasets with Ray Data, requests with Ray Serve. docs/cluster.md shows all of it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from castiron.pipelines.installing import remedy

if TYPE_CHECKING:
    from castiron.pipelines.cluster.places import Stored as Stored
    from castiron.pipelines.cluster.places import store as store
    from castiron.pipelines.cluster.rows import Generate as Generate
    from castiron.pipelines.cluster.serving import deployment as deployment

if find_spec("ray") is None:
    raise ModuleNotFoundError(f"castiron.ray needs ray, which is not installed: {remedy('ray')}", name="ray")

# Rows need nothing of what serves, and the other way round.
_MODULES = {"Generate": "rows", "Stored": "places", "deployment": "serving", "store": "places"}
__all__ = [*_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'castiron.ray' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"castiron.pipelines.cluster.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
