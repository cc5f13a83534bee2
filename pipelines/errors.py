"""The error of the pipelines, and the table of every error that a user may meet."""

import sys


class PipelineError(Exception):
    """Something asked of a command that cannot be done; one sentence for the user."""


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the text is one sentence for the user."""


# Module and class. A class is looked up only in modules that are already imported, so that the command line does not
# import torch or the compiler to learn that neither failed.
USER_ERRORS = (
    ("castiron.pipelines.errors", "PipelineError"),
    ("castiron.pipelines.errors", "CheckpointError"),
    ("castiron.emitter.types", "EmitError"),
    ("castiron.vmfb.compiler", "CompileError"),
    ("castiron.vmfb.targets", "TargetError"),
    ("castiron.vmfb.manifest", "BundleError"),
    ("castiron.vmfb.weights", "WeightsError"),
    ("castiron.vmfb.program", "SessionError"),
    ("castiron.vmfb.state_file", "StateError"),
)


def user_errors() -> tuple[type[Exception], ...]:
    """The error classes of the modules imported so far whose text is meant for a user."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in USER_ERRORS)
    return tuple(error for error in found if error is not None)
