"""Texts that hold to a schema, an expression or a grammar: what is chosen, what is not computed, what is refused."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

import castiron
from castiron.pipelines import cli
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.constraint import CannotFollow, Constraint
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.grammar import GrammarError
from castiron.pipelines.generation.sampling import Sampler, Sampling
from castiron.pipelines.generation.speculate import Costs
from castiron.pipelines.generation.text import Text, load_text
from castiron.pipelines.generation.vocabulary import Vocabulary
from castiron.vmfb.batch import Batch
from castiron.vmfb.session import Session
from tests.pipelines import schemas, served
from tests.pipelines.toy_text import read_json

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Every text of a language, so that a test knows without a parser what may come next.
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
def path(tmp_path_factory):
    return served.bundle(tmp_path_factory.getbasetemp() / "structured", (4,))


@pytest.fixture(scope="module")
def model(path):
    with castiron.load(path, threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def text(path):
    return load_text(path)


def likeliest(path, text, prompt: str) -> str:
    """Of WORDS the one that the highest logit of all that may come next leads to, token by token; the lowest id of equals."""
    session, said = Session(path, 1), ""
    session.prefill(text.encode(prompt))
    while True:
        nexts = {text.tokenizer.token_to_id(word[len(said)]) for word in WORDS if word.startswith(said) and word != said}
        ids = sorted(nexts | ({text.eos[0]} if said in WORDS else set()))
        if ids in ([], [text.eos[0]]):
            return said
        best = ids[int(session.logits()[ids].argmax())]
        if best == text.eos[0]:
            return said
        said += text.tokenizer.id_to_token(best)
        session.step(best)


PROMPTS = ["Hello", "Why is the sky blue?", "a", "To be, or not to be", "0", "[]", "Zz"]


def test_the_likeliest_of_what_is_allowed_is_said_alone_and_together(path, model, text):
    expected = [likeliest(path, text, prompt) for prompt in PROMPTS]
    assert len(set(expected)) > 1, "the model has to choose"
    assert [model.generate(prompt, regex=REGEX).text for prompt in PROMPTS] == expected
    results = model.generate(PROMPTS, regex=REGEX)
    assert [result.text for result in results] == expected and {r.finish_reason for r in results} == {"stop"}
    gbnf = "root ::= " + " | ".join(json.dumps(word) for word in WORDS)
    assert [r.text for r in model.generate(PROMPTS, grammar=gbnf)] == expected
    assert [r.text for r in model.generate(PROMPTS, grammar=gbnf.replace("root ::=", "start:"))] == expected


def test_speculation_says_the_same_and_proposes_nothing_that_is_forbidden(path, text, monkeypatch):
    checked = []
    real = Session.verify
    monkeypatch.setattr(Session, "verify", lambda self, tokens: checked.append(list(tokens)) or real(self, tokens))
    # As if a pass over several tokens cost what a step does, so that it is tried wherever there is a proposal.
    monkeypatch.setattr(Costs, "of", lambda self, width: 1.0)
    monkeypatch.setattr(Costs, "known", True)
    grammar = text.grammar(regex="([ab]{2,3}, [0-9]{2}; ){5}")
    prompt = text.encode("".join(f"{letters}, {digit}z; " for digit, letters in enumerate(["aa", "ab", "ba", "bb", "aa"] * 2)))
    said = []
    for speculate in (False, True):
        generation = Generation(Session(path, 1), prompt, text=text, grammar=grammar, speculate=speculate)
        said.append(("".join(generation.stream()), generation.finish_reason))
        assert generation.session.position <= len(prompt) + len(generation.tokens) - 1
    assert said[0] == said[1] and said[0][0].count(";") == 5
    assert checked and not any(text.decode(tokens[1:2]) == "z" for tokens in checked)
    assert generation.speculator.accepted


def test_forced_tokens_are_read_together(model, path, text, monkeypatch):
    steps = []
    monkeypatch.setattr(Session, "step", lambda self, token: pytest.fail(f"a step for {token}"))
    monkeypatch.setattr(Batch, "step", lambda self, tokens: steps.append(tokens) or pytest.fail("a step of the batch"))
    word = "this is certain before it is said"
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


def test_tokens_and_their_probabilities_are_the_same_where_these_are_asked_for(model, path, text):
    """Then nothing is skipped: the model says what it would have thought of every token."""
    said = {}
    for top in (None, 2):
        sequence = castiron.Sequence(text.encode("Hi"), 126, text=text, top_logprobs=top, grammar=text.grammar(regex="sure[0-9]+x"),
                                     max_tokens=9)  # fmt: skip
        scheduler = castiron.Scheduler(path, 1)
        scheduler.submit(sequence)
        events = []
        while not scheduler.idle:
            events += [event for _, event in scheduler.turn()]
        said[top] = sequence.tokens
        probabilities = [token.logprob for event in events for token in getattr(event, "tokens", ())]
        assert len(probabilities) == len(sequence.tokens) and all((p is None) == (top is None) for p in probabilities)
    assert said[None] == said[2]


def test_drawn_texts_hold_too_and_stop_strings_and_limits_end_them(model):
    texts = {model.generate("Hi", json_schema=PERSON, temperature=1.5, seed=seed).text for seed in range(5)}
    assert len(texts) == 5
    for said in texts:
        jsonschema.validate(json.loads(said), PERSON)
    cut = model.generate("Hi", json_schema=PERSON, max_tokens=6)
    assert (cut.text, cut.finish_reason) == ('{"name', "length")
    cut = model.generate("Hi", json_schema=PERSON, stop_strings='e":')
    assert (cut.text, cut.finish_reason) == ('{"nam', "stop")
    assert model.generate("Hi", regex="abc", max_tokens=3).finish_reason == "stop", "whole is whole"
    assert model.generate("Hi", regex="[ab]{4}", stop_tokens=()).finish_reason == "stop", "there is nothing to go on with"


@settings(max_examples=60, deadline=None)
@given(schemas.schemas(), st.integers(0, 1000))
def test_whatever_is_said_under_a_schema_is_valid(schema, seed):
    text = schemas.TEXT
    said, end = schemas.say(text, text.grammar(json_schema=schema), seed)
    if end == "stop":
        jsonschema.validate(json.loads(said), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("keyword", schemas.LACKING)
def test_a_keyword_that_cannot_be_honoured_is_named(keyword):
    with pytest.raises(GrammarError, match=f'"{keyword}" cannot be honoured'):
        schemas.TEXT.grammar(json_schema={"properties": {"a": {keyword: schemas.LACKING[keyword]}}})


@pytest.mark.parametrize(
    ("asked", "says"),
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
def test_what_cannot_be_honoured_is_one_sentence(asked, says):
    with pytest.raises(PipelineError, match=says) as error:
        schemas.TEXT.grammar(**asked)
    assert "\n" not in str(error.value)


def test_a_schema_that_is_no_object():
    assert schemas.say(schemas.TEXT, schemas.TEXT.grammar(json_schema=True), 1)[1] == "stop"


def test_a_text_that_is_forced_for_ever_is_looked_ahead_so_far():
    """It is done while others wait for the step."""
    assert len(schemas.TEXT.grammar(regex="((a{1000}){1000}){1000}").constraint().forced) < 250_000
    values = [f"value {i * 7919} of {i}" for i in range(20_000)]
    assert schemas.TEXT.grammar(json_schema={"enum": values}).constraint().mask(300).any()


THINKS = (("<think>", "</think>"),)


def test_thoughts_come_before_what_the_grammar_holds():
    """Whether the prompt has begun them or the model may; and not where the prompt has ended them."""
    tokenizer = schemas.tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    text = Text(tokenizer, eos=(0,))
    ids = lambda words: text.tokenizer.encode(words, add_special_tokens=False).ids
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


def test_a_mask_forbids_all_but_what_is_allowed():
    constraint: Constraint = schemas.TEXT.grammar(regex="[ab]").constraint()
    logits = np.zeros(300, np.float32)
    allowed = np.flatnonzero(constraint.masked(logits) == 0)
    assert [schemas.TEXT.grammars.tokens[i] for i in allowed] == [b"a", b"b"] and constraint.masked(logits).dtype == np.float32
    # A request's fault, and no failure of the model.
    with pytest.raises(CannotFollow, match="cannot be followed"):
        constraint.accept(0)


@given(st.lists(st.binary(max_size=9), max_size=20), st.sets(st.integers(0, 19)))
def test_a_vocabulary_comes_back_as_it_was_written(tokens, special):
    written = Vocabulary(tokens, tuple(sorted(i for i in special if i < len(tokens))))
    assert Vocabulary.read(bytes(written)) == written


def test_a_bundle_holds_the_bytes_of_its_vocabulary(path, text):
    found = Vocabulary.read((path / "vocabulary.bin").read_bytes())
    assert found == Vocabulary.of(text.tokenizer, 211) and found.special == (0, 1, 2) and found.tokens[3] == b" "
    assert text.grammars.tokens == found.tokens


def test_a_tokenizer_that_begins_texts_with_a_space_goes_on_without_one():
    vocab = {"<unk>": 0, "▁a": 1, "a": 2, "▁": 3, "b": 4, "</s>": 5}
    found = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    found.add_special_tokens(["</s>"])
    text = Text(found, eos=(5,))
    assert text.encode("ab") == [1, 4] and text.grammars.encode("ab a") == [2, 4, 1]
    assert list(text.grammar(regex="ab a").constraint().forced) == [2, 4, 1]


def test_a_text_that_the_vocabulary_has_no_bytes_for_is_refused(text):
    with pytest.raises(GrammarError, match="no bytes for '€'"):
        text.grammar(json_schema={"description": "in ¥", "enum": ["1", {"x": ["1 €"]}]})
    assert text.grammar(json_schema={"description": "in €", "enum": ["1"]})


def test_keywords_that_ask_for_nothing_are_passed_over(text):
    idle = {"type": "object", "properties": {"uniqueItems": {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": False, "maxItems": 1}},
            "propertyNames": {"type": "string"}, "additionalProperties": False, "required": ["uniqueItems"]}  # fmt: skip
    assert schemas.say(text, text.grammar(json_schema={"anyOf": [idle]}), 1)[0] in (
        '{"uniqueItems":[]}',
        '{"uniqueItems":["a"]}',
    )
    with pytest.raises(GrammarError, match='"propertyNames" cannot be honoured'):
        text.grammar(json_schema={**idle, "propertyNames": {"maxLength": 3}})


def test_a_vocabulary_without_an_end_ends_where_the_grammar_does():
    text = Text(schemas.tokenizer())
    assert schemas.say(text, text.grammar(regex="ab|cd"), 1)[1] == "stop"
    assert schemas.say(text, text.grammar(regex="[ab]+"), 1, 20)[1] == "length"


@pytest.fixture(scope="module")
def client(path, tmp_path_factory):
    with served.served(path, tmp_path_factory.mktemp("serve") / "log") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
            yield found
        assert "Traceback" not in server.errors, server.errors


def ask(client, **more):
    return client.chat.completions.create(model="tiny", messages=served.MESSAGES, **{"temperature": 0, "max_tokens": 90} | more)


def test_openais_client_gets_its_schema(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    whole = ask(client, response_format=form, n=2)
    expected = model.chat(served.MESSAGES, json_schema=PERSON, max_tokens=90)
    assert [(c.message.content, c.finish_reason) for c in whole.choices] == [(expected.text, "stop")] * 2
    chunks = list(ask(client, response_format=form, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    drawn = ask(client, response_format=form, temperature=1.5, seed=4, logprobs=True).choices[0]
    jsonschema.validate(json.loads(drawn.message.content), PERSON)
    assert "".join(token.token for token in drawn.logprobs.content) == drawn.message.content
    assert ask(client, response_format={"type": "json_object"}, max_tokens=12).choices[0].message.content[0] == "{"
    cut = ask(client, response_format=form, max_tokens=4).choices[0]
    assert (cut.message.content, cut.finish_reason) == ('{"na', "length")
    assert ask(client, extra_body={"regex": "ab|cd"}).choices[0].message.content in ("ab", "cd")
    said = client.completions.create(model="tiny", prompt="x", extra_body={"grammar": 'root ::= "ab" | "cd"'}).choices[0]
    assert said.text in ("ab", "cd") and said.finish_reason == "stop"


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"choice": ["a.b (c)|*", '"d\\']}},
        {"structured_outputs": {"json": {"enum": ["x"]}}},
        {"structured_outputs": {"json": '{"enum": ["x"]}'}},
        {"structured_outputs": {"regex": "ab|cd"}},
        {"structured_outputs": {"grammar": 'root ::= "ab" | "cd"'}},
        {"guided_choice": ["ab", "cd"]},
        {"guided_json": {"enum": ["x"]}},
        {"guided_regex": "ab|cd"},
        {"guided_grammar": 'start: "ab" | "cd"'},
        {"json_schema": {"enum": ["x"]}},
        {"response_format": {"type": "json_object", "schema": {"enum": ["x"]}}},
        {"response_format": {"type": "json_schema", "schema": {"enum": ["x"]}}},
    ],
)
def test_forms_are_asked_for_as_vllm_and_llama_cpp_have_it(client, body):
    answer = ask(client, extra_body=body).choices[0]
    assert answer.message.content in ("ab", "cd", '"x"', "a.b (c)|*", '"d\\') and answer.finish_reason == "stop"


def test_openais_client_parses_into_a_class(client):
    from pydantic import BaseModel

    class Pair(BaseModel):
        one: bool
        two: int | None

    answer = client.chat.completions.parse(
        model="tiny", messages=served.MESSAGES, response_format=Pair, max_tokens=90, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Pair) or answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"contains": {}}}}}, "response_format",
         '"contains" cannot be honoured'),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "goes with the type"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema", "goes with"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"grammar": "root ::= x"}, "grammar", "'x' not found"),
        ({"regex": "a", "grammar": "start: A"}, "regex", "give one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex", "give one"),
        ({"guided_json": "{"}, "guided_json", "must be a JSON schema"),
        ({"guided_json": {"not": {}}}, "guided_json", '"not"'),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "goes with"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_honoured_is_a_400(client, body, param, says):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, extra_body=body)
    assert error.value.param == param and says in error.value.message


def test_run_holds_to_a_file(path, tmp_path, capsys):
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    (tmp_path / "words.gbnf").write_text('root ::= "ab" | "cd"\n')
    for option, value in (
        ("--json-schema", tmp_path / "person.json"),
        ("--grammar", tmp_path / "words.gbnf"),
        ("--regex", "ab|cd"),
    ):
        assert cli.main(["run", str(path), "Hello", option, str(value), "--json"]) == 0
        answer = read_json(capsys.readouterr().out)
        assert answer["finish_reason"] == "stop"
        assert answer["text"] in ("ab", "cd") or jsonschema.validate(json.loads(answer["text"]), PERSON) is None
    (tmp_path / "person.json").write_text("{")
    assert cli.main(["run", str(path), "Hello", "--json-schema", str(tmp_path / "person.json")]) == 1
    assert "is not JSON" in capsys.readouterr().err


def test_sampling_draws_the_same_with_and_without_what_is_forced(path, text):
    """A token that is forced costs no random number, whoever reads it."""
    grammar = text.grammar(regex="one [a-z]{3} two [a-z]{3} three")
    said = []
    for top in (None, 0):
        sampler = Sampler(Sampling(temperature=2, seed=5))
        sequence = castiron.Sequence(text.encode("Hi"), 126, text=text, grammar=grammar, top_logprobs=top, sampler=sampler)
        scheduler = castiron.Scheduler(path, 1)
        scheduler.submit(sequence)
        while not scheduler.idle:
            scheduler.turn()
        said.append(sequence.tokens)
    assert said[0] == said[1]
