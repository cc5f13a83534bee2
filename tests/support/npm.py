"""Packages of npm for tests, installed once into castiron's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from castiron.vmfb.atomic_write import locked
from castiron.vmfb.cache_folder import cache_root

needs_node = pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")), reason="no Node.js here: apt-get install nodejs npm"
)


def node_modules(*packages: str) -> Path:
    """Return a node_modules folder with `packages`, each given as NAME@VERSION."""
    root = cache_root() / "test-npm"
    folder = root / "+".join(package.replace("/", "-") for package in packages)
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=root) as staging:
                options = ["--ignore-scripts", "--no-audit", "--no-fund", f"--prefix={staging}"]
                done = subprocess.run(["npm", "install", *options, *packages], capture_output=True, text=True)
                assert done.returncode == 0, f"npm cannot install {' '.join(packages)}: {done.stderr[-300:].strip()}"
                os.rename(Path(staging) / "node_modules", folder)
    return folder


def run_script(script: str, modules: Path, *arguments: str) -> str:
    """Run a CommonJS script in Node.js and return its output; `modules`: a node_modules folder."""
    environment = {**os.environ, "NODE_PATH": str(modules)}
    done = subprocess.run(["node", "-e", script, *arguments], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
