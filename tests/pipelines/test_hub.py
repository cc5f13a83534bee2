"""Names on the hub, against a stand-in of its HTTP interface: what is fetched, resumed, checked, and said when it cannot be."""

from __future__ import annotations

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

from castiron.pipelines import cli, space
from castiron.pipelines.checking.verify import checkpoint_of
from castiron.pipelines.checkpoints import CheckpointError, find_checkpoint, open_checkpoint
from castiron.pipelines.commands.options import choose_on_hub, default_bundle
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.hub_name import HubName
from castiron.reference import tiny
from castiron.vmfb.bundle import open_bundle
from tests.pipelines.hub_stand_in import COMMIT, Hub, serving
from tests.pipelines.test_cli import complaint
from tests.pipelines.tiny_gguf import write_llama
from tests.pipelines.toy_text import read_json

OTHERS = ("pytorch_model.bin", "onnx/model.onnx", "original/model.safetensors", "README.md", "tf_model.h5")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """A model in two shards among what is not needed of it, and one in GGUF files."""
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
    """Files of the cache that are neither blobs of a whole file nor links to them."""
    return [path for path in folder.rglob("*") if path.suffix == ".incomplete" or (path.is_symlink() and not path.exists())]


def test_of_a_directory_what_is_needed_is_fetched_once_and_lies_where_the_hubs_own_tools_find_it(hub, tmp_path):
    told = []
    path = find_checkpoint("org/tiny", lambda stage, done: told.append((stage, done)))
    assert path == tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert sorted(hub.fetched()) == sorted(["config.json", "model.safetensors.index.json", *SHARDS])
    assert file_download.try_to_load_from_cache("org/tiny", SHARDS[0], cache_dir=tmp_path / "hub") == str(path / SHARDS[0])
    assert (path / SHARDS[0]).is_symlink() and {stage for stage, _ in told} == {"fetch"}
    assert [done for _, done in told] == sorted(done for _, done in told) and told[-1] == ("fetch", 1.0) and len(told) >= 3
    assert np.isfinite(open_checkpoint("org/tiny").tensors["model.norm.weight"].dequantise()).all()
    assert len(hub.fetched()) == 4
    # What was fetched before by anybody is not fetched again.
    assert find_checkpoint(tmp_path / "hub" / "models--org--tiny") == find_checkpoint(path) == path


def test_a_transfer_that_breaks_off_goes_on_where_it_was_in_one_call_and_in_the_next(hub, repositories, tmp_path, monkeypatch):
    # What it writes at once, and so may lose.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    whole = repositories["org/tiny"][SHARDS[1]]
    half = len(whole) // 2000 * 1000
    # The connection closes once: huggingface_hub goes on by itself.
    hub.cut = {SHARDS[0]: [7500]}
    # It closes at once whenever it is tried: that call ends in a sentence.
    hub.cut[SHARDS[1]] = [half + 1, *[0] * 6]
    assert "broke off after" in (said := refusal("org/tiny")) and "the same command goes on from there" in said
    ranges = {path: asked for method, path, asked in hub.asked if method == "GET" and asked}
    assert ranges == {SHARDS[0]: "bytes=7000-", SHARDS[1]: f"bytes={half}-"}
    (partial,) = left_over(tmp_path / "hub")
    assert partial.read_bytes() == whole[:half]
    hub.asked.clear(), hub.cut.clear()
    path = find_checkpoint("org/tiny")
    assert [asked for asked in hub.asked if asked[0] == "GET"][1:] == [("GET", SHARDS[1], f"bytes={half}-")]
    assert (path / SHARDS[1]).read_bytes() == whole and not left_over(tmp_path / "hub")


@pytest.mark.parametrize("file", ["config.json", SHARDS[0]])
def test_a_file_that_is_not_what_its_hash_says_is_refused_and_nothing_of_it_stays(hub, tmp_path, file):
    hub.wrong = {file}
    assert f"gave {file} of org/tiny with the hash" in refusal("org/tiny")
    assert not left_over(tmp_path / "hub") and not list((tmp_path / "hub").rglob(file))
    hub.wrong = set()
    assert (find_checkpoint("org/tiny") / file).read_bytes() == hub.files["org/tiny"][file]


def test_of_gguf_files_the_one_is_taken_that_is_named(hub, tmp_path, capsys):
    said = refusal("org/tiny-GGUF")
    assert "tiny-Q4_K_M.gguf (0.3 MB), tiny-Q8_0.gguf (0.3 MB)" in said and "--file" in said and "mmproj" not in said
    for name in ("org/tiny-GGUF:q4_k_m", "hf.co/org/tiny-GGUF:tiny-Q4_K_M.gguf", f"org/tiny-GGUF@{COMMIT}:Q4_K_M"):
        assert find_checkpoint(name).name == "tiny-Q4_K_M.gguf"
    assert hub.fetched() == ["tiny-Q4_K_M.gguf"]
    assert "no GGUF file Q5_K_M: it has tiny-Q4_K_M.gguf" in refusal("org/tiny-GGUF:Q5_K_M")
    assert "no GGUF file K_M.gguf" in refusal("org/tiny-GGUF:K_M.gguf") and "no GGUF file _M" in refusal("org/tiny-GGUF:_M")
    assert find_checkpoint("org/one-GGUF").name == "one.gguf"
    assert find_checkpoint(tmp_path / "hub" / "models--org--one-GGUF").name == "one.gguf"
    assert "neither config.json with model.safetensors" in refusal("org/pickled")
    assert cli.main(["inspect", "org/tiny-GGUF", "--file", "tiny-Q8_0.gguf", "--revision", COMMIT, "--json"]) == 0
    assert read_json(capsys.readouterr().out)["path"].endswith(f"{COMMIT}/tiny-Q8_0.gguf")


def test_a_path_has_precedence_and_a_path_that_is_wrong_asks_no_hub(hub, tmp_path, capsys):
    here = write_llama(tmp_path / "tiny")
    (tmp_path / "org").mkdir()
    shutil.move(here, tmp_path / "org" / "tiny")
    assert open_checkpoint("org/tiny").format == "gguf"
    for wrong in ("org/tinny", "other/model.gguf", "./org/tinny", "tiny", "/org/tiny", "a/b/c"):
        assert "is neither a file nor a directory" in refusal(wrong)
    assert cli.main(["inspect", "org/tiny", "--file", "x"]) == 1
    assert "org/tiny is none" in complaint(capsys)
    assert hub.asked == []
    assert open_checkpoint("hf.co/org/tiny").format == "hf"


def test_what_may_not_be_had_is_one_sentence(hub, monkeypatch):
    assert "org/absent is no path here, and no model of" in refusal("org/absent")
    assert "org/tiny has no revision v2" in refusal("org/tiny@v2")
    assert "org/na--me cannot be fetched: " in refusal("org/na--me")
    hub.gated = True
    said = refusal("org/tiny")
    assert f"accept its licence at {hub.url}/org/tiny" in said and "HF_TOKEN" in said
    monkeypatch.setenv("HF_TOKEN", "right")
    assert open_checkpoint("org/tiny").format == "hf"


def test_without_the_hub_the_cache_is_taken_or_a_sentence_says_what_to_do(hub, tmp_path, monkeypatch, capsys):
    ways = {
        "HF_HUB_OFFLINE is set": lambda m: m.setattr(constants, "HF_HUB_OFFLINE", True),
        "answered 503": lambda m: m.setattr(hub, "down", True),
        "cannot be reached (": lambda m: m.setenv("HF_ENDPOINT", "http://127.0.0.1:9"),
        "need huggingface_hub, which is not": lambda m: m.setitem(sys.modules, "huggingface_hub", None),
    }
    for kept in (False, True):
        if kept:
            path = find_checkpoint("org/tiny")
            find_checkpoint("org/tiny-GGUF:Q8_0")
        for why, break_it in ways.items():
            with monkeypatch.context() as broken:
                break_it(broken)
                if not kept:
                    said = refusal("org/tiny")
                    assert why in said and f"{tmp_path / 'hub'} does not hold it whole" in said
                    continue
                assert find_checkpoint("org/tiny") == path
                assert why in capsys.readouterr().err
                assert find_checkpoint("org/tiny-GGUF").name == "tiny-Q8_0.gguf"
    monkeypatch.setattr(hub, "down", True)
    os.unlink(path / SHARDS[1])
    assert "does not hold it whole" in refusal("org/tiny")


def test_a_disk_without_room_is_seen_before_anything_is_fetched(hub, monkeypatch):
    monkeypatch.setattr(space.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9 - 99, 99))
    assert "fetching org/one-GGUF needs" in refusal("org/one-GGUF") and hub.fetched() == []


def test_a_cache_that_cannot_be_written_is_one_sentence(hub, tmp_path):
    (tmp_path / "hub").write_text("a file")
    assert "cannot be stored in" in (said := refusal("org/tiny")) and "HF_HUB_CACHE" in said


def test_the_bundle_says_where_its_model_came_from_and_finds_it_again(hub, tmp_path, capsys):
    plain = ["--context", "8", "--lowering", "portable", "--batch", "none", "--speculate", "none"]
    assert cli.main(["compile", "org/tiny-GGUF:Q4_K_M", "-o", "out", *plain]) == 0
    source = {"repository": "org/tiny-GGUF", "revision": COMMIT, "file": "tiny-Q4_K_M.gguf"}
    bundle = open_bundle(tmp_path / "out")
    assert bundle.manifest.source["hub"] == source and bundle.manifest.name == "tiny-Q4_K_M"
    capsys.readouterr()
    assert cli.main(["inspect", "out"]) == 0
    assert f"org/tiny-GGUF {COMMIT} tiny-Q4_K_M.gguf" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "hub")
    assert checkpoint_of(bundle).name == "tiny-Q4_K_M.gguf"
    # run, chat and serve take the same names.
    assert cli.main(["run", "org/absent", "-p", "x"]) == 1
    assert "no model of" in capsys.readouterr().err


def test_the_lines_of_the_guide_are_command_lines_with_names_on_the_hub(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    monkeypatch.chdir(tmp_path)
    lines = re.search(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1].splitlines()
    for argv in (shlex.split(line)[1:] for line in lines):
        args = cli.build_parser(argv).parse_args(argv)
        choose_on_hub(args)
        assert HubName.read(getattr(args, "model", None) or args.bundle), argv


@pytest.mark.parametrize(
    ("text", "name", "bundle"),
    [
        ("org/name", HubName("org/name"), "name"),
        ("org/name:Q4_K_M", HubName("org/name", wanted="Q4_K_M"), "name-Q4_K_M"),
        ("org/name@v1.0:a/b.gguf", HubName("org/name", "v1.0", "a/b.gguf"), "b"),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1"), "name"),
        ("hf.co/org/name:x.gguf", HubName("org/name", wanted="x.gguf"), "x"),
        ("https://huggingface.co/org/name/", HubName("org/name"), "name"),
        ("org/name.gguf", None, "name"),
        ("hub/models--org--name", None, "name"),
        ("name", None, "name"),
        ("../org/name", None, "name"),
        ("org/name@../x", None, "x"),
    ],
)
def test_a_name_is_read_as_people_write_it(text, name, bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert HubName.read(text) == name and default_bundle(text).name == bundle
    assert name is None or HubName.read(str(name)) == name
