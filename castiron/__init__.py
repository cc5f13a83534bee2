"""castiron from Python: `import castiron` is everything that docs/python.md shows, loaded when first asked for.

The folders beside this file are the project's packages: `castiron.emitter`, `castiron.vmfb`, `castiron.pipelines` and
`castiron.reference`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from castiron import ray as ray
    from castiron.emitter.types import EmitError as EmitError
    from castiron.pipelines.casting.cast import compile as compile
    from castiron.pipelines.checkpoints.checkpoint import CheckpointError as CheckpointError
    from castiron.pipelines.errors import PipelineError as PipelineError
    from castiron.pipelines.generation.chat import Chat as Chat
    from castiron.pipelines.generation.draft import Draft as Draft
    from castiron.pipelines.generation.draft import open_draft as open_draft
    from castiron.pipelines.generation.generate import Generation as Generation
    from castiron.pipelines.generation.many import Result as Result
    from castiron.pipelines.generation.many import generate_many as generate_many
    from castiron.pipelines.generation.model_sampling import model_sampling as model_sampling
    from castiron.pipelines.generation.sampling import Sampling as Sampling
    from castiron.pipelines.generation.scheduler import Scheduler as Scheduler
    from castiron.pipelines.generation.scoring import Scored as Scored
    from castiron.pipelines.generation.sequence import Delta as Delta
    from castiron.pipelines.generation.sequence import Failed as Failed
    from castiron.pipelines.generation.sequence import Finished as Finished
    from castiron.pipelines.generation.sequence import Sequence as Sequence
    from castiron.pipelines.generation.text import Detokeniser as Detokeniser
    from castiron.pipelines.generation.text import Text as Text
    from castiron.pipelines.generation.text import load_text as load_text
    from castiron.pipelines.generation.thoughts import Thought as Thought
    from castiron.pipelines.model import Model as Model
    from castiron.pipelines.model import Stream as Stream
    from castiron.pipelines.model import load as load
    from castiron.pipelines.serve.app import open_app as open_app
    from castiron.vmfb.bundle import Bundle as Bundle
    from castiron.vmfb.bundle import open_bundle
    from castiron.vmfb.compiler import CompileError as CompileError
    from castiron.vmfb.manifest import BundleError as BundleError
    from castiron.vmfb.program import SessionError as SessionError
    from castiron.vmfb.session import Session as Session

    # Under another name it is exported by being assigned.
    generate, open = Generation, open_bundle

# The full name of each. The runtime takes a quarter of a second to load, and the command line imports this module too.
_FULL_NAMES = {
    "Bundle": "castiron.vmfb.bundle.Bundle",
    "BundleError": "castiron.vmfb.manifest.BundleError",
    "Chat": "castiron.pipelines.generation.chat.Chat",
    "CheckpointError": "castiron.pipelines.checkpoints.checkpoint.CheckpointError",
    "CompileError": "castiron.vmfb.compiler.CompileError",
    "Delta": "castiron.pipelines.generation.sequence.Delta",
    "Detokeniser": "castiron.pipelines.generation.text.Detokeniser",
    "Draft": "castiron.pipelines.generation.draft.Draft",
    "EmitError": "castiron.emitter.types.EmitError",
    "Failed": "castiron.pipelines.generation.sequence.Failed",
    "Finished": "castiron.pipelines.generation.sequence.Finished",
    "Generation": "castiron.pipelines.generation.generate.Generation",
    "Model": "castiron.pipelines.model.Model",
    "PipelineError": "castiron.pipelines.errors.PipelineError",
    "Result": "castiron.pipelines.generation.many.Result",
    "Sampling": "castiron.pipelines.generation.sampling.Sampling",
    "Scheduler": "castiron.pipelines.generation.scheduler.Scheduler",
    "Scored": "castiron.pipelines.generation.scoring.Scored",
    "Sequence": "castiron.pipelines.generation.sequence.Sequence",
    "Session": "castiron.vmfb.session.Session",
    "SessionError": "castiron.vmfb.program.SessionError",
    "Stream": "castiron.pipelines.model.Stream",
    "Text": "castiron.pipelines.generation.text.Text",
    "compile": "castiron.pipelines.casting.cast.compile",
    "Thought": "castiron.pipelines.generation.thoughts.Thought",
    "generate": "castiron.pipelines.generation.generate.Generation",
    "generate_many": "castiron.pipelines.generation.many.generate_many",
    "load": "castiron.pipelines.model.load",
    "load_text": "castiron.pipelines.generation.text.load_text",
    "model_sampling": "castiron.pipelines.generation.model_sampling.model_sampling",
    "open": "castiron.vmfb.bundle.open_bundle",
    "open_draft": "castiron.pipelines.generation.draft.open_draft",
    "open_app": "castiron.pipelines.serve.app.open_app",
}
__all__ = ["__version__", *_FULL_NAMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "ray":
        # A module of its own, which needs the extra `ray`.
        return import_module("castiron.ray")
    if name not in _FULL_NAMES:
        raise AttributeError(f"module 'castiron' has no attribute {name!r}")
    module, _, attribute = _FULL_NAMES[name].rpartition(".")
    globals()[name] = value = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
