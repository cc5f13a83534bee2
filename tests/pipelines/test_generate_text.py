"""Text as it streams, and chat templates as HF renders them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.chat_template import render
from castiron.pipelines.generation.text import Detokeniser, Text

SPECIAL = "<|end|>"


def byte_level() -> Tokenizer:
    """Every byte is a token, and some tokens end inside a character, as in GPT-2's tokenizers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # E4 BD, the first two bytes of many Chinese characters, and F0 9F, those of emoji.
    merges = [("ä", "½"), ("ð", "Ł"), ("h", "e"), ("Ġ", "t")]
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: bytes only where no token fits, words that begin with ▁, the first space taken away."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


TEXTS = {"byte-level": Text(byte_level()), "sentencepiece": Text(sentencepiece())}


def pieces(text: Text, tokens: list[int]) -> tuple[list[str], str]:
    stream = Detokeniser(text)
    return [stream.add(token) for token in tokens], stream.finish()


CHARACTERS = st.characters(exclude_characters="�▁", exclude_categories=["Cs"])


@given(st.lists(st.integers(0, TEXTS["byte-level"].tokenizer.get_vocab_size() - 1), max_size=30))
def test_pieces_of_any_tokens_join_to_the_whole(tokens):
    text = TEXTS["byte-level"]
    streamed, rest = pieces(text, tokens)
    assert "".join(streamed) + rest == text.decode(tokens)


@given(st.lists(st.one_of(CHARACTERS, st.sampled_from(["a", "b", "▁", "▁a", "▁ab", SPECIAL])), max_size=20))
def test_pieces_join_where_bytes_are_tokens_of_their_own(parts):
    text = TEXTS["sentencepiece"]
    tokens = []
    for part in parts:
        index = text.tokenizer.token_to_id(part)
        tokens += [1 + byte for byte in part.encode()] if index is None else [index]
    streamed, rest = pieces(text, tokens)
    assert "".join(streamed) == text.decode(tokens) and rest == ""


@pytest.mark.parametrize("kind", TEXTS)
@given(st.text(alphabet=st.one_of(st.sampled_from(" abhet\n"), CHARACTERS)))
@example("a你好 👩‍🚀 é")
def test_no_piece_breaks_a_character(kind, words):
    text = TEXTS[kind]
    tokens = text.tokenizer.encode(words, add_special_tokens=False).ids
    streamed, rest = pieces(text, tokens)
    assert not any("�" in piece for piece in streamed) and rest == ""
    assert "".join(streamed) == text.decode(tokens)


def test_text_comes_as_soon_as_it_is_certain():
    text = TEXTS["byte-level"]
    ids = [text.tokenizer.token_to_id(token) for token in ("he", "ä½", "ł", "a")]
    assert pieces(text, ids) == (["he", "", "你", "a"], "")
    assert pieces(text, ids[:2]) == (["he", ""], "�")


def test_special_tokens_leave_no_trace_and_do_not_eat_a_space():
    text = TEXTS["sentencepiece"]
    a, end = text.tokenizer.token_to_id("▁a"), text.tokenizer.token_to_id(SPECIAL)
    assert pieces(text, [a, end, a, end]) == (["a", "", " a", ""], "")


MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüße 你好"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "  Again  "},
]
TEMPLATES = {
    "chatml": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": "{{ bos_token }}\n  {%- for m in messages %}\n    {% if m.role == 'system' %}\n  sys: {{ m.content | tojson }}\n"
    "    {% else %}\n  {{ m.role }}: {{ m.content | trim }}{{ eos_token }}\n    {% endif %}\n  {% endfor %}\n",
    "controls": "{% for m in messages %}{% if loop.index0 == 2 %}{% continue %}{% endif %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% if loop.index0 == 3 %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}"
    "{{ ns.n }} {{ strftime_now('%Y') }} {{ {'b': [1, 'é'], 'a': none} | tojson(indent=2) }}{{ tools is none }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name):
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for messages in (MESSAGES, MESSAGES[1:2]):
        expected, _ = render_jinja_template(
            conversations=[messages], chat_template=TEMPLATES[name], add_generation_prompt=True, **special
        )
        assert render(TEMPLATES[name], messages, special_tokens=special) == expected[0]


@pytest.mark.parametrize(
    ("template", "says"),
    [("{{ raise_exception('roles must alternate') }}", "roles must alternate"), ("{% if %}", "not valid Jinja"),
     ("{{ ''.__class__.__mro__ }}", "unsafe"), ("{{ messages.append(1) }}", "messages"), ("{{ 1 / 0 }}", "division")],
)  # fmt: skip
def test_a_template_that_fails_or_reaches_out_is_one_sentence(template, says):
    with pytest.raises(PipelineError, match=says) as error:
        render(template, MESSAGES)
    assert "\n" not in str(error.value)


def test_a_prompt_that_is_no_text_is_one_sentence():
    with pytest.raises(PipelineError, match="UTF-8"):
        TEXTS["byte-level"].encode("caf\udce9")


def test_without_a_template_the_way_out_is_named():
    with pytest.raises(PipelineError, match="--raw"):
        TEXTS["byte-level"].encode_chat(MESSAGES)


@pytest.mark.parametrize(("expression", "unknown"), [("(x+)+$", "<unk>"), ("x", "none")])
def test_a_text_that_the_library_gives_up_on_is_one_sentence(expression, unknown):
    """By a panic, which is no Exception, or by an Exception without a class; other texts are read before and after."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(expression), "isolated")
    text = Text(tokenizer, "{{ messages[0].content }}")
    for said in (text.encode, lambda words: text.encode_chat([{"role": "user", "content": words}]), text.offsets):
        for words in ("x" * 40 + "b", "x" * 30_000 + "b"):
            assert len(said("a")) == 1
            with pytest.raises(PipelineError, match="the model's tokenizer does not take this text") as error:
                said(words)
            assert len(str(error.value)) < 300
