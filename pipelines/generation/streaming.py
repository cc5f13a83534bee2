"""Text as its tokens come, up to a stop string."""

from collections.abc import Iterable, Iterator

from castiron.pipelines.generation.stops import StopStrings
from castiron.pipelines.generation.text import Detokeniser, Text


def pieces(tokens: Iterable[int], text: Text, stops: StopStrings) -> Iterator[str]:
    """The text of `tokens`, never in the middle of a character; ends before the first stop string, `stops.stopped` then.

    After a stop string no more of `tokens` is asked for.
    """
    characters = Detokeniser(text)
    for token in tokens:
        if piece := stops.add(characters.add(token)):
            yield piece
        if stops.stopped:
            return
    if piece := stops.add(characters.finish()) + stops.finish():
        yield piece
