"""Stop strings in text that comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, and holds back only what may be the beginning of one.

    What `add` returns, and `finish` at the end, join to the text before the stop string. Of two stop strings in one
    text the one that begins first counts. `stopped` tells whether one was met.
    """

    def __init__(self, strings: Sequence[str]):
        self.strings = tuple(strings)
        self.held = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """The text that is certain with this piece."""
        if self.stopped or not piece:
            return ""
        if not self.strings:
            return piece
        text = self.held + piece
        found = [place for string in self.strings if (place := text.find(string)) >= 0]
        cut = min(found, default=len(text))
        # A stop string that begins before the one found may still become whole.
        begins = min((p for string in self.strings if (p := _beginning(text, string)) is not None), default=len(text))
        if begins < cut:
            self.held = text[begins:]
            return text[:begins]
        self.stopped, self.held = bool(found), ""
        return text[:cut]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        text, self.held = self.held, ""
        if self.stopped:
            return ""
        found = [place for string in self.strings if (place := text.find(string)) >= 0]
        self.stopped = bool(found)
        return text[: min(found, default=len(text))]


def _beginning(text: str, string: str) -> int | None:
    """Where at the end of `text` a proper beginning of `string` starts, the earliest; None if nowhere."""
    for place in range(max(0, len(text) - len(string) + 1), len(text)):
        if string.startswith(text[place:]):
            return place
    return None
