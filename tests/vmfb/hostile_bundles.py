"""Mutants of a bundle, and what becomes of each: it runs or is refused in a sentence, and neither ends the process.

Of five kinds: a manifest that lies, of which the parts may agree with each other; a table of weights, a module's own tables, the
small files, each with the hashes and sizes of a manifest that agrees; and bytes that were changed in a bundle that was opened
before, with sizes and times of modification as they were. `test_hostile_bundles.py` runs some; thousands:

    python -m tests.vmfb.hostile_bundles --mutants 2000

What a module's machine code does nobody checks: that is what `--verify-key` is for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

LONGEST, SECONDS, BYTES = 400, 30, 4 << 30
NUMBERS = [0, 1, -1, 2, 3, 7, 31, 33, 64, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64, 10**30, 0.5, 1e308, 1e400]
WORDS = [
    "",
    "f32",
    "i8",
    "f16",
    "bf16",
    "f64",
    "positional",
    "window",
    "recurrent",
    "decode",
    "batch",
    "x" * 5000,
    "\ud800",
    "a\x1b[2J",
    "../x",
    "None",
]
KINDS = ("manifest", "weights", "module", "files", "forged")


def run(place: Path, text: bool) -> None:
    """What a command does with a bundle: opened, its tokenizer read where `text` is asked for, some tokens read and written."""
    from castiron.pipelines.generation.text import load_text
    from castiron.vmfb.batch import Batch
    from castiron.vmfb.bundle import open_bundle

    bundle = open_bundle(place)
    if bundle.tokenizer and text:
        text = load_text(bundle)
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


def write_sound(place: Path) -> Path:
    """A toy bundle with every file that one may have."""
    from castiron.pipelines.generation.vocabulary import Vocabulary
    from tests.pipelines import toy_text

    toy_text.write(place)
    (place / "vocabulary.bin").write_bytes(bytes(Vocabulary.of(toy_text.tokenizer(), 32)))
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"]["vocabulary.bin"] = {}
    work = {"calls": 2, "flops": [64, 0, 64], "bytes": [128, 4, 256], "weights": 128, "paths": ["layers.*.mlp"], "tokens": 1}
    manifest["compile"] = {"work": {"decode_step": {"gemv": work}}}
    (place / "manifest.json").write_text(json.dumps(manifest))
    rehash(place)
    return place


def mutant(number: int, sound: Path, place: Path) -> str:
    """Writes a mutant of the bundle `sound` to `place`; its kind."""
    rng = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    shutil.copytree(sound, place)
    if kind == "manifest":
        path = place / "manifest.json"
        manifest = json.loads(path.read_text())
        lie_together(rng, manifest) if rng.random() < 0.5 else lie(rng, manifest)
        path.write_text(json.dumps(manifest).replace("Infinity", "1e400"), errors="surrogatepass")
        return kind
    if kind == "forged":
        # Opened before, so that a stamp says that it is whole.
        from castiron.vmfb.bundle import open_bundle

        open_bundle(place)
        path = place / rng.choice(["model.vmfb", "weights.irpa", "tokenizer.json"])
        stat, data = path.stat(), bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 3, 100))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with open(path, "r+b") as file:
            file.write(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return kind
    small = [name for name in ("tokenizer.json", "chat_template.jinja", "vocabulary.bin") if (place / name).exists()]
    path = place / {"weights": "weights.irpa", "module": "model.vmfb", "files": rng.choice(small)}[kind]
    path.write_bytes(spoilt(rng, path.read_bytes(), tables(path)))
    rehash(place)
    return kind


def tables(path: Path) -> int:
    """How many bytes of a file tell where the others are, or say what they are."""
    if path.suffix == ".irpa":
        return 4096
    if path.suffix == ".vmfb":
        # The first entry of the archive; the second is machine code.
        return path.read_bytes().rindex(b"PK\x03\x04")
    return path.stat().st_size


def spoilt(rng: random.Random, data: bytes, head: int) -> bytes:
    """With bytes of its `head` changed, or its end cut off or longer."""
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


def rehash(place: Path) -> None:
    """The manifest of files that are others now."""
    path = place / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        data = (place / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(manifest))


def lie(rng: random.Random, manifest: dict) -> None:
    """Some values are others, gone or twice."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        node, key = manifest, rng.choice(list(manifest))
        while isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.9:
            node = node[key]
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        how = rng.random()
        if how < 0.1:
            del node[key]
        elif how < 0.2 and isinstance(node, dict):
            node[rng.choice(WORDS)] = node.pop(key)
        elif how < 0.3 and isinstance(node, list):
            node.append(node[key])
        else:
            node[key] = rng.choice([*NUMBERS, *WORDS, None, True, [], {}, [[]], node[key], [node[key]]])


def lie_together(rng: random.Random, manifest: dict) -> None:
    """Another vocabulary, context, state or width, of which every function's signature tells."""
    from castiron.vmfb.manifest import entry_points
    from castiron.vmfb.record import to_json
    from castiron.vmfb.states import State

    number = lambda: rng.choice((1, 2, 3, 4, 5, 8, 16, 23, 25, 33, 64, 1000, 2**20, 2**31, 2**33, 2**45, 2**63))
    states = manifest["states"]
    for _ in range(rng.choice((1, 1, 2))):
        match rng.randrange(7):
            case 0:
                manifest["vocab"] = number()
            case 1:
                manifest["context"] = number()
                for state in states:
                    state["shape"][1] = manifest["context"]
            case 2:
                state = rng.choice(states)
                state["shape"][rng.choice((0, -1))] = number()
            case 3:
                rng.choice(states)["dtype"] = rng.choice(("f32", "f16", "bf16", "i8"))
            case 4:
                rng.choice(states).update(kind="recurrent")
            case 5:
                states.pop() if rng.random() < 0.5 else states.append(states[0] | {"name": "x"})
            case 6:
                for state in states:
                    state["dtype"] = "i8"
    widths = {}
    for function in manifest["functions"]:
        width = number() if rng.random() < 0.1 and function["role"] != "decode" else function["width"]
        widths.setdefault(function["role"], []).append(width)
    if rng.random() < 0.3:
        widths[rng.choice(("batch", "verify", "embed"))] = [rng.choice((2, 4))]
        manifest["hidden"] = rng.choice((4, 64))
    records = [State(**{**state, "shape": tuple(state["shape"])}) for state in states]
    manifest["functions"] = to_json(entry_points(records, manifest["vocab"], widths, manifest.get("hidden", 0)))


def verdict(place: Path, text: bool = True) -> str:
    """ "taken", "refused", or what is wrong; the bundle is run in a child of this process, within limits."""
    there, here = os.pipe()
    if (child := os.fork()) == 0:
        os.close(there)
        os.write(here, judged(place, text).encode(errors="replace")[:4000])
        os._exit(0)
    os.close(here)
    with open(there, "rb") as file:
        said = file.read().decode()
    status = os.waitpid(child, 0)[1]
    return f"ended by {signal.Signals(status & 127).name}" if status & 127 else said


def judged(place: Path, text: bool) -> str:
    from castiron.pipelines.errors import user_errors

    signal.alarm(3 * SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    # Beyond what the process that was forked has: the tests', at their end, has torch and JAX.
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sys.stderr = open(os.devnull, "w")
    try:
        run(place, text)
    except user_errors() as error:
        said = str(error).replace(str(place), "PATH")
        return "refused" if len(said) < LONGEST and said.isprintable() else f"said badly: {said!r}"
    except Exception as error:
        own = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if "/castiron/" in f.filename or "/vmfb/" in f.filename or "/pipelines/" in f.filename
        ]
        where = f"{own[-1].filename.split('/')[-1]}:{own[-1].lineno}" if own else "?"
        return f"traceback {type(error).__name__} at {where}: {str(error)[:100]!r}"
    return "taken"


def main() -> int:
    import castiron.pipelines.generation.text
    import castiron.vmfb.batch  # noqa: F401

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--bundle", type=Path, help="the sound one (default: a toy)")
    args = parser.parse_args()
    found: dict[tuple[str, str], list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CASTIRON_CACHE"] = f"{folder}/cache"
        sound = args.bundle or write_sound(Path(folder) / "toy")
        assert verdict(sound) == "taken"
        for number in range(args.first, args.first + args.mutants):
            place = Path(folder) / "mutant"
            kind = mutant(number, sound, place)
            found.setdefault((kind, verdict(place, kind == "files")), []).append(number)
            shutil.rmtree(place)
    for (kind, said), numbers in sorted(found.items()):
        if said not in ("taken", "refused"):
            print(f"{len(numbers):6} {kind}: {said}   e.g. {numbers[:3]}")
    counts = Counter(f"{kind}: {said.split()[0]}" for (kind, said), numbers in found.items() for _ in numbers)
    print(json.dumps(dict(sorted(counts.items()))))
    return int(any(said not in ("taken", "refused") for _, said in found))


if __name__ == "__main__":
    sys.exit(main())
