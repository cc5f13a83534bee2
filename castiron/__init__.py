"""castiron from Python: `import castiron` is everything that docs/python.md shows, loaded when first asked for.

The folders beside this file are the project's packages: `castiron.emitter`, `castiron.vmfb`, `castiron.pipelines` and
`castiron.reference`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from castiron.pipelines.errors import PipelineError as PipelineError
    from castiron.pipelines.generation.chat import Chat as Chat
    from castiron.pipelines.generation.generate import Generation as Generation
    from castiron.pipelines.generation.generate import generate as generate
    from castiron.pipelines.generation.sampling import Sampling as Sampling
    from castiron.pipelines.generation.text import Detokeniser as Detokeniser
    from castiron.pipelines.generation.text import Text as Text
    from castiron.pipelines.generation.text import load_text as load_text
    from castiron.vmfb.bundle import Bundle as Bundle
    from castiron.vmfb.bundle import open_bundle as open  # noqa: F401
    from castiron.vmfb.manifest import BundleError as BundleError
    from castiron.vmfb.session import Session as Session
    from castiron.vmfb.session import SessionError as SessionError

# Where each name is, and what it is called there. The runtime takes a quarter of a second to load, and the command line
# imports this module too.
_PLACES = {
    "Bundle": "castiron.vmfb.bundle.Bundle",
    "BundleError": "castiron.vmfb.manifest.BundleError",
    "Chat": "castiron.pipelines.generation.chat.Chat",
    "Detokeniser": "castiron.pipelines.generation.text.Detokeniser",
    "Generation": "castiron.pipelines.generation.generate.Generation",
    "PipelineError": "castiron.pipelines.errors.PipelineError",
    "Sampling": "castiron.pipelines.generation.sampling.Sampling",
    "Session": "castiron.vmfb.session.Session",
    "SessionError": "castiron.vmfb.session.SessionError",
    "Text": "castiron.pipelines.generation.text.Text",
    "generate": "castiron.pipelines.generation.generate.generate",
    "load_text": "castiron.pipelines.generation.text.load_text",
    "open": "castiron.vmfb.bundle.open_bundle",
}
__all__ = ["__version__", *_PLACES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'castiron' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].rpartition(".")
    globals()[name] = value = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
