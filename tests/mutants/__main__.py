"""`make mutants`: apply the mutants one at a time and print which test notices each.

The exit status is 0 if all are caught, 1 if one survives, and 2 if the tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from tests.mutants.mutant import CATALOGUE, Mutant
from tests.mutants.running import Outcome, UnchangedCodeFails, examine


def line(mutant: Mutant, outcome: Outcome) -> str:
    """Return the line of the table for a mutant."""
    by = outcome.by.removeprefix("tests/") or outcome.why
    return f"{outcome.status:<9} {outcome.seconds:6.1f} s  {mutant.name} ({mutant.file})  {by}"


def record(mutant: Mutant, outcome: Outcome) -> dict:
    """Return the record of a mutant for JSON."""
    found = {"outcome": outcome.status, "by": outcome.by, "why": outcome.why, "seconds": round(outcome.seconds, 2)}
    return {"name": mutant.name, "file": mutant.file, **found}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only mutants whose name or file contains one of these words")
    parser.add_argument("--list", action="store_true", help="print names and files, and run nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    words = options.words or [""]
    chosen = [mutant for mutant in CATALOGUE if any(word in mutant.name or word in mutant.file for word in words)]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(words)} in its name or file; use --list to print them")
    if options.list:
        print("\n".join(f"{mutant.name} ({mutant.file})" for mutant in chosen))
        return 0
    start, records = time.monotonic(), []
    try:
        print(f"running the tests of {len(chosen)} mutants on unchanged code", file=sys.stderr)
        for mutant, outcome in examine(chosen):
            records.append(record(mutant, outcome))
            print(line(mutant, outcome), file=sys.stderr if options.json else sys.stdout, flush=True)
    except UnchangedCodeFails as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    seconds, caught = time.monotonic() - start, sum(each["outcome"] == "caught" for each in records)
    if options.json:
        print(json.dumps({"mutants": records, "caught": caught, "of": len(records), "seconds": round(seconds, 1)}))
    else:
        print(f"{caught} of {len(records)} mutants caught in {seconds:.0f} s")
    return 0 if caught == len(records) else 1


if __name__ == "__main__":
    sys.exit(main())
