"""docs/embeddings.md: every command and snippet works with a tiny model of the same family."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tests.support import encoders
from tests.support.served import served

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/embeddings.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
         for line in block.replace("\\\n", " ").splitlines()]  # fmt: skip
SERVER, CLIENT = "castiron serve ", "curl "
MODEL = "embeddinggemma-300m"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder for the page's commands, with the model that they use."""
    directory = tmp_path_factory.mktemp("embeddings")
    both = {"use_bidirectional_attention": True, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    (directory / "models").mkdir()
    encoders.write("gemma3_text", directory / f"models/{MODEL}", pooling="mean", dense=(80, 64), longest=48, **both)
    (directory / "bin").mkdir()
    (directory / "bin/castiron").write_text(f'#!/bin/sh\nexec {sys.executable} -m castiron "$@"\n')
    (directory / "bin/castiron").chmod(0o755)
    return directory


@pytest.mark.slow
def test_the_commands_of_the_page_work(folder, tmp_path, monkeypatch):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    for line in LINES:
        if line.startswith((SERVER, CLIENT)):
            continue
        done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", (line, done.stderr)
        if line.startswith("castiron embed") and "-o " not in line:
            assert all(json.loads(row) for row in done.stdout.splitlines()) and done.stdout
    assert np.load(folder / "vectors.npy").shape == (2, 64)
    monkeypatch.chdir(folder)
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(code, "docs/embeddings.md", "exec"), {})
    (server,), (client, reranker) = ([line for line in LINES if line.startswith(start)] for start in (SERVER, CLIENT))
    with served(folder / shlex.split(server)[2], tmp_path / "log") as running:

        def asked(line: str) -> dict:
            _, url, _, body = shlex.split(line)
            url = url.replace("http://127.0.0.1:8000", running.url)
            with urllib.request.urlopen(urllib.request.Request(url, body.encode())) as answer:
                return json.load(answer)

        vectors = [row["embedding"] for row in asked(client)["data"]]
        (best,) = asked(reranker)["results"]
        assert best["document"]["text"] in ("The sky is blue.", "Ice melts.")
    np.testing.assert_allclose(vectors, np.load(folder / "vectors.npy"), atol=1e-7)
