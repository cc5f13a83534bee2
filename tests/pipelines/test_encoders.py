"""Models that encode texts: vectors as transformers and torch compute them from sentence-transformers' files."""

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
from castiron.emitter.models import family as family_of
from castiron.pipelines import cli
from castiron.pipelines.casting.compile import Options, build_model, compile_model
from castiron.pipelines.checkpoints import CheckpointError, open_checkpoint
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.serve.app import open_app
from castiron.pipelines.serve.several import Several
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.encoder import Encoder
from castiron.vmfb.manifest import BundleError, dump, parse
from castiron.vmfb.program import SessionError
from castiron.vmfb.session import Session
from tests.pipelines import encoders, hf_to_gguf, served
from tests.pipelines.tiny_gguf import write_gguf
from tests.pipelines.toy_text import read_json

# A relative error of some roundings of f32, of vectors whose length is 1.
CLOSE = 4e-6
TEXTS = ["Hello", "Ice melts", "a longer text, of several calls", "x" * 38]
# Shaped like EmbeddingGemma: a layer that sees seven tokens both ways and one that sees all.
GEMMA = {
    "use_bidirectional_attention": True,
    "sliding_window": 12,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
# And like Qwen3-Embedding.
QWEN = {"num_hidden_layers": 2, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    place = tmp_path_factory.mktemp("encoders")
    made = encoders.write("gemma3_text", place / "gemma", pooling="mean", dense=(96, 48), longest=40, **GEMMA)
    return made, compile_model(made, place / "bundle", Options(embed=(8,))).bundle


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    place = tmp_path_factory.mktemp("encoders")
    made = encoders.write("qwen3", place / "qwen", pooling="lasttoken", bare=False, longest=60, **QWEN)
    return made, compile_model(made, place / "bundle", Options(embed=(8, 32))).bundle


def check(place, bundle, lengths):
    """The vectors of random tokens, longer and shorter ones in turn."""
    oracle, encoder = encoders.Oracle(place), Encoder(bundle, 1)
    for length in lengths:
        tokens = np.random.default_rng(length).integers(3, 211, length).tolist()
        np.testing.assert_allclose(encoder.encode(tokens), oracle.vector(tokens), atol=CLOSE, err_msg=f"{length} tokens")


def test_both_ways_within_a_window_then_pooled_and_projected(gemma):
    place, bundle = gemma
    manifest = open_bundle(bundle).manifest
    assert [f.name for f in manifest.functions] == ["encode_8", "encode_40"] and manifest.hidden == 48
    assert manifest.encoder and manifest.encoder.whole and manifest.encoder.dense == (96, 48)
    # Rows of one layer alone, whatever the number of layers.
    assert {state.shape[:2] for state in manifest.states} == {(1, 40)}
    check(place, bundle, (40, 1, 8, 39, 9, 7))


def test_the_last_token_of_several_calls(qwen):
    place, bundle = qwen
    manifest = open_bundle(bundle).manifest
    assert [f.name for f in manifest.functions] == ["encode_8", "encode_32"]
    # The last call's padding has rows too.
    assert manifest.context == 64 and manifest.encoder and manifest.encoder.max_tokens == 60
    check(place, bundle, (60, 1, 33, 32, 5, 41))


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_portable_lowering_pools_the_same(family, tmp_path):
    """Of a model that looks backwards the mean is summed from call to call."""
    own, pooling = {"gemma3_text": (GEMMA, "cls"), "qwen3": (QWEN, "mean")}[family]
    made = encoders.write(family, tmp_path / "model", pooling=pooling, longest=20, bare=False, **own)
    width = 20 if pooling == "cls" else 8
    bundle = compile_model(made, tmp_path / "bundle", Options(embed=(width,), lowering="portable")).bundle
    check(made, bundle, (20, 3, 8, 17) if family == "qwen3" else (20, 3))


def test_bert_is_an_encoder_by_either_name_of_its_tensors(tmp_path):
    """As `BertModel` saves it, and as the first checkpoints were: within a model, with other names in their norms."""
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
        family_of(new.config).Config.read(new.config | {"position_embedding_type": "relative_key"})


def test_modernbert_looks_near_and_far_in_turn(tmp_path):
    """Without biases, as its makers have it; a head that fills in words is left out."""
    own = {"num_hidden_layers": 2, "local_attention": 12, "global_attn_every_n_layers": 2}
    made = encoders.write("modernbert", tmp_path / "model", pooling="mean", longest=20, **own)
    check(made, compile_model(made, tmp_path / "bundle", Options(embed=(20,))).bundle, (20, 1, 13))
    whole = {f"model.{name}": value for name, value in load_file(made / "model.safetensors").items()}
    save_file(whole | {"head.dense.weight": np.ones((4, 4), np.float32)}, made / "model.safetensors")
    checkpoint = open_checkpoint(made)
    assert checkpoint.tensors.keys() == {name for name, w in build_model(checkpoint, Options()).weights.items() if w.values is None}  # fmt: skip


def test_texts_have_prompts_and_are_cut(qwen, capfd):
    place, bundle = qwen
    oracle, words = encoders.Oracle(place), served.tokenizer()
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
        assert "1 of 2 texts has more than 60 tokens, of which the first 60 count" in capfd.readouterr().err
        short = model.embed(TEXTS, dimensions=5)
        np.testing.assert_allclose(short, found[:, :5] / np.linalg.norm(found[:, :5], axis=1, keepdims=True), atol=1e-6)
        assert model.embed([], dimensions=5).shape == (0, 5)
        for wrong, why in (
            (lambda: model.embed("x", prompt_name="passage"), "no prompt 'passage'; its prompts are: query, document"),
            (lambda: model.embed("x", dimensions=65), "1 to 64"),
            (lambda: model.embed("x", pooling="mean"), "pool by last"),
            (lambda: model.embed([[1] * 61]), "61 tokens has no vector; it needs 1 to 60"),
            (lambda: model.generate("x"), "generates none"),
        ):
            with pytest.raises(PipelineError, match=why):
                wrong()
        with pytest.raises(SessionError, match="below 211"):
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
    assert [line["index"] for line in lines] == [0, 1] and not any(line["cut"] for line in lines)
    np.testing.assert_array_equal(np.float32([line["embedding"] for line in lines]), vectors)
    assert cli.main([*common, "--file", str(tmp_path / "texts"), "-o", str(tmp_path / "found.npy"), "--json"]) == 0
    told = read_json(capsys.readouterr().out)
    assert told["dimensions"] == 7 and told["prompt"] == encoders.PROMPTS["query"] and len(told["embeddings"]) == 2
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), vectors)
    assert cli.main(["embed", str(bundle)]) == 1
    assert "there is no text" in capsys.readouterr().err
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
    common = ["batch", str(bundle), str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--ordered"]
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
    assert "castiron run answers with it" in capsys.readouterr().err


def test_a_bundle_encodes_or_generates(qwen, tmp_path_factory, capsys):
    place, bundle = qwen
    for command in (["run", "x"], ["chat"], ["verify"], ["evaluate"], ["bench"]):
        assert cli.main([command[0], str(bundle), *command[1:]]) == 1
        assert "encodes texts and generates none: castiron embed" in capsys.readouterr().err
    for command in (["tune"], ["diff", "--tokens", "1,2"]):
        assert cli.main([command[0], str(place), *command[1:]]) == 1
        assert "for models that generate" in (said := capsys.readouterr().err) or "compares models that generate" in said
    with pytest.raises(SessionError, match="castiron embed"):
        Session(bundle, 1)
    assert cli.main(["quantise", str(place), "-o", str(tmp_path_factory.mktemp("out") / "x.gguf"), "--weights", "q8_0"]) == 1
    assert "encodes texts" in capsys.readouterr().err
    generating = served.bundle(tmp_path_factory.getbasetemp())
    assert cli.main(["embed", str(generating), "x"]) == 1
    assert "castiron run answers with it" in capsys.readouterr().err
    with pytest.raises(SessionError, match="castiron run"):
        Encoder(generating, 1)


# As their makers published them; positions, window and theta tell what was read.
PUBLISHED = {
    "embeddinggemma-300m": {
        "_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "dtype": "float32", "eos_token_id": 1,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768,
        "initializer_range": 0.02, "intermediate_size": 1152,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4, "max_position_embeddings": 2048,
        "model_type": "gemma3_text", "num_attention_heads": 3, "num_hidden_layers": 24, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": True,
        "use_cache": True, "vocab_size": 262144,
    },
    "all-MiniLM-L6-v2": {
        "_name_or_path": "nreimers/MiniLM-L6-H384-uncased", "architectures": ["BertModel"],
        "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 384, "initializer_range": 0.02, "intermediate_size": 1536,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12,
        "num_hidden_layers": 6, "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2,
        "use_cache": True, "vocab_size": 30522,
    },
    "ModernBERT-base": {
        "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281,
        "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean",
        "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0,
        "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "gradient_checkpointing": False, "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0,
        "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128,
        "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0,
        "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12,
        "num_hidden_layers": 22, "pad_token_id": 50283, "position_embedding_type": "absolute", "reference_compile": True,
        "repad_logits_with_grad": False, "sep_token_id": 50282, "sparse_pred_ignore_index": -100,
        "sparse_prediction": False, "vocab_size": 50368,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "positions", "windows"), [
    ("embeddinggemma-300m", 2048, ([257] * 5 + [None]) * 4),
    ("all-MiniLM-L6-v2", 512, None),
    ("ModernBERT-base", 8192, [None if layer % 3 == 0 else 65 for layer in range(22)]),
])  # fmt: skip
def test_configs_of_makers_are_read(name, positions, windows):
    read = family_of(PUBLISHED[name]).Config.read(PUBLISHED[name])
    assert read.bidirectional and read.max_positions == positions and getattr(read, "windows", None) == windows


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
        # The client unpacks base64, which it asks for by itself.
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
        with pytest.raises(BadRequestError, match="generates none; use /v1/embeddings"):
            client.chat.completions.create(model="qwen", messages=[{"role": "user", "content": "x"}])
        for path, more in (
            ("/responses", {"input": "x"}),
            ("/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ):
            with pytest.raises(BadRequestError, match="generates none; use /v1/embeddings"):
                client.post(path, body=more, cast_to=object)
        (listed,) = client.models.list().data
        assert (listed.dimensions, listed.prompts, listed.context_length) == (64, encoders.PROMPTS, 60)
    several = TestClient(Several([open_bundle(bundle)], open_app, keep=1).app)
    (told,) = several.get("/v1/models").json()["data"]
    ours = {name: value for name, value in listed.model_dump(exclude_unset=True).items() if not name.startswith("created")}
    assert ours == {name: value for name, value in told.items() if name in ours} and told["loaded"] is False
    assert "4 texts of" in (tmp_path / "log").read_text()
    generating = served.bundle(tmp_path_factory.getbasetemp())
    with served.served(generating, tmp_path / "log") as running, OpenAI(base_url=f"{running.url}/v1", api_key="-") as client:
        with pytest.raises(BadRequestError, match="generates text and has no embeddings"):
            client.embeddings.create(model="tiny", input="x")


def _numbers(embedding):
    """Of an answer: a list, or the bytes of f32 as text, which the client leaves to whoever asks for them."""
    return embedding if isinstance(embedding, list) else np.frombuffer(base64.b64decode(embedding), "<f4")


def test_what_a_directory_says_is_understood_or_refused(qwen, tmp_path):
    place, bundle = qwen

    def with_(name, change):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(place, copy)
        value = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(change(value) or value))
        return copy

    pooling, modules = "1_Pooling/config.json", "modules.json"
    today = open_checkpoint(with_(pooling, lambda _: {"embedding_dimension": 64, "pooling_mode": "mean"})).encoding
    assert today and today.pooling.mode == "mean"
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    for name, change, why in (
        (pooling, lambda value: value.update(pooling_mode_mean_tokens=True), "mean, lasttoken"),
        (pooling, lambda _: {"pooling_mode": "max"}, "pools by max"),
        (pooling, lambda _: {"pooling_mode": "mean", "include_prompt": False}, "leaves the prompt out"),
        (modules, lambda value: value.append(dense), "Dense after what castiron knows"),
        (modules, lambda value: value.pop(0), "does not begin with a Transformer"),
        (modules, lambda value: value.insert(2, dense), "no config.json, and modules.json names it"),
        (modules, lambda value: value.insert(2, dense | {"path": ".."}), "the folder of each module"),
        ("config_sentence_transformers.json", lambda value: value.update(default_prompt_name="q"), "no prompt 'q'"),
    ):
        with pytest.raises(CheckpointError, match=why):
            open_checkpoint(with_(name, change))
    checkpoint = open_checkpoint(encoders.write("gemma3_text", tmp_path / "both", pooling="mean", **GEMMA))
    checkpoint.encoding = None
    with pytest.raises(castiron.EmitError, match=r"encodes texts and generates none.*modules\.json"):
        build_model(checkpoint, Options())
    manifest = json.loads(dump(open_bundle(bundle).manifest))
    for field, value, why in (("max_tokens", 65, "take 64"), ("default_prompt", "q", "has not")):
        with pytest.raises(BundleError, match=why):
            parse(json.dumps(manifest | {"encoder": manifest["encoder"] | {field: value}}).encode(), "x")
    with pytest.raises(BundleError, match="functions"):
        parse(json.dumps(manifest | {"encoder": None}).encode(), "x")


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_a_gguf_file_with_a_pooling_type_is_the_same_encoder(family, tmp_path):
    """As llama.cpp's converter writes it, with the layers after pooling."""
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
    # Of layers with a bias or more than a product there are none in such files.
    assert [layer.features for layer in found.encoding.pooling.dense] == list(dense)
    biases = {name for name in directory.tensors if name.endswith("linear.bias")}
    assert found.tensors.keys() == directory.tensors.keys() - biases
    for name, tensor in found.tensors.items():
        np.testing.assert_allclose(tensor.dequantise(), directory.tensors[name].dequantise(), atol=1e-6, err_msg=name)
    ours, theirs = (family_of(c.config).Config.read(c.config) for c in (found, directory))
    windows = lambda c: getattr(c, "windows", None)
    assert (ours.bidirectional, windows(ours)) == (theirs.bidirectional, windows(theirs))
    with pytest.raises(CheckpointError, match=r"pooling_type is 4, and castiron knows 1 \(mean\)"):
        open_checkpoint(write_gguf(tmp_path / "y.gguf", arch, keys | {f"{arch}.pooling_type": 4}, tensors))
