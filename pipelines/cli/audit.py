"""Compute an answer again from its receipt, and compare.

castiron run --receipt, the server's field `receipt` and the Python API write receipts. The bundle
reads several tokens in a call, so an audit is faster than the generation was. If all functions of
the bundle give the same bits ("has_same_bits" in the manifest; --numerics canonical makes sure),
the bits of all logits are compared; otherwise only the tokens. The exit status is 1 if anything
differs.
"""

import argparse
import json
from pathlib import Path

from castiron.pipelines.cli.open_engine import with_device
from castiron.pipelines.cli.options import add_options
from castiron.pipelines.terminal import Progress, counted

EXAMPLES = """\
examples:
  castiron run build/model "Name three colours." --receipt answer.json
  castiron audit answer.json build/model
  castiron audit answer.json build/arm64 --other-bundle

--json prints one object: equal, compared (bits or tokens), positions (tokens that were compared),
differences and rounded (tokens that differ only by rounding), each with what, recorded, computed,
position (index in the answer) and margin (between the logits of two tokens).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("receipt", metavar="FILE", help="the receipt")
    parser.add_argument("bundle", metavar="DIR", help="the bundle that gave the answer")
    parser.add_argument("--other-bundle", action="store_true",
                        help="accept another bundle of the same checkpoint, such as one for this CPU")  # fmt: skip
    add_options(parser, "--threads", "--device", "--json")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.compile.open_model import require_generation
    from castiron.pipelines.engine.receipt import read_receipt
    from castiron.pipelines.evaluate.audit import audit
    from castiron.vmfb.bundle.bundle import open_bundle
    from castiron.vmfb.bundle.json_record import to_json

    receipt = read_receipt(Path(args.receipt))
    bundle = with_device(require_generation(open_bundle(args.bundle, full_check=True)), args.device)
    with Progress() as progress:
        found = audit(
            receipt, bundle, args.threads, other_bundle=args.other_bundle,
            progress=lambda done, total: progress("computing the answer again", done / total),
        )  # fmt: skip
    is_equal = not found.differences
    if args.json:
        print(json.dumps({"equal": is_equal, **to_json(found)}, ensure_ascii=False))
    else:
        for each in found.rounded:
            print(f"rounding    {line(each)}")
        for each in found.differences:
            print(f"differs     {line(each)}")
        if is_equal:
            bits = "the logits have the same bits" if found.compared == "bits" else (
                "only tokens were compared, because calls of several tokens round otherwise; compile with --numerics canonical"
            )  # fmt: skip
            print(f"equal       {counted(found.positions, 'token')}: {bits}")
    return 0 if is_equal else 1


def line(difference) -> str:
    """Return a line with a difference: where it is, and the recorded and the computed value."""
    where = "receipt" if difference.position is None else f"token {difference.position} of the answer"
    margin = "" if difference.margin is None else f", whose logit is {difference.margin:.2g} higher"
    return f"{where}: {difference.what} is {difference.recorded} in the receipt; computed {difference.computed}{margin}"
