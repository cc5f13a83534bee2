"""Running a bundle does not need modules that only POSIX systems have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT_POSIX = """
import importlib.abc, os, sys

class Block(importlib.abc.MetaPathFinder):
    names = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "curses", "readline", "syslog", "crypt", "spwd"}

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ImportError(f"{name} is not on this system")

for name in Block.names:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Block())
for name in ("fork", "forkpty", "register_at_fork", "pread", "mkfifo", "killpg", "setsid", "getuid", "geteuid", "getgid",
             "sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "sched_setscheduler", "sched_param", "SCHED_OTHER",
             "SCHED_BATCH", "sysconf", "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "getloadavg", "posix_fadvise"):
    if hasattr(os, name):
        delattr(os, name)

from castiron.pipelines.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_bundle_runs_without_posix_modules(toy_dir, tmp_path):
    """`castiron run` in a process without these modules and functions of `os`."""
    command = ["run", toy_dir, "--tokens", "1,2,3", "-n", "4", "--ignore-eos", "--json"]
    environment = {**os.environ, "CASTIRON_CACHE": str(tmp_path)}
    found = [
        subprocess.run([sys.executable, *start, *command], env=environment, capture_output=True, text=True, cwd=ROOT)
        for start in (["-c", WITHOUT_POSIX], ["-m", "castiron"])
    ]
    assert [done.returncode for done in found] == [0, 0], found[0].stderr
    without, usual = (json.loads(done.stdout)["tokens"] for done in found)
    assert without == usual and len(usual) == 4
