"""An aarch64 system in a folder: Debian's Python for arm64 and the wheels, run by qemu-user.

`python -m tests.aarch64 FOLDER` makes the folder unless it exists, as `make test-aarch64` does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

CLONE = Path(__file__).resolve().parent.parent
EMULATOR = "qemu-aarch64-static"
# The programs that are needed, with their Debian packages.
PROGRAMS = {EMULATOR: "qemu-user-static", "mmdebstrap": "mmdebstrap"}
SUITE, PYTHON = "bookworm", "python3.11"
DEBIAN = (f"{PYTHON}-minimal", f"lib{PYTHON}-stdlib", "libc6", "libstdc++6", "libgcc-s1")
# The packages that a bundle needs, and those that the runtime and jinja2 import.
WHEELS = ("iree-base-runtime", "numpy", "tokenizers", "jinja2", "ml-dtypes", "MarkupSafe")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
# The program that sys.executable names: a shell script of the host, which an emulated process can
# start too.
STARTER = f"""#!/bin/sh
root=$(dirname "$0")/../..
exec {EMULATOR} -0 "$0" -L "$root" "$root/usr/bin/{PYTHON}" "$@"
"""


@dataclass(frozen=True)
class Machine:
    """A folder of `make_folder` with one of qemu's CPUs (`qemu-aarch64-static -cpu help`)."""

    folder: Path
    cpu: str = "max"

    def run(self, *arguments: object, timeout: float = 600) -> subprocess.CompletedProcess:
        """Run Python with `arguments` there; castiron and tests are those of this clone."""
        variables = {"PYTHONPATH": f"{self.folder / 'wheels'}:{CLONE}", "CASTIRON_CACHE": str(self.folder / "cache")}
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "QEMU_CPU": self.cpu, **variables}
        command = [str(word) for word in (self.folder / "root/usr/bin/python", *arguments)]
        return subprocess.run(command, cwd=CLONE, env=environment, capture_output=True, text=True, timeout=timeout)


def make_folder(folder: Path) -> None:
    """Make the root folder, the wheels and the program that starts Python, unless they exist."""
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
    """Install missing programs; exit with an error message if this user may not install them."""
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() or not shutil.which("apt-get"):
        sys.exit(f"castiron: make test-aarch64 needs {' and '.join(missing)} of Debian or Ubuntu: sudo {' '.join(install)}")
    call("apt-get", "update")
    call(*install)


def make_root(root: Path) -> None:
    """Unpack Debian's packages without running them, which needs neither chroot nor binfmt."""
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


def pins() -> list[str]:
    """Return pip's requirements for `WHEELS`, in the versions of requirements.lock."""
    lock = dict(re.findall(r"^([\w.-]+)==(\S+)", (CLONE / "requirements.lock").read_text(), re.MULTILINE))
    versions = {canonicalize_name(name): version for name, version in lock.items()}
    return [f"{name}=={versions[canonicalize_name(name)]}" for name in WHEELS]


def fetch_wheels(folder: Path) -> None:
    """Fetch the runtime's packages for arm64."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    call(*pip, *platforms, f"--python-version={PYTHON.removeprefix('python')}", "--target", folder, *pins())


def call(*command: object) -> None:
    """Run a program; if it fails, exit with its output and an error message."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}castiron: cannot set up aarch64: {command[0]} failed; see its output above")


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]).resolve())
