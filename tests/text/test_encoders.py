"""Embedding models: their vectors equal those of transformers and torch."""

from __future__ import annotations

import base64
import json
import shutil

import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from safetensors.numpy import load_file, save_file
from starlette.testclient import TestClient
from transformers import AutoConfig

import castiron
from castiron.emitter.models import read_config
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.build_model import build_model
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.app import App, open_api, open_app
from castiron.pipelines.server.metrics import Metrics
from castiron.pipelines.server.served_models import ModelPool
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.bundle.manifest import BundleError, dump, parse
from castiron.vmfb.device.program import SessionError
from castiron.vmfb.run.encoder import Encoder
from castiron.vmfb.run.session import Session
from tests.support import encoders, hf_to_gguf, served
from tests.support.tiny_gguf import write_gguf
from tests.support.toy_text import read_json

# Error of f32 roundings, of vectors of length 1.
CLOSE = 4e-6
TEXTS = ["Hello", "Ice melts", "a longer text, of several calls", "x" * 38]
# Like EmbeddingGemma: bidirectional attention in a window of 12, and over the full text.
GEMMA = {
    "use_bidirectional_attention": True,
    "sliding_window": 12,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Like Qwen3-Embedding.
QWEN = {"num_hidden_layers": 2, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    made = encoders.write("gemma3_text", folder / "gemma", pooling="mean", dense=(96, 48), longest=40, **GEMMA)
    return made, compile_model(made, folder / "bundle", Options(embed=(8,))).bundle


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    made = encoders.write("qwen3", folder / "qwen", pooling="lasttoken", bare=False, longest=60, **QWEN)
    return made, compile_model(made, folder / "bundle", Options(embed=(8, 32))).bundle


def check(folder, bundle, lengths):
    """Compare the vectors of random tokens with torch's."""
    oracle, encoder = encoders.Oracle(folder), Encoder(bundle, 1)
    for length in lengths:
        tokens = np.random.default_rng(length).integers(3, 211, length).tolist()
        np.testing.assert_allclose(encoder.encode(tokens), oracle.vector(tokens), atol=CLOSE, err_msg=f"{length} tokens")


def test_both_ways_within_a_window_then_pooled_and_projected(gemma):
    folder, bundle = gemma
    manifest = open_bundle(bundle).manifest
    assert [f.name for f in manifest.functions] == ["encode_8", "encode_40"] and manifest.hidden == 48
    assert manifest.encoder and manifest.encoder.single_call and manifest.encoder.dense == (96, 48)
    # All layers share the rows of one layer.
    assert {state.shape[:2] for state in manifest.states} == {(1, 40)}
    check(folder, bundle, (40, 1, 8, 39, 9, 7))


def test_last_token_pooling_over_chunks(qwen):
    folder, bundle = qwen
    manifest = open_bundle(bundle).manifest
    assert [f.name for f in manifest.functions] == ["encode_8", "encode_32"]
    # The last call's padding takes rows too.
    assert manifest.context == 64 and manifest.encoder and manifest.encoder.max_tokens == 60
    check(folder, bundle, (60, 1, 33, 32, 5, 41))


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_portable_lowering_pools_the_same(family, tmp_path):
    """A causal model sums the mean over several calls."""
    own, pooling = {"gemma3_text": (GEMMA, "cls"), "qwen3": (QWEN, "mean")}[family]
    made = encoders.write(family, tmp_path / "model", pooling=pooling, longest=20, bare=False, **own)
    width = 20 if pooling == "cls" else 8
    bundle = compile_model(made, tmp_path / "bundle", Options(embed=(width,), lowering="portable")).bundle
    check(made, bundle, (20, 3, 8, 17) if family == "qwen3" else (20, 3))


def test_bert_is_an_encoder_by_either_name_of_its_tensors(tmp_path):
    """`BertModel` saves new names; the first checkpoints have a prefix and other names of norms."""
    made = encoders.write("bert", tmp_path / "model", pooling="cls", longest=20, num_hidden_layers=2)
    check(made, compile_model(made, tmp_path / "bundle", Options(embed=(20,))).bundle, (20, 1, 13))
    new = open_checkpoint(made)
    tensors = load_file(made / "model.safetensors")
    assert any(name.startswith("pooler.") for name in tensors)
    old = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    save_file(old | {"bert.embeddings.position_ids": np.arange(4)}, made / "model.safetensors")
    renamed = open_checkpoint(made)
    assert renamed.tensors.keys() == new.tensors.keys() == build_model(renamed, Options()).weights.keys()
    for name, tensor in renamed.tensors.items():
        np.testing.assert_array_equal(tensor.dequantise(), new.tensors[name].dequantise())
    with pytest.raises(castiron.EmitError, match="position_embedding_type"):
        read_config(new.config | {"position_embedding_type": "relative_key"})


def test_modernbert_alternates_local_and_global_attention(tmp_path):
    """The head of masked language models is left out."""
    own = {"num_hidden_layers": 2, "local_attention": 12, "global_attn_every_n_layers": 2}
    made = encoders.write("modernbert", tmp_path / "model", pooling="mean", longest=20, **own)
    check(made, compile_model(made, tmp_path / "bundle", Options(embed=(20,))).bundle, (20, 1, 13))
    complete = {f"model.{name}": value for name, value in load_file(made / "model.safetensors").items()}
    save_file(complete | {"head.dense.weight": np.ones((4, 4), np.float32)}, made / "model.safetensors")
    checkpoint = open_checkpoint(made)
    assert checkpoint.tensors.keys() == {name for name, w in build_model(checkpoint, Options()).weights.items() if w.values is None}  # fmt: skip


def test_texts_have_prompts_and_are_cut(qwen, capfd):
    folder, bundle = qwen
    oracle, words = encoders.Oracle(folder), served.tokenizer()
    with castiron.load(bundle, threads=1) as model:

        def expected(text, prompt=""):
            ids = [1, *words.encode((prompt + text).strip()).ids][:59]
            return oracle.vector([*ids, 2])

        found = model.embed(TEXTS)
        assert found.dtype == np.float32 and found.shape == (4, 64)
        np.testing.assert_allclose(found, [expected(text) for text in TEXTS], atol=CLOSE)
        np.testing.assert_allclose(model.embed(" Ice \n"), expected("Ice"), atol=CLOSE)
        asked = model.embed("Ice", prompt_name="query")
        np.testing.assert_allclose(asked, expected("Ice", encoders.PROMPTS["query"]), atol=CLOSE)
        np.testing.assert_array_equal(asked, model.embed(["Ice"], prompt=encoders.PROMPTS["query"])[0])
        ids = [1, *words.encode("Ice").ids, 2]
        np.testing.assert_array_equal(model.embed(ids), model.embed("Ice"))
        assert capfd.readouterr().err == ""
        np.testing.assert_allclose(model.embed(["x" * 59, "y"])[0], expected("x" * 59), atol=CLOSE)
        assert "1 of 2 texts exceeds 60 tokens; only the first 60 are used" in capfd.readouterr().err
        short = model.embed(TEXTS, dimensions=5)
        np.testing.assert_allclose(short, found[:, :5] / np.linalg.norm(found[:, :5], axis=1, keepdims=True), atol=1e-6)
        assert model.embed([], dimensions=5).shape == (0, 5)
        for wrong, why in (
            (lambda: model.embed("x", prompt_name="passage"), "no prompt 'passage'; its prompts are: query, document"),
            (lambda: model.embed("x", dimensions=65), "1 to 64"),
            (lambda: model.embed("x", pooling="mean"), "always pools by last"),
            (lambda: model.embed([[1] * 61]), "has 61 tokens; .* embeds 1 to 60"),
            (lambda: model.generate("x"), "cannot generate text"),
        ):
            with pytest.raises(PipelineError, match=why):
                wrong()
        with pytest.raises(SessionError, match="token 211 is outside the vocabulary of 211"):
            model.embed([211])
    with pytest.raises(PipelineError, match="closed"):
        model.embed("x")


def test_the_command_gives_a_line_a_text(qwen, tmp_path, capsys):
    _, bundle = qwen
    (tmp_path / "texts").write_text("Hello\r\nIce melts\n")
    with castiron.load(bundle, threads=1) as model:
        vectors = model.embed(["Hello", "Ice melts"], prompt_name="query", dimensions=7)
    common = ["embed", str(bundle), "--prompt-name", "query", "--dimensions", "7", "--threads", "1"]
    assert cli.main([*common, "Hello", "Ice melts"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1] and not any(line["truncated"] for line in lines)
    np.testing.assert_array_equal(np.float32([line["embedding"] for line in lines]), vectors)
    assert cli.main([*common, "--file", str(tmp_path / "texts"), "-o", str(tmp_path / "found.npy"), "--json"]) == 0
    reported = read_json(capsys.readouterr().out)
    assert reported["dimensions"] == 7 and reported["prompt"] == encoders.PROMPTS["query"] and len(reported["embeddings"]) == 2
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), vectors)
    assert cli.main(["embed", str(bundle)]) == 1
    assert "no texts" in capsys.readouterr().err
    assert cli.main(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "texts of at most 60 tokens: last pooling, vectors of 64 numbers of length 1" in shown and "query, document" in shown


def test_a_batch_of_rows_gives_the_same_vectors(qwen, tmp_path, tmp_path_factory, capsys):
    _, bundle = qwen
    with castiron.load(bundle, threads=1) as model:
        vectors = model.embed(["Hello", "Ice melts"], prompt_name="query", dimensions=7)
    asked = {"input": ["Hello", "Ice melts"], "dimensions": 7, "prompt_name": "query"}
    openai = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": asked}
    rows = [{"text": "Hello", "id": 1}, {"text": "Ice melts"}, {"text": [999]}, openai]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ["batch", str(bundle), str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert cli.main([*common, "--embed", "--prompt-name", "query", "--dimensions", "7", "--threads", "1"]) == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(np.float32([row["embedding"] for row in found[:2]]), vectors)
    assert found[0]["id"] == 1 and found[2]["error"] and found[2]["embedding"] is None
    body = found[3]["response"]["body"]
    np.testing.assert_array_equal(np.float32([one["embedding"] for one in body["data"]]), vectors)
    capsys.readouterr()
    assert cli.main(common) == 1 and "add --embed" in capsys.readouterr().err
    generating = served.bundle(tmp_path_factory.getbasetemp())
    assert cli.main([common[0], str(generating), *common[2:], "--embed"]) == 1
    assert "use castiron run" in capsys.readouterr().err


def test_commands_reject_the_other_kind_of_model(qwen, tmp_path_factory, capsys):
    folder, bundle = qwen
    for command in (["run", "x"], ["chat"], ["verify"], ["evaluate"], ["bench"]):
        assert cli.main([command[0], str(bundle), *command[1:]]) == 1
        assert "cannot generate text; use castiron embed" in capsys.readouterr().err
    for command in (["tune"], ["diff", "--tokens", "1,2"]):
        assert cli.main([command[0], str(folder), *command[1:]]) == 1
        assert "is an embedding model" in (generated := capsys.readouterr().err) or "compares models that generate" in generated
    with pytest.raises(SessionError, match="castiron embed"):
        Session(bundle, 1)
    assert cli.main(["quantise", str(folder), "-o", str(tmp_path_factory.mktemp("out") / "x.gguf"), "--weights", "q8_0"]) == 1
    assert "cannot write an embedding model" in capsys.readouterr().err
    generating = served.bundle(tmp_path_factory.getbasetemp())
    assert cli.main(["embed", str(generating), "x"]) == 1
    assert "use castiron run" in capsys.readouterr().err
    with pytest.raises(SessionError, match="castiron run"):
        Encoder(generating, 1)


def test_a_server_gives_embeddings(qwen, tmp_path, tmp_path_factory):
    _, bundle = qwen
    with castiron.load(bundle, threads=1) as model:
        vectors = model.embed(TEXTS)
    with served.served(bundle, tmp_path / "log") as running, OpenAI(base_url=f"{running.url}/v1", api_key="-") as client:

        def embedded(given, **more):
            return client.embeddings.create(model="qwen", input=given, **more)

        for packing in ("base64", "float"):
            answer = embedded(TEXTS, encoding_format=packing)
            np.testing.assert_allclose([_numbers(one.embedding) for one in answer.data], vectors, atol=1e-7)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(text) + 2 for text in TEXTS)
        assert [one.index for one in answer.data] == [0, 1, 2, 3]
        # The client asks for base64 by default, and decodes it.
        np.testing.assert_allclose(embedded("Hello").data[0].embedding, vectors[0], atol=1e-7)
        ids = [1, *served.tokenizer().encode("Hello").ids, 2]
        for given in (ids, [ids]):
            np.testing.assert_allclose(embedded(given).data[0].embedding, vectors[0], atol=1e-7)
        short = np.array(embedded("Hello", dimensions=3).data[0].embedding)
        np.testing.assert_allclose(short, vectors[0, :3] / np.linalg.norm(vectors[0, :3]), atol=1e-6)
        more = {"prompt_name": "query", "truncate": True}
        assert embedded("x" * 70, extra_body=more).usage.prompt_tokens == 60
        for given, options, why in (
            ("x" * 59, {}, "more than 60 tokens"),
            (["x", [999]], {}, "vocabulary"),
            ("x", {"dimensions": 65}, "1 to 64"),
            ("x", {"extra_body": {"prompt_name": "passage"}}, "no prompt 'passage'"),
        ):
            with pytest.raises(BadRequestError, match=why):
                embedded(given, **options)
        with pytest.raises(BadRequestError, match="cannot generate text; use /v1/embeddings"):
            client.chat.completions.create(model="qwen", messages=[{"role": "user", "content": "x"}])
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for path, more in (("/responses", {"input": "x"}), ("/messages", chat)):
            with pytest.raises(BadRequestError, match="cannot generate text; use /v1/embeddings"):
                client.post(path, body=more, cast_to=object)
        (listed,) = client.models.list().data
        assert (listed.dimensions, listed.prompts, listed.context_length) == (64, encoders.PROMPTS, 60)
    many = TestClient(App(ModelPool([open_bundle(bundle)], open_api, keep=1, arguments=["bundle"]), Metrics()))
    (reported,) = many.get("/v1/models").json()["data"]
    ours = {name: value for name, value in listed.model_dump(exclude_unset=True).items() if not name.startswith("created")}
    assert ours == {name: value for name, value in reported.items() if name in ours} and reported["loaded"] is False
    assert "4 texts of" in (tmp_path / "log").read_text()
    generating = served.bundle(tmp_path_factory.getbasetemp())
    with TestClient(open_app(generating, threads=1)) as client:
        refused = client.post("/v1/embeddings", json={"input": "x"})
        assert refused.status_code == 400 and "is not an embedding model" in refused.json()["error"]["message"]


def test_ollamas_api_gives_the_same_embeddings(qwen):
    _, bundle = qwen
    with castiron.load(bundle, threads=1) as model:
        vectors = model.embed(TEXTS)
    with TestClient(open_app(bundle, threads=1)) as client:
        found = client.post("/api/embed", json={"model": "qwen:latest", "input": TEXTS}).json()
        np.testing.assert_allclose(found["embeddings"], vectors, atol=1e-7)
        assert found["prompt_eval_count"] == sum(len(text) + 2 for text in TEXTS) and found["total_duration"] > 0
        short = client.post("/api/embed", json={"input": TEXTS[0], "dimensions": 3}).json()["embeddings"]
        np.testing.assert_allclose(short, vectors[:1, :3] / np.linalg.norm(vectors[:1, :3]), atol=1e-6)
        older = client.post("/api/embeddings", json={"prompt": TEXTS[0]}).json()
        np.testing.assert_allclose(older["embedding"], vectors[0], atol=1e-7)
        assert client.post("/api/embed", json={"input": "x" * 70}).json()["prompt_eval_count"] == 60
        uncut = client.post("/api/embed", json={"input": "x" * 70, "truncate": False})
        assert uncut.status_code == 400 and "more than 60 tokens" in uncut.json()["error"]
        assert client.post("/api/embed", json={"input": []}).json()["embeddings"] == []
        assert client.post("/api/embeddings", json={}).json() == {"embedding": []}
        chat = client.post("/api/chat", json={"messages": [{"role": "user", "content": "x"}]})
        assert chat.status_code == 400 and "cannot generate text" in chat.json()["error"]
        assert client.post("/api/show", json={}).json()["capabilities"] == ["embedding"]


def _numbers(embedding):
    """Return an embedding from a list of numbers or from f32 in base64."""
    return embedding if isinstance(embedding, list) else np.frombuffer(base64.b64decode(embedding), "<f4")


def test_reads_or_rejects_module_configs(qwen, tmp_path):
    folder, bundle = qwen

    def with_(name, change):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        value = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(change(value) or value))
        return copy

    pooling, modules = "1_Pooling/config.json", "modules.json"
    today = open_checkpoint(with_(pooling, lambda _: {"embedding_dimension": 64, "pooling_mode": "mean"})).encoding
    assert today and today.pooling.mode == "mean"
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    for name, change, why in (
        (pooling, lambda value: value.update(pooling_mode_mean_tokens=True), "mean, lasttoken"),
        (pooling, lambda _: {"pooling_mode": "max"}, "the pooling mode is max"),
        (pooling, lambda _: {"pooling_mode": "mean", "include_prompt": False}, "include_prompt is false"),
        (modules, lambda value: value.append(dense), "unsupported module in this place: Dense"),
        (modules, lambda value: value.pop(0), "begins with unsupported modules"),
        (modules, lambda value: value.insert(2, dense), "no config.json, but modules.json lists this folder"),
        (modules, lambda value: value.insert(2, dense | {"path": ".."}), "lacks a valid type or path"),
        (
            "config_sentence_transformers.json",
            lambda value: value.update(default_prompt_name="q"),
            "is inconsistent: default_prompt_name is 'q', but there is no such prompt",
        ),
    ):
        with pytest.raises(CheckpointError, match=why):
            open_checkpoint(with_(name, change))
    checkpoint = open_checkpoint(encoders.write("gemma3_text", tmp_path / "both", pooling="mean", **GEMMA))
    checkpoint.encoding = None
    with pytest.raises(castiron.EmitError, match=r"only compute embeddings.*modules\.json"):
        build_model(checkpoint, Options())
    manifest = json.loads(dump(open_bundle(bundle).manifest))
    for field, value, why in (
        ("max_tokens", 65, "the functions support 1 to 64"),
        ("default_prompt", "q", "use a key of encoder.prompts"),
    ):
        with pytest.raises(BundleError, match=why):
            parse(json.dumps(manifest | {"encoder": manifest["encoder"] | {field: value}}).encode(), "x")
    with pytest.raises(BundleError, match="functions"):
        parse(json.dumps(manifest | {"encoder": None}).encode(), "x")


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_a_gguf_file_with_a_pooling_type_is_the_same_encoder(family, tmp_path):
    """llama.cpp's converter also writes the layers after pooling."""
    own, pooling, dense = {"gemma3_text": (GEMMA, "mean", (96, 48)), "qwen3": (QWEN, "lasttoken", ())}[family]
    layers = {"num_hidden_layers": 6, "layer_types": None} if family == "gemma3_text" else {}
    made = encoders.write(family, tmp_path / "model", pooling=pooling, dense=dense, bare=False, **own | layers)
    directory, config = open_checkpoint(made), AutoConfig.from_pretrained(made)
    keys, tensors = hf_to_gguf.metadata_of(config), hf_to_gguf.tensors_of(made, config)
    arch = {"gemma3_text": "gemma-embedding", "qwen3": "qwen3"}[family]
    keys = {f"{arch}.{key.partition('.')[2]}": value for key, value in keys.items()}
    if family == "gemma3_text":
        keys |= {f"{arch}.attention.sliding_window": 12, f"{arch}.dense_2_feat_in": 64}
        for n in (2, 3):
            name = f"{n}_Dense.linear.weight"
            tensors[f"dense_{n}.weight"] = directory.tensors[name].dequantise()
    number = {"mean": 1, "lasttoken": 3}[pooling]
    found = open_checkpoint(write_gguf(tmp_path / "x.gguf", arch, keys | {f"{arch}.pooling_type": number}, tensors))
    assert found.encoding and directory.encoding
    assert found.encoding.pooling.mode == directory.encoding.pooling.mode and found.encoding.pooling.normalised
    # GGUF files have no biases of these layers.
    assert [layer.features for layer in found.encoding.pooling.dense] == list(dense)
    biases = {name for name in directory.tensors if name.endswith("linear.bias")}
    assert found.tensors.keys() == directory.tensors.keys() - biases
    for name, tensor in found.tensors.items():
        np.testing.assert_allclose(tensor.dequantise(), directory.tensors[name].dequantise(), atol=1e-6, err_msg=name)
    ours, theirs = (read_config(c.config) for c in (found, directory))
    assert (ours.bidirectional, ours.windows) == (theirs.bidirectional, theirs.windows)
    for kind, why in ((4, f"a {arch} reranker whose cls.output.weight is missing"), (5, r"pooling_type is 5, not 1 \(mean\)")):
        with pytest.raises(CheckpointError, match=why):
            open_checkpoint(write_gguf(tmp_path / "y.gguf", arch, keys | {f"{arch}.pooling_type": kind}, tensors))
