"""An aarch64 CPU on another machine: Debian's Python for arm64 and the runtime's wheels in one folder, run by qemu-user.

`python -m tests.aarch64 FOLDER` makes the folder, as `make test-aarch64` does, where it is not there yet.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

CLONE = Path(__file__).resolve().parent.parent
EMULATOR = "qemu-aarch64-static"
# A program and Debian's package that has it.
PROGRAMS = {EMULATOR: "qemu-user-static", "mmdebstrap": "mmdebstrap"}
SUITE, PYTHON = "bookworm", "python3.11"
DEBIAN = (f"{PYTHON}-minimal", f"lib{PYTHON}-stdlib", "libc6", "libstdc++6", "libgcc-s1")
WHEELS = ("iree-base-runtime", "numpy", "tokenizers", "jinja2", "ml-dtypes", "MarkupSafe")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
# What sys.executable is: a program that the machine's own system starts, so that an emulated one may start it.
STARTER = f"""#!/bin/sh
root=$(dirname "$0")/../..
exec {EMULATOR} -0 "$0" -L "$root" "$root/usr/bin/{PYTHON}" "$@"
"""


@dataclass(frozen=True)
class Machine:
    """What `make_folder` made, with one of qemu's CPUs (`qemu-aarch64-static -cpu help`)."""

    folder: Path
    cpu: str = "max"

    @property
    def python(self) -> Path:
        return self.folder / "root/usr/bin/python"

    def run(self, *arguments: object, timeout: float = 600) -> subprocess.CompletedProcess:
        """What Python's `arguments` did there: castiron and tests are this clone's."""
        return subprocess.run(**self._started(arguments), capture_output=True, text=True, timeout=timeout)

    def start(self, *arguments: object) -> subprocess.Popen:
        """Python there, with pipes for its outputs."""
        return subprocess.Popen(**self._started(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _started(self, arguments: Iterable[object]) -> dict[str, Any]:
        places = {"PYTHONPATH": f"{self.folder / 'wheels'}:{CLONE}", "CASTIRON_CACHE": str(self.folder / "cache")}
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "QEMU_CPU": self.cpu, **places}
        return {"args": [str(word) for word in (self.python, *arguments)], "cwd": CLONE, "env": environment}


def make_folder(folder: Path) -> None:
    """Makes root, wheels and the program that starts Python; nothing where they are there already."""
    if (folder / "root").exists():
        return
    install_programs()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        root, wheels = Path(temporary) / "root", Path(temporary) / "wheels"
        print("castiron: fetching Debian's Python for arm64 and wheels, once: 60 MB", file=sys.stderr)
        make_root(root)
        fetch_wheels(wheels)
        shutil.rmtree(folder / "wheels", ignore_errors=True)
        wheels.rename(folder / "wheels")
        root.rename(folder / "root")


def install_programs() -> None:
    """Ends with a sentence where they are missing and are not ours to install."""
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() or not shutil.which("apt-get"):
        sys.exit(f"castiron: make test-aarch64 needs {' and '.join(missing)} of Debian or Ubuntu: sudo {' '.join(install)}")
    call("apt-get", "update")
    call(*install)


def make_root(root: Path) -> None:
    """Debian's packages, unpacked: nothing of them is run, so that neither chroot nor binfmt is needed."""
    archive = root.with_suffix(".tar")
    hooks = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"
    how = ["--architectures=arm64", "--variant=extract", "--skip=check/qemu", hooks, f"--include={','.join(DEBIAN)}"]
    call("mmdebstrap", *how, SUITE, archive)
    root.mkdir()
    call("tar", "--extract", "--file", archive, "--directory", root, "--exclude=./dev")
    archive.unlink()
    starter = root / "usr/bin/python"
    starter.write_text(STARTER)
    starter.chmod(0o755)


def fetch_wheels(folder: Path) -> None:
    """The runtime's packages for arm64, in the versions of requirements.lock."""
    lock = dict(re.findall(r"^([\w.-]+)==(\S+)", (CLONE / "requirements.lock").read_text(), re.MULTILINE))
    versions = {canonicalize_name(name): version for name, version in lock.items()}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    pins = [f"{name}=={versions[canonicalize_name(name)]}" for name in WHEELS]
    call(*pip, *platforms, f"--python-version={PYTHON.removeprefix('python')}", "--target", folder, *pins)


def call(*command: object) -> None:
    """Runs a program in silence; what it says is shown where it fails, which ends this one."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}castiron: aarch64 cannot be set up, because {command[0]} failed as above")


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]).resolve())
