"""Says how many requests of a kind this machine answers, how fast, in how much memory, and how many such machines a rate needs.

Without more the calls of the bundle are measured here, in a few seconds. Of another machine, described by --cores, --bandwidth,
--flops and --memory, the answer is a calculation: what the bundle's kernels read and compute over what that machine can, and
the share of it that calls usually reach.
"""

import argparse
import json
from typing import TYPE_CHECKING, Any

from castiron.pipelines.commands.generating import add_bundle_argument, trust_of
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.sizes import megabytes

if TYPE_CHECKING:
    from castiron.pipelines.measuring.call_times import Limits
    from castiron.pipelines.measuring.plan import Times
    from castiron.vmfb.bundle import Bundle

EXAMPLES = """\
examples:
  castiron plan build/model --prompt 512 --gen 128 --rate 20
  castiron plan build/model --prompt 2000 --gen 300 --busiest 0.6 --rate 5 --json
  castiron plan build/model --rate 20 --cores 64 --bandwidth 400 --flops 4000 --memory 512

--flops is the f32 peak of all cores, in GFLOP/s, multiply and add counted as two; --bandwidth what they read, in GB/s. castiron
explain shows both for this machine. What is left out of them is this machine's, of the peak for each core.

--json prints one object: name, measured (false of a calculation), prompt, gen, slots, memory (weights, state of one request,
slots and total, there; bytes), prefill_tok_s (of one prompt alone), decode_tok_s (by sequences at once), most_per_s and
batch_per_s (requests of one machine, and rows of castiron batch); with --rate machines, busy, active (sequences that decode),
first_ms and token_ms, each of one of these machines; with --check check (most_per_s, first_ms and token_ms, and the same
with expected_ before each, of the very requests that were run).
"""
# The busiest that a machine is planned to be: beyond it waiting grows faster than the rate.
BUSIEST = 0.8
# Any number of an option; with more or less the arithmetic means nothing.
LEAST, MOST = 1e-6, 1e9
# What --check tells, and with how many decimals.
CHECKED = (
    ("requests a second at most", "most_per_s", 2),
    ("ms to the first token", "first_ms", 0),
    ("ms a token", "token_ms", 1),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser)
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of a prompt (default: 512)")
    parser.add_argument("--gen", type=int, default=128, metavar="N", help="tokens of an answer (default: 128)")
    parser.add_argument("--rate", type=float, metavar="R", help="requests a second, for which machines are counted")
    parser.add_argument("--busiest", type=float, default=BUSIEST, metavar="SHARE", help="the most of what it could answer "
                        f"that a machine is given (default: {BUSIEST})")  # fmt: skip
    parser.add_argument("--check", type=float, metavar="S", help="then run requests at that rate here, about so many seconds, "
                        "and tell what they met beside what was expected of them")  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per physical core)")
    group = parser.add_argument_group("another machine", "With one of the first three nothing is measured but this machine's "
                                      "limits, where they are needed.")  # fmt: skip
    group.add_argument("--cores", type=int, metavar="N", help="its physical cores")
    group.add_argument("--bandwidth", type=float, metavar="GB/S", help="what it reads from memory")
    group.add_argument("--flops", type=float, metavar="GFLOP/S", help="its f32 peak")
    group.add_argument("--memory", type=float, metavar="GB", help="its memory (default: this machine's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.casting.named import bundle_of, generating
    from castiron.pipelines.measuring.call_times import calculated, measured

    for name in ("rate", "cores", "bandwidth", "flops", "memory", "check"):
        if (value := getattr(args, name)) is not None and not LEAST <= value <= MOST:
            raise PipelineError(f"--{name} is {value:g}; give a number from {LEAST:g} to {MOST:g}")
    if not 0 < args.busiest < 1:
        raise PipelineError(f"--busiest is {args.busiest:g}; give a share above 0 and below 1")
    here = args.cores is args.bandwidth is args.flops is None
    if args.check and not (args.rate and here):
        raise PipelineError("--check runs requests on this machine at a --rate: give one, and describe no other machine")
    bundle = generating(bundle_of(args.bundle, **trust_of(args)))
    if here:
        times = measured(bundle, args.prompt, args.gen, args.threads)
    else:
        times = calculated(bundle.manifest, args.prompt, args.gen, limits(args))
    found = answer(args, bundle, times)
    if args.check:
        from castiron.pipelines.measuring.plan_check import checked

        found["check"] = checked(bundle, times, args.prompt, args.rate / found["machines"], args.check, args.threads)
    print(json.dumps(found) if args.json else "\n".join(table(found, args)))
    return 0


def limits(args: argparse.Namespace) -> "Limits":
    """The other machine's; those of this one are measured for what is not given, the peak as many times as there are cores."""
    from castiron.pipelines.measuring.call_times import Limits

    read, peak = args.bandwidth, args.flops
    if read is None or peak is None:
        from castiron.pipelines.measuring.machine import Machine
        from castiron.vmfb.cpu import physical_cores

        threads = args.threads or physical_cores()
        machine = Machine(threads)
        read = machine.read_gb_s() if read is None else read
        peak = machine.peak_gflop_s() / threads * (args.cores or threads) if peak is None else peak
    return Limits(read, peak)


def answer(args: argparse.Namespace, bundle: "Bundle", times: "Times") -> dict[str, Any]:
    """What --json prints; PipelineError where a single request has no room."""
    from castiron.pipelines.measuring.call_times import state_bytes
    from castiron.pipelines.measuring.memory import needed, slots_of, total_bytes
    from castiron.pipelines.measuring.plan import batch_rate, load, machines, most

    manifest = bundle.manifest
    there = int(args.memory * 1e9) if args.memory else total_bytes()
    weights, state = needed(manifest).weights, state_bytes(manifest, args.prompt + args.gen)
    slots = min(slots_of(manifest), (there - weights) // state)
    if slots < 1:
        raise PipelineError(
            f"the weights take {megabytes(weights)} and a request {megabytes(state)}, and there are {megabytes(there)}: take a "
            "machine with more memory, or fewer bits"
        )
    sizes = [size for size in times.steps if size <= slots]
    found: dict[str, Any] = {
        "name": manifest.name,
        "measured": args.cores is args.bandwidth is args.flops is None,
        "prompt": args.prompt,
        "gen": args.gen,
        "slots": slots,
        "memory": {"weights": weights, "state": state, "total": weights + slots * state, "there": there},
        "prefill_tok_s": round(args.prompt / times.alone, 1),
        "decode_tok_s": {str(size): round(size / times.steps[size], 1) for size in sorted(sizes)},
        "most_per_s": round(most(times, slots), 4),
        "batch_per_s": round(batch_rate(times, slots), 4),
    }
    if args.rate:
        count = machines(times, slots, args.rate, args.busiest)
        one = load(times, slots, args.rate / count)
        found |= {
            "rate": args.rate, "machines": count, "busy": round(one.busy, 3), "active": round(one.active, 2),
            "first_ms": round(one.first * 1e3, 1), "token_ms": round(one.token * 1e3, 2),
        }  # fmt: skip
    return found


def table(found: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """The answer for a person."""
    memory, how = found["memory"], "measured on this machine" if found["measured"] else "a calculation, nothing of it measured"
    lines = [
        f"{found['name']}: {found['prompt']} tokens in, {found['gen']} out; {how}",
        f"a prompt alone is read at {found['prefill_tok_s']:,.0f} tok/s",
        *(f"{size:>2} at once decode {speed:,.0f} tok/s" for size, speed in found["decode_tok_s"].items()),
        f"memory: weights {megabytes(memory['weights'])}, {found['slots']} slots of {megabytes(memory['state'])}: "
        f"{megabytes(memory['total'])} of {megabytes(memory['there'])}",
        f"one machine answers {found['most_per_s']:.3g} requests a second at most, castiron batch {found['batch_per_s']:.3g}",
    ]
    if "machines" in found:
        count = found["machines"]
        lines.append(
            f"{found['rate']:g} requests a second need {count} machine{'s' * (count != 1)}, each {found['busy']:.0%} busy (at "
            f"most {args.busiest:.0%}): first token after {found['first_ms']:.0f} ms, then {found['token_ms']:.1f} ms a token"
        )
    if check := found.get("check"):
        for what, key, places in CHECKED:
            lines.append(f"measured {check[key]:.{places}f} {what}, expected {check[f'expected_{key}']:.{places}f}")
    return lines
