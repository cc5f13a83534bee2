"""Random JSON schemas, and texts generated under them from random logits."""

from __future__ import annotations

import numpy as np
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from castiron.pipelines.engine.sampling import Sampler, Sampling
from castiron.pipelines.text.text_output import text_request
from castiron.pipelines.text.tokenizer import Tokenizer, byte_alphabet

NAMES = st.sampled_from(["name", "id", "a b", 'qu"ote', "é", "$", "list", "sub"])
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6)
SCALARS = st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(-1e6, 1e6).map(lambda x: round(x, 3)) | WORDS
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(NAMES, v, max_size=2), max_leaves=4)
# What llguidance lacks, with something that it says.
LACKING = {
    "not": {"type": "null"}, "contains": {}, "uniqueItems": True, "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]}, "if": {}, "unevaluatedProperties": False, "dependentSchemas": {},
}  # fmt: skip


def bounded(low: str, high: str, numbers: st.SearchStrategy) -> st.SearchStrategy:
    """Return a strategy for a lower and an upper limit, an upper limit only, or none."""
    both = st.tuples(numbers, numbers).map(sorted).map(lambda pair: {low: pair[0], high: pair[1]})
    return both | numbers.map(lambda n: {high: n}) | st.just({})


def joined(*parts: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(*parts).map(lambda dicts: {name: value for each in dicts for name, value in each.items()})


def typed(name: str) -> st.SearchStrategy:
    return st.just({"type": name})


STRINGS = joined(typed("string"), bounded("minLength", "maxLength", st.integers(0, 8))) | st.sampled_from([
    {"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": "string", "pattern": "x+y"}, {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"}, {"type": "string", "format": "ipv4"}, {"type": "string", "format": "date-time"},
])  # fmt: skip
NUMBERS = st.one_of(
    joined(typed("integer"), bounded("minimum", "maximum", st.integers(-2000, 2000))),
    joined(typed("number"), bounded("minimum", "maximum", st.integers(-50, 50))),
    joined(typed("integer"), st.sampled_from([{"multipleOf": n} for n in (2, 5, 12)])),
    st.just({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 12}),
)
LEAVES = st.one_of(
    STRINGS, NUMBERS, typed("boolean"), typed("null"), st.lists(VALUES, min_size=1, max_size=4).map(lambda v: {"enum": v}),
    VALUES.map(lambda v: {"const": v}), st.just({"type": ["string", "null"], "maxLength": 3}),
)  # fmt: skip


def _arrays(items: st.SearchStrategy) -> st.SearchStrategy:
    limits = bounded("minItems", "maxItems", st.integers(0, 3))
    prefixed = st.lists(items, min_size=1, max_size=3).map(lambda parts: {"prefixItems": parts, "items": False})
    return joined(typed("array"), st.builds(lambda i: {"items": i}, items), limits) | joined(typed("array"), prefixed)


@st.composite
def _objects(draw, values: st.SearchStrategy) -> dict:
    properties = draw(st.dictionaries(NAMES, values, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    extra = draw(st.sampled_from([False, False, True, {"type": "integer"}]))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": extra}


def schemas() -> st.SearchStrategy:
    """Return a strategy for supported schemas, some of which are recursive."""
    tree = lambda inner: _arrays(inner) | _objects(inner) | st.lists(inner, min_size=1, max_size=3).map(lambda a: {"anyOf": a})
    plain = st.recursive(LEAVES, tree, max_leaves=6)
    chain = {"type": "object", "properties": {"value": {}, "next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}}}
    linked = plain.map(lambda s: {
        "$defs": {"link": {**chain, "properties": {**chain["properties"], "value": s}, "required": ["next"],
                           "additionalProperties": False}}, "$ref": "#/$defs/link"})  # fmt: skip
    return plain | linked


def tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with single bytes and frequent sequences of JSON as tokens."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    tokens = [letters[byte] for byte in range(256)]
    merges, vocab = [], {token: index for index, token in enumerate(["</s>", *tokens])}
    for first, second in [('"', ":"), ('"', ","), ("{", '"'), ('"', "}"), ("}", ","), ("n", "a"), ("na", "m"), ("nam", "e"), ("[", '"'),
                          ("n", "u"), ("l", "l"), ("nu", "ll"), ("0", "0")]:  # fmt: skip
        vocab[first + second] = len(vocab)
        merges.append((first, second))
    found = tokenizers.Tokenizer(models.BPE(vocab, merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["</s>"])
    return found


TEXT = Tokenizer(tokenizer(), eos=(0,))


def generate_text(text: Tokenizer, grammar, seed: int, limit: int = 2000) -> tuple[str, str]:
    """Return a text generated under `grammar` from random logits, and its finish reason.

    An even seed generates greedily.
    """
    random, size = np.random.default_rng(seed), text.backend.get_vocab_size()
    # Tokens that can end JSON are more probable, so that texts stay short.
    bonus = 2.0 * np.array([bool(set(text.grammars.tokens[i]) & set(b'"]},')) or i in text.eos for i in range(size)])
    sampler = Sampler(Sampling(temperature=seed % 2, seed=seed))
    request = text_request([1], limit + 1, text, grammar=grammar, sampling=sampler, max_tokens=limit, stop_tokens=text.eos)
    generated = []
    while request.finish_reason is None:
        logits = (random.normal(size=size) + bonus).astype(np.float32)
        generated += [e.text for e in request.advance(int(logits.argmax()), lambda: logits) if hasattr(e, "text")]
    return "".join(generated), request.finish_reason
