"""The chart of a bench result, as a picture and as text."""

from pathlib import Path

from castiron.pipelines.measuring.bench import count
from castiron.pipelines.measuring.kernel_times import bar

COLOURS = {"castiron": "#c2410c", "llama.cpp": "#64748b", "hf": "#cbd5e1"}
PANELS = (("decode_tok_s", "decode"), ("prefill_tok_s", "prefill"))

TEXT_WIDTH = 60


def text_chart(result: dict) -> list[str]:
    """The same bars for a terminal, the longest of a panel TEXT_WIDTH columns long."""
    engines = {"castiron": result["castiron"], **result["peers"]}
    width = max(map(len, engines))
    lines = []
    for key, title in PANELS:
        most = max(engine[key] for engine in engines.values())
        lines += ["", f"{title}, tok/s"]
        lines += [f"  {name:<{width}} {bar(e[key] / most, TEXT_WIDTH)} {e[key]:.0f}" for name, e in engines.items()]
    return lines


def draw(result: dict, path: str | Path) -> None:
    """Bars of decode and prefill, tokens per second, with the spread of the runs; the kind is the name's suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    engines = {"castiron": result["castiron"], **result["peers"]}
    settings = result["settings"]
    detail = {
        "decode": f"{settings['gen']} tokens from position {settings['depth']}",
        "prefill": f"{settings['prompt']} tokens",
    }
    # Equal results give equal files, so that a chart under version control changes with its numbers only.
    with pyplot.rc_context({"svg.hashsalt": "castiron", "svg.fonttype": "none", "font.size": 10}):
        figure, axes = pyplot.subplots(1, 2, figsize=(8, 0.9 + 0.55 * len(engines)), layout="constrained")
        for axis, (key, title) in zip(axes, PANELS, strict=True):
            values = [engine[key] for engine in engines.values()]
            runs = [engine["runs"][key] for engine in engines.values()]
            errors = [
                [max(0.0, value - run["min"]) for value, run in zip(values, runs, strict=True)],
                [max(0.0, run["max"] - value) for value, run in zip(values, runs, strict=True)],
            ]
            bars = axis.barh(list(engines), values, xerr=errors, color=[COLOURS[name] for name in engines], capsize=2)
            axis.bar_label(bars, fmt="%.0f", padding=6)
            axis.invert_yaxis()
            axis.margins(x=0.15)
            axis.set_title(f"{title}, tok/s ({detail[title]})", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{settings['model']}, {count(settings['threads'], 'thread')}, {result['machine']['cpu']}", fontsize=10)
        metadata = {"Date": None} if str(path).endswith(".svg") else None
        figure.savefig(path, metadata=metadata)
        pyplot.close(figure)
