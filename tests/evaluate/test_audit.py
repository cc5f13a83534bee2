"""An audit repeats the answer of a receipt, and finds every change of one."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

import castiron
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.receipt import Receipt, Transcript, read_receipt
from castiron.pipelines.engine.request import Request
from castiron.pipelines.engine.sampling import Sampler, Sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate import audit as auditing
from castiron.pipelines.evaluate.audit import audit
from castiron.pipelines.server.app import open_app
from castiron.pipelines.text.text_output import text_request
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.bundle.json_record import from_json
from tests.support import served

PROMPT = list(range(3, 40))
# Random enough that the 211 random logits do not always give one token.
RANDOM = Sampling(temperature=1.5, seed=11)
SAMPLINGS = {
    "greedy": Sampling(),
    "random": RANDOM,
    "no seed": Sampling(temperature=2.0),
    "NumPy": Sampling(
        temperature=np.float32(0.7), top_k=np.int64(50), seed=np.int64(3), logit_bias={np.int64(9): np.float64(2)}
    ),
    "cuts": replace(RANDOM, top_k=40, top_p=0.9, min_p=0.01, samplers=("temperature", "min_p", "top_p", "top_k")),
    "penalties": replace(RANDOM, repeat_penalty=1.3, repeat_last_n=-1, frequency_penalty=0.5, presence_penalty=-0.4),
    "biases": Sampling(repeat_penalty=1.2, logit_bias={7: 3.0, 11: -2.0}),
    "schedule": replace(RANDOM, temperature_schedule="linear:0.1:12"),
}


@pytest.fixture(scope="module", params=["canonical", "exact"])
def bundle(request, tmp_path_factory) -> Bundle:
    return open_bundle(compiled(tmp_path_factory, request.param))


@pytest.fixture(scope="module")
def canonical(tmp_path_factory) -> Bundle:
    return open_bundle(compiled(tmp_path_factory, "canonical"))


def compiled(tmp_path_factory, numerics: str) -> Path:
    folder = tmp_path_factory.getbasetemp() / f"audit-{numerics}"
    folder.mkdir(exist_ok=True)
    return served.bundle(folder, (2, 4), numerics)


def answered(bundle: Bundle, *requests: Request, **options) -> list[Receipt]:
    """Answer the requests together; return their receipts, written and parsed."""
    engine = Engine(bundle, 1, **options)
    stream = engine.stream()
    for request in requests:
        stream.submit(request)
    for _ in stream:
        pass
    engine.close()
    return [from_json(Receipt, json.loads(request.receipt(bundle.manifest).to_json())) for request in requests]


def asked(sampling: Sampling = RANDOM, max_tokens: int | None = 20, **options) -> Request:
    return Request(PROMPT, served.CONTEXT, sampling=sampling, max_tokens=max_tokens, receipt=True, **options)


def changed(receipt: Receipt, **values) -> Receipt:
    """Return a receipt that somebody changed with care: its hash is right."""
    other = replace(receipt, **values)
    return replace(other, sha256=other.digest)


def test_an_answer_in_a_batch_is_repeated_in_wider_calls(bundle):
    receipts = answered(bundle, *(asked(sampling) for sampling in SAMPLINGS.values()))
    for name, receipt in zip(SAMPLINGS, receipts, strict=True):
        found = audit(receipt, bundle, 1)
        assert (found.differences, found.positions) == ((), 20), name
        assert found.compared == ("bits" if bundle.manifest.has_same_bits else "tokens")
        assert bundle.manifest.has_same_bits or bundle.manifest.numerics == "exact"
    assert receipts[2].sampling["seed"] is not None


def test_speculation_and_cached_prefixes_give_the_same_receipt(canonical):
    (single,) = answered(canonical, asked(), single=True)
    (speculated,) = answered(canonical, asked(), single=True, ngrams=True)
    first, second = answered(canonical, asked(), asked())
    assert single == speculated == first == second
    # Nothing is recorded, or read from the logits, for a request without a receipt.
    assert Request(PROMPT, served.CONTEXT).transcript is None


def test_the_hash_covers_every_logit():
    logits = np.arange(5, dtype=np.float32)
    transcript = Transcript()
    for index in range(5):
        transcript.add(0, np.where(np.arange(5) == index, np.nextafter(logits, np.float32(9)), logits))
    transcript.add(0, logits)
    assert len(set(transcript.hashes)) == 6


def test_every_end_is_repeated(canonical):
    text = load_tokenizer(canonical)
    greedy = answered(canonical, asked(Sampling(), 30))[0].answer
    end = next(token for token in greedy[8:] if token > 2)
    space = served.CONTEXT - len(PROMPT) + 1
    requests = {
        "stop": asked(Sampling(), stop_tokens=[end]),
        "length": asked(Sampling(), 5),
        "context": asked(Sampling(), None, stop_tokens=()),
    }
    options = {"sampling": Sampling(), "max_tokens": 30, "receipt": True}
    strings = text_request(PROMPT, served.CONTEXT, text, stop_strings=text.decode([end]), **options)
    receipts = answered(canonical, *requests.values(), strings)
    assert [receipt.finish_reason for receipt in receipts] == [*requests, "stop"]
    assert receipts[0].answer[-1] == receipts[3].answer[-1] == end and len(receipts[2].answer) == space
    for receipt in receipts:
        assert not audit(receipt, canonical, 1).differences
    stopped, short, full, string = receipts
    for wrong in (
        changed(stopped, stop_tokens=()),
        changed(stopped, finish_reason="length"),
        changed(short, max_tokens=6),
        changed(short, finish_reason="stop"),
        changed(full, stop_tokens=(full.answer[40],)),
        changed(full, context=served.CONTEXT - 1, prompt=full.prompt, answer=full.answer[:-1], logits=full.logits[:-1],
                finish_reason="length"),
        changed(string, stop_strings=()),
        changed(short, answer=short.answer[:4], logits=short.logits[:4]),
    ):  # fmt: skip
        (difference,) = audit(wrong, canonical, 1).differences
        assert difference.what == "end"


def test_every_changed_field_is_found(canonical):
    (receipt,) = answered(canonical, asked(SAMPLINGS["penalties"]))
    # A field, another value, and what differs if the receipt's own hash is right again.
    changes: dict[str, tuple[object, str]] = {
        "bundle": ("0" * 64, "bundle"),
        "checkpoint": ("0" * 64, "checkpoint"),
        "numerics": ("exact", "numerics"),
        "prompt": ((4, *receipt.prompt[1:]), "logits"),
        "answer": ((*receipt.answer[:9], receipt.answer[9] ^ 1, *receipt.answer[10:]), "token"),
        "logits": ((*receipt.logits[:9], "0" * 32, *receipt.logits[10:]), "logits"),
        "finish_reason": ("stop", "end"),
        "max_tokens": (19, "end"),
        "stop_tokens": ((receipt.answer[9],), "end"),
        "sampling": (receipt.sampling | {"seed": 12}, "token"),
        "castiron": ("0.1", ""),
        "context": (served.CONTEXT - 1, ""),
        "stop_strings": (("no such text",), ""),
        "repetition_stop": (True, ""),
    }
    assert {*changes} == {each.name for each in fields(Receipt)} - {"format", "sha256"}
    for name, (value, what) in changes.items():
        assert audit(replace(receipt, **{name: value}), canonical, 1).differences[0].what == "sha256", name
        # The last four have no effect on this answer: the receipt is as true with them.
        differences = audit(changed(receipt, **{name: value}), canonical, 1).differences
        assert [each.what for each in differences[:1]] == [what] * bool(what), name
    for name in ("answer", "logits"):
        assert audit(changed(receipt, **{name: changes[name][0]}), canonical, 1).differences[0].position == 9
    for name, value in (
        ("temperature", 0.2), ("top_k", 1), ("top_p", 0.01), ("min_p", 0.99), ("repeat_penalty", 3.0), ("repeat_last_n", 1),
        ("frequency_penalty", 2.0), ("presence_penalty", 2.0), ("logit_bias", {"50": 100.0}),
        ("temperature_schedule", "linear:0:3"),
    ):  # fmt: skip
        found = audit(changed(receipt, sampling=receipt.sampling | {name: value}), canonical, 1)
        assert found.differences[0].what == "token", name


def test_a_different_bundle_is_refused_unless_it_is_expected(canonical, tmp_path_factory):
    (receipt,) = answered(canonical, asked())
    other = compile_model(
        served.checkpoint(tmp_path_factory.mktemp("other") / "checkpoint"), tmp_path_factory.mktemp("other") / "bundle",
        Options(context=served.CONTEXT, batch=(), verify_widths=(), numerics="canonical"),
    ).bundle  # fmt: skip
    other = open_bundle(other)
    assert [each.what for each in audit(receipt, other, 1).differences] == ["bundle"]
    # This bundle has no function for several positions, so it decodes them.
    assert not audit(receipt, other, 1, other_bundle=True).differences
    assert not audit(receipt, canonical.with_context(64), 1).differences


def test_only_a_token_within_the_rounding_is_excused(bundle, monkeypatch):
    (receipt,) = answered(bundle, asked(Sampling()))
    last = len(receipt.answer) - 1
    engine = Engine(bundle, 1, single=True)
    with engine.exclusive() as scheduler:
        session = scheduler.batch.slots[0]
        session.prefill([*receipt.prompt, *receipt.answer[:-1]])
        best, second = np.argsort(-session.logits())[:2].tolist()
    assert best == receipt.answer[last]
    wrong = changed(receipt, answer=(*receipt.answer[:last], second))
    (difference,) = audit(wrong, bundle, 1).differences
    assert (difference.what, difference.position, difference.recorded, difference.computed) == ("token", last, second, best)
    assert difference.margin > 0
    monkeypatch.setattr(auditing, "NEAR", 1.0)
    found = audit(wrong, bundle, 1)
    is_exact = bundle.manifest.numerics == "exact"
    assert [each.position for each in (found.rounded if is_exact else found.differences)] == [last]


def test_a_drawn_token_is_excused_only_beside_a_boundary(canonical, monkeypatch):
    (receipt,) = answered(canonical, asked(max_tokens=1))
    wrong = [changed(receipt, answer=(token,)) for token in range(211) if token != receipt.answer[0]]
    assert all(audit(each, canonical, 1).differences for each in wrong[::30])
    monkeypatch.setattr(auditing, "NEAR_DRAWN", 0.02)
    excused = [each for each in wrong if audit(each, canonical, 1).rounded]
    assert 1 <= len(excused) <= 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"[" * 100_000, "nested|recursion|too many"),
        (b"[" + b"1," * 5_000_000 + b"1]", "too many values"),
        (b'{"format": 2}', "format is 2, but this castiron reads format 1"),
        (b'{"format": 1, "more": 1}', "unknown field: more"),
    ],
)
def test_a_file_that_is_no_receipt_is_rejected(content, message, tmp_path):
    path = tmp_path / "receipt.json"
    path.write_bytes(content)
    with pytest.raises(PipelineError, match=f"^invalid receipt {path}: .*{message}"):
        read_receipt(path)


def test_fields_of_other_types_and_sizes_are_rejected(canonical, tmp_path):
    (receipt,) = answered(canonical, asked(max_tokens=3))
    valid, path = json.loads(receipt.to_json()), tmp_path / "receipt.json"
    for name in valid:
        for value in (None, True, -1, 1e999, [], {}, [[]], "x", 10**30, [10**30], {"a": 1}, float("nan")):
            path.write_text(json.dumps(valid | {name: value}))
            check(path, canonical)
    for name in valid["sampling"]:
        for value in (True, -1, 1e999, [], [[]], "x", 10**30, {"7": "x"}, {"999999": 1.0}, float("nan")):
            path.write_text(json.dumps(valid | {"sampling": valid["sampling"] | {name: value}}))
            check(path, canonical)


def check(path: Path, bundle: Bundle) -> None:
    """Audit a changed receipt; the result is a one-line error or a difference."""
    try:
        receipt = read_receipt(path)
        audit(replace(receipt, sha256=receipt.digest), bundle, 1)
    except PipelineError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        return
    assert audit(receipt, bundle, 1).differences or json.loads(path.read_text())["sha256"] == receipt.digest


def test_what_an_audit_cannot_repeat_is_refused(canonical):
    text = load_tokenizer(canonical)
    with pytest.raises(PipelineError, match=r"^receipt does not support a grammar, tools"):
        text_request(PROMPT, served.CONTEXT, text, grammar=text.grammar(regex="a+"), receipt=True)
    with pytest.raises(PipelineError, match=r"^receipt does not support a max_tokens of 0"):
        asked(max_tokens=0)
    with pytest.raises(PipelineError, match=r"^receipt needs sampling options"):
        asked(Sampler(RANDOM))


def test_python_and_the_commands_write_and_audit_receipts(bundle, tmp_path, capsys):
    with castiron.load(bundle.path, threads=1) as model:
        one, other = model.generate(["Hello", "there"], max_tokens=4, temperature=0.9, receipt=True)
        assert model.generate("Hello", max_tokens=1).receipt is None
        with pytest.raises(PipelineError, match=r"^receipt does not support"):
            model.generate("Hello", regex="a+", receipt=True)
    for result in (one, other):
        assert result.receipt.answer[:4] == tuple(result.tokens)
        assert not audit(result.receipt, bundle, 1).differences
    path = tmp_path / "answers" / "answer.json"
    for options in ((), ("--json",)):
        command = ["run", str(bundle.path), "-p", "Hello there", "-n", "6", "--threads", "1", "--receipt", str(path), *options]
        assert cli.main(command) == 0
    assert len(read_receipt(path).answer) == 6
    capsys.readouterr()
    assert cli.main(["audit", str(path), str(bundle.path), "--threads", "1"]) == 0
    assert capsys.readouterr().out.startswith("equal       6 tokens: ")
    receipt = read_receipt(path)
    path.write_text(changed(receipt, answer=(*receipt.answer[:5], receipt.answer[5] ^ 1)).to_json())
    assert cli.main(["audit", str(path), str(bundle.path), "--threads", "1"]) == 1
    assert capsys.readouterr().out.startswith(
        f"differs     token 5 of the answer: token is {receipt.answer[5] ^ 1} in the receipt"
    )
    assert cli.main(["audit", str(path), str(bundle.path), "--threads", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"] and found["differences"][0]["position"] == found["positions"] == 5


def test_every_api_returns_receipts(canonical):
    messages, limit = served.MESSAGES, {"max_tokens": 5, "seed": 4, "receipt": True}
    with TestClient(open_app(canonical.path, threads=1)) as client:

        def post(path: str, **body):
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            if not body.get("stream"):
                return answer.json()
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
            return [json.loads(line) for line in lines]

        chat = post("/v1/chat/completions", messages=messages, n=2, **limit)
        found = [choice["receipt"] for choice in chat["choices"]]
        chunks = post("/v1/chat/completions", messages=messages, stream=True, **limit)
        found += [choice["receipt"] for chunk in chunks for choice in chunk["choices"] if "receipt" in choice]
        found += [choice["receipt"] for choice in post("/v1/completions", prompt="Hello", echo=True, **limit)["choices"]]
        found.append(post("/v1/messages", messages=messages, **limit)["receipt"])
        found += [
            event["receipt"] for event in post("/v1/messages", messages=messages, stream=True, **limit) if "receipt" in event
        ]
        del limit["max_tokens"]
        found.append(post("/v1/responses", input="Hello", max_output_tokens=5, **limit)["receipt"])
        ollama = {"options": {"num_predict": 5, "seed": 4}, "receipt": True, "stream": False}
        found.append(post("/api/chat", model="tiny", messages=messages, **ollama)["receipt"])
        found.append(post("/api/generate", model="tiny", prompt="Hello", **ollama)["receipt"])
        assert len(found) == 9 and found[0] == found[2] != found[1]
        refused = client.post("/v1/chat/completions", json={"messages": messages, "regex": "a+", **limit})
        assert refused.status_code == 400 and "receipt does not support" in refused.text
        assert "receipt" not in client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1}).text
    for each in found:
        assert not audit(from_json(Receipt, each), canonical, 1).differences
