"""Measure a bundle and other engines ("peers"): speed, time to first token and memory.

For castiron, the result also has the fractions of the machine's read bandwidth and peak FLOP/s
that it reaches. They are computed from the FLOP and bytes of each kernel in the bundle's manifest.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate.bench_engines import Engine, Progress, Settings, measure
from castiron.pipelines.evaluate.machine import READ_FLOATS, Machine, amount, busy_signs, describe, peak_of, spread
from castiron.pipelines.evaluate.verify import checkpoint_of
from castiron.pipelines.terminal import counted, print_message
from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.bundle.manifest import WEIGHTS, Manifest
from castiron.vmfb.run.chunks import chunks


def bench(
    bundle: Bundle, settings: Settings, against: Sequence[str], checkpoint: str | None, progress: Progress
) -> dict[str, Any]:
    """Measure a bundle, and run other engines on the same model; return the results as JSON values.

    checkpoint: the model for the other engines; None for the one that the bundle was compiled from.
    """
    if settings.context > bundle.manifest.max_context:
        raise PipelineError(
            f"--prompt, --gen and --depth need {settings.context} positions, but the bundle has "
            f"{bundle.manifest.max_context}; lower them, or compile with a larger --max-context"
        )
    bundle = bundle.with_context(bundle.manifest.max_context)
    engines = {"castiron": Engine("castiron", str(bundle.path))}
    absent = add_peers(engines, against, checkpoint_of(bundle, checkpoint, any_format=True) if against else Path())
    progress("compiling the probes of the machine", 0.0)
    tokens = np.random.default_rng(0).integers(bundle.manifest.vocab, size=settings.context).tolist()
    rounds, failed = measure(engines, settings, tokens, Machine(settings.threads), progress)
    missing = absent | failed
    for name, reason in missing.items():
        print_message(f"{name}: {reason}")
    limits = {name: statistics.median(values) for name, values in rounds.items()}
    peers = {name: summarise(engine) for name, engine in engines.items()}
    own, ours, manifest = engines["castiron"], peers.pop("castiron"), bundle.manifest
    shares = Workload(manifest).shares(settings, ours, limits)
    signs = busy_signs({**rounds, "decode tok/s": own.decode, "prefill tok/s": own.prefill}, limited(manifest, shares))
    return {
        "castiron": ours | shares,
        "busy": signs,
        "peers": peers,
        "machine": describe(rounds),
        "ratios": {name: ratios(ours, peer) for name, peer in peers.items()},
        "settings": {
            "model": manifest.name, "weights": manifest.weights, "numerics": manifest.numerics, "kv_cache_type": manifest.cache,
            **asdict(settings),
        },
        "missing": missing,
    }  # fmt: skip


def limited(manifest: Manifest, shares: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the shares of the machine's limits that can be above 1 only on a busy machine."""
    kernels = [name for functions in manifest.compile.get("work", {}).values() for name in functions]
    is_f32 = all(peak_of(name) == "peak_gflop_s" for name in kernels)
    is_large = manifest.files[WEIGHTS].size > 4 * READ_FLOATS
    return {
        "decode of the read bandwidth": shares["decode_roofline"] if is_large else None,
        "prefill of the f32 peak": shares["prefill_peak_share"] if is_f32 else None,
    }


def add_peers(engines: dict[str, Engine], against: Sequence[str], source: Path) -> dict[str, str]:
    """Add the engines that can run the model; return {name of an engine that cannot: reason}."""
    from castiron.reference.peers import PEERS

    missing = {}
    for name in against:
        module, install = PEERS[name]
        if importlib.util.find_spec(module) is None:
            missing[name] = f"not installed: {install}"
        elif name == "llama.cpp" and source.is_dir():
            missing[name] = f"reads GGUF files, and {source} is a directory; give a file with --checkpoint"
        else:
            engines[name] = Engine(name, str(source))
    return missing


def summarise(engine: Engine) -> dict[str, Any]:
    return {
        "decode_tok_s": round(statistics.median(engine.decode), 2),
        "prefill_tok_s": round(statistics.median(engine.prefill), 2),
        "ttft_ms": round(statistics.median(engine.first), 1),
        "rss_mb": round(engine.rss_mb, 1),
        "runs": {
            "decode_tok_s": spread(engine.decode),
            "prefill_tok_s": spread(engine.prefill),
            "ttft_ms": spread(engine.first),
        },
    }


def ratios(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, float]:
    """Return how many times better castiron is than an engine; below 1, the engine is better."""
    return {
        "decode": round(ours["decode_tok_s"] / peer["decode_tok_s"], 3),
        "prefill": round(ours["prefill_tok_s"] / peer["prefill_tok_s"], 3),
        "ttft": round(peer["ttft_ms"] / ours["ttft_ms"], 3),
        "rss": round(peer["rss_mb"] / ours["rss_mb"], 3),
    }


def table(result: Mapping[str, Any]) -> str:
    settings, machine = result["settings"], result["machine"]
    lines = [
        f"{settings['model']}, {counted(settings['threads'], 'thread')}, decode {settings['gen']} from position "
        f"{settings['depth']}, prefill {settings['prompt']}",
        f"{machine['cpu']}: reads {machine['read_gb_s']:.1f} GB/s, f32 peak {machine['peak_gflop_s']:.0f} GFLOP/s",
        "",
        f"{'':<12}{'decode tok/s':>14}{'of limit':>10}{'prefill tok/s':>15}{'of peak':>9}{'first ms':>10}{'RSS MB':>8}",
    ]
    for name, engine in {"castiron": result["castiron"], **result["peers"]}.items():
        roofline, peak = (
            f"{share:.0%}" if (share := engine.get(key)) is not None else ""
            for key in ("decode_roofline", "prefill_peak_share")
        )
        lines.append(
            f"{name:<12}{engine['decode_tok_s']:>14.1f}{roofline:>10}{engine['prefill_tok_s']:>15.1f}{peak:>9}"
            f"{engine['ttft_ms']:>10.0f}{engine['rss_mb']:>8.0f}"
        )
    if (result["castiron"]["prefill_peak_share"] or 0) > 1:
        lines.append("of peak: of the f32 peak, which int8 and bf16 kernels can exceed")
    for name, ratio in result["ratios"].items():
        lines.append(
            f"against {name}: decode {ratio['decode']:.2f}x, prefill {ratio['prefill']:.2f}x, first token "
            f"{ratio['ttft']:.2f}x, memory {ratio['rss']:.2f}x"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Workload:
    """The work of a bundle: bytes that its decode steps read, and FLOP of its prefills."""

    manifest: Manifest

    def shares(self, settings: Settings, measured: Mapping[str, Any], limits: Mapping[str, float]) -> dict[str, float | None]:
        """Return the reached shares of the read bandwidth and of the f32 peak.

        Int8 activations can exceed the peak. Both are None without FLOP and bytes in the manifest.
        """
        if not self._kernels() or not all("weights" in kernel for kernel in self._kernels()):
            return {"decode_roofline": None, "prefill_peak_share": None}
        nbytes, flops = self.decode_bytes(settings.depth, settings.gen), self.prefill_flops(settings.prompt)
        read, computed = nbytes * measured["decode_tok_s"], flops / settings.prompt * measured["prefill_tok_s"]
        return {
            "decode_roofline": round(read / limits["read_gb_s"] / 1e9, 4),
            "prefill_peak_share": round(computed / limits["peak_gflop_s"] / 1e9, 4),
        }

    def decode_bytes(self, depth: int, tokens: int) -> float:
        """Return the mean bytes of weights and KV cache that a decode step from `depth` on reads.

        Of the embedding, one row counts; of the experts, those to which a token is routed.
        """
        weights = sum(kernel["calls"] * kernel["weights"] for kernel in self._kernels())
        # Only kernels that read the KV cache have bytes that grow with the position; at position 0 they read one entry.
        cache = sum(
            kernel["calls"] * (amount(kernel, "bytes", position) - kernel["bytes"][0] + kernel["bytes"][1])
            for kernel in self._kernels()
            if kernel["bytes"][1]
            for position in range(depth, depth + tokens)
        )
        return weights + cache / tokens

    def prefill_flops(self, tokens: int) -> float:
        """Return the FLOP to prefill `tokens` tokens and compute the last logits."""
        names = {
            function.width: function.name
            for function in self.manifest.functions
            if function.role == "prefill" and not function.is_long
        }
        names[1] = "decode_step"
        done, total = 0, 0.0
        for width, count in chunks(tokens, 0, self.manifest.context, self.manifest.widths("prefill"), 0.0):
            for kernel in self._kernels(names[width]):
                # A one-token kernel in a call of many tokens is the output head, which only the last call needs.
                of_last = width > 1 and kernel.get("tokens") == 1
                share = (done + count == tokens) if of_last else count / width
                total += kernel["calls"] * amount(kernel, "flops", done) * share
            done += count
        return total

    def _kernels(self, function: str = "decode_step") -> list[dict]:
        return list(self.manifest.compile.get("work", {}).get(function, {}).values())
