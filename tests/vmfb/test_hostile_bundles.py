"""No bundle does more than be refused, in a sentence; who signed one can be asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)

from castiron.pipelines import cli
from castiron.pipelines.casting.named import bundle_of
from castiron.pipelines.generation.text import load_text
from castiron.vmfb.archive import Part
from castiron.vmfb.bundle import open_bundle, pack_bundle
from castiron.vmfb.manifest import BundleError
from castiron.vmfb.session import Session
from castiron.vmfb.signature import SIGNATURE
from tests.vmfb import hostile_bundles

MUTANTS = 60


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return hostile_bundles.write_sound(tmp_path_factory.mktemp("sound") / "toy")


@pytest.fixture
def toy(sound, tmp_path):
    """A directory to spoil."""
    return shutil.copytree(sound, tmp_path / "toy")


def test_mutants_run_or_are_refused(sound, tmp_path):
    assert hostile_bundles.verdict(sound) == "taken"
    found = {}
    for number in range(MUTANTS):
        place = tmp_path / str(number)
        kind = hostile_bundles.mutant(number, sound, place)
        found[number] = kind, hostile_bundles.verdict(place, kind == "files")
    assert {n: said for n, said in found.items() if said[1] not in ("taken", "refused")} == {}
    # What was changed is never run.
    assert {said for kind, said in found.values() if kind == "forged"} == {"refused"}


def refusal(path, **options) -> str:
    with pytest.raises(BundleError) as error:
        Session(open_bundle(path, **options), 1)
    assert "\n" not in str(error.value)
    return str(error.value)


def spoil(path, at: int = -8) -> None:
    """Another byte, with the size and the time of modification as they were."""
    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_module_and_weights_are_compared_with_the_manifest(toy):
    """Before a byte of the module's code runs; a manifest's parts agree with each other here."""
    place = toy / "manifest.json"
    text = place.read_text()
    place.write_text(text.replace("32xf32", "64xf32").replace('"vocab": 32', '"vocab": 64'))
    assert "has another decode_step than the manifest says" in refusal(toy)
    place.write_text(text)
    with open(toy / "weights.irpa", "r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 8)
    hostile_bundles.rehash(toy)
    assert "weights.irpa is not as castiron writes it" in refusal(toy)


def test_a_stamp_is_believed_once_or_never(toy, tmp_path, monkeypatch):
    open_bundle(toy)
    spoil(toy / "weights.irpa")
    assert "is not the file that was written" in refusal(toy)
    spoil(toy / "weights.irpa")
    open_bundle(toy)
    hashed = []
    sha256 = Part.sha256
    monkeypatch.setattr(Part, "sha256", lambda part: hashed.append(part) or sha256(part))
    open_bundle(toy)
    assert not hashed
    assert cli.main(["run", str(toy), "a", "-n", "1", "--trust", "never"]) == 0
    files = json.loads((toy / "manifest.json").read_text())["files"]
    assert len(hashed) == len(files)
    # What is cast when a model is first named is a bundle as well.
    monkeypatch.setattr("castiron.pipelines.casting.cast.cast", lambda *_, **options: open_bundle(toy))
    bundle_of("smollm2-135m-instruct", full_check=True)
    assert len(hashed) == 2 * len(files)


def test_what_is_no_file_is_not_read(toy):
    for name in ("manifest.json", "model.vmfb", "weights.irpa", "tokenizer.json", "chat_template.jinja"):
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
            path = toy / name
            before = path.read_bytes()
            path.unlink()
            make(path)
            assert name in refusal(toy)
            path.rmdir() if path.is_dir() else path.unlink()
            path.write_bytes(before)
    os.mkfifo(toy / SIGNATURE)
    open_bundle(toy)


def test_a_template_that_is_no_utf_8(toy):
    (toy / "chat_template.jinja").write_bytes(b"\xff\xfe")
    hostile_bundles.rehash(toy)
    with pytest.raises(BundleError, match="chat_template.jinja is not UTF-8"):
        load_text(toy)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two private keys and their public ones, as files."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        key = Ed25519PrivateKey.generate()
        (folder / name).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return folder


def test_a_signed_bundle_is_its_owners(toy, keys, tmp_path, capsys):
    signed = tmp_path / "signed.castiron"
    assert cli.main(["pack", str(toy), "-o", str(signed), "--sign", str(keys / "mine")]) == 0
    shutil.unpack_archive(signed, tmp_path / "unpacked", "zip")
    pack_bundle(open_bundle(tmp_path / "unpacked"), tmp_path / "again.castiron")
    assert (tmp_path / "again.castiron").read_bytes() == signed.read_bytes()
    for place in (signed, tmp_path / "unpacked"):
        open_bundle(place, verify_key=keys / "mine.pub")
        assert "is not signed by the owner of" in refusal(place, verify_key=keys / "other.pub")
    assert "is not signed: " in refusal(toy, verify_key=keys / "mine.pub")
    # Whatever the manifest says, and whatever files it has, is signed with it.
    manifest = tmp_path / "unpacked/manifest.json"
    manifest.write_text(manifest.read_text().replace('"toy"', '"tOy"', 1))
    assert "is not signed by the owner of" in refusal(tmp_path / "unpacked", verify_key=keys / "mine.pub")
    capsys.readouterr()
    run = ["run", str(signed), "a", "-n", "1", "--verify-key"]
    assert [cli.main([*run, str(keys / name)]) for name in ("mine.pub", "other.pub", "mine", "none")] == [0, 1, 1, 1]
    assert capsys.readouterr().err.count("castiron: ") == 4
    assert cli.main(["pack", str(toy), "-o", str(signed), "--sign", str(keys / "mine.pub")]) == 1
    assert "no private Ed25519 key: openssl genpkey" in capsys.readouterr().err


def test_every_command_with_the_option_asks_for_the_signature(toy, keys, tmp_path, capsys):
    """Of the bundle, and of a draft, whose code runs as well."""
    signed = tmp_path / "signed.castiron"
    pack_bundle(open_bundle(toy), signed, key=keys / "mine")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    more = {"run": ["a"], "chat": [], "embed": ["a"], "plan": [], "serve": ["--port", "0"],
            "batch": [tmp_path / "rows.jsonl", "-o", tmp_path / "out.jsonl"]}  # fmt: skip
    (commands,) = (action for action in cli.build_parser([], whole=True)._actions if action.dest == "command")
    taken = {name: parser.format_help() for name, parser in commands.choices.items()}
    assert more.keys() == {name for name, said in taken.items() if "--verify-key KEY" in said}
    asked = [[name, toy, *words] for name, words in more.items()]
    asked += [[name, signed, *more[name], "--draft", toy] for name in more if "--draft" in taken[name]]
    assert len(asked) == 9
    for words in asked:
        assert cli.main([*map(str, words), "--verify-key", str(keys / "mine.pub")]) == 1
        assert f"{toy} is not signed" in capsys.readouterr().err, words


def test_a_bundle_that_is_open_is_checked_when_that_is_asked_for(toy, keys):
    bundle = open_bundle(toy)
    assert open_bundle(bundle) is bundle and open_bundle(bundle, full_check=True).manifest == bundle.manifest
    assert "is not signed" in refusal(bundle, verify_key=keys / "mine.pub")


def test_a_signature_is_one_of_the_manifest_as_it_lies(toy, keys, tmp_path):
    pack_bundle(open_bundle(toy), tmp_path / "signed.castiron", key=keys / "mine")
    shutil.unpack_archive(tmp_path / "signed.castiron", tmp_path / "out", "zip")
    signature, manifest = ((tmp_path / "out" / name).read_bytes() for name in (SIGNATURE, "manifest.json"))
    load_pem_public_key((keys / "mine.pub").read_bytes()).verify(signature, manifest)
    if shutil.which("openssl") is None:
        return
    command = [
        "openssl",
        "pkeyutl",
        "-verify",
        "-pubin",
        "-inkey",
        keys / "mine.pub",
        "-rawin",
        "-in",
        tmp_path / "out/manifest.json",
    ]
    done = subprocess.run([*command, "-sigfile", tmp_path / "out" / SIGNATURE], capture_output=True, text=True)
    assert "Verified Successfully" in done.stdout


def test_without_the_library_a_signature_is_one_sentence(toy, keys, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    assert cli.main(["pack", str(toy), "-o", str(toy) + ".castiron", "--sign", str(keys / "mine")]) == 1
    assert "this needs cryptography" in capsys.readouterr().err


KERNEL = {"paths": [], "calls": 1, "flops": [1, 0, 1], "bytes": [1, 0, 1], "weights": 0}


@pytest.mark.parametrize(
    ("name", "facts", "says"),
    [
        ("source", {"hub": 5}, "source.hub is 5, not an object"),
        ("source", {"left_out": {"a": "b"}}, "source.left_out.a is 'b', not a whole number"),
        ("source", {"adapter": {"path": 5}}, "source.adapter.path is 5, not a string"),
        ("compile", {"work": {"decode_step": 5}}, "compile.work.decode_step is 5, not an object"),
        ("compile", {"work": {"decode_step": {"k": KERNEL | {"flops": [1]}}}}, "what no kernel does"),
        ("compile", {"work": {"decode_step": {"k": KERNEL | {"calls": 10**400}}}}, "what no kernel does"),
        ("compile", {"repacked": []}, "compile.repacked is [], not an object"),
    ],
)
def test_what_a_manifest_tells_of_its_making_is_of_its_type(toy, name, facts, says, capsys):
    """Commands show it, and choose by it how slots are decoded."""
    place = toy / "manifest.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {name: facts}))
    for command in (["run", str(toy), "a"], ["inspect", str(toy)]):
        assert cli.main(command) == 1
        assert says in capsys.readouterr().err
    assert cli.main(["list", str(toy)]) == 0 and says in capsys.readouterr().out


def test_small_files_that_are_large_are_not_read(toy):
    """Files with holes take no room."""
    manifest = json.loads((toy / "manifest.json").read_text())
    manifest["files"]["tokenizer.json"]["size"] = 10**10
    (toy / "manifest.json").write_text(json.dumps(manifest))
    os.truncate(toy / "tokenizer.json", 10**10)
    assert "files.tokenizer.json has 10000000000 bytes, and none has more than" in refusal(toy)
    os.truncate(toy / "manifest.json", 10**10)
    assert "has a manifest of 10000000000 bytes, as none has" in refusal(toy)
