"""Reranking by transformers' classifiers and by the cosine of embeddings."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from starlette.testclient import TestClient
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import castiron
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.app import open_app
from tests.support import encoders, hf_to_gguf, rerankers, served
from tests.support.tiny_gguf import write_gguf

QUERY, DOCUMENTS = "What does ice do?", ["Ice melts.", "The sky is blue", "", "Hello", "a longer one, cut" + "!" * 40]
# Error of sums in f32 of numbers about 1.
CLOSE = 2e-5
LONGEST = 48


def compiled(made, folder, longest=LONGEST):
    return compile_model(made, folder / "bundle", Options(context=longest, embed=(longest,))).bundle


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    made = encoders.write_classifier("bert", folder / "bert", num_hidden_layers=2)
    return made, compiled(made, folder)


def expected(made):
    """Return the logit of the query with each document; the longer text of a pair is cut."""
    space = LONGEST - 3 - len(QUERY)
    return np.array([encoders.logit(made, QUERY, document[:space]) for document in DOCUMENTS])


def test_bert_scores_pairs_of_texts(bert):
    made, bundle = bert
    wanted = 1 / (1 + np.exp(-expected(made)))
    assert np.ptp(wanted) > 0.05, "the scores differ too little for a test"
    with castiron.load(bundle, threads=1) as model:
        found = model.rerank(QUERY, DOCUMENTS)
        assert [index for index, _ in found] == np.argsort(-wanted).tolist()
        np.testing.assert_allclose([score for _, score in found], np.sort(wanted)[::-1], atol=CLOSE)
        # The order of the two texts changes the score.
        assert abs(model.rerank(DOCUMENTS[0], [QUERY])[0][1] - wanted[0]) > 1e-4
        assert model.rerank(QUERY, []) == []
        with pytest.raises(PipelineError, match="is a reranking model and cannot embed text"):
            model.embed("x")


def test_modernbert_reports_raw_scores(tmp_path):
    own = {"num_hidden_layers": 2, "local_attention": 12, "global_attn_every_n_layers": 2, "classifier_pooling": "mean",
           "classifier_bias": True}  # fmt: skip
    made = encoders.write_classifier("modernbert", tmp_path / "model", "linear.Identity", **own)
    with castiron.load(compiled(made, tmp_path), threads=1) as model:
        found = dict(model.rerank(QUERY, DOCUMENTS))
    np.testing.assert_allclose([found[index] for index in range(5)], expected(made), atol=CLOSE)


def test_the_server_and_a_batch_job_rerank(bert, tmp_path, tmp_path_factory, capsys):
    _, bundle = bert
    with castiron.load(bundle, threads=1) as model:
        wanted = model.rerank(QUERY, DOCUMENTS)
    with TestClient(open_app(bundle, threads=1, names=[bundle.name])) as client:
        ask = lambda path="/v1/rerank", **body: client.post(path, json={"query": QUERY, "documents": DOCUMENTS} | body)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            answer = ask(path).json()
            assert [(row["index"], row["relevance_score"]) for row in answer["results"]] == wanted
        assert [row["document"] for row in answer["results"]] == [{"text": DOCUMENTS[index]} for index, _ in wanted]
        bodies = [{"query": QUERY, "documents": DOCUMENTS}, {"query": QUERY, "documents": []}, {"input": "x"}]
        urls = ["/v1/rerank", "/v1/rerank", "/v1/embeddings"]
        rows = [{"custom_id": f"{i}", "url": url, "body": body} for i, (url, body) in enumerate(zip(urls, bodies))]
        (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"text": "x"}])))
        words = [str(bundle), str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--threads", "1"]
        assert cli.main(["batch", *words]) == 0
        *reported, plain = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        for url, body, row in zip(urls, bodies, reported):
            asked = client.post(url, json=body)
            without = lambda found: {name: value for name, value in found.items() if name != "id"}
            assert row["response"]["status_code"] == asked.status_code
            assert without(row["response"]["body"]) == without(asked.json())
        assert reported[0]["response"]["body"]["id"].startswith("rerank-") and "rerank texts with it" in plain["error"]
        assert answer["usage"]["total_tokens"] == sum(min(LONGEST, len(QUERY) + len(text) + 3) for text in DOCUMENTS)
        documents = [{"text": text, "title": "x"} for text in DOCUMENTS]
        top = ask(documents=documents, top_n=2, max_chunks_per_doc=1).json()["results"]
        assert [row["index"] for row in top] == [index for index, _ in wanted[:2]]
        assert top[0]["document"] == documents[wanted[0][0]]
        assert all(row.keys() == {"index", "relevance_score"} for row in ask(return_documents=False).json()["results"])
        for body, param in (({"documents": []}, "documents"), ({"documents": [{"title": "x"}]}, "documents"), ({"top_n": 0}, "top_n"),
                            ({"query": None}, "query"), ({"max_chunks_per_doc": 2}, "max_chunks_per_doc")):  # fmt: skip
            refused = ask(**body)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert "/v1/rerank" in client.get("/").text and "dimensions" not in client.get("/v1/models").json()["data"][0]
        refused = client.post("/v1/embeddings", json={"input": "x"})
        assert refused.status_code == 400 and "at /v1/rerank" in refused.json()["error"]["message"]
    with TestClient(open_app(served.bundle(tmp_path_factory.getbasetemp()), threads=1)) as client:
        refused = client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS})
        assert refused.status_code == 400 and "BERT or ModernBERT classifier" in refused.json()["error"]["message"]
    assert cli.main(["inspect", str(bundle)]) == 0
    assert f"two texts of at most {LONGEST} tokens together: cls pooling, sigmoid of one number" in capsys.readouterr().out
    assert cli.main(["embed", str(bundle), "x"]) == 1 and "rerank texts with it" in capsys.readouterr().err


def test_scores_are_in_the_order_of_the_texts(bert, tmp_path_factory):
    _, bundle = bert
    with castiron.load(bundle, threads=1) as model:
        wanted = [score for _, score in sorted(model.rerank(QUERY, DOCUMENTS))]
        crossed = [model.rerank(*pair)[0][1] for pair in ((QUERY, DOCUMENTS[:1]), (DOCUMENTS[0], [QUERY]))]
    with TestClient(open_app(bundle, threads=1)) as client:
        for path in ("/v1/score", "/score"):
            answer = client.post(path, json={"text_1": QUERY, "text_2": DOCUMENTS}).json()
            assert [(row["index"], row["score"]) for row in answer["data"]] == list(enumerate(wanted))
        assert answer["usage"]["total_tokens"] == sum(min(LONGEST, len(QUERY) + len(text) + 3) for text in DOCUMENTS)
        pairs = {"text_1": [QUERY, DOCUMENTS[0]], "text_2": [DOCUMENTS[0], QUERY]}
        assert [row["score"] for row in client.post("/score", json=pairs).json()["data"]] == crossed
        one = client.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS[0]}).json()
        assert [row["score"] for row in one["data"]] == crossed[:1]
        for body, why in (
            ({"text_1": ["a", "b"]}, "text_1 has 2 texts and text_2 has 5"),
            ({"text_1": 5}, "must be a string or a list"),
        ):
            refused = client.post("/score", json={"text_2": DOCUMENTS, **body})
            assert refused.status_code == 400 and why in refused.json()["error"]["message"]
    with TestClient(open_app(served.bundle(tmp_path_factory.getbasetemp()), threads=1)) as client:
        refused = client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS})
        assert refused.status_code == 400 and "BERT or ModernBERT classifier" in refused.json()["error"]["message"]


def test_embeddings_rerank_by_cosine(tmp_path):
    made = encoders.write("bert", tmp_path / "model", pooling="cls", longest=LONGEST, num_hidden_layers=1)
    bundle = compiled(made, tmp_path)
    with castiron.load(bundle, threads=1) as model:
        question, texts = model.embed(QUERY, prompt_name="query"), model.embed(DOCUMENTS, prompt_name="document")
        found = model.rerank(QUERY, DOCUMENTS)
    assert [index for index, _ in found] == np.argsort(-(texts @ question), kind="stable").tolist()
    np.testing.assert_allclose([score for _, score in found], np.sort(texts @ question)[::-1], atol=1e-6)
    with TestClient(open_app(bundle, threads=1)) as client:
        scored = client.post("/score", json={"text_1": [QUERY] * len(DOCUMENTS), "text_2": DOCUMENTS}).json()["data"]
    np.testing.assert_allclose([row["score"] for row in scored], texts @ question, atol=1e-6)


def test_rejects_other_classifiers(bert, tmp_path):
    made, _ = bert
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(made / name)
    config = json.loads((made / "config.json").read_text())
    for changed, why in (
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "classifiers with one label",
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "supported are Sigmoid and Identity",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(CheckpointError, match=why):
            open_checkpoint(tmp_path)


# The code of Qwen3-Reranker's model card, with its own names.
CARD = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def texts(count: int, longest: int) -> list[str]:
    random = np.random.default_rng(0)
    return ["".join(random.choice(list("abc defg hij. XYZ\n?!<>|é"), random.integers(1, longest))) for _ in range(count)]


def of_the_card(made, queries, documents, max_length: int) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(made)
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, attn_implementation="eager").eval()
    false, true = (tokenizer.convert_tokens_to_ids(token) for token in ("no", "yes"))
    prefix, suffix = (tokenizer.encode(part, add_special_tokens=False) for part in (PREFIX, SUFFIX))
    scores = []
    for query, document in zip(queries, documents):
        pair = f"<Instruct>: {CARD}\n<Query>: {query}\n<Document>: {document}"
        limit = max_length - len(prefix) - len(suffix)
        ids = prefix + tokenizer(pair, truncation="longest_first", max_length=limit)["input_ids"] + suffix
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(torch.softmax(logits[[false, true]], 0)[1].item())
    return scores


def test_qwen3_reranker_scores_as_its_model_card(tmp_path):
    """Only the folder names its first versions; a long document is cut before the prompt's end."""
    made, longest = rerankers.language_model(tmp_path / "Qwen3-Reranker-tiny", None), 480
    bundle = compile_model(made, tmp_path / "bundle", Options(context=longest, embed=(longest,))).bundle
    queries, documents = texts(24, 20), [*texts(20, 60), *("long " * 99, "", "yes", "no")]
    wanted = of_the_card(made, queries, documents, longest)
    assert np.ptp(wanted) > 0.02, "the scores differ too little for a test"
    with castiron.load(bundle, threads=1) as model:
        found = [model.rerank(*pair)[0][1] for pair in zip(queries, ([document] for document in documents))]
        with pytest.raises(PipelineError, match="is a reranking model and cannot embed text"):
            model.embed("x")
    np.testing.assert_allclose(found, wanted, atol=CLOSE / 10)
    with TestClient(open_app(bundle, threads=1)) as client:
        answer = client.post("/v1/rerank", json={"query": queries[0], "documents": documents[:1]}).json()
    assert answer["results"][0]["relevance_score"] == found[0]


def as_gguf(made, path, tied: bool, **changed):
    """Write the GGUF file of a Qwen3 reranker as llama.cpp's converter does."""
    config, text = AutoConfig.from_pretrained(made), rerankers.tokenizer()
    tensors = hf_to_gguf.tensors_of(made, config)
    head = tensors["token_embd.weight"] if tied else tensors.pop("output.weight")
    tensors["cls.output.weight"] = np.stack([head[text.token_to_id(token)] for token in ("yes", "no")])
    names = sorted(text.get_vocab(), key=text.get_vocab().get)
    prompt = f"{PREFIX}<Instruct>: {CARD}\n<Query>: {{query}}\n<Document>: {{document}}{SUFFIX}"
    keys = hf_to_gguf.metadata_of(config) | {
        "qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"], "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": names + [f"[PAD{i}]" for i in range(len(names), len(head))],
        "tokenizer.ggml.token_type": [3 if name.startswith("<|") else 4 if name in rerankers.MARKS else 1 for name in names] + [5] * (len(head) - len(names)),
        "tokenizer.ggml.merges": ["y e", "ye s", "n o"], "tokenizer.ggml.eos_token_id": text.token_to_id("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": text.token_to_id("<|endoftext|>"), "tokenizer.chat_template": rerankers.TEMPLATE,
        "tokenizer.chat_template.rerank": prompt,
    }  # fmt: skip
    keys = {key: value for key, value in (keys | changed.get("keys", {})).items() if value is not None}
    return write_gguf(path, "qwen3", keys, tensors | changed.get("tensors", {}))


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_reranker_scores_as_its_model_card(tied, tmp_path):
    made, longest = rerankers.language_model(tmp_path / "model", None, tied=tied), 480
    bundle = compiled(as_gguf(made, tmp_path / "x.gguf", tied), tmp_path, longest)
    queries, documents = texts(24, 20), [*texts(20, 60), *("long " * 99, "", "{query}", "{{ 1 }}")]
    wanted = of_the_card(made, queries, documents, longest)
    assert np.ptp(wanted) > 0.02, "the scores differ too little for a test"
    with castiron.load(bundle, threads=1) as model:
        found = [model.rerank(*pair)[0][1] for pair in zip(queries, ([document] for document in documents))]
    np.testing.assert_allclose(found, wanted, atol=CLOSE / 10)


def test_other_gguf_rerankers_are_rejected(tmp_path):
    made = rerankers.language_model(tmp_path / "model", None)
    for changed, why in (
        (
            {"tensors": {"cls.output.weight": np.zeros((1, 64), np.float32)}},
            r"has shape \[1, 64\] is not supported; give Qwen3-Reranker",
        ),
        ({"keys": {"tokenizer.chat_template.rerank": None}}, "the reranker's prompt is missing"),
    ):
        with pytest.raises(CheckpointError, match=why):
            open_checkpoint(as_gguf(made, tmp_path / "x.gguf", True, **changed))


def test_a_classifier_of_a_decoder_scores_the_last_token(tmp_path):
    made = rerankers.classifier(tmp_path / "model")
    queries, documents = texts(20, 20), texts(20, 20)
    tokenizer = AutoTokenizer.from_pretrained(made)
    model = AutoModelForSequenceClassification.from_pretrained(made, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        wanted = [model(**tokenizer(*pair, return_tensors="pt")).logits.sigmoid().item() for pair in zip(queries, documents)]
    assert np.ptp(wanted) > 0.05
    with castiron.load(compiled(made, tmp_path), threads=1) as loaded:
        found = [loaded.rerank(query, [document])[0][1] for query, document in zip(queries, documents)]
    np.testing.assert_allclose(found, wanted, atol=CLOSE)


@pytest.mark.parametrize("kind", rerankers.KINDS)
def test_a_rerankers_score_and_prompt_are_read(kind, tmp_path):
    """The score is one row: that of yes minus that of no, or what LogitScore states."""
    found = open_checkpoint(rerankers.KINDS[kind](tmp_path / "model"))
    names = ["lm_head.weight"] if "classifier" in kind or kind == "untied" else ["model.embed_tokens.weight"]
    source = tmp_path / ("model-source" if "classifier" in kind else "model")
    stored = load_file(source / "model.safetensors")
    head = stored.get(names[0], stored["model.embed_tokens.weight"])
    tokenizer = rerankers.tokenizer()
    true, false = {"modules": (7, 9), "one token": (7, None)}.get(
        kind, [tokenizer.token_to_id(token) for token in ("yes", "no")]
    )
    np.testing.assert_array_equal(
        found.tensors["score.linear.weight"].dequantise()[0], head[true] - (0 if false is None else head[false])
    )
    assert not {"lm_head.weight", "score.weight"} & found.tensors.keys()
    published = kind in ("modules", "one token")
    assert found.encoding.relevance == ("identity" if published else "sigmoid")
    assert (found.encoding.prompts, found.encoding.default_prompt) == (
        ({"query": "Find it"}, "query") if published else ({}, None)
    )
    start = "{%- set add_generation_prompt = True %}" if published else ""
    assert found.chat_template == (start + rerankers.TEMPLATE if "template" in kind or published or kind == "untied" else None)


def test_a_language_model_is_no_reranker(tmp_path):
    """Only a template that asks for both roles makes it one, or LogitScore."""
    plain = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{% endfor %}"
    for name, template in (("qwen3", None), ("chat", plain + "{# query document #}")):
        assert open_checkpoint(rerankers.language_model(tmp_path / name, template)).encoding is None
    with pytest.raises(CheckpointError, match="lacks the roles query and document"):
        published = {"modules": rerankers.modules(("a.Transformer", ""), ("a.LogitScore", "1_LogitScore"))}
        open_checkpoint(rerankers.language_model(tmp_path / "published", None, **published))
