"""What a program of one's own needs of castiron, importable from one place; docs/python.md shows it."""

from collections.abc import Callable, Collection, Sequence

from vmfb.bundle import Bundle, open_bundle
from vmfb.manifest import BundleError
from vmfb.session import Session, SessionError

from .chat import Chat
from .errors import PipelineError
from .generate import Generation
from .sampling import Sampler, Sampling
from .text import Detokeniser, Text, load_text

__all__ = [
    "Bundle", "BundleError", "Chat", "Detokeniser", "Generation", "PipelineError", "Sampling", "Session", "SessionError",
    "Text", "generate", "load_text", "open_bundle",
]  # fmt: skip


def generate(
    session: Session,
    prompt: Sequence[int],
    *,
    max_tokens: int | None = None,
    sampling: Sampling = Sampling(),
    stop_tokens: Collection[int] = (),
    speculate: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Generation:
    """An iterator over the token ids that follow `prompt`, which starts at the session's position; see `Generation`."""
    return Generation(
        session, prompt, sampler=Sampler(sampling), max_tokens=max_tokens, stop_tokens=stop_tokens, speculate=speculate,
        progress=progress,
    )  # fmt: skip
