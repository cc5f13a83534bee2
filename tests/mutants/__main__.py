"""`make mutants`: apply the mutants one at a time and print which test notices each.

The exit status is 0 if all are caught, 1 if one survives, and 2 if the tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.mutants.mutant import CATALOGUE, Mutant
from tests.mutants.running import Outcome, UnchangedCodeFails, examine


def line(mutant: Mutant, outcome: Outcome) -> str:
    """Return the line of the table for a mutant."""
    by = outcome.by.removeprefix("tests/") or outcome.why
    return f"{outcome.status:<9} {outcome.seconds:6.1f} s  {mutant.name} ({mutant.file})  {by}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only mutants whose name or file contains one of these words")
    parser.add_argument("--list", action="store_true", help="print names and files, and run nothing")
    options = parser.parse_args(argv)
    words = options.words or [""]
    chosen = [mutant for mutant in CATALOGUE if any(word in mutant.name or word in mutant.file for word in words)]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(words)} in its name or file; use --list to print them")
    if options.list:
        print("\n".join(f"{mutant.name} ({mutant.file})" for mutant in chosen))
        return 0
    start, caught = time.monotonic(), 0
    try:
        print(f"running the tests of {len(chosen)} mutants on unchanged code", file=sys.stderr)
        for mutant, outcome in examine(chosen):
            caught += outcome.status == "caught"
            print(line(mutant, outcome), flush=True)
    except UnchangedCodeFails as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    print(f"{caught} of {len(chosen)} mutants caught in {time.monotonic() - start:.0f} s")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
