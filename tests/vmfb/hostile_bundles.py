"""Mutants of a bundle: each must run or be rejected with a one-line error, without a crash.

Five kinds: a manifest with other values, which may agree with each other; a changed table of
weights, module or small file with updated hashes; and bytes changed in a bundle that was opened
before, with the same sizes and times. `python -m tests.vmfb.hostile_bundles N` runs N of them.
Machine code in a module is not changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from castiron.emitter.abi import functions
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.bundle.json_record import to_json
from castiron.vmfb.bundle.manifest import BundleError
from castiron.vmfb.run.session import Batch, Session
from tests.support import toy_text
from tests.support.hostile import limited
from tests.support.hostile_mutants import dumped, mutate_tree

# Limits of a run: seconds, and bytes of memory.
SECONDS, BYTES = 30, 4 << 30
KINDS = ("manifest", "weights", "module", "files", "forged")


def rejection(path: Path, **options) -> str:
    """Return the one-line error message of opening a bundle or loading its program."""
    with pytest.raises(BundleError) as caught:
        Session(open_bundle(path, **options), 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flip_byte(path: Path, offset: int = -8) -> None:
    """Change a byte of a file, but neither its size nor its time of modification."""
    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def run(folder: Path, text: bool) -> None:
    """Open a bundle, use its tokenizer if `text`, and run some tokens."""
    bundle = open_bundle(folder)
    if bundle.tokenizer and text:
        text = load_tokenizer(bundle)
        text.decode(text.encode("abc"))
        text.grammar(regex="a+")
        if bundle.chat_template:
            text.encode_chat([{"role": "user", "content": "abc"}])
    batch = Batch(bundle, threads=1)
    session, count = batch.slots[0], min(bundle.manifest.context - 2, 11)
    token = session.prefill([n % bundle.manifest.vocab for n in range(count)]) if count > 0 else 0
    for _ in range(min(3, session.context - session.position)):
        token = session.step(int(token))
    batch.step({slot: 0 for slot in range(batch.size) if batch.slots[slot].position < session.context})


def write_valid(folder: Path) -> Path:
    """Write a toy bundle with every optional file."""
    toy_text.write(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    work = {"calls": 2, "flops": [64, 0, 64], "bytes": [128, 4, 256], "weights": 128, "paths": ["layers.*.mlp"], "tokens": 1}
    manifest["compile"] = {"work": {"decode_step": {"gemv": work}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rehash(folder)
    return folder


def mutant(number: int, valid: Path, folder: Path) -> str:
    """Write a mutant of the bundle `valid` to `folder`; return its kind."""
    rng = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    shutil.copytree(valid, folder)
    if kind == "manifest":
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        change_consistently(rng, manifest) if rng.random() < 0.5 else mutate_tree(rng, manifest)
        path.write_bytes(dumped(manifest))
        return kind
    if kind == "forged":
        # Opening writes the stamp to the cache.
        open_bundle(folder)
        path = folder / rng.choice(["model.vmfb", "weights.irpa", "tokenizer.json"])
        stat, data = path.stat(), bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 3, 100))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with open(path, "r+b") as file:
            file.write(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return kind
    small = [name for name in ("tokenizer.json", "chat_template.jinja") if (folder / name).exists()]
    path = folder / {"weights": "weights.irpa", "module": "model.vmfb", "files": rng.choice(small)}[kind]
    path.write_bytes(damage(rng, path.read_bytes(), tables(path)))
    rehash(folder)
    return kind


def tables(path: Path) -> int:
    """Return the number of bytes of a file before its data."""
    if path.suffix == ".irpa":
        return 4096
    if path.suffix == ".vmfb":
        # A module is a zip archive whose second entry is machine code.
        return path.read_bytes().rindex(b"PK\x03\x04")
    return path.stat().st_size


def damage(rng: random.Random, data: bytes, head: int) -> bytes:
    """Change bytes of the `head`, or truncate or extend the data."""
    changed = bytearray(data)
    how = rng.random()
    if how < 0.15:
        return bytes(changed[: rng.randrange(len(changed))])
    if how < 0.25:
        return bytes(changed) + rng.randbytes(rng.choice((1, 64, 4096)))
    for _ in range(rng.choice((1, 1, 2, 5, 50))):
        at = rng.randrange(min(head, len(changed)))
        value = rng.choice((rng.randbytes(1), b"\xff" * 8, b"\0" * 8, (2 ** rng.randrange(64)).to_bytes(8, "little")))
        changed[at : at + len(value)] = value
    return bytes(changed[: max(len(data), 1)])


def rehash(folder: Path) -> None:
    """Update sizes and hashes in the manifest."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(manifest))


def change_consistently(rng: random.Random, manifest: dict) -> None:
    """Change the vocabulary, context, states or widths, and the functions with them."""
    number = lambda: rng.choice((1, 2, 3, 4, 5, 8, 16, 23, 25, 33, 64, 1000, 2**20, 2**31, 2**33, 2**45, 2**63))
    states = manifest["states"]
    for _ in range(rng.choice((1, 1, 2))):
        state = rng.choice(states)
        match rng.randrange(6):
            case 0:
                manifest["vocab"] = number()
            case 1:
                manifest["context"] = number()
                for each in states:
                    each["shape"][1] = manifest["context"]
            case 2:
                state["shape"][rng.choice((0, -1))] = number()
            case 3:
                storage = rng.choice(("f32", "f16", "bf16", "q8_0"))
                for each in rng.choice(([state], states)):
                    each["storage"] = storage
            case 4:
                state["kind"] = "recurrent"
            case 5:
                states.pop() if rng.random() < 0.5 else states.append(states[0] | {"name": "x"})
    widths = {}
    for function in manifest["functions"]:
        width = number() if rng.random() < 0.1 and function["role"] != "decode" else function["width"]
        widths.setdefault(function["role"], []).append(width)
    if rng.random() < 0.3:
        widths[rng.choice(("batch", "verify", "embed"))] = [rng.choice((2, 4))]
        manifest["hidden"] = rng.choice((4, 64))
    manifest["functions"] = to_json(functions(widths))


def verdict(folder: Path, text: bool = True) -> str:
    """Return the verdict on running the bundle, with its tokenizer if `text`."""
    return limited(folder, lambda path: run(path, text), SECONDS, BYTES)


def main(count: int = 1000) -> None:
    """Run `count` mutants and print the verdicts by kind."""
    found: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        os.environ["CASTIRON_CACHE"] = f"{name}/cache"
        valid, folder = write_valid(Path(name) / "toy"), Path(name) / "mutant"
        for number in range(count):
            kind = mutant(number, valid, folder)
            found[kind, verdict(folder, kind == "files").partition(" at ")[0]] += 1
            shutil.rmtree(folder)
    print(*sorted(found.items()), sep="\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
