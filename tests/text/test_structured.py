"""Texts under a JSON schema, an expression or a grammar: their tokens, and what is rejected."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

import castiron
from castiron.pipelines.engine.constraint import Constraint, ConstraintError
from castiron.pipelines.engine.draft import CallCosts
from castiron.pipelines.engine.sampling import Sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.grammar import GrammarError
from castiron.pipelines.text.tokenizer import Tokenizer, load_tokenizer
from castiron.vmfb.run.session import Batch, Session
from tests.support import schemas, structured
from tests.support.generating import Generation

path, model = structured.path, structured.model
# All texts of a language, so that a test needs no parser to know the allowed tokens.
WORDS = (
    "cats are small",
    "cats bark",
    "dogs bark loudly and long",
    "do",
    "dogs are 10",
    "dogs are 11",
    "dogs are 10 years old",
)
REGEX = "|".join(WORDS)


@pytest.fixture(scope="module")
def text(path):
    return load_tokenizer(path)


def likeliest(path, text, prompt: str) -> str:
    """Return the text of WORDS that greedy choices among the allowed tokens lead to."""
    session, generated = Session(path, 1), ""
    session.prefill(text.encode(prompt))
    while True:
        nexts = {
            text.backend.token_to_id(word[len(generated)]) for word in WORDS if word.startswith(generated) and word != generated
        }
        ids = sorted(nexts | ({text.eos[0]} if generated in WORDS else set()))
        if ids in ([], [text.eos[0]]):
            return generated
        best = ids[int(session.logits()[ids].argmax())]
        if best == text.eos[0]:
            return generated
        generated += text.backend.id_to_token(best)
        session.step(best)


PROMPTS = ["Hello", "Why is the sky blue?", "a", "To be, or not to be", "0", "[]", "Zz"]


def test_chooses_the_most_probable_allowed_token(path, model, text):
    expected = [likeliest(path, text, prompt) for prompt in PROMPTS]
    assert len(set(expected)) > 1, "the model has to choose"
    assert [model.generate(prompt, regex=REGEX).text for prompt in PROMPTS] == expected
    results = model.generate(PROMPTS, regex=REGEX)
    assert [result.text for result in results] == expected and {r.finish_reason for r in results} == {"stop"}
    gbnf = "root ::= " + " | ".join(json.dumps(word) for word in WORDS)
    assert [r.text for r in model.generate(PROMPTS, grammar=gbnf)] == expected
    assert [r.text for r in model.generate(PROMPTS, grammar=gbnf.replace("root ::=", "start:"))] == expected


def test_speculation_proposes_allowed_tokens_only(path, text, monkeypatch):
    checked = []
    real = Session.verify
    monkeypatch.setattr(Session, "verify", lambda self, tokens: checked.append(list(tokens)) or real(self, tokens))
    # Verify calls cost as much as a step, so every proposal is checked.
    monkeypatch.setattr(CallCosts, "of", lambda self, width: 1.0)
    monkeypatch.setattr(CallCosts, "known", True)
    grammar = text.grammar(regex="([ab]{2,3}, [0-9]{2}; ){5}")
    prompt = text.encode("".join(f"{letters}, {digit}z; " for digit, letters in enumerate(["aa", "ab", "ba", "bb", "aa"] * 2)))
    generated = []
    for speculate in (False, True):
        generation = Generation(Session(path, 1), prompt, text=text, grammar=grammar, speculate=speculate)
        generated.append(("".join(generation.stream()), generation.finish_reason))
        assert generation.session.position <= len(prompt) + len(generation.tokens) - 1
    assert generated[0] == generated[1] and generated[0][0].count(";") == 5
    assert checked and not any(text.decode(tokens[1:2]) == "z" for tokens in checked)
    assert generation.speculator.accepted


def test_forced_tokens_are_read_together(model, path, text, monkeypatch):
    steps = []
    monkeypatch.setattr(Session, "step", lambda self, token: pytest.fail(f"a step for {token}"))
    monkeypatch.setattr(Batch, "step", lambda self, tokens: steps.append(tokens) or pytest.fail("a step of the batch"))
    word = "this is certain and read at once"
    result = model.generate("Hello", regex=word)
    assert (result.text, result.finish_reason, len(result.tokens)) == (word, "stop", len(word))
    monkeypatch.undo()
    calls = []
    real = Session.prefill
    monkeypatch.setattr(
        Session, "prefill", lambda self, tokens, **more: calls.append(len(tokens)) or real(self, tokens, **more)
    )
    generation = Generation(Session(path, 1), text.encode("Hello"), text=text, grammar=text.grammar(regex=f"{word}[ab]"))
    assert "".join(generation.stream())[:-1] == word and calls == [5, len(word)]


def test_sampled_texts_fit_and_stop_strings_and_limits_end_them(model):
    texts = {model.generate("Hi", json_schema=structured.PERSON, temperature=1.5, seed=seed).text for seed in range(5)}
    assert len(texts) == 5
    for generated in texts:
        jsonschema.validate(json.loads(generated), structured.PERSON)
    cut = model.generate("Hi", json_schema=structured.PERSON, max_tokens=6)
    assert (cut.text, cut.finish_reason) == ('{"name', "length")
    cut = model.generate("Hi", json_schema=structured.PERSON, stop_strings='e":')
    assert (cut.text, cut.finish_reason) == ('{"nam', "stop")
    assert model.generate("Hi", regex="abc", max_tokens=3).finish_reason == "stop", "the text is complete"
    assert model.generate("Hi", regex="[ab]{4}", stop_tokens=()).finish_reason == "stop", "no token can follow"


@settings(max_examples=60, deadline=None)
@given(schemas.schemas(), st.integers(0, 1000))
def test_text_under_a_schema_is_valid(schema, seed):
    text = schemas.TEXT
    generated, end = schemas.generate_text(text, text.grammar(json_schema=schema), seed)
    if end == "stop":
        jsonschema.validate(json.loads(generated), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("keyword", schemas.LACKING)
def test_rejects_an_unsupported_keyword(keyword):
    with pytest.raises(GrammarError, match=f'"{keyword}" cannot be honoured'):
        schemas.TEXT.grammar(json_schema={"properties": {"a": {keyword: schemas.LACKING[keyword]}}})


@pytest.mark.parametrize(
    ("asked", "error_message"),
    [
        ({"json_schema": {"type": "string", "format": "phone"}}, 'json schema: the format "phone" cannot be honoured'),
        ({"json_schema": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, '"oneOf" cannot be honoured where more than one'),
        ({"json_schema": {"type": "string", "pattern": "(?!a)b"}}, 'a "pattern" cannot be honoured: look-around'),
        ({"json_schema": {"$ref": "#/$defs/x"}}, r'a "\$ref" leads to #/\$defs/x'),
        ({"json_schema": {"$ref": "https://example.com/x"}}, "leads to https://example.com/x, which is not part"),
        ({"json_schema": {"type": "strin"}}, "json schema: Invalid type: strin"),
        ({"json_schema": False}, "json schema: Unsatisfiable"),
        ({"regex": "(a"}, "regex: unclosed group"),
        ({"regex": r"(a)\1"}, "regex: backreferences are not supported"),
        ({"grammar": "root ::= foo"}, "grammar: Rule 'foo' not found"),
        ({"grammar": "start: FOO"}, 'grammar: .*unknown name: "FOO"'),
        ({}, "give one of"),
        ({"regex": "a", "grammar": "start: A"}, "give one of"),
    ],
)  # fmt: skip
def test_rejects_an_unsupported_grammar_in_one_line(asked, error_message):
    with pytest.raises(PipelineError, match=error_message) as error:
        schemas.TEXT.grammar(**asked)
    assert "\n" not in str(error.value)


def test_lookahead_of_an_endless_forced_text_is_limited():
    """Other requests wait while it runs."""
    assert len(schemas.TEXT.grammar(regex="((a{1000}){1000}){1000}").constraint().forced) < 250_000
    values = [f"value {i * 7919} of {i}" for i in range(20_000)]
    assert schemas.TEXT.grammar(json_schema={"enum": values}).constraint().mask(300).any()


THINKS = (("<think>", "</think>"),)


def test_a_grammar_starts_after_the_reasoning():
    """The prompt or the model may start the reasoning; the prompt may also have ended it."""
    tokenizer = schemas.tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    text = Tokenizer(tokenizer, eos=(0,))
    ids = lambda words: text.backend.encode(words, add_special_tokens=False).ids
    grammar = text.grammar(regex="yes|no")
    for prompt, words in (("<think>\n", "hm, what?</think>"), ("", "<think>hm, what?</think>"), ("", ""), ("</think>\n\n", "")):
        constraint = grammar.constraint(THINKS, prompt)
        for token in ids(words):
            assert constraint.allows(token) and not constraint.done
            constraint.accept(token)
        assert not constraint.allows(ids("h")[0]) and constraint.allows(ids("y")[0])
        assert constraint.allows(ids("<think>")[0]) == (words == prompt == "")
        constraint.accept(ids("n")[0])
        assert list(constraint.forced) == ids("o")
        constraint.accept(ids("o")[0])
        assert constraint.done


def test_a_mask_allows_only_fitting_tokens():
    constraint: Constraint = schemas.TEXT.grammar(regex="[ab]").constraint()
    logits = np.zeros(300, np.float32)
    allowed = np.flatnonzero(constraint.masked(logits) == 0)
    assert [schemas.TEXT.grammars.tokens[i] for i in allowed] == [b"a", b"b"] and constraint.masked(logits).dtype == np.float32
    # An error of the request, not of the model.
    with pytest.raises(ConstraintError, match="no allowed next token in the grammar"):
        constraint.accept(0)


def test_a_vocabulary_has_the_bytes_of_every_token_of_the_model(text):
    assert len(text.vocabulary) == 211 and text.vocabulary[3] == b" "
    assert text.grammars.tokens == text.vocabulary and text.grammars.special == (0, 1, 2)


def test_continues_a_text_without_a_leading_space():
    vocab = {"<unk>": 0, "▁a": 1, "a": 2, "▁": 3, "b": 4, "</s>": 5}
    found = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    found.add_special_tokens(["</s>"])
    text = Tokenizer(found, eos=(5,))
    assert text.encode("ab") == [1, 4] and text.grammars.encode("ab a") == [2, 4, 1]
    assert list(text.grammar(regex="ab a").constraint().forced) == [2, 4, 1]


def test_rejects_text_that_the_vocabulary_has_no_bytes_for(text):
    with pytest.raises(GrammarError, match="no tokens of this model spell '€'"):
        text.grammar(json_schema={"description": "in ¥", "enum": ["1", {"x": ["1 €"]}]})
    assert text.grammar(json_schema={"description": "in €", "enum": ["1"]})


def test_ignores_keywords_that_constrain_nothing(text):
    idle = {"type": "object", "properties": {"uniqueItems": {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": False, "maxItems": 1}},
            "propertyNames": {"type": "string"}, "additionalProperties": False, "required": ["uniqueItems"]}  # fmt: skip
    assert schemas.generate_text(text, text.grammar(json_schema={"anyOf": [idle]}), 1)[0] in (
        '{"uniqueItems": []}',
        '{"uniqueItems": ["a"]}',
    )
    with pytest.raises(GrammarError, match='"propertyNames" cannot be honoured'):
        text.grammar(json_schema={**idle, "propertyNames": {"maxLength": 3}})


def test_a_vocabulary_without_an_end_ends_where_the_grammar_does():
    text = Tokenizer(schemas.tokenizer())
    assert schemas.generate_text(text, text.grammar(regex="ab|cd"), 1)[1] == "stop"
    assert schemas.generate_text(text, text.grammar(json_schema=True), 1)[1] == "stop"
    assert schemas.generate_text(text, text.grammar(regex="[ab]+"), 1, 20)[1] == "length"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=2, seed=5)], ids=["greedy", "sampled"])
def test_logprobs_do_not_change_tokens(path, text, sampling):
    """With logprobs also forced tokens are computed; these use no random numbers."""
    grammar, generated = text.grammar(regex="one [a-z]{3} two [a-z]{3} three"), []
    for top in (None, 2):
        request = castiron.text_request(text.encode("Hi"), 126, text, grammar=grammar, top_logprobs=top, sampling=sampling)
        events = [event for _, event in castiron.Engine(path, 1).submit(request)]
        probabilities = [token.logprob for event in events for token in getattr(event, "tokens", ())]
        assert len(probabilities) == len(request.tokens) and all((p is None) == (top is None) for p in probabilities)
        generated.append(request.tokens)
    assert generated[0] == generated[1]
