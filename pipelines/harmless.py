"""Text of models, files and requests on its way to a terminal."""

import re

# C0 but tab and line feed, DEL and C1; embeddings, overrides and isolates of UAX 9.
_OBEYED = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """`text` of which a terminal obeys nothing but tabs and ends of lines: what it would obey is as in a repr."""
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text.replace("\r\n", "\n"))
