"""Run batch jobs in this process, and read and write files of records."""

from __future__ import annotations

import json
from pathlib import Path

from castiron.pipelines.cli import main as cli


def write(path: Path, rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class Jobs:
    """A callable that runs `castiron batch` and returns the object that --json prints."""

    def __init__(self, path: Path, capsys):
        self.path, self.capsys = path, capsys

    def __call__(self, rows: Path, output: Path, *options: str) -> dict:
        cli.main(["batch", str(self.path), str(rows), "-o", str(output), "--threads", "1", "--json", *options])
        captured = self.capsys.readouterr()
        self.errors = captured.err
        return json.loads(captured.out)


# Fields of a response that differ between runs: ids, times, and counts that depend on cached tokens.
VARYING = {
    "id", "call_id", "created", "created_at", "completed_at", "prompt_tokens_details", "input_tokens_details", "input_tokens",
    "cache_creation_input_tokens", "cache_read_input_tokens",
}  # fmt: skip


def without_varying(value):
    """Return a result or a part of it without the fields `VARYING`."""
    if isinstance(value, dict):
        return {name: without_varying(member) for name, member in value.items() if name not in VARYING}
    return [without_varying(item) for item in value] if isinstance(value, list) else value
