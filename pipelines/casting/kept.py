"""What `castiron compile --keep` leaves in a folder: the MLIR before and after lowering, and how it becomes a module."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from castiron.emitter.printer import print_layers
from castiron.emitter.step import ModelModule

# The name by which castiron compiles, and which stands in the module.
LAYERS, TEXT, COMMANDS = "layers.mlir", "module.mlir", "commands.sh"


def write_kept(folder: Path, model: ModelModule, text: str, flags: Sequence[str], bundle: Path | str) -> None:
    """Writes the graph of layer operations, the `text` that the compiler gets, and a script of the commands.

    The script, run where it lies, makes the very module of the bundle and puts it in; whoever changes the text or a flag
    runs it again. OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LAYERS).write_text(print_layers(model), encoding="utf-8")
    (folder / TEXT).write_text(text, encoding="utf-8")
    compile_ = shlex.join(["iree-compile", TEXT, *flags, "-o", "model.vmfb"])
    repack = shlex.join(["castiron", "repack", str(Path(bundle).resolve()), "--module", "model.vmfb"])
    (folder / COMMANDS).write_text(
        "#!/bin/sh -e\n"
        f"# {LAYERS} are layer operations, {TEXT} is what they are lowered to. Every phase of the compiler is written down\n"
        "# with --dump-compilation-phases-to=phases.\n"
        'cd "$(dirname "$0")"\n'
        f"{compile_}\n{repack}\n",
        encoding="utf-8",
    )
    (folder / COMMANDS).chmod(0o755)
