"""castiron's Python API (docs/python.md); names are imported when they are first used.

The folders beside this file are the packages: `castiron.emitter`, `castiron.vmfb`,
`castiron.pipelines` and `castiron.reference`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from castiron import ray as ray
    from castiron.emitter.graph.types import EmitError as EmitError
    from castiron.pipelines.checkpoints.checkpoint import CheckpointError as CheckpointError
    from castiron.pipelines.engine.draft import Draft as Draft
    from castiron.pipelines.engine.engine import Engine as Engine
    from castiron.pipelines.engine.engine import EventStream as EventStream
    from castiron.pipelines.engine.request import Failed as Failed
    from castiron.pipelines.engine.request import Finished as Finished
    from castiron.pipelines.engine.request import Request as Request
    from castiron.pipelines.engine.request import Token as Token
    from castiron.pipelines.engine.request import Tokens as Tokens
    from castiron.pipelines.engine.sampling import Sampling as Sampling
    from castiron.pipelines.engine.sampling import model_sampling as model_sampling
    from castiron.pipelines.errors import PipelineError as PipelineError
    from castiron.pipelines.model import Model as Model
    from castiron.pipelines.model import compile_bundle
    from castiron.pipelines.model import load as load
    from castiron.pipelines.server.app import open_app as open_app
    from castiron.pipelines.text.conversation import Chat as Chat
    from castiron.pipelines.text.generate import Result as Result
    from castiron.pipelines.text.generate import Scored as Scored
    from castiron.pipelines.text.generate import open_draft as open_draft
    from castiron.pipelines.text.reasoning import Reasoning as Reasoning
    from castiron.pipelines.text.text_output import Delta as Delta
    from castiron.pipelines.text.text_output import Stream as Stream
    from castiron.pipelines.text.text_output import text_request as text_request
    from castiron.pipelines.text.tokenizer import Detokeniser as Detokeniser
    from castiron.pipelines.text.tokenizer import Tokenizer as Tokenizer
    from castiron.pipelines.text.tokenizer import load_tokenizer as load_tokenizer
    from castiron.vmfb.bundle.bundle import Bundle as Bundle
    from castiron.vmfb.bundle.bundle import open_bundle
    from castiron.vmfb.bundle.manifest import BundleError as BundleError
    from castiron.vmfb.compiler.iree_compile import CompileError as CompileError
    from castiron.vmfb.device.program import SessionError as SessionError
    from castiron.vmfb.run.session import Session as Session

    # An assignment, because type checkers don't accept an import under another name as an export.
    compile, open = compile_bundle, open_bundle

# Names by module. They are loaded on demand, because loading the runtime takes a quarter of a second
# and the command line imports this module too.
_NAMES = {
    "emitter.graph.types": "EmitError",
    "pipelines.checkpoints.checkpoint": "CheckpointError",
    "pipelines.engine.draft": "Draft",
    "pipelines.engine.engine": "Engine EventStream",
    "pipelines.engine.request": "Failed Finished Request Token Tokens",
    "pipelines.engine.sampling": "Sampling model_sampling",
    "pipelines.errors": "PipelineError",
    "pipelines.model": "Model compile load",
    "pipelines.server.app": "open_app",
    "pipelines.text.conversation": "Chat",
    "pipelines.text.generate": "Result Scored open_draft",
    "pipelines.text.reasoning": "Reasoning",
    "pipelines.text.text_output": "Delta Stream text_request",
    "pipelines.text.tokenizer": "Detokeniser Tokenizer load_tokenizer",
    "vmfb.bundle.bundle": "Bundle open",
    "vmfb.compiler.iree_compile": "CompileError",
    "vmfb.bundle.manifest": "BundleError",
    "vmfb.device.program": "SessionError",
    "vmfb.run.session": "Session",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_ALIASES = {"compile": "compile_bundle", "open": "open_bundle"}
__all__ = ["__version__", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "ray":
        # castiron.ray is loaded as a module, because it needs the extra `ray`.
        return import_module("castiron.ray")
    if name not in _MODULES:
        raise AttributeError(f"module 'castiron' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"castiron.{_MODULES[name]}"), _ALIASES.get(name, name))
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
