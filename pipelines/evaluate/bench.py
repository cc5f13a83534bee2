"""Measure a bundle and other engines ("peers"): speed, time to first token and memory, as shares of
the machine's limits.

The bundle's manifest has the work of each kernel (`castiron.pipelines.compile.bundle_manifest`);
llama.cpp's bytes come from the tensors of the GGUF file.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from castiron.emitter.abi import ELEMENT_BYTES
from castiron.emitter.kv_cache import SCALE_BYTES
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate.bench_engines import Engine, Settings, measure
from castiron.pipelines.evaluate.machine import Machine, amount, describe, spread
from castiron.pipelines.evaluate.verify import checkpoint_of
from castiron.pipelines.terminal import counted, print_message
from castiron.vmfb.bundle import Bundle
from castiron.vmfb.chunks import chunks
from castiron.vmfb.manifest import Manifest

Progress = Callable[[str, float], None]


def bench(
    bundle: Bundle, settings: Settings, against: Sequence[str], checkpoint: str | None, progress: Progress
) -> dict[str, Any]:
    """Measure a bundle and the peers `against`; return the object that --json prints.

    checkpoint: what peers read; by default the one that the bundle was compiled from.
    """
    if settings.context > bundle.manifest.context:
        raise PipelineError(
            f"settings need {settings.context} positions, but the bundle's context is {bundle.manifest.context}; lower "
            "--prompt, --gen or --depth, or compile with a larger --context"
        )
    workload = Workload(bundle.manifest)
    engines = {"castiron": Engine("castiron", str(bundle.path), workload.weight_bytes, workload.cache_item_bytes)}
    absent = add_peers(engines, workload, against, checkpoint_of(bundle, checkpoint, any_format=True) if against else Path())
    _print_remarks(absent)
    progress("compiling the probes of the machine", 0.0)
    tokens = np.random.default_rng(0).integers(bundle.manifest.vocab, size=settings.context).tolist()
    rounds, missing, notes = measure(engines, settings, tokens, Machine(settings.threads), progress)
    _print_remarks(missing | notes)
    limits = {name: statistics.median(values) for name, values in rounds.items()}
    peers = {name: summarise(engine, settings, workload, limits) for name, engine in engines.items()}
    ours = peers.pop("castiron")
    manifest = bundle.manifest
    return {
        "castiron": ours,
        "peers": peers,
        "machine": describe(rounds),
        "ratios": {name: ratios(ours, peer) for name, peer in peers.items()},
        "settings": {
            "model": manifest.name, "weights": manifest.weights, "numerics": manifest.numerics, "cache": manifest.cache,
            **asdict(settings),
        },
        "missing": absent | missing,
        "notes": notes,
    }  # fmt: skip


def add_peers(engines: dict[str, Engine], workload: Workload, against: Sequence[str], source: Path) -> dict[str, str]:
    """Add the peers that can read `source` to `engines`; return why each other peer is missing."""
    from castiron.reference.peers import PEERS

    missing = {}
    for name in against:
        module, install = PEERS[name]
        if importlib.util.find_spec(module) is None:
            missing[name] = f"not installed: {install}"
        elif name == "llama.cpp" and source.is_dir():
            missing[name] = f"reads GGUF files, and {source} is a directory; give a file with --checkpoint"
        elif name == "llama.cpp":
            engines[name] = Engine(name, str(source), gguf_bytes(source), 2)
        else:
            elements = workload.elements
            engines[name] = Engine(name, str(source), elements and elements * 4, 4)
    return missing


def _print_remarks(remarks: Mapping[str, str]) -> None:
    for name, remark in remarks.items():
        print_message(f"{name}: {remark}")


def summarise(engine: Engine, settings: Settings, workload: Workload, limits: Mapping[str, float]) -> dict[str, Any]:
    """Return the measurements of one engine as JSON values.

    decode_roofline: share of the read bandwidth that decoding needs for weights and KV cache.
    prefill_peak_share: share of the f32 peak that prefill needs; an engine that rounds activations
    to int8 may exceed 1. Both are None if the engine's work is unknown.
    """
    nbytes, flops = engine.weight_bytes, workload.prefill_flops(settings.prompt)
    if nbytes is not None:
        nbytes += workload.cache_bytes(settings.depth, settings.gen, engine.cache_item_bytes)
    decode, prefill = statistics.median(engine.decode), statistics.median(engine.prefill)

    # Work per token at `rate` tokens/s, as a share of a limit in 10^9 units/s.
    share = lambda work, rate, limit: None if work is None else round(work * rate / (limit * 1e9), 4)
    return {
        "decode_tok_s": round(decode, 2),
        "prefill_tok_s": round(prefill, 2),
        "decode_roofline": share(nbytes, decode, limits["read_gb_s"]),
        "prefill_peak_share": share(flops and flops / settings.prompt, prefill, limits["peak_gflop_s"]),
        "ttft_ms": round(statistics.median(engine.first), 1),
        "rss_mb": round(engine.rss_mb, 1),
        "runs": {
            "decode_tok_s": spread(engine.decode),
            "prefill_tok_s": spread(engine.prefill),
            "ttft_ms": spread(engine.first),
        },
    }


def ratios(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, float]:
    """Return castiron's advantage over a peer: above 1 is faster, or less memory."""
    return {
        "decode": round(ours["decode_tok_s"] / peer["decode_tok_s"], 3),
        "prefill": round(ours["prefill_tok_s"] / peer["prefill_tok_s"], 3),
        "ttft": round(peer["ttft_ms"] / ours["ttft_ms"], 3),
        "rss": round(peer["rss_mb"] / ours["rss_mb"], 3),
    }


def table(result: Mapping[str, Any]) -> str:
    """Format the result as text."""
    settings, machine = result["settings"], result["machine"]
    percent = lambda share: "?" if share is None else f"{share:.0%}"
    lines = [
        f"{settings['model']}, {counted(settings['threads'], 'thread')}, decode {settings['gen']} from position "
        f"{settings['depth']}, prefill {settings['prompt']}",
        f"{machine['cpu']}: reads {machine['read_gb_s']:.1f} GB/s, f32 peak {machine['peak_gflop_s']:.0f} GFLOP/s",
        "",
        f"{'':<12}{'decode tok/s':>14}{'of limit':>10}{'prefill tok/s':>15}{'of peak':>9}{'first ms':>10}{'RSS MB':>8}",
    ]
    for name, engine in {"castiron": result["castiron"], **result["peers"]}.items():
        lines.append(
            f"{name:<12}{engine['decode_tok_s']:>14.1f}{percent(engine['decode_roofline']):>10}"
            f"{engine['prefill_tok_s']:>15.1f}{percent(engine['prefill_peak_share']):>9}"
            f"{engine['ttft_ms']:>10.0f}{engine['rss_mb']:>8.0f}"
        )
    for name, ratio in result["ratios"].items():
        lines.append(
            f"against {name}: decode {ratio['decode']:.2f}x, prefill {ratio['prefill']:.2f}x, first token "
            f"{ratio['ttft']:.2f}x, memory {ratio['rss']:.2f}x"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Workload:
    """The work of a bundle: bytes read for one token, and FLOP to prefill a prompt.

    If the manifest has no work of kernels (the lowering `portable`), `cache_bytes` returns 0, and
    the other values are None.
    """

    manifest: Manifest

    @property
    def known(self) -> bool:
        """Whether the manifest has the work of every kernel."""
        return bool(self._kernels()) and all("weights" in kernel for kernel in self._kernels())

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of weights read for a token, with one row of embeddings and the chosen experts."""
        return sum(k["calls"] * k["weights"] for k in self._kernels()) if self.known else None

    @property
    def elements(self) -> int | None:
        """Number of weights in the matmuls of one token; each weight takes one multiply-add."""
        return sum(k["calls"] * k["flops"][0] // 2 for k in self._kernels() if "tokens" in k) if self.known else None

    @property
    def cache_item_bytes(self) -> float:
        """Bytes per element of the KV caches, including the element's share of a q8_0 scale."""
        if self.manifest.cache != "q8_0":
            return ELEMENT_BYTES[self.manifest.cache]
        size = next(state.shape[-1] for state in self.manifest.states if state.kind != "recurrent")
        return size / (size - SCALE_BYTES)

    def cache_bytes(self, depth: int, tokens: int, item_bytes: float) -> float:
        """Return the mean bytes of KV cache that a token reads.

        depth, tokens: position of the first token, and number of tokens. item_bytes: bytes per
        element of the cache.
        """
        if not self.known:
            return 0.0
        # A kernel whose bytes grow with the position reads one position at 0.
        read = sum(
            kernel["calls"] * (amount(kernel, "bytes", position) - kernel["bytes"][0] + kernel["bytes"][1])
            for kernel in self._kernels()
            if kernel["bytes"][1]
            for position in range(depth, depth + tokens)
        )
        return read * item_bytes / self.cache_item_bytes / tokens

    def prefill_flops(self, tokens: int) -> float | None:
        """Return the FLOP to prefill `tokens` tokens from position 0, with the last one's logits.

        A call with fewer tokens than its width counts in proportion.
        """
        if not self.known:
            return None
        names = {function.width: function.name for function in self.manifest.functions if function.role == "prefill"}
        names[1] = "decode_step"
        done, total = 0, 0.0
        for width, count in chunks(tokens, 0, self.manifest.context, self.manifest.widths("prefill"), 0.0):
            for kernel in self._kernels(names[width]):
                # A kernel for one token in a call of many is the output head, which the last call needs.
                of_last = width > 1 and kernel.get("tokens") == 1
                share = (done + count == tokens) if of_last else count / width
                total += kernel["calls"] * amount(kernel, "flops", done) * share
            done += count
        return total

    def _kernels(self, function: str = "decode_step") -> list[dict]:
        return list(self.manifest.compile.get("work", {}).get(function, {}).values())


def gguf_bytes(path: Path) -> int:
    """Return the bytes of weights that llama.cpp reads from a GGUF file for one token.

    Only the chosen experts count, and one row of an embedding table that is not the output head.
    """
    from castiron.pipelines.checkpoints.gguf_file import read_gguf

    file = read_gguf(path)
    prefix = f"{file.metadata.get('general.architecture')}."
    experts = file.metadata.get(prefix + "expert_count", 0)
    chosen = file.metadata.get(prefix + "expert_used_count", experts)
    read = 0
    for tensor in file.tensors.values():
        rows = prod(tensor.shape[:-1])
        if len(tensor.shape) == 3 and tensor.shape[0] == experts:
            read += tensor.nbytes * chosen // experts
        else:
            table = tensor.name == "token_embd.weight" and "output.weight" in file.tensors
            read += tensor.nbytes // rows if table else tensor.nbytes
    return read
