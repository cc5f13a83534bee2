"""Tuned tiles: how they are stored, when a compilation uses them, and which files are rejected."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from castiron.emitter.kernels.matmul.selection import default_tiles, read_tiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile import compile_model as compiling
from castiron.pipelines.compile import tile_store as store
from castiron.pipelines.compile.build_model import build_module
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.tile_store import Finding, Key
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.compiler.iree_compile import CompileResult
from castiron.vmfb.cpu_features import physical_cores
from castiron.vmfb.targets import resolve
from tests.support.tiny_gguf import write_llama

HOST = resolve("host")
pytestmark = pytest.mark.usefixtures("own_cache")
OPTIONS = Options(context=16, verify_widths=(), batch=(), threads=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def compiled(monkeypatch):
    """Replace iree-compile; return the list of the texts that it would have compiled."""
    texts = []

    def compile_modules(by_name, target, folder, extra_flags=(), cancelled=None):
        texts.append("".join(by_name.values()))
        for name in by_name:
            (folder / name).write_bytes(b"code")
        return CompileResult(0.0, False, ())

    monkeypatch.setattr(compiling, "compile_modules", compile_modules)
    return texts


def matmuls(checkpoint, options=OPTIONS) -> dict[str, Matmul]:
    module = build_module(open_checkpoint(checkpoint), options)
    calls = [op.attrs["kernel"] for f in module.functions.values() for op in f.ops if op.kind == "kernel"]
    return {kernel.matmul.name: kernel.matmul for kernel in calls if kernel.matmul}


def other_tiles(matmul: Matmul, threads: int = 3) -> dict[str, int]:
    default = default_tiles(matmul, ISAS[HOST.isa], threads)
    return asdict(replace(default, workgroups=default.workgroups + 1))


def finding(matmul: Matmul, key: Key | None = None) -> Finding:
    return Finding(key or store.key_of(HOST, 3), matmul.name, other_tiles(matmul), 1.25)


def test_the_last_finding_of_a_matmul_wins():
    key = Key("a cpu", "avx2", "3.13.0", "abcd", 2)
    first, default = Finding(key, "p", {"workgroups": 2}, 1.5), Finding(key, "q", None, 1.0)
    other, last = replace(first, key=replace(key, threads=1)), replace(first, tiles={"workgroups": 9})
    store.add_findings([first, default, other])
    assert store.findings_of(key) == {"p": first, "q": default}
    store.add_findings([last])
    assert store.findings_of(key) == {"p": last, "q": default} and store.findings_of(other.key) == {"p": other}


def test_compilation_uses_tiles_of_its_own_key_only(checkpoint, tmp_path, compiled):
    matmul = list(matmuls(checkpoint).values())[1]
    key = store.key_of(HOST, 3)
    for field in asdict(key):
        store.add_findings([finding(matmul, replace(key, **{field: 9 if field == "threads" else "other"}))])
    compile_model(checkpoint, tmp_path / "out", OPTIONS)
    store.add_findings([finding(matmul, key)])
    report = compile_model(checkpoint, tmp_path / "out", OPTIONS)
    kernel = f"{matmul.name}_{HOST.isa}_{read_tiles(matmul, other_tiles(matmul)).name}"
    assert not report.up_to_date and kernel not in compiled[0] and kernel in compiled[1]


def test_the_tiles_decide_whether_a_bundle_is_up_to_date(checkpoint, tmp_path, compiled):
    def up_to_date(**options):
        return compile_model(checkpoint, tmp_path / "out", replace(OPTIONS, **options)).up_to_date

    one, two = list(matmuls(checkpoint).values())[:2]
    assert not up_to_date() and up_to_date()
    store.add_findings([replace(finding(one), product="another model's")])
    store.add_findings([replace(finding(two), tiles=None)])
    assert up_to_date() and up_to_date(tuned=False)
    store.add_findings([finding(one)])
    assert up_to_date(tuned=False) and not up_to_date() and up_to_date()
    store.add_findings([finding(two)])
    assert not up_to_date() and up_to_date()
    assert not up_to_date(tuned=False) and up_to_date(tuned=False)
    assert not up_to_date(threads=4)


def test_manifest_and_inspect_list_tuned_tiles(checkpoint, tmp_path, compiled, monkeypatch, capsys):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    known = matmuls(checkpoint)
    chosen = list(known.values())[2]
    store.add_findings([finding(chosen)])
    arguments = ["compile", str(checkpoint), "--context", "16", "--verify-widths", "none", "--batch", "", "--threads", "3"]

    for more, tuned, line in (
        ((), {chosen.name: other_tiles(chosen)}, f"1 of {len(known)} matmuls, for 3 threads"),
        (("--no-tuned",), {}, "no"),
    ):
        assert cli.main([*arguments, "-o", str(tmp_path / "out"), *more]) == 0
        facts = json.loads((tmp_path / "out" / "manifest.json").read_text())["compile"]
        assert facts["tuned"] == tuned and facts["matmuls"] == list(known) and facts["threads"] == 3
        capsys.readouterr()
        assert cli.main(["inspect", str(tmp_path / "out")]) == 0
        shown = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        assert ["tuned", line] in shown


def test_other_targets_and_lowerings_use_no_tuned_tiles(checkpoint, tmp_path, compiled):
    known = matmuls(checkpoint).values()
    store.add_findings([finding(matmul) for matmul in known])
    for change in ({"target": "x86-64-v3"}, {"lowering": "portable"}):
        compile_model(checkpoint, tmp_path / "out", replace(OPTIONS, **change))
        assert all(read_tiles(matmul, other_tiles(matmul)).name not in compiled[-1] for matmul in known)


def test_batch_functions_are_those_of_the_option(checkpoint, tmp_path, compiled):
    for options, widths in (((), [4, 8]), (("--batch", "none"), []), (("--batch", "2"), [2])):
        assert cli.main(["compile", str(checkpoint), "-o", str(tmp_path / "out"), "--context", "16", *options]) == 0
        functions = json.loads((tmp_path / "out" / "manifest.json").read_text())["functions"]
        assert [function["width"] for function in functions if function["role"] == "batch"] == widths
        assert all(f"@decode_batch_{width}(" in compiled[-1] for width in widths)


def test_threads_default_to_the_cores_of_the_machine_that_runs_it():
    assert Options().threads_or_cores == physical_cores()
    assert Options(target="aarch64").threads_or_cores == 2
    assert Options(target="aarch64", threads=8).threads_or_cores == 8


BAD = [
    b"[]", b"{", b'{"schema": 1, "findings": []}', b'{"schema": 2}', b'{"schema": 2, "findings": [], "more": 1}', b"\xff\xfe",
    b"[" * 100_000,
]  # fmt: skip


def test_an_invalid_store_ends_in_one_line_and_stays(checkpoint, tmp_path, compiled, capsys):
    path = store.store_path()
    arguments = ["compile", str(checkpoint), "-o", str(tmp_path / "out"), "--context", "16"]
    for data in BAD:
        path.write_bytes(data)
        assert cli.main(arguments) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and str(path) in err and "--no-tuned" in err
        assert not (tmp_path / "out").exists()
        with pytest.raises(PipelineError):
            store.add_findings([])
        assert path.read_bytes() == data
    assert cli.main([*arguments, "--no-tuned"]) == 0


def test_invalid_tiles_end_in_one_line(checkpoint, tmp_path, compiled):
    matmul = next(p for p in matmuls(checkpoint).values() if p.tokens == 8)
    wrong = other_tiles(matmul) | {"tokens": 7, "rows": 2}
    for tiles in (wrong, {"workgroups": 2}):
        store.add_findings([replace(finding(matmul), tiles=tiles)])
        with pytest.raises(PipelineError, match="tuned.json.*--no-tuned") as error:
            compile_model(checkpoint, tmp_path / "out", OPTIONS)
        assert "\n" not in str(error.value)
