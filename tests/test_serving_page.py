"""docs/serving.md: its systemd unit, nginx configuration and container image work.

Without systemd, a test checks the server as the unit would run it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from castiron.pipelines.cli.main import command_parser
from castiron.vmfb.bundle.bundle import open_bundle, pack_bundle
from tests.support import served as serving
from tests.support.served import ask

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return found


@pytest.fixture(scope="module")
def packed(path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "smollm2.castiron"
    pack_bundle(open_bundle(path), out)
    return out


def on_a_free_port(words: list[str]) -> list[str]:
    """Return the command line of a server with port 0."""
    at = words.index("--port")
    return [*words[: at + 1], "0", *words[at + 2 :]]


@pytest.mark.slow
def test_the_unit_starts_a_server_that_its_stop_ends(packed, tmp_path):
    unit = block("ini")
    program = tmp_path / "castiron"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m castiron "$@"\n')
    program.chmod(0o755)
    unit = unit.replace("/opt/castiron/bin/castiron", str(program)).replace("/srv/models/smollm2.castiron", str(packed))
    assert str(program) in unit and str(packed) in unit
    if shutil.which("systemd-analyze"):
        (tmp_path / "castiron.service").write_text(unit)
        checked = subprocess.run(["systemd-analyze", "verify", tmp_path / "castiron.service"], capture_output=True, text=True)
        # systemd-analyze may report other units of the machine.
        assert checked.returncode == 0 and "castiron.service" not in checked.stderr, checked.stderr
    entries = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    name, _, cache = entries["Environment"].partition("=")
    assert cache == f"/var/cache/{entries['CacheDirectory']}"
    (key_line,) = re.findall(rf"`{entries['EnvironmentFile']}` holds `(\w+)=\.\.\.`", PAGE)
    environment = {"PATH": os.environ["PATH"], name: str(tmp_path / "cache"), key_line: "secret"}
    command = shlex.split(entries["ExecStart"])
    assert float(entries["TimeoutStopSec"]) > command_parser("serve").parse_args(command[2:]).shutdown_timeout
    with serving.running(on_a_free_port(command), tmp_path / "log", environment) as server:
        assert ask(server.url, "/health")[0] == 200
        assert ask(server.url, "/v1/models")[0] == 401 and ask(server.url, "/v1/models", key="secret")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(float(entries["TimeoutStopSec"])) == 0


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("nginx"), reason="nginx is not installed; apt-get install nginx, and run make test-all again"
)
def test_the_proxy_stands_before_a_server(path, tmp_path):
    """The proxy passes streams, limits bodies and hides metrics."""
    with serving.served(path, tmp_path / "log", slow=0.1) as running:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=llm.example.org", "-days", "1",
             "-keyout", tmp_path / "key", "-out", tmp_path / "pem"], check=True, capture_output=True,
        )  # fmt: skip
        text = block("nginx").replace("http://127.0.0.1:8000", running.url)
        text = re.sub(r"/etc/ssl/llm\.example\.org\.(pem|key)", rf"{tmp_path}/\1", text)
        port = serving.free_port()
        text = text.replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
        paths = "".join(f"{n}_temp_path {tmp_path}/{n};\n" for n in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        head = f"pid {tmp_path}/pid;\nerror_log {tmp_path}/errors;\ndaemon off;\nevents {{}}\n"
        (tmp_path / "conf").write_text(f"{head}http {{\naccess_log off;\n{paths}{text}}}\n")
        command = ["nginx", "-p", tmp_path, "-e", tmp_path / "errors", "-c", tmp_path / "conf"]
        # As root, nginx runs its workers as a user that cannot read pytest's directories.
        command += ["-g", "user root;"] if not os.geteuid() else []
        tested = subprocess.run([*command, "-t"], capture_output=True, text=True)
        assert tested.returncode == 0, tested.stderr
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as proxy:
            try:
                url = f"https://127.0.0.1:{port}"
                until = time.monotonic() + 20
                while not (tmp_path / "pid").read_text():
                    assert proxy.poll() is None and time.monotonic() < until, (tmp_path / "errors").read_text()
                    time.sleep(0.05)
                assert ask(url, "/health")[0] == 200
                assert ask(url, "/metrics")[0] == 403 and ask(running.url, "/metrics")[0] == 200
                assert ask(url, "/v1/completions", {"prompt": "a" * (5 << 20)})[0] == 413
                # Events arrive one by one, at least once in five streams.
                assert any(gaps(url) > 0.5 for _ in range(5))
            finally:
                proxy.terminate()


def gaps(url: str) -> float:
    """Return the seconds between the first and last event of an answer that takes one second."""
    body = {"prompt": "abc", "max_tokens": 10, "stream": True, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60, context=ssl._create_unverified_context()) as reply:
        times = [time.monotonic() for line in reply if line.startswith(b"data: {")]
    assert len(times) > 5
    return times[-1] - times[0]


@pytest.mark.slow
def test_the_image_is_built_and_answers(packed, tmp_path):
    """Runs the Dockerfile's instructions in a virtual environment on the files in git."""
    (wheel,) = re.findall(r"`(pip wheel [^`]*)`", PAGE)
    context, image = tmp_path / "clone", tmp_path / "image"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, context / name, follow_symlinks=False)
    (context / "build").mkdir()
    shutil.copy(packed, context / "build")
    for folder in (image, image / "tmp"):
        folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", image / "venv"], check=True)
    environment = {**os.environ, "PATH": f"{image}/venv/bin:{os.environ['PATH']}"}
    subprocess.run(shlex.split(wheel), cwd=context, env=environment, check=True, capture_output=True)
    command: list[str] = []
    check: list[str] = []
    for line in block("dockerfile").replace("\\\n", " ").splitlines():
        kind, _, rest = line.partition(" ")
        rest = re.sub(r"(?<= )/(?=tmp/|model)", f"{image}/", f" {rest}").strip()
        if kind == "RUN":
            done = subprocess.run(["bash", "-c", rest], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        elif kind == "COPY":
            source, target = rest.split()
            shutil.copy(context / source, target)
        elif kind == "ENV":
            name, _, value = rest.partition("=")
            environment[name] = f"{image}{value}"
        elif kind == "HEALTHCHECK":
            check = json.loads(rest.partition(" CMD ")[2])
        elif kind == "CMD":
            command = [word.replace("/model", f"{image}/model") for word in json.loads(rest)]
        else:
            assert (kind, rest) in {("FROM", "python:3.12-slim"), ("USER", "1000"), ("EXPOSE", "8000")}, line
    # As after `pipx install`, the requirements are complete and the command runs through a link.
    complete = subprocess.run([image / "venv/bin/python", "-m", "pip", "check"], capture_output=True, text=True)
    assert complete.returncode == 0, complete.stdout
    (tmp_path / "castiron").symlink_to(image / "venv/bin/castiron")
    assert subprocess.run([tmp_path / "castiron", "--version"], env={}, cwd="/", check=True, capture_output=True).stdout
    installed = subprocess.run(
        [image / "venv/bin/python", "-m", "pip", "list", "--format=json"], capture_output=True, text=True
    )
    assert not {"torch", "transformers", "iree-base-compiler"} & {row["name"] for row in json.loads(installed.stdout)}
    environment = {name: environment[name] for name in ("PATH", "CASTIRON_CACHE")}
    run = on_a_free_port([image / "venv/bin" / command[0], *command[1:]])
    with serving.running([*read_only(image), *run], tmp_path / "log", environment) as server:
        healthy = [image / "venv/bin" / check[0], *(word.replace("http://127.0.0.1:8000", server.url) for word in check[1:])]
        assert subprocess.run(healthy, env=environment, capture_output=True).returncode == 0
        status, _, answer = ask(
            server.url, "/v1/chat/completions", {"messages": serving.MESSAGES, "max_tokens": 3, "ignore_eos": True}
        )
        assert status == 200 and answer["usage"]["completion_tokens"] == 3
        server.process.kill()
        server.process.wait()
        assert subprocess.run(healthy, env=environment, capture_output=True).returncode != 0


def read_only(image: Path) -> list[str]:
    """Return a command prefix that makes the image read-only except /tmp, if the system can."""
    mounts = f"mount --bind {image} {image} && mount --bind {image}/tmp {image}/tmp && mount -o remount,bind,ro {image}"
    prefix = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else []), "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    probe = [*prefix, "sh", "-c", f"! touch {image}/x 2> /dev/null && touch {image}/tmp/x"]
    return prefix if shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0 else []
