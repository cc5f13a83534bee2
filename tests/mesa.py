"""Mesa's llvmpipe, a Vulkan device on the CPU: of the system, or fetched into a folder.

`python -m tests.mesa FOLDER` prints shell commands that export the variables with which the Vulkan
loader finds it. It fetches Debian's packages into the folder once; this needs no root.
"""

from __future__ import annotations

import ctypes.util
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("mesa-vulkan-drivers", "libvulkan1")
SYSTEM = (Path("/usr/share/vulkan/icd.d"), Path("/etc/vulkan/icd.d"))
DRIVER, LOADER = "libvulkan_lvp.so", "libvulkan.so.1"


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables for llvmpipe; empty if this system cannot get it."""
    if ctypes.util.find_library("vulkan") and (found := [icd for path in SYSTEM for icd in path.glob("lvp_icd*.json")]):
        return {"VK_ICD_FILENAMES": str(found[0])}
    if not (folder / "root").exists() and not fetch(folder):
        return {}
    loader, driver = (next((folder / "root").rglob(name), None) for name in (LOADER, DRIVER))
    if driver is None:
        return {}
    icd = folder / "lvp_icd.json"
    icd.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": str(driver), "api_version": "1.1.0"}}))
    folders = dict.fromkeys(str(library.parent) for library in (driver, loader) if library)
    return {"VK_ICD_FILENAMES": str(icd), "LD_LIBRARY_PATH": ":".join(folders)}


def fetch(folder: Path, status: Path = Path("/var/lib/dpkg/status")) -> bool:
    """Unpack Debian's packages that the system lacks into `folder`; return whether that worked.

    status: the list of the installed packages.
    """
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        print("castiron: no apt-get, so llvmpipe is not fetched and the Vulkan tests are skipped", file=sys.stderr)
        return False
    folder.mkdir(parents=True, exist_ok=True)
    print("castiron: fetching Debian's packages of llvmpipe, once: 60 MB", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        work, root = Path(temporary), Path(temporary) / "root"
        for name in ("state/lists/partial", "cache/archives/partial", "root"):
            (work / name).mkdir(parents=True)
        # Folders of its own, so that apt needs neither root nor its lock.
        settings = {"Dir::State": work / "state", "Dir::State::status": status, "Dir::Cache": work / "cache",
                    "APT::Sandbox::User": "", "APT::Get::Download-Only": "true", "Debug::NoLocking": "true"}  # fmt: skip
        apt = ["apt-get", "--quiet", *(f"--option={key}={value}" for key, value in settings.items())]
        for arguments in ["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]:
            done = subprocess.run([*apt, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                last = done.stdout.strip().splitlines()[-1:]
                print(f"castiron: cannot fetch llvmpipe ({' '.join(last)}); the Vulkan tests are skipped", file=sys.stderr)
                return False
        for package in (work / "cache/archives").glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
        root.rename(folder / "root")
    return True


if __name__ == "__main__":
    for name, value in variables(Path(sys.argv[1]).resolve()).items():
        print(f"export {name}={shlex.quote(value)}")
