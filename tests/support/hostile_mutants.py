"""Make mutants of valid checkpoints; mutant N of a checkpoint is always the same."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from castiron.pipelines.checkpoints.gguf.gguf_file import read_gguf
from tests.support.tiny_gguf import entry, raw_gguf, string, tensor_info
from tests.support.valid_checkpoints import BESIDE

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
STRINGS = ("", "\0", "yarn", "linear", "none", "llama", "gpt2", "x" * 5000, "a\x1b]0;x\x07\nb", "\u2581", "a" * (1 << 20),
           b"\xff")  # fmt: skip
TENSOR_NAMES = ("rope_freqs.weight", "x\x1b[31m\n", "x" * 5000, "rope_factors_long.weight")
SHAPES = ((1 << 62, 4), (1,), (64,), (8,), (3, 5, 7, 2))
_PACK = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def packed(kind: int, value: Any) -> bytes:
    """Return the bytes of a metadata value; an array is (kind of its elements, elements)."""
    if kind == STRING:
        return string(value)
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(packed(inner, one) for one in values)
    return struct.pack("<" + _PACK[kind], value)


def typed(value: Any) -> tuple[int, Any]:
    match value:
        case bool():
            return BOOL, value
        case int():
            return (U32, value) if 0 <= value < 1 << 32 else (I64, value)
        case float():
            return F32, value
        case str():
            return STRING, value
        case _:
            values = value.tolist() if isinstance(value, np.ndarray) else list(value)
            return ARRAY, (typed(values[0])[0] if values else U32, values)


def gguf_bytes(source: Path, rng: random.Random) -> bytes:
    """Return a valid file of f32 tensors with one or two hostile pieces."""
    file = read_gguf(source)
    entries = [[key, *typed(value)] for key, value in file.metadata.items()]
    infos, data = [], b""
    for tensor in file.tensors.values():
        infos.append([tensor.name, tensor.shape[::-1], 0, len(data)])
        raw = tensor.data.tobytes()
        data += raw + b"\0" * (-len(raw) % 32)
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.75:
            chosen = rng.choice(entries)
            match rng.randrange(8):
                case 0:
                    entries.remove(chosen)
                case 1:
                    chosen[0] = rng.choice([chosen[0] + "x", "", "\0", "llama.rope.scale_linear", "x" * 5000, b"\xff\xfe"])
                case 2 | 3:
                    chosen[1:] = hostile_entry(rng)
                case _:
                    chosen[2] = nearby(rng, chosen[1], chosen[2])
        else:
            chosen = rng.choice(infos)
            match rng.randrange(5):
                case 0:
                    infos.remove(chosen)
                case 1:
                    digits = "9" * rng.choice((3, 50, 5000))
                    chosen[0] = rng.choice([f"blk.{digits}.attn_q.weight", *TENSOR_NAMES, chosen[0] + ".bias"])
                case 2:
                    chosen[1] = rng.choice([chosen[1][::-1], (*chosen[1], 1), *SHAPES, chosen[1][:1]])
                case 3:
                    chosen[2] = rng.choice([1, 2, 8, 12, 14, 30, 39, 9999])
                case _:
                    chosen[3] = rng.choice([1, 32, 1 << 62, 1 << 40])
    if rng.random() < 0.1:
        values = np.frombuffer(data, np.float32).copy()
        values[rng.randrange(len(values))] = rng.choice((math.nan, math.inf))
        data = values.tobytes()
    return raw_gguf(
        tuple(entry(key, kind, packed(kind, value)) for key, kind, value in entries),
        tuple(tensor_info(name, dims, kind, offset) for name, dims, kind, offset in infos),
        data,
    )


def hostile_entry(rng: random.Random) -> tuple[int, Any]:
    """Return the kind and the value of a hostile metadata entry."""
    kind = rng.choice((U8, U32, I32, F32, F64, BOOL, STRING, ARRAY, U64, I64))
    if kind == ARRAY:
        inner = rng.choice((U8, U32, I32, F32, BOOL, STRING, ARRAY))
        return kind, (inner, [hostile_of(rng, inner) for _ in range(rng.choice((0, 1, 2, 3, 7, 200)))])
    return kind, hostile_of(rng, kind)


def hostile_of(rng: random.Random, kind: int) -> Any:
    if kind == STRING:
        return rng.choice(STRINGS)
    if kind == ARRAY:
        return U32, [1, 2]
    if kind in (F32, F64):
        return rng.choice((0.0, -0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e-45, 3e38, 1e30))
    if kind == BOOL:
        return rng.random() < 0.5
    bits = struct.calcsize(_PACK[kind]) * 8
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind in (I8, I16, I32, I64) else (0, (1 << bits) - 1)
    return rng.choice((0, 1, 2, 3, 5, 7, 16, 64, 100, high, high // 2 + 1, low, 1 if low == 0 else -1))


def nearby(rng: random.Random, kind: int, value: Any) -> Any:
    """Return another value of the same kind."""
    if kind != ARRAY:
        return hostile_of(rng, kind)
    inner, values = value
    changed = list(values)
    match rng.randrange(4):
        case 0 if changed:
            changed[rng.randrange(len(changed))] = hostile_of(rng, inner)
        case 1 if changed:
            changed.pop()
        case 2:
            changed = changed * rng.choice((0, 2, 100))
        case _ if inner == STRING:
            changed = ["a" * (n + 1) for n in range(rng.choice((50, 1000)))]
    return inner, changed


WORDS = ("", "a", "yarn", "linear", "llama3", "longrope", "default", "full_attention", "model.safetensors", "x" * 5000,
         "\x1b[31m\n\x07", "\ud800", "(a+)+$", "(", "{% for", "/etc/passwd", "é" * 400, "1e5")  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 5, 7, 0.5, 0.0, -0.5, 1.5, 1e-300, 1e300, 1e-8, math.nan, math.inf, -math.inf, 2**31, 2**63, 10**20,
           10**400, 100, 1000, 1e400, -(2**31))  # fmt: skip
RAW = "\x00RAW\x00"
RAWS = ("9" * 5000, "-" + "1" * 5000, "1e999999", "[" * 50_000, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 900 + "]" * 900, "nul")


def hostile_value(rng: random.Random) -> Any:
    match rng.randrange(8):
        case 0 | 1 | 2:
            return rng.choice(NUMBERS)
        case 3:
            return rng.choice(WORDS)
        case 4:
            return rng.choice((None, True, False, [], {}, [[]], [None], {"": None}, [{}]))
        case 5:
            return [rng.choice(NUMBERS) for _ in range(rng.choice((1, 2, 3, 8, 500)))]
        case 6:
            return {rng.choice(WORDS[:-7]): rng.choice(NUMBERS)}
        case _:
            return RAW + str(rng.randrange(len(RAWS)))


def values_of(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container, and the key or index in it, of every value of a JSON tree."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from values_of(tree[key])


def mutate_tree(rng: random.Random, tree: Any) -> None:
    every = list(values_of(tree))
    if not every:
        return
    # The elements of a long list outnumber the keys, so a key of the root is chosen often.
    depth_one = [(tree, key) for key in tree] if isinstance(tree, dict) else every
    container, key = rng.choice(every if rng.random() < 0.6 else depth_one)
    match rng.randrange(8):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[rng.choice(ADDED)] = hostile_value(rng)
        case 2:
            other, of = rng.choice(every)
            container[key] = json.loads(json.dumps(other[of])) if _in(other, of) else None
        case _:
            container[key] = hostile_value(rng)


def _in(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


ADDED = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "head_dim", "sliding_window", "layer_types",
         "original_max_position_embeddings", "rms_norm_eps", "attention_bias", "text_config", "eos_token_id", "bos_token_id",
         "mscale", "attention_factor", "factor", "truncation", "padding", "max_position_embeddings", "num_key_value_heads")  # fmt: skip


def dumped(tree: Any) -> bytes:
    text = json.dumps(tree)
    for number, raw in enumerate(RAWS):
        text = text.replace(json.dumps(RAW + str(number)), raw)
    return text.encode("utf-8", "surrogatepass")


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(min(len(changed), 6000)) if changed else 0
        match rng.randrange(4):
            case 0:
                changed = changed[: rng.randrange(len(changed) + 1)]
            case 1:
                changed[at:at] = rng.randbytes(rng.choice((1, 8, 300)))
            case 2:
                changed[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 1 << 31, 1 << 62, (1 << 64) - 1)))
            case _:
                changed[at : at + 1] = rng.randbytes(1)
    return bytes(changed)


def mutate_directory(rng: random.Random, folder: Path) -> None:
    file = rng.choices(
        ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json", "weights", "index", "kind"),
        (50, 20, 5, 4, 12, 4, 3),
    )[0]
    weights = next(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    match file:
        case "kind":
            # A folder, a pipe, an endless device, or nothing in place of a file.
            victim = rng.choice(sorted(folder.iterdir()))
            victim.unlink()
            kinds = (victim.mkdir, lambda: os.mkfifo(victim), lambda: victim.symlink_to("/dev/zero"), lambda: None)
            rng.choice(kinds)()
        case "weights":
            mutate_weights(rng, weights)
        case _:
            path = index if file == "index" else folder / file
            tree = json.loads(path.read_text()) if path.exists() else {"weight_map": {"lm_head.weight": weights.name}}
            if file == "index" and not path.exists():
                weights.rename(folder / "model-1.safetensors")
            mutate_json(rng, path, tree)


def mutate_json(rng: random.Random, path: Path, tree: Any) -> None:
    if rng.random() < 0.1:
        path.write_bytes(mutate_bytes(rng, dumped(tree)))
        return
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutate_tree(rng, tree)
    path.write_bytes(dumped(tree))


def mutate_weights(rng: random.Random, weights: Path) -> None:
    """Change bytes, numbers or the header of an f32 safetensors file."""
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    what = rng.randrange(3)
    if what == 0:
        weights.write_bytes(mutate_bytes(rng, data))
    elif what == 1:
        values = np.frombuffer(data[8 + size :], np.float32).copy()
        values[rng.randrange(len(values))] = rng.choice((math.nan, math.inf, -math.inf))
        weights.write_bytes(data[: 8 + size] + values.tobytes())
    else:
        header = json.loads(data[8 : 8 + size])
        if rng.random() < 0.5:
            name = rng.choice(sorted(header))
            digits = "8" * rng.choice((2, 30, 5000))
            names = (name + "x", f"model.layers.{digits}.mlp.up_proj.weight", "\x1b[2J\n", "x" * 5000)
            header[rng.choice(names)] = header.pop(name)
        else:
            mutate_tree(rng, header)
        raw = dumped(header)
        weights.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + size :])


def mutate_beside(rng: random.Random, folder: Path) -> None:
    """Change the config, or a file of an adapter, encoder or classifier."""
    own = ("model.safetensors", "tokenizer.json", "tokenizer_config.json")
    path = rng.choice([p for p in sorted(folder.rglob("*")) if p.is_file() and not (p.parent == folder and p.name in own)])
    if path.suffix == ".json":
        mutate_json(rng, path, json.loads(path.read_text()))
    else:
        mutate_weights(rng, path)


def source_of(number: int, valid: list[Path]) -> Path:
    """Return the valid checkpoint from which mutant `number` is made."""
    rng = random.Random(number)
    directory = rng.random() >= 0.4
    return rng.choice([path for path in valid if path.is_dir() == directory] or valid)


def mutant(number: int, source: Path, folder: Path) -> Path:
    """Write mutant `number` of `source` below `folder`; return its path."""
    rng = random.Random(f"{source.name} {number}")
    if not source.is_dir():
        folder = folder / "mutant.gguf"
        if rng.random() < 0.2:
            folder.write_bytes(mutate_bytes(rng, source.read_bytes()))
        else:
            folder.write_bytes(gguf_bytes(source, rng))
        return folder
    folder = folder / "mutant"
    shutil.copytree(source, folder)
    (mutate_beside if source.name in BESIDE else mutate_directory)(rng, folder)
    return folder
