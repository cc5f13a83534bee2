"""Compare GGUF tokenizers with llama.cpp's, or record llama.cpp's results for the tests.

    python -m tests.models.llama_cpp_vocabularies compare
    python -m tests.models.llama_cpp_vocabularies record

Both need requirements-bench.lock. `compare` prints a table: llama.cpp's vocabularies as they are,
GPT-2's with every value of tokenizer.ggml.pre, and small vocabularies with random headers.
`record` writes what the tests read.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from random import Random

import llama_cpp
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from castiron.pipelines.checkpoints.gguf import vocabulary as special_tokens
from castiron.pipelines.checkpoints.gguf.gguf_file import GgufFile, read_gguf
from castiron.pipelines.checkpoints.gguf.tokenizer_json import SPACE, tokenizer_json
from castiron.pipelines.checkpoints.gguf.vocabulary import eos_token_ids
from castiron.pipelines.checkpoints.pre_tokenizers import PRE_TOKENIZERS
from tests.models.checkpoints import DOWNLOADS, archive
from tests.models.test_real_vocabularies import IDS, digests_of, texts_for, vocabularies
from tests.support import llama_cpp_texts as made
from tests.support.tiny_gguf import write_gguf

MERGES, POOL, MORE, SPECS = 1000, 3000, 25, 40


class Vocabulary:
    """A GGUF file's vocabulary, loaded by llama.cpp."""

    def __init__(self, path: Path):
        options = llama_cpp.llama_model_default_params()
        options.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        raw = text.encode()
        ids = (llama_cpp.llama_token * (len(raw) + 16))()
        return ids[: llama_cpp.llama_tokenize(self._vocab, raw, len(raw), ids, len(ids), add_special, True)]

    def ends(self) -> list[int]:
        size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        return [token for token in range(size) if llama_cpp.llama_vocab_is_eog(self._vocab, token)]

    def __enter__(self) -> Vocabulary:
        return self

    def __exit__(self, *_) -> None:
        llama_cpp.llama_model_free(self._model)


@llama_cpp.llama_log_callback
def _silent(*_) -> None: ...


def of_metadata(metadata: Mapping, folder: Path) -> Vocabulary:
    lists = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in metadata.items()}
    return Vocabulary(write_gguf(folder / "x.gguf", "llama", {**lists, "llama.block_count": 1}, {}))


def names_in_source() -> list[str]:
    """The values of tokenizer.ggml.pre in llama-vocab.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive(*DOWNLOADS["llama.cpp"].requirements, Path(folder))) as sdist:
            name = next(name for name in sdist.getnames() if name.endswith("/vendor/llama.cpp/src/llama-vocab.cpp"))
            source = sdist.extractfile(name).read().decode()
    return sorted(set(re.findall(r'tokenizer_pre == "([^"]+)"', source)))


def train(texts: list[str], is_raw: bool) -> list[str]:
    """Merges learned from complete texts, which cross the borders of words."""
    learner, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.pre_tokenizer = pre_tokenizers.Split("\n", "isolated") if is_raw else byte_level
    size = MERGES + (400 if is_raw else 256)
    learner.train_from_iterator(
        [text.replace(" ", SPACE) for text in texts] if is_raw else texts,
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=[] if is_raw else byte_level.alphabet(), show_progress=False),
    )
    return [" ".join(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]


def chosen_texts(results: Mapping[str, list[list[int] | None]], pool: list[str]) -> list[int]:
    """Indices of texts that tell any two pre-tokenizers apart, three times if the pool can."""
    left = {pair: 3 for pair in combinations(results, 2)}
    differing = [
        {(a, b) for a, b in left if None not in (results[a][i], results[b][i]) and results[a][i] != results[b][i]}
        for i in range(len(pool))
    ]
    chosen: list[int] = []
    while best := max(
        (sum(pair in left for pair in pairs), -len(pool[i]), i) for i, pairs in enumerate(differing) if i not in chosen
    ):
        if not best[0]:
            return sorted(chosen)
        chosen.append(best[2])
        for pair in differing[best[2]] & left.keys():
            left[pair] -= 1
            if not left[pair]:
                del left[pair]
    return sorted(chosen)


def record() -> None:
    random = Random(1)
    pool = [text for text in made.texts(random, POOL)]
    merges = {"byte_level": train(pool, is_raw=False), "raw": train(pool, is_raw=True)}
    names = names_in_source()
    results: dict[str, list[list[int] | None]] = {}
    headers = []
    groups = [*map(list, special_tokens._FIM_TEXTS.values()), *([text] for text in special_tokens._END_TEXTS)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in [*names, None]:
            if name != "whitespace":  # aborts at a space
                with of_metadata(made.made_vocabulary(merges, name), folder) as vocabulary:
                    comparable = lambda text: made.is_comparable(name or "default", text)
                    results[name or ""] = [vocabulary.encode(text) if comparable(text) else None for text in pool]
        for _ in range(SPECS):
            spec = made.random_spec(random, groups, made.OTHERS)
            special = [text for text, _ in spec["special"]] + (["<unk>", "<s>", "</s>"] if spec["model"] == "llama" else [])
            texts = [text for text in made.texts(random, 12, special) if text.isascii()][:3]
            with of_metadata(made.header(spec), folder) as vocabulary:
                ids = [vocabulary.encode(text) for text in texts]
                headers.append({**spec, "ends": vocabulary.ends(), "texts": texts, "ids": ids})
    texts = sorted({*chosen_texts(results, pool), *random.sample(range(len(pool)), MORE)})
    outcomes, chosen = [], {name: [] for name in results}
    for at in texts:
        distinct = [list(ids) for ids in dict.fromkeys(tuple(found[at]) for found in results.values() if found[at] is not None)]
        outcomes.append(distinct)
        for name, found in results.items():
            chosen[name].append(-1 if found[at] is None else distinct.index(found[at]))
    content = {
        "names": names, "merges": merges, "texts": [pool[at] for at in texts], "outcomes": outcomes, "chosen": chosen,
        "headers": headers,
    }  # fmt: skip
    made.RECORDED.write_text(_lines(content), encoding="utf-8")
    real = {}
    for name, path in vocabularies().items():
        file = read_gguf(path)
        with Vocabulary(path) as vocabulary:
            real[name] = {"ends": vocabulary.ends(), "ids": digests_of(file, texts_for(name, file), vocabulary.encode)}
    IDS.write_text(_lines(real), encoding="utf-8")


def _lines(content: Mapping) -> str:
    """JSON with a line for each key."""
    dump = lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return "{\n" + ",\n".join(f"{dump(key)}:{dump(value)}" for key, value in content.items()) + "\n}\n"


def compared(file: GgufFile, vocabulary: Vocabulary, texts: list[str], pre: str | None) -> tuple[int, int, int, bool]:
    """Count texts, those with other ids, the comparable ones of these, and other ends."""
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(file)))
    differ = [t for t in texts if tokenizer.encode(t, add_special_tokens=False).ids != vocabulary.encode(t)]
    wrong = [text for text in differ if made.is_comparable(pre, text)]
    for text in wrong[:3]:
        print(f"   {text!r}: {tokenizer.encode(text, add_special_tokens=False).ids}, not {vocabulary.encode(text)}")
    return len(texts), len(differ), len(wrong), set(vocabulary.ends()) != set(eos_token_ids(file))


def compare(count: int = 400, specs: int = 1000) -> None:
    total: dict[str, list[int]] = {}

    def add(kind: str, result: tuple[int, int, int, bool]) -> None:
        total[kind] = [a + b for a, b in zip(total.get(kind, [0] * 5), (1, *result))]

    for name, path in vocabularies().items():
        file = read_gguf(path)
        pre = file.metadata.get("tokenizer.ggml.pre", "default") if file.metadata["tokenizer.ggml.model"] == "gpt2" else None
        with Vocabulary(path) as vocabulary:
            add("vocabularies", compared(file, vocabulary, texts_for(name, file, count), pre))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        gpt2 = {k: v for k, v in read_gguf(vocabularies()["gpt-2"]).metadata.items() if k.startswith("tokenizer.")}
        for name in PRE_TOKENIZERS:
            if not PRE_TOKENIZERS[name].is_raw:
                metadata = {**gpt2, "tokenizer.ggml.pre": name}
                with of_metadata(metadata, folder) as vocabulary:
                    result = compared(made.gguf_of(metadata), vocabulary, made.texts(Random(name), count), name)
                    add("values of tokenizer.ggml.pre", result)
        random = Random(2)
        groups = [*map(list, special_tokens._FIM_TEXTS.values()), *([text] for text in special_tokens._END_TEXTS)]
        for _ in range(specs):
            spec = made.random_spec(random, groups, made.OTHERS)
            texts = [text for text in made.texts(random, 40, [text for text, _ in spec["special"]]) if text.isascii()]
            with of_metadata(made.header(spec), folder) as vocabulary:
                pre = spec["pre"] if spec["model"] == "gpt2" else None
                add("random headers", compared(made.gguf_of(made.header(spec)), vocabulary, texts, pre))
    print("kind | files | texts | other ids | of these, not for a known reason | other ends")
    for kind, numbers in total.items():
        print(kind, *numbers, sep=" | ")


if __name__ == "__main__":
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    {"compare": compare, "record": record}[sys.argv[1]]()
