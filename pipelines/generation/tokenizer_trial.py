"""Tries a tokenizer.json on stdin, as a program of its own: the library may end the process, and some files take for ever.

Prints one JSON object: {"error": what it says} or {"largest": the largest id that the sample got, with special tokens}.
"""

import contextlib
import json
import resource
import sys

SAMPLE = "Hello, it's 12:30 on the 7th.\n\n\tdef f(x):\r\n    return x ** 2  # ünïcödé 日本語 \U0001f600\n" + "a b " * 50
LETTERS, RUN = "a 0.\né", 3000
SECONDS, BYTES = 10, 2 << 30


def main() -> None:
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, BYTES)):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # Some systems, macOS among them, do not limit addresses.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, hard))
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(sys.stdin.buffer.read())
    except Exception as error:  # tokenizers raises Exception itself
        print(json.dumps({"error": str(error)}))
        return
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        ids = tokenizer.encode(SAMPLE).ids
        tokenizer.decode(ids)
    except Exception:
        # A text of other letters may be read.
        ids = []
    for letter in LETTERS:
        # Some expressions look at all of a run again from each letter of it.
        with contextlib.suppress(Exception):
            tokenizer.encode(letter * RUN)
    print(json.dumps({"largest": max(ids, default=-1)}))


if __name__ == "__main__":
    main()
