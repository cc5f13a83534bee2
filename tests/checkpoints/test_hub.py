"""Models on the hub, which a local server replaces: what is fetched, resumed and checked, and errors."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import close_session
from safetensors.numpy import load_file, save_file

from castiron.pipelines import files
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError
from castiron.pipelines.checkpoints.open_checkpoint import find_checkpoint, open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.cli.options import default_bundle
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate.verify import checkpoint_of
from castiron.pipelines.locate import HubName
from castiron.reference import tiny
from castiron.vmfb.bundle.bundle import open_bundle
from tests.support import encoders
from tests.support.hub_stand_in import COMMIT, Hub, serving
from tests.support.tiny_gguf import write_llama
from tests.support.tokenizer_directories import base, write
from tests.support.toy_text import read_json
from tests.support.valid_checkpoints import write_beside, write_valid

OTHERS = ("pytorch_model.bin", "onnx/model.onnx", "original/model.safetensors", "README.md", "tf_model.h5")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """Repositories of a model in two shards among files that are not needed, and of GGUF files."""
    folder = tmp_path_factory.mktemp("tiny")
    directory = tiny.tiny_model("llama", folder / "llama")
    tensors = load_file(directory / "model.safetensors")
    shards = {name: dict(list(tensors.items())[number::2]) for number, name in enumerate(SHARDS)}
    for name, part in shards.items():
        save_file(part, folder / name)
    index = {"weight_map": {tensor: name for name, part in shards.items() for tensor in part}}
    model = {name: b"not needed" for name in OTHERS} | {name: (folder / name).read_bytes() for name in SHARDS}
    model |= {
        "config.json": (directory / "config.json").read_bytes(),
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    gguf = write_llama(folder / "x.gguf").read_bytes()
    other = write_llama(folder / "y.gguf", {"general.name": "larger"}).read_bytes()
    files = {"tiny-Q4_K_M.gguf": gguf, "tiny-Q8_0.gguf": other, "mmproj-tiny-f16.gguf": gguf, "README.md": b""}
    return {
        "org/tiny": model,
        "org/tiny-GGUF": files,
        "org/one-GGUF": {"one.gguf": gguf},
        "org/parts-GGUF": {f"big-Q4_0-0000{part}-of-00002.gguf": gguf for part in (1, 2)},
        "org/pickled": {"pytorch_model.bin": b""},
    }


@pytest.fixture
def hub(repositories, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    with serving(Hub({name: dict(files) for name, files in repositories.items()})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub
    close_session()


def refusal(name: str) -> str:
    with pytest.raises((CheckpointError, PipelineError)) as error:
        find_checkpoint(name)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    return str(error.value)


def left_over(folder) -> list:
    """Return incomplete files and broken links of the cache."""
    return [path for path in folder.rglob("*") if path.suffix == ".incomplete" or (path.is_symlink() and not path.exists())]


def test_fetches_the_needed_files_once_into_the_hubs_cache(hub, tmp_path):
    reports = []
    path = find_checkpoint("org/tiny", lambda stage, done: reports.append((stage, done)))
    assert path == tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert sorted(hub.fetched()) == sorted(["config.json", "model.safetensors.index.json", *SHARDS])
    assert file_download.try_to_load_from_cache("org/tiny", SHARDS[0], cache_dir=tmp_path / "hub") == str(path / SHARDS[0])
    assert (path / SHARDS[0]).is_symlink() and {stage for stage, _ in reports} == {"fetch"}
    assert reports == sorted(reports) and reports[-1] == ("fetch", 1.0) and len(reports) >= 3
    assert np.isfinite(open_checkpoint("org/tiny").tensors["model.norm.weight"].dequantise()).all()
    assert len(hub.fetched()) == 4
    # A cached file is not fetched again.
    assert find_checkpoint(path) == path


def _summary(checkpoint: Checkpoint) -> dict:
    """Return what a checkpoint consists of, without its path and with hashes of its tensors."""
    hashes = lambda tensors: {name: hashlib.sha256(t.data.tobytes()).hexdigest() for name, t in tensors.items()}
    found = {key: value for key, value in vars(checkpoint).items() if key not in ("path", "tensors", "encoding")}
    encoding = vars(checkpoint.encoding) if checkpoint.encoding else {}
    layers = hashes(encoding.get("tensors", {}))
    return found | {"tensors": hashes(checkpoint.tensors), "encoding": encoding | {"tensors": layers}}


TEXT_FILES = {
    "tokenizer_config.json": json.dumps({"eos_token": "</s>", "image_token": "<image>"}),
    "special_tokens_map.json": json.dumps({"pad_token": "<pad>"}), "added_tokens.json": json.dumps({"<more>": 40}),
    "chat_template.jinja": "x", "chat_template.json": json.dumps({"chat_template": "y"}),
    "additional_chat_templates/tool_use.jinja": "z",
}  # fmt: skip


@pytest.mark.parametrize("families", [("llama", "qwen2", "qwen3"), ()], ids=["some", "all"])
def test_a_copy_through_the_hub_gives_what_the_local_directory_gives(families, hub, tmp_path):
    (folder := tmp_path / "valid").mkdir()
    directories = [path for path in (*write_valid(folder, families), *write_beside(folder)) if path.is_dir()]
    for tied, bare in itertools.product((True, False), repeat=2):
        own = {"pooling": "lasttoken" if bare else "mean", "dense": (8,) if tied else (), "bare": bare}
        directories.append(encoders.write("qwen3", tmp_path / f"{tied}-{bare}", tie_word_embeddings=tied, longest=9, **own))
    for name, removed in (("files", ()), ("old", ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"))):
        own = shutil.copytree(tmp_path / "valid" / "llama", tmp_path / name)
        write(own, {file: text for file, text in TEXT_FILES.items() if file not in removed})
        directories.append(own)
    vocabulary = shutil.copytree(tmp_path / "valid" / "qwen2", tmp_path / "vocabulary")
    (vocabulary / "tokenizer.json").unlink()
    model = json.loads(base("qwen"))["model"]
    merges = "\n".join(map(" ".join, model["merges"]))
    directories.append(write(vocabulary, {"vocab.json": json.dumps(model["vocab"]), "merges.txt": merges}))
    for directory in directories:
        files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
        hub.files["org/copy"] = {name: path.read_bytes() for name, path in files.items() if "adapter" not in name}
        hub.files["org/copy"] |= {name: b"not needed" for name in OTHERS}
        shutil.rmtree(tmp_path / "hub", ignore_errors=True)
        fetched = find_checkpoint("org/copy")
        assert _summary(open_checkpoint(fetched)) == _summary(open_checkpoint(directory)), directory.name
        assert not {*hub.fetched()} & {*OTHERS}
        hub.asked.clear()


def test_a_missing_module_is_named(hub, tmp_path):
    directory = encoders.write("qwen3", tmp_path / "encoder", pooling="mean")
    hub.files["org/encoder"] = {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }
    del hub.files["org/encoder"]["1_Pooling/config.json"]
    assert "lacks 1_Pooling/config.json, which its modules.json names" in refusal("org/encoder")


def test_an_interrupted_download_is_resumed(hub, repositories, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    complete = repositories["org/tiny"][SHARDS[1]]
    # The connection closes once: the same call resumes from there.
    hub.cut = {SHARDS[0]: [7500]}
    # It closes at each try: the call fails, and the next one fetches what is missing.
    hub.cut[SHARDS[1]] = [len(complete) // 2, *[0] * 6]
    assert "cannot be reached (" in refusal("org/tiny")
    assert "bytes=7000-" in [asked for method, path, asked in hub.asked if path == SHARDS[0]]
    assert not left_over(tmp_path / "hub")
    hub.asked.clear(), hub.cut.clear()
    path = find_checkpoint("org/tiny")
    assert hub.fetched() == [SHARDS[1]] and (path / SHARDS[1]).read_bytes() == complete


def test_a_file_that_differs_from_its_sha256_is_removed(hub, tmp_path):
    hub.wrong = {SHARDS[0]}
    assert f"{SHARDS[0]} of org/tiny has sha256" in refusal("org/tiny")
    assert not left_over(tmp_path / "hub") and not list((tmp_path / "hub").rglob(SHARDS[0]))
    hub.wrong = set()
    assert (find_checkpoint("org/tiny") / SHARDS[0]).read_bytes() == hub.files["org/tiny"][SHARDS[0]]


def test_a_body_longer_than_announced_is_rejected(hub, tmp_path):
    hub.endless = {"one.gguf"}
    assert f"one.gguf is longer than the {len(hub.files['org/one-GGUF']['one.gguf'])} bytes" in refusal("org/one-GGUF")
    assert not left_over(tmp_path / "hub")


def test_an_invalid_answer_of_the_hub_is_one_line(hub):
    files = ({"rfilename": "one.gguf", "size": "12"}, {"rfilename": "one.gguf"}, {"rfilename": "one\0.gguf", "size": 12},
             {"rfilename": "../one.gguf", "size": 12}, {"rfilename": 7, "size": 12})  # fmt: skip
    changes = [{"sha": 7}, {"sha": "../../x"}, {"siblings": "x"}, *({"siblings": [file]} for file in files)]
    for answer in ["x", [{}], *changes]:
        hub.answer = lambda valid, answer=answer: valid | answer if isinstance(answer, dict) else answer
        assert f"invalid response for org/one-GGUF from {hub.url}" in refusal("org/one-GGUF"), answer
    assert hub.fetched() == []


def test_a_suffix_chooses_among_gguf_files(hub, tmp_path, capsys):
    message = refusal("org/tiny-GGUF")
    assert (
        "tiny-Q4_K_M.gguf (0.3 MB), tiny-Q8_0.gguf (0.3 MB)" in message
        and "org/tiny-GGUF:Q4_K_M" in message
        and "mmproj" not in message
    )
    for name in ("org/tiny-GGUF:q4_k_m", "hf.co/org/tiny-GGUF:tiny-Q4_K_M.gguf", f"org/tiny-GGUF@{COMMIT}:Q4_K_M"):
        assert find_checkpoint(name).name == "tiny-Q4_K_M.gguf"
    assert hub.fetched() == ["tiny-Q4_K_M.gguf"]
    assert "no GGUF file Q5_K_M; choose one of tiny-Q4_K_M.gguf" in refusal("org/tiny-GGUF:Q5_K_M")
    assert "no GGUF file K_M.gguf" in refusal("org/tiny-GGUF:K_M.gguf") and "no GGUF file _M" in refusal("org/tiny-GGUF:_M")
    assert find_checkpoint("org/one-GGUF").name == "one.gguf"
    assert (first := find_checkpoint("org/parts-GGUF:Q4_0")).name == "big-Q4_0-00001-of-00002.gguf"
    assert first.with_name("big-Q4_0-00002-of-00002.gguf").exists()
    hub.files["org/parts-GGUF"].popitem()
    assert "lacks big-Q4_0-00002-of-00002.gguf, one of 2 parts of the model" in refusal("org/parts-GGUF")
    assert "no GGUF file, and no config.json with model.safetensors" in refusal("org/pickled")
    assert cli.main(["inspect", f"org/tiny-GGUF@{COMMIT}:tiny-Q8_0.gguf", "--json"]) == 0
    assert read_json(capsys.readouterr().out)["path"].endswith(f"{COMMIT}/tiny-Q8_0.gguf")


def test_an_existing_path_wins_over_the_hub(hub, tmp_path, capsys):
    here = write_llama(tmp_path / "tiny")
    (tmp_path / "org").mkdir()
    shutil.move(here, tmp_path / "org" / "tiny")
    assert open_checkpoint("org/tiny").format == "gguf"
    for wrong in ("org/tinny", "other/model.gguf", "./org/tinny", "tiny", "/org/tiny", "a/b/c"):
        assert "no such file or directory" in refusal(wrong)
    assert hub.asked == []
    assert open_checkpoint("hf.co/org/tiny").format == "hf"


def test_missing_and_gated_repositories_end_in_one_line(hub, monkeypatch):
    assert "org/absent: no such file or directory, and no public model of" in refusal("org/absent")
    assert "org/tiny has no revision v2" in refusal("org/tiny@v2")
    assert "org/na--me cannot be fetched: " in refusal("org/na--me")
    hub.gated = True
    message = refusal("org/tiny")
    assert f"accept its licence at {hub.url}/org/tiny" in message and "HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", "right")
    assert open_checkpoint("org/tiny").format == "hf"


def test_uses_the_cache_if_the_hub_is_unreachable(hub, tmp_path, monkeypatch, capsys):
    ways = {
        "HF_HUB_OFFLINE is set": lambda m: m.setattr(constants, "HF_HUB_OFFLINE", True),
        "answered 503": lambda m: m.setattr(hub, "down", True),
        "cannot be reached (": lambda m: m.setenv("HF_ENDPOINT", "http://127.0.0.1:9"),
        "need huggingface_hub, which is not": lambda m: m.setitem(sys.modules, "huggingface_hub", None),
    }
    for stored in (False, True):
        if stored:
            path = find_checkpoint("org/tiny")
            find_checkpoint("org/tiny-GGUF:Q8_0")
        for why, break_it in ways.items():
            with monkeypatch.context() as broken:
                break_it(broken)
                if not stored:
                    message = refusal("org/tiny")
                    assert why in message and f"{tmp_path / 'hub'} has no complete copy" in message
                    continue
                assert find_checkpoint("org/tiny") == path
                assert why in capsys.readouterr().err
                assert find_checkpoint("org/tiny-GGUF").name == "tiny-Q8_0.gguf"
    monkeypatch.setattr(hub, "down", True)
    os.unlink(path / SHARDS[1])
    assert "has no complete copy" in refusal("org/tiny")


def test_a_full_disk_and_a_read_only_cache_end_in_one_line(hub, tmp_path, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(files.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9 - 99, 99))
        assert "fetching org/one-GGUF needs" in refusal("org/one-GGUF") and hub.fetched() == []
    shutil.rmtree(tmp_path / "hub", ignore_errors=True)
    (tmp_path / "hub").write_text("a file")
    assert "cannot store org/tiny" in (message := refusal("org/tiny")) and "HF_HUB_CACHE" in message


def test_the_manifest_names_the_hub_repository_and_commit(hub, tmp_path, capsys):
    plain = ["--context", "8", "--lowering", "portable", "--batch", "none", "--verify-widths", "none"]
    assert cli.main(["compile", "org/tiny-GGUF:Q4_K_M", "-o", "out", *plain]) == 0
    source = {"repository": "org/tiny-GGUF", "revision": COMMIT, "file": "tiny-Q4_K_M.gguf"}
    bundle = open_bundle(tmp_path / "out")
    assert bundle.manifest.source["hub"] == source and bundle.manifest.name == "tiny-Q4_K_M"
    capsys.readouterr()
    assert cli.main(["inspect", "out"]) == 0
    assert f"org/tiny-GGUF {COMMIT} tiny-Q4_K_M.gguf" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "hub")
    assert checkpoint_of(bundle).name == "tiny-Q4_K_M.gguf"
    # run accepts the same names.
    assert cli.main(["run", "org/absent", "-p", "x"]) == 1
    assert "no public model of" in capsys.readouterr().err


def test_commands_in_the_guide_parse(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    monkeypatch.chdir(tmp_path)
    lines = re.search(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1].splitlines()
    for argv in (shlex.split(line)[1:] for line in lines):
        args = cli.command_parser(argv[0]).parse_args(argv[1:])
        assert HubName.read(getattr(args, "model", None) or args.bundle), argv


@pytest.mark.parametrize(
    ("text", "name", "bundle"),
    [
        ("org/name", HubName("org/name"), "name"),
        ("org/name:Q4_K_M", HubName("org/name", wanted="Q4_K_M"), "name-Q4_K_M"),
        ("org/name@v1.0:a/b.gguf", HubName("org/name", "v1.0", "a/b.gguf"), "b"),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1"), "name"),
        ("https://huggingface.co/org/name/", HubName("org/name"), "name"),
        ("org/name.gguf", None, "name"),
        ("hub/models--org--name", None, "models--org--name"),
        ("name", None, "name"),
        ("../org/name", None, "name"),
        ("org/name@../x", None, "x"),
    ],
)
def test_hub_names_are_parsed(text, name, bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert HubName.read(text) == name and default_bundle(text).name == bundle
    assert name is None or HubName.read(str(name)) == name
