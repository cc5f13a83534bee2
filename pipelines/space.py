"""Room on a disk, asked for before work begins that would fill it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.sizes import megabytes
from castiron.vmfb.aside import sweep


def need_room(place: Path | str, needed: int, what: str) -> None:
    """PipelineError if the disk of `place`, which need not exist yet, has not `needed` bytes free for `what`, after what killed
    processes left beside it is gone."""
    sweep(Path(place).absolute().parent)
    folder = next((folder for folder in (Path(place), *Path(place).absolute().parents) if folder.is_dir()), Path(os.curdir))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise PipelineError(f"{what} needs {megabytes(needed)} in {folder}, where {megabytes(free)} are free: make room there")
