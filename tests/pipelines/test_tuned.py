"""What tuning found: how it is kept, when a compilation takes it, and what is refused."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace

import pytest

from castiron.emitter.kernels.products.choosing import default_tiles, read_tiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import ISAS
from castiron.pipelines import cli
from castiron.pipelines.casting import compile as compiling
from castiron.pipelines.casting.compile import Options, build_module, compile_model
from castiron.pipelines.checkpoints import open_checkpoint
from castiron.pipelines.tuning import store
from castiron.pipelines.tuning.store import Finding, Key, StoreError
from castiron.vmfb.compiler import CompileResult
from castiron.vmfb.cpu import physical_cores
from castiron.vmfb.targets import resolve
from tests.pipelines.tiny_gguf import write_llama
from tests.pipelines.toy_text import read_json

HOST = resolve("host")
OPTIONS = Options(context=16, speculate=(), batch=(), threads=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def compiled(monkeypatch):
    """The texts that would have been compiled; iree-compile itself is left out."""
    texts = []

    def compile_mlir(text, target, out, extra_flags=()):
        texts.append(text)
        out.write_bytes(b"code")
        return CompileResult(0.0, False, (), out)

    monkeypatch.setattr(compiling, "compile_mlir", compile_mlir)
    return texts


def products(checkpoint, options=OPTIONS) -> dict[str, Product]:
    module = build_module(open_checkpoint(checkpoint), options)
    calls = [op.attrs["kernel"] for f in module.functions.values() for op in f.ops if op.kind == "kernel"]
    return {kernel.product.name: kernel.product for kernel in calls if kernel.product}


def other_tiles(product: Product, threads: int = 3) -> dict[str, int]:
    default = default_tiles(product, ISAS[HOST.isa], threads)
    return asdict(replace(default, unroll=default.unroll + 1))


def finding(product: Product, key: Key | None = None) -> Finding:
    return Finding(key or store.key_of(HOST, 3), product.name, other_tiles(product), 1.25)


def test_what_is_kept_is_read_and_the_last_of_a_product_holds():
    key = Key("a cpu", "avx2", "3.13.0", "abcd", 2)
    other = replace(key, threads=1)
    first = Finding(key, "p", {"workgroups": 2}, 1.5)
    store.keep([first, Finding(key, "q", None, 1.0), Finding(other, "p", {"workgroups": 3}, 1.1)])
    assert store.findings_of(key)["p"] == first and store.tiles_of(key) == {"p": {"workgroups": 2}}
    store.keep([Finding(key, "p", {"workgroups": 9}, 1.7)])
    assert store.tiles_of(key) == {"p": {"workgroups": 9}} and store.tiles_of(other) == {"p": {"workgroups": 3}}
    assert set(store.findings_of(key)) == {"p", "q"} and len(store.read()) == 3


@pytest.mark.parametrize("field", ["cpu", "isa", "iree", "kernels", "threads"])
def test_a_compilation_takes_what_was_found_under_its_key_alone(checkpoint, tmp_path, compiled, field):
    product = list(products(checkpoint).values())[1]
    key = store.key_of(HOST, 3)
    elsewhere = replace(key, **{field: 9 if field == "threads" else "other"})
    store.keep([finding(product, elsewhere)])
    compile_model(checkpoint, tmp_path / "out", OPTIONS)
    store.keep([finding(product, key)])
    report = compile_model(checkpoint, tmp_path / "out", OPTIONS)
    tiles = read_tiles(product, other_tiles(product)).name
    assert not report.up_to_date and tiles not in compiled[0] and tiles in compiled[1]


def test_the_tiles_decide_whether_a_bundle_is_up_to_date(checkpoint, tmp_path, compiled):
    def up_to_date(**options):
        return compile_model(checkpoint, tmp_path / "out", replace(OPTIONS, **options)).up_to_date

    one, two = list(products(checkpoint).values())[:2]
    assert not up_to_date() and up_to_date()
    store.keep([replace(finding(one), product="another model's")])
    store.keep([replace(finding(two), tiles=None)])
    assert up_to_date() and up_to_date(tuned=False)
    store.keep([finding(one)])
    assert up_to_date(tuned=False) and not up_to_date() and up_to_date()
    store.keep([finding(two)])
    assert not up_to_date() and up_to_date()
    assert not up_to_date(tuned=False) and up_to_date(tuned=False)
    assert not up_to_date(threads=4)


def test_manifest_and_inspect_tell_what_was_tuned(checkpoint, tmp_path, compiled, monkeypatch, capsys):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    known = products(checkpoint)
    chosen = list(known.values())[2]
    store.keep([finding(chosen)])
    arguments = ["compile", str(checkpoint), "--context", "16", "--speculate", "none", "--batch", "", "--threads", "3"]

    def inspected(*more) -> tuple[dict, str]:
        assert cli.main([*arguments, "-o", str(tmp_path / "out"), *more]) == 0
        capsys.readouterr()
        assert cli.main(["inspect", str(tmp_path / "out"), "--json"]) == 0
        facts = read_json(capsys.readouterr().out)["compile"]
        assert cli.main(["inspect", str(tmp_path / "out")]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tuned")]
        return facts, line.split(maxsplit=1)[1]

    facts, line = inspected()
    assert facts["tuned"] == {chosen.name: other_tiles(chosen)} and facts["products"] == list(known)
    assert facts["threads"] == 3 and line == f"1 of {len(known)} matrix products, for 3 threads"
    facts, line = inspected("--no-tuned")
    assert facts["tuned"] == {} and line == "no"


@pytest.mark.parametrize("change", [{"target": "x86-64-v3"}, {"lowering": "portable"}])
def test_other_targets_and_lowerings_take_none(checkpoint, tmp_path, compiled, change):
    store.keep([finding(product) for product in products(checkpoint).values()])
    compile_model(checkpoint, tmp_path / "out", replace(OPTIONS, **change))
    assert all(read_tiles(product, other_tiles(product)).name not in compiled[0] for product in products(checkpoint).values())


@pytest.mark.parametrize(
    ("options", "batches"),
    [((), ["decode_batch_4", "decode_batch_8"]), (("--batch", "none"), []), (("--batch", "2"), ["decode_batch_2"])],
)
def test_a_bundle_can_batch_unless_it_is_told_not_to(checkpoint, tmp_path, compiled, options, batches, capsys):
    assert cli.main(["compile", str(checkpoint), "-o", str(tmp_path / "out"), "--context", "16", *options]) == 0
    functions = json.loads((tmp_path / "out" / "manifest.json").read_text())["functions"]
    assert [function["name"] for function in functions if function["role"] == "batch"] == batches
    assert all(f"@{name}(" in compiled[0] for name in batches)


def test_threads_default_to_the_cores_of_the_machine_that_runs_it():
    assert Options().threads_or_cores == physical_cores()
    assert Options(target="aarch64").threads_or_cores == 2
    assert Options(target="aarch64", threads=8).threads_or_cores == 8


BAD = [
    b"", b"[]", b"{", b'{"schema": 1, "findings": []}', b'{"schema": 2}', b'{"schema": 2, "findings": [{"product": "p"}]}',
    b'{"schema": 2, "findings": [], "more": 1}', b"\xff\xfe", b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("data", BAD)
def test_a_file_of_something_else_is_one_sentence_and_stays(checkpoint, tmp_path, compiled, data, capsys):
    path = store.store_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    arguments = ["compile", str(checkpoint), "-o", str(tmp_path / "out"), "--context", "16"]
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(path) in err and "--no-tuned" in err
    assert not (tmp_path / "out").exists()
    with pytest.raises(StoreError):
        store.keep([])
    assert path.read_bytes() == data
    assert cli.main([*arguments, "--no-tuned"]) == 0


def test_tiles_that_do_not_fit_are_one_sentence(checkpoint, tmp_path, compiled):
    product = next(p for p in products(checkpoint).values() if p.tokens == 8)
    wrong = other_tiles(product) | {"tokens": 7, "rows": 2}
    for tiles in (wrong, {"workgroups": 2}):
        store.keep([replace(finding(product), tiles=tiles)])
        with pytest.raises(StoreError, match="tuned.json.*--no-tuned") as error:
            compile_model(checkpoint, tmp_path / "out", OPTIONS)
        assert "\n" not in str(error.value)


def test_the_file_is_whole_at_every_moment():
    """Readers in another thread never see half of what is written."""
    key = Key("a cpu", "avx2", "3.13.0", "abcd", 2)
    many = [Finding(key, f"product {n}", {"workgroups": n}, 1.0) for n in range(300)]
    store.keep(many)
    done = threading.Event()

    def write():
        try:
            for _ in range(20):
                store.keep(many)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    sizes = {len(store.read())}
    while not done.is_set():
        sizes.add(len(store.read()))
    writer.join()
    assert sizes == {300}
    assert [path.name for path in store.store_path().parent.iterdir()] == ["tuned.json"]
    json.loads(store.store_path().read_bytes())
