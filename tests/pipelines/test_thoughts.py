"""What a reasoning model thinks is told apart from what it says: the marks, pieces, chats, terminals, answers over HTTP."""

from __future__ import annotations

import hashlib
import io
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tokenizers import AddedToken, Tokenizer

from castiron.pipelines import cli
from castiron.pipelines.commands.spoken import Spoken
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.chat import Chat
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.sequence import Sequence, Token
from castiron.pipelines.generation.text import Text, load_text
from castiron.pipelines.generation.thoughts import Thought, Thoughts, marks_of
from castiron.pipelines.serve.app import open_app
from castiron.vmfb.bundle import open_bundle
from tests.pipelines import toy_text
from tests.pipelines.toy_text import read_json

THINK = (("<think>", "</think>"),)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}a{% if enable_thinking is defined and enable_thinking is false %}<think></think>"
    "{% endif %}{% endif %}"
)


def told(text: str, pieces: list[int], prompt: str = "", marks=THINK) -> tuple[str, str]:
    """Thoughts and answer of `text` that comes in pieces of these sizes."""
    seen, found, start = Thoughts(marks, prompt), [], 0
    for size in pieces:
        found += seen.add(text[start : start + size])
        start += size
    found += seen.add(text[start:]) + seen.finish()
    thoughts = [piece for piece in found if isinstance(piece, Thought)]
    assert found[: len(thoughts)] == thoughts, "thoughts come first"
    return "".join(thoughts), "".join(found[len(thoughts) :])


PIECES = st.lists(st.integers(1, 5), max_size=40)
WORDS = st.text("<>/think ab\n", max_size=20)


@given(WORDS.filter(lambda t: "</think>" not in t), WORDS, PIECES, st.booleans())
@example("a", " <think>b</think>", [1] * 30, False)
def test_thoughts_and_answer_are_told_apart_however_they_come(thoughts, answer, pieces, begun):
    text = f"{'' if begun else '<think>'}{thoughts}</think>{answer}"
    # A mark may also become whole across the seam.
    cut = f"{thoughts}</think>".index("</think>")
    thoughts, answer = thoughts[:cut], (f"{thoughts}</think>{answer}")[cut + len("</think>") :]
    assert told(text, pieces, "user: hi\n<think>\n" if begun else "hi") == (thoughts.strip(), answer.lstrip())


@given(WORDS.filter(lambda t: not t.lstrip().startswith("<think>")), PIECES)
def test_text_without_thoughts_at_its_beginning_is_left_as_it_is(text, pieces):
    assert told(text, pieces) == ("", text)
    assert told(text, pieces, marks=()) == ("", text)
    assert told(text, pieces, "hi <think>\n\n</think>\n\n") == ("", text), "the prompt has closed them"


def test_thoughts_that_never_end_are_thoughts():
    assert told("<think> a b ", [3]) == ("a b", "") == told("a b</thin"[:3], [1], "<think>")
    assert told("a</thin", [2], "<think>") == ("a</thin", "")


def test_nothing_is_held_back_that_cannot_be_a_mark():
    seen = Thoughts(THINK)
    assert seen.add("<thi") == [] and seen.add("nk>\nso") == [Thought("so")] and seen.add(" far") == [Thought(" far")]
    assert seen.add(" </") == [] and seen.add("b") == [Thought(" </b")] and seen.add("</think>\n\nYes") == ["Yes"]
    assert seen.add(" </think>") == [" </think>"]


@pytest.mark.parametrize(
    ("template", "tokens", "marks"),
    [
        ("{{ content.split('</think>')[-1] }}", [], THINK),
        ("", ["<think>", "</think>", "<s>"], THINK),
        ("", ["[THINK]", "[/THINK]"], (("[THINK]", "[/THINK]"),)),
        ("", ["<|START_THINKING|>", "<|END_THINKING|>"], (("<|START_THINKING|>", "<|END_THINKING|>"),)),
        ("<seed:think></seed:think>", [], (("<seed:think>", "</seed:think>"),)),
        ("{{ messages }} </s>", ["<s>", "</s>", "</tool_call>"], ()),
    ],
)
def test_the_template_and_the_vocabulary_name_the_marks(template, tokens, marks):
    assert marks_of(template, tokens) == marks


def thinking_tokenizer(special: bool) -> Tokenizer:
    """The toy's, where b and d stand for the marks."""
    described = json.loads(toy_text.tokenizer().to_str())
    vocab = described["model"]["vocab"]
    vocab["<think>"], vocab["</think>"] = vocab.pop("b"), vocab.pop("d")
    found = Tokenizer.from_str(json.dumps(described))
    found.add_tokens([AddedToken(mark, special=special) for mark in ("<think>", "</think>")])
    if special:
        found.add_special_tokens([AddedToken(mark, special=True) for mark in ("<think>", "</think>")])
    return found


class Saying:
    """A session that says what it is told to say, whatever it reads."""

    def __init__(self, tokens: list[int]):
        self.context, self.position, self.tokens, self.fed = 200, 0, tokens, []

    def prefill(self, tokens, progress=None) -> int:
        self.position += len(tokens)
        self.fed += tokens
        self.said = -1
        return self.step(None)

    def step(self, token) -> int:
        self.position += token is not None
        self.said += 1
        return self.tokens[self.said]

    def logits(self):
        raise AssertionError("greedy")

    def keep(self) -> None:
        pass

    def rewind(self, position: int) -> None:
        self.position = position

    def reachable(self, position: int) -> int:
        return position


def ids(text: Text, words: str) -> list[int]:
    return text.tokenizer.encode(words, add_special_tokens=False).ids


@pytest.fixture
def text():
    return Text(thinking_tokenizer(False), TEMPLATE, None, (toy_text.EOS,))


def test_a_generation_tells_them_apart_and_as_text_where_nobody_asks(text):
    session = Saying([*ids(text, "<think>ac</think>eg"), toy_text.EOS])
    pieces = list(Generation(session, [2], text=text, stop_tokens=text.eos, thoughts=True).stream())
    assert "".join(p for p in pieces if isinstance(p, Thought)) == "ac"
    assert "".join(p for p in pieces if not isinstance(p, Thought)) == "eg"
    assert "".join(Generation(session, [2], text=text, stop_tokens=text.eos).stream()) == "<think>ac</think>eg"


def test_a_chat_keeps_thoughts_out_of_what_it_says_again(text):
    session = Saying([*ids(text, "<think>ac</think>eg"), toy_text.EOS])
    chat = Chat(session, text)
    assert list(map(type, chat.answer("h")))[:1] == [Thought]
    assert chat.messages[-1] == {"role": "assistant", "content": "eg"}


def test_variables_reach_the_template_and_unknown_ones_are_named(text):
    messages = [{"role": "user", "content": "h"}]
    plain = text.render_chat(messages)
    quick = Text(text.tokenizer, TEMPLATE, template_args={"enable_thinking": False})
    assert quick.render_chat(messages) == f"{plain}<think></think>"
    assert quick.render_chat(messages, enable_thinking=True) == plain
    with pytest.raises(PipelineError, match="does not read enable_thinkin; it reads enable_thinking"):
        Text(text.tokenizer, TEMPLATE, template_args={"enable_thinkin": False})


def thinking_bundle(path):
    """The toy, where the marks are special tokens."""
    toy_text.write(path)
    manifest = json.loads((path / "manifest.json").read_text())
    data = thinking_tokenizer(True).to_str().encode()
    (path / "tokenizer.json").write_bytes(data)
    manifest["files"]["tokenizer.json"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return open_bundle(path)


def test_marks_that_are_special_tokens_are_seen(tmp_path):
    """A tokenizer leaves special tokens out of its text."""
    text = load_text(thinking_bundle(tmp_path / "toy"))
    assert text.marks == THINK and text.decode([1, 0, 3]) == "<think>a</think>"
    assert text.decode([toy_text.EOS]) == "", "the others are still left out"
    assert all(text.tokenizer.get_added_tokens_decoder()[mark].special for mark in (1, 3)), "the tokenizer is the bundle's own"


def test_over_http_thoughts_are_reasoning_content_whole_and_streamed(tmp_path, monkeypatch):
    app = open_app(thinking_bundle(tmp_path / "toy"), threads=1)
    script = [*ids(app.api.text, "<think>ac</think>eg"), toy_text.EOS]
    monkeypatch.setattr(Sequence, "_choose", lambda self, *_: Token(script[len(self.tokens)], self._decoded))
    body = {"messages": [{"role": "user", "content": "h"}], "max_tokens": 9}
    with TestClient(app) as client:
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("ac", "eg")
        stream = client.post("/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
        deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in stream if event.startswith("data: {")]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "ac"
        assert "".join(delta.get("content", "") for delta in deltas) == "eg"
        # What a client completes by itself is text as it is.
        text = client.post("/v1/completions", json={"prompt": "h", "max_tokens": 9}).json()["choices"][0]["text"]
        assert text == "<think>ac</think>eg"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_thoughts_dimmed_and_a_pipe_none():
    for out, shown in ((Terminal(), "\x1b[2mhm\x1b[0m\x1b[2m, so\x1b[0m\n\nYes."), (io.StringIO(), "Yes.")):
        spoken = Spoken(out)
        for piece in (Thought("hm"), Thought(", so"), "Yes", "."):
            spoken.write(piece)
        assert out.getvalue() == shown and not spoken.thinking
    spoken = Spoken(Terminal(), wrap=str.upper)
    spoken.write(Thought("hm"))
    # What ends the line is no answer.
    spoken.write("\n")
    assert spoken.out.getvalue() == "\x1b[2mHM\x1b[0m\n" and spoken.thinking


def test_a_terminal_obeys_nothing_that_a_model_writes():
    """Colours, titles, the clipboard, the cursor, text backwards; a pipe gets what was written."""
    written = "a\x1b[31m\x1b]52;c;aGk=\x07 \x9b2J\tb\r\nc\rd\x08\u202eé\u200d\x7f"
    shown = r"a\x1b[31m\x1b]52;c;aGk=\x07 \x9b2J" + "\tb\n" + r"c\rd\x08\u202e" + "é\u200d" + r"\x7f"
    for kind, expected in ((Terminal(), shown), (io.StringIO(), written)):
        Spoken(kind).write(written)
        assert kind.getvalue() == expected
    out = Terminal()
    Spoken(out).write(Thought("\x1b[8m"))
    assert out.getvalue() == "\x1b[2m\\x1b[8m\x1b[0m"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--template-arg", "thinking=1"], "does not read thinking"),
        (["--template-arg", "thinking=1", "--raw"], "--raw"),
    ],
)
def test_a_template_argument_that_changes_nothing_is_one_sentence(tmp_path, argv, says, capsys):
    assert cli.main(["run", str(toy_text.write(tmp_path / "toy")), "abc", *argv]) == 1
    assert says in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["run", "x", "abc", "--template-arg", "thinking"])


def test_run_hands_template_arguments_to_the_template(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(toy_text, "TEMPLATE_TEXT", toy_text.TEMPLATE_TEXT + "{% if more %}{{ more }}{% endif %}")
    path = str(toy_text.write(tmp_path / "toy"))
    sizes = []
    for argv in ([], ["--template-arg", 'more="ab"'], ["--template-arg", "more=abc"], ["--template-arg", "more=false"]):
        assert cli.main(["run", path, "abc", "-n", "1", "--ignore-eos", "--json", *argv]) == 0
        sizes.append(read_json(capsys.readouterr().out)["prompt_tokens"])
    assert [size - sizes[0] for size in sizes] == [0, 2, 3, 0]
