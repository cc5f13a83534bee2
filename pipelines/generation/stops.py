"""Stop strings in text that comes bit by bit."""

from collections.abc import Sequence

from castiron.pipelines.errors import PipelineError


class StopStrings:
    """Lets text through up to the first stop string, and holds back only what may be the beginning of one.

    What `add` returns, and `finish` at the end, join to the text before the stop string. Of two stop strings in one
    text the one that begins first counts. `met` is the one that ended the text, None as long as none did.
    """

    def __init__(self, strings: Sequence[str]):
        """PipelineError for an empty string, which would end every text at once."""
        self.strings = tuple(strings)
        if "" in self.strings:
            raise PipelineError("a stop string is empty; give --stop the text to end before")
        self.held = ""
        self.met: str | None = None

    @property
    def stopped(self) -> bool:
        return self.met is not None

    def add(self, more: str) -> str:
        """The text that is certain once `more` has come."""
        if self.stopped or not more:
            return ""
        if not self.strings:
            return more
        text = self.held + more
        cut, met = self._find(text)
        # A stop string that begins before the one found may still become whole.
        begins = min(beginning_in(text, string) for string in self.strings)
        if begins < cut:
            self.held = text[begins:]
            return text[:begins]
        self.met, self.held = met, ""
        return text[:cut]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        text, self.held = self.held, ""
        if self.stopped:
            return ""
        cut, self.met = self._find(text)
        return text[:cut]

    def _find(self, text: str) -> tuple[int, str | None]:
        """Where the first string in `text` begins, and which it is; the end of `text` and None if there is none."""
        found = [(at, string) for string in self.strings if (at := text.find(string)) >= 0]
        return min(found, key=lambda one: one[0], default=(len(text), None))


def beginning_in(text: str, string: str) -> int:
    """Where a proper beginning of `string` starts that `text` ends in, the earliest; the end of `text` if nowhere."""
    starts = range(max(0, len(text) - len(string) + 1), len(text))
    return next((start for start in starts if string.startswith(text[start:])), len(text))
