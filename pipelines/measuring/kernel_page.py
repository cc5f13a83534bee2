"""The times of a call's kernels as one page of HTML that needs nothing else: a flame of the modules, the graph by layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from castiron.pipelines.measuring.kernel_times import REST, of_limit, rest_ms, where

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
body { color: #1e293b; background: #fff }
h1 { font-size: 1.3rem }
h2 { font-size: 1.05rem; margin-top: 2rem }
.flame { display: flex }
.frame { flex: none; overflow: hidden }
.label { display: block; height: 1.6rem; padding: 0 .3rem; border: 1px solid #fff; border-radius: 3px; font-size: 12px }
.label { box-sizing: border-box; overflow: hidden; white-space: nowrap; text-overflow: ellipsis }
.graph { border-left: 3px solid #cbd5e1; padding-left: 1rem }
.block { border: 1px dashed #94a3b8; border-radius: 6px; padding: .5rem }
.node { display: flex; gap: 1rem; align-items: baseline; border-radius: 4px; padding: .25rem .6rem; margin: .25rem 0 }
.node b { min-width: 14rem }
.node code { overflow-wrap: anywhere; flex: 1 }
table { border-collapse: collapse; width: 100% }
td, th { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #e2e8f0 }
td:last-child, th:last-child { text-align: left; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) {
  body { color: #e2e8f0; background: #0f172a }
  .label, .node { color: #1e293b }
  .label { border-color: #0f172a }
}
"""


@dataclass
class Frame:
    """A module, or a kernel in it, with the milliseconds below it."""

    name: str
    ms: float = 0.0
    below: dict[str, Frame] = field(default_factory=dict)

    def add(self, names: Sequence[str], ms: float) -> None:
        self.ms += ms
        if names:
            self.below.setdefault(names[0], Frame(names[0])).add(names[1:], ms)


def flame(result: Mapping[str, Any]) -> Frame:
    """The call's time by module path, kernels at the tips; of a kernel in several modules each has an equal part."""
    root = Frame(result["function"])
    for row in result["dispatches"]:
        paths = row["paths"] or ["made by IREE"]
        for path in paths:
            # `layers.*` is one frame.
            root.add([*re.split(r"\.(?!\*)", path.removeprefix("model.")), row["kernel"]], row["ms"] / len(paths))
    root.add([REST], rest_ms(result))
    return root


def page(result: Mapping[str, Any], title: str, order: Sequence[str]) -> str:
    """The page. `order` are the function's kernels as they first run, without the `_fn` of a dispatch."""
    root = flame(result)
    machine, threads = result["machine"], result["threads"]
    head = f"{title}: {result['function']} at position {result['position']} on {threads} thread{'s' * (threads != 1)}"
    about = f"{result['call_ms']:.2f} ms a call"
    if result["python_us"] is not None:
        about += f", of which Python {result['python_us']:.0f} µs"
    about += f"; this machine reads {machine['read_gb_s']:.1f} GB/s and computes {machine['peak_gflop_s']:.0f} GFLOP/s (f32)"
    parts = [
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">', f"<title>{escape(head)}</title>",
        f"<style>{STYLE}</style></head><body>", f"<h1>{escape(head)}</h1><p>{escape(about)}</p>",
        "<h2>Time by module</h2>", *_frames(root, root.ms or 1.0),
        "<h2>The graph by layer</h2>", *_graph(result["dispatches"], order, root.ms or 1.0),
        "<h2>Kernels</h2>", *_table(result, root.ms or 1.0), "</body></html>", "",
    ]  # fmt: skip
    return "\n".join(parts)


def _frames(frame: Frame, total: float, above: float | None = None, depth: int = 0) -> Iterator[str]:
    """A frame as wide as its part of the `above` milliseconds of the one that it is in, and those below it."""
    words = f"{frame.name}: {frame.ms:.3f} ms, {frame.ms / total:.1%}"
    colour = "#e2e8f0" if frame.name == REST else f"hsl({max(8, 42 - 7 * depth)} 90% {min(86, 66 + 4 * depth)}%)"
    yield f'<div class="frame" style="width:{100 * frame.ms / (above or frame.ms or 1.0):.4f}%" title="{escape(words)}">'
    yield f'<span class="label" style="background:{colour}">{escape(words)}</span>'
    if frame.below:
        yield '<div class="flame">'
        for child in sorted(frame.below.values(), key=lambda child: -child.ms):
            yield from _frames(child, total, frame.ms, depth + 1)
        yield "</div>"
    yield "</div>"


def _graph(rows: Sequence[Mapping[str, Any]], order: Sequence[str], total: float) -> Iterator[str]:
    """Kernels one under another as they first run; those of the layers in one box, which stands for all of them."""
    place = {name: i for i, name in enumerate(order)}
    known = [row for row in rows if row["kernel"].removesuffix("_fn") in place]
    known.sort(key=lambda row: place[row["kernel"].removesuffix("_fn")])
    inside = [any("layers." in path for path in row["paths"]) for row in known]
    first = inside.index(True) if any(inside) else len(known)
    last = len(known) - inside[::-1].index(True) if any(inside) else len(known)
    yield '<div class="graph">'
    yield from (_node(row, total) for row in known[:first])
    if first < last:
        layers = max((row["calls"] // len(row["paths"]) for row in known[first:last]), default=1)
        yield f'<div class="block">{layers} layers, each'
        yield from (_node(row, total) for row in known[first:last])
        yield "</div>"
    yield from (_node(row, total) for row in known[last:])
    yield "</div>"


def _node(row: Mapping[str, Any], total: float) -> str:
    share = row["ms"] / total
    colour = f"hsl(24 90% {92 - 32 * min(1.0, share * 2):.0f}%)"
    return (
        f'<div class="node" style="background:{colour}"><b>{escape(where(row))}</b><code>{escape(row["kernel"])}</code>'
        f"<span>{row['calls']} × {row['ms'] * 1e3 / row['calls']:.1f} µs, {share:.1%}</span></div>"
    )


def _table(result: Mapping[str, Any], total: float) -> Iterator[str]:
    heads = ("ms", "share", "calls", "µs a call", "MB", "MFLOP", "of limit", "where, kernel")
    yield f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"
    for row in result["dispatches"]:
        known = row["bytes"] is not None
        cells = (
            f"{row['ms']:.3f}", f"{row['ms'] / total:.1%}", str(row["calls"]), f"{row['ms'] * 1e3 / row['calls']:.1f}",
            f"{row['bytes'] / 1e6:.1f}" if known else "?", f"{row['flops'] / 1e6:.1f}" if known else "?", of_limit(row),
            f"{where(row)} {row['kernel']}",
        )  # fmt: skip
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    rest = rest_ms(result)
    yield f"<tr><td>{rest:.3f}</td><td>{rest / total:.1%}</td>{'<td></td>' * 5}<td>{REST}</td></tr></table>"
