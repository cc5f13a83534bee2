"""The tokenizer and chat templates: text as it streams, rendering as in HF, and its limits."""

from __future__ import annotations

import threading
import time

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text import chat_template
from castiron.pipelines.text.chat_template import reads_tools, render, variables_of
from castiron.pipelines.text.tokenizer import Detokeniser, Tokenizer

SPECIAL = "<|end|>"


def byte_level() -> tokenizers.Tokenizer:
    """Return a tokenizer like GPT-2's: bytes are tokens, and some tokens end inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # E4 BD, the first two bytes of many Chinese characters, and F0 9F, those of emoji.
    merges = [("ä", "½"), ("ð", "Ł"), ("h", "e"), ("Ġ", "t")]
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 2's: words start with ▁, and bytes are a fallback."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


TEXTS = {"byte-level": Tokenizer(byte_level()), "sentencepiece": Tokenizer(sentencepiece())}


def pieces(text: Tokenizer, tokens: list[int]) -> tuple[list[str], str]:
    stream = Detokeniser(text)
    return [stream.add(token) for token in tokens], stream.finish()


CHARACTERS = st.characters(exclude_characters="�▁", exclude_categories=["Cs"])


@given(st.lists(st.integers(0, TEXTS["byte-level"].backend.get_vocab_size() - 1), max_size=30))
def test_pieces_join_to_the_complete_text(tokens):
    text = TEXTS["byte-level"]
    streamed, rest = pieces(text, tokens)
    assert "".join(streamed) + rest == text.decode(tokens)


@given(st.lists(st.one_of(CHARACTERS, st.sampled_from(["a", "b", "▁", "▁a", "▁ab", SPECIAL])), max_size=20))
def test_pieces_join_where_bytes_are_tokens_of_their_own(parts):
    text = TEXTS["sentencepiece"]
    tokens = []
    for part in parts:
        index = text.backend.token_to_id(part)
        tokens += [1 + byte for byte in part.encode()] if index is None else [index]
    streamed, rest = pieces(text, tokens)
    assert "".join(streamed) == text.decode(tokens) and rest == ""


@pytest.mark.parametrize("kind", TEXTS)
@given(st.text(alphabet=st.one_of(st.sampled_from(" abhet\n"), CHARACTERS)))
@example("a你好 👩‍🚀 é")
def test_no_piece_breaks_a_character(kind, words):
    text = TEXTS[kind]
    tokens = text.backend.encode(words, add_special_tokens=False).ids
    streamed, rest = pieces(text, tokens)
    assert not any("�" in piece for piece in streamed) and rest == ""
    assert "".join(streamed) == text.decode(tokens)


def test_text_comes_as_soon_as_it_is_certain():
    text = TEXTS["byte-level"]
    ids = [text.backend.token_to_id(token) for token in ("he", "ä½", "ł", "a")]
    assert pieces(text, ids) == (["he", "", "你", "a"], "")
    assert pieces(text, ids[:2]) == (["he", ""], "�")


def test_special_tokens_leave_no_trace_and_do_not_eat_a_space():
    text = TEXTS["sentencepiece"]
    a, end = text.backend.token_to_id("▁a"), text.backend.token_to_id(SPECIAL)
    assert pieces(text, [a, end, a, end]) == (["a", "", " a", ""], "")


HELLO = [{"role": "user", "content": "Hi"}]
PLAIN = "{{ messages[0].content }}{{ tools }}{{ thinking }}"
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
    "reasoning": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }};{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}"
    "{{ ns.n }} {{ strftime_now('%Y') }} {{ {'b': [1, 'é'], 'a': none} | tojson(indent=2) }}{{ tools is none }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name):
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    answers = [{"role": "assistant", "content": "", name: name} for name in ("reasoning_content", "thinking", "reasoning")]
    for messages in (MESSAGES, MESSAGES[1:2], [*answers, answers[0] | answers[1]]):
        expected, _ = render_jinja_template(
            conversations=[messages], chat_template=TEMPLATES[name], add_generation_prompt=True, **special
        )
        assert render(TEMPLATES[name], messages, special_tokens=special) == expected[0]


@pytest.mark.parametrize(
    ("template", "error_message"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('\x1b[2J' * 999) }}", "x1b"),
        ("{{ messages[0].update(role='x') }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe|undefined"),
        ("{% for a in range(10**9) %}{% endfor %}", "too big"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "not valid Jinja"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_a_failing_or_hostile_template_is_one_line(template, error_message):
    messages = [dict(message) for message in HELLO]
    with pytest.raises(PipelineError, match=error_message) as error:
        render(template, messages)
    assert str(error.value).isprintable() and len(str(error.value)) < 300 and messages == HELLO


def test_variables_of_a_template_are_found():
    assert render(PLAIN, HELLO, thinking=1) == "HiNone1"
    assert variables_of(PLAIN) == ["thinking"] and reads_tools(PLAIN)
    assert variables_of("{% if %}") == [] and not reads_tools("{% if %}")


def test_messages_cannot_make_a_template_render_without_end(monkeypatch):
    quadratic = "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}"
    many = HELLO * 20_000
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    start = time.thread_time()
    with pytest.raises(PipelineError, match="longer than 0.3 s; send fewer messages"):
        render(quadratic, many)
    assert time.thread_time() - start < 2
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1000)
    with pytest.raises(PipelineError, match="exceeds 1000 characters"):
        render(quadratic, many)


def test_renders_any_text_in_threads():
    assert render(PLAIN, [{"role": "user", "content": "\ud800é"}]) == "\ud800éNone"
    found = {}
    ask = lambda n: found.update({n: [render(PLAIN, [{"content": f"{n} {i}"}]) for i in range(20)]})
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == {n: [f"{n} {i}None" for i in range(20)] for n in range(4)}


def test_rejects_a_prompt_with_lone_surrogates():
    with pytest.raises(PipelineError, match="UTF-8"):
        TEXTS["byte-level"].encode("caf\udce9")


def test_a_missing_template_names_the_remedy():
    with pytest.raises(PipelineError, match="--raw"):
        TEXTS["byte-level"].encode_chat(MESSAGES)


@pytest.mark.parametrize(("expression", "unknown"), [("(x+)+$", "<unk>"), ("x", "none")])
def test_reports_a_text_that_the_tokenizer_fails_on(expression, unknown):
    """The library panics, or raises a bare Exception; other texts are still encoded."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(expression), "isolated")
    text = Tokenizer(tokenizer, "{{ messages[0].content }}")
    for generated in (text.encode, lambda words: text.encode_chat([{"role": "user", "content": words}]), text.offsets):
        for words in ("x" * 40 + "b", "x" * 30_000 + "b"):
            assert len(generated("a")) == 1
            with pytest.raises(PipelineError, match="the model's tokenizer fails on this text") as error:
                generated(words)
            assert len(str(error.value)) < 300
