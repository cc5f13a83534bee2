"""Run castiron on Ray: `Generate` for Ray Data, `deployment` for Ray Serve (docs/cluster.md)."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from castiron.pipelines.errors import install_command

if TYPE_CHECKING:
    from castiron.pipelines.cluster.actors import Generate as Generate
    from castiron.pipelines.cluster.bundle_source import Stored as Stored
    from castiron.pipelines.cluster.bundle_source import store as store
    from castiron.pipelines.cluster.deployment import deployment as deployment

if find_spec("ray") is None:
    raise ModuleNotFoundError(f"castiron.ray needs ray, which is not installed: {install_command('ray')}", name="ray")

_MODULES = {"Generate": "actors", "Stored": "bundle_source", "deployment": "deployment", "store": "bundle_source"}
__all__ = [*_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'castiron.ray' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"castiron.pipelines.cluster.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
