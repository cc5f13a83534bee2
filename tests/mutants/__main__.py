"""`make mutants`: applies the catalogue's faults, one at a time, and says which test notices each.

Ends with 0 if every one is caught, with 1 if one survives, and with 2 if the tests fail without any.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence

from tests.mutants.faults import CATALOGUE
from tests.mutants.mutant import Mutant
from tests.mutants.running import Outcome, SoundCodeFails, examine


def today() -> int:
    """A seed that is another one every day."""
    return datetime.datetime.now(datetime.UTC).date().toordinal()


def share(count: int, seed: int, catalogue: Sequence[Mutant] = CATALOGUE) -> list[Mutant]:
    """So many of the catalogue; with seeds one after another all have their turn."""
    count = min(count, len(catalogue))
    return [catalogue[(seed * count + i) % len(catalogue)] for i in range(count)]


def named(words: Sequence[str]) -> list[Mutant]:
    """Those whose name or file has one of these words in it."""
    return [mutant for mutant in CATALOGUE if any(word in mutant.name or word in mutant.file for word in words)]


def line(mutant: Mutant, outcome: Outcome) -> str:
    """One line of the table."""
    by = outcome.by.removeprefix("tests/") or outcome.why
    return f"{outcome.of:<9} {outcome.seconds:6.1f} s  {mutant.name} ({mutant.file})  {by}"


def report(rows: Sequence[tuple[Mutant, Outcome]], seconds: float) -> dict:
    """What there is to tell, for JSON."""
    each = [
        {"name": m.name, "file": m.file, "outcome": o.of, "by": o.by, "why": o.why, "seconds": round(o.seconds, 2)}
        for m, o in rows
    ]
    return {"mutants": each, "caught": sum(o.of == "caught" for _, o in rows), "of": len(rows), "seconds": round(seconds, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only those with such a word in their name or file")
    parser.add_argument("--share", type=int, metavar="N", help="only N of them, which the seed chooses")
    parser.add_argument("--seed", type=int, help="which share (default: that of the day)")
    parser.add_argument("--list", action="store_true", help="name them and apply none")
    parser.add_argument("--json", action="store_true", help="print one object with what became of each")
    options = parser.parse_args(argv)
    chosen = named(options.words) if options.words else list(CATALOGUE)
    if not chosen:
        parser.error(f"no mutant has {' or '.join(options.words)} in its name or file; --list names them")
    if options.share:
        seed = today() if options.seed is None else options.seed
        print(f"share of seed {seed}", file=sys.stderr)
        chosen = share(options.share, seed, chosen)
    if options.list:
        print("\n".join(f"{mutant.name} ({mutant.file})" for mutant in chosen))
        return 0
    start, rows = time.monotonic(), []
    try:
        print(f"running the tests of {len(chosen)} mutants without any", file=sys.stderr)
        for mutant, outcome in examine(chosen):
            rows.append((mutant, outcome))
            print(line(mutant, outcome), file=sys.stderr if options.json else sys.stdout, flush=True)
    except SoundCodeFails as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    told = report(rows, time.monotonic() - start)
    summary = f"{told['caught']} of {told['of']} mutants caught in {told['seconds']:.0f} s"
    print(json.dumps(told) if options.json else summary)
    return 0 if told["caught"] == told["of"] else 1


if __name__ == "__main__":
    sys.exit(main())
