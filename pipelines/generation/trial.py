"""Whether a tokenizer.json can be read without harm: another process tries, once, and the cache remembers which were."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castiron.pipelines.errors import CheckpointError
from castiron.pipelines.generation import tokenizer_trial
from castiron.vmfb.cache import cache_root, keep
from castiron.vmfb.disk import naming

# Any number of tokens.
ANY = 2**31


class Trial:
    """Another process reads the tokenizer from the beginning of the block on, if none has done so before."""

    def __init__(self, data: bytes, vocab: int, sha256: str | None = None):
        """`vocab`: how many tokens the model has. `sha256`: of `data`, in hex, where that is known."""
        self.data, self.vocab = data, vocab
        name = f"tokenizer-{vocab}-{sha256 or hashlib.sha256(data).hexdigest()}"
        self.stamp = cache_root() / "verified" / name

    def __enter__(self) -> Trial:
        self.process = None
        if self.data and not self.stamp.exists():
            import tempfile

            # -P: the modules beside it are castiron's and not the library's.
            command = [sys.executable, "-P", str(Path(tokenizer_trial.__file__))]
            with naming(tempfile.gettempdir()), tempfile.TemporaryFile() as file:
                file.write(self.data)
                file.seek(0)
                self.process = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def fault(self) -> str | None:
        """What the file that has it is said to have: a tokenizer that cannot be read, ends its process or gives ids past the
        vocabulary; None for a sound one."""
        if self.process is None:
            return None
        try:
            found = json.loads(self.process.communicate(timeout=6 * tokenizer_trial.SECONDS)[0])
        except (ValueError, subprocess.TimeoutExpired):
            return "a tokenizer that the tokenizers library fails on"
        if "error" in found:
            said = "".join(c for c in found["error"][:100] if c.isprintable())
            return f"no tokenizer that can be read ({said})"
        if found["largest"] >= self.vocab:
            return f"a tokenizer of other tokens: one is {found['largest']}, of {self.vocab} in all"
        keep(self.stamp, b"")
        return None


def tokenizer_of(content: Mapping[str, Any], path: object, vocab: int = ANY) -> Any:
    """The tokenizer of a checkpoint at `path`, which takes whole texts; CheckpointError for one that cannot be read without
    harm."""
    from tokenizers import Tokenizer

    with Trial(data := tokenizer_bytes(content, path), vocab) as trial:
        if fault := trial.fault():
            raise CheckpointError(f"{path} has {fault}: fetch it again")
    tokenizer = Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_bytes(content: Mapping[str, Any], path: object) -> bytes:
    """As a bundle has it; CheckpointError, which names `path`, for what no file can hold."""
    try:
        return json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} has a tokenizer that is nested too deep or no UTF-8: fetch it again") from None
