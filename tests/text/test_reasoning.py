"""A model's reasoning is separated from its answer: in text, chats, terminals and over HTTP."""

from __future__ import annotations

import hashlib
import io
import json

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tokenizers import AddedToken

from castiron.pipelines.cli import main as cli
from castiron.pipelines.cli.run import AnswerOutput
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.request import Request, Token
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.app import open_app
from castiron.pipelines.text.conversation import Chat
from castiron.pipelines.text.reasoning import Reasoning, ReasoningSplitter, marks_of
from castiron.pipelines.text.tokenizer import Tokenizer, load_tokenizer
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Batch
from tests.support import toy_text
from tests.support.fake_session import FakeSession
from tests.support.generating import Generation
from tests.support.toy_text import read_json

THINK = (("<think>", "</think>"),)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}a{% if enable_thinking is defined and enable_thinking is false %}<think></think>"
    "{% endif %}{% endif %}"
)


def reported(text: str, pieces: list[int], prompt: str = "", marks=THINK) -> tuple[str, str]:
    """Return the reasoning and the answer of `text` that comes in `pieces` of these sizes."""
    seen, found, start = ReasoningSplitter(marks, prompt), [], 0
    for size in pieces:
        found += seen.add(text[start : start + size])
        start += size
    found += seen.add(text[start:]) + seen.finish()
    reasoning_text = [piece for piece in found if isinstance(piece, Reasoning)]
    assert found[: len(reasoning_text)] == reasoning_text, "reasoning comes first"
    return "".join(reasoning_text), "".join(found[len(reasoning_text) :])


PIECES = st.lists(st.integers(1, 5), max_size=40)
WORDS = st.text("<>/think ab\n", max_size=20)


@given(WORDS.filter(lambda t: "</think>" not in t), WORDS, PIECES, st.booleans())
@example("a", " <think>b</think>", [1] * 30, False)
def test_separates_reasoning_from_the_answer_in_any_pieces(reasoning_text, answer, pieces, begun):
    text = f"{'' if begun else '<think>'}{reasoning_text}</think>{answer}"
    # The joint of reasoning and mark may complete an earlier mark.
    cut = f"{reasoning_text}</think>".index("</think>")
    reasoning_text, answer = reasoning_text[:cut], (f"{reasoning_text}</think>{answer}")[cut + len("</think>") :]
    assert reported(text, pieces, "user: hi\n<think>\n" if begun else "hi") == (reasoning_text.strip(), answer.lstrip())


@given(WORDS.filter(lambda t: not t.lstrip().startswith("<think>")), PIECES)
def test_text_without_leading_reasoning_is_unchanged(text, pieces):
    assert reported(text, pieces) == ("", text)
    assert reported(text, pieces, marks=()) == ("", text)
    assert reported(text, pieces, "hi <think>\n\n</think>\n\n") == ("", text), "the prompt ends the reasoning"


def test_reasoning_without_an_end_is_reasoning():
    assert reported("<think> a b ", [3]) == ("a b", "") == reported("a b</thin"[:3], [1], "<think>")
    assert reported("a</thin", [2], "<think>") == ("a</thin", "")


def test_holds_back_possible_marks_only():
    seen = ReasoningSplitter(THINK)
    assert seen.add("<thi") == [] and seen.add("nk>\nso") == [Reasoning("so")] and seen.add(" far") == [Reasoning(" far")]
    assert seen.add(" </") == [] and seen.add("b") == [Reasoning(" </b")] and seen.add("</think>\n\nYes") == ["Yes"]
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


def thinking_tokenizer(special: bool) -> tokenizers.Tokenizer:
    """Return the toy's tokenizer with the marks in place of b and d."""
    described = json.loads(toy_text.tokenizer().to_str())
    vocab = described["model"]["vocab"]
    vocab["<think>"], vocab["</think>"] = vocab.pop("b"), vocab.pop("d")
    found = tokenizers.Tokenizer.from_str(json.dumps(described))
    found.add_tokens([AddedToken(mark, special=special) for mark in ("<think>", "</think>")])
    if special:
        found.add_special_tokens([AddedToken(mark, special=True) for mark in ("<think>", "</think>")])
    return found


class Scripted(FakeSession):
    """A session that generates the given tokens, whatever it reads."""

    def __init__(self, tokens: list[int]):
        super().__init__(200)
        self.tokens = tokens

    def prefill(self, tokens, progress=None, total=0) -> int:
        self.fed += map(int, tokens)
        self.generated = 0
        return self.tokens[0]

    def step(self, token: int) -> int:
        self.fed.append(token)
        self.generated += 1
        return self.tokens[self.generated]


def ids(text: Tokenizer, words: str) -> list[int]:
    return text.backend.encode(words, add_special_tokens=False).ids


@pytest.fixture
def text():
    return Tokenizer(thinking_tokenizer(False), TEMPLATE, None, (toy_text.EOS,))


def test_streams_separate_reasoning_only_on_request(text):
    session = Scripted([*ids(text, "<think>ac</think>eg"), toy_text.EOS])
    pieces = list(Generation(session, [2], text=text, stop_tokens=text.eos, reasoning=True).stream())
    assert "".join(p for p in pieces if isinstance(p, Reasoning)) == "ac"
    assert "".join(p for p in pieces if not isinstance(p, Reasoning)) == "eg"
    assert "".join(Generation(session, [2], text=text, stop_tokens=text.eos).stream()) == "<think>ac</think>eg"


def test_a_chat_does_not_send_earlier_reasoning(text):
    session = Scripted([*ids(text, "<think>ac</think>eg"), toy_text.EOS])
    chat = Chat(Engine(Batch(session)), text)
    assert list(map(type, chat.answer("h")))[:1] == [Reasoning]
    assert chat.messages[-1] == {"role": "assistant", "content": "eg"}


def test_variables_reach_the_template_and_unknown_ones_are_named(text):
    messages = [{"role": "user", "content": "h"}]
    plain = text.render_chat(messages)
    quick = Tokenizer(text.backend, TEMPLATE, template_args={"enable_thinking": False})
    assert quick.render_chat(messages) == f"{plain}<think></think>"
    assert quick.render_chat(messages, enable_thinking=True) == plain
    with pytest.raises(PipelineError, match="does not read enable_thinkin; it reads enable_thinking"):
        Tokenizer(text.backend, TEMPLATE, template_args={"enable_thinkin": False})


def thinking_bundle(path):
    """Write the toy bundle with the marks as special tokens."""
    toy_text.write(path)
    manifest = json.loads((path / "manifest.json").read_text())
    data = thinking_tokenizer(True).to_str().encode()
    (path / "tokenizer.json").write_bytes(data)
    manifest["files"]["tokenizer.json"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return open_bundle(path)


def test_recognises_marks_that_are_special_tokens(tmp_path):
    text = load_tokenizer(thinking_bundle(tmp_path / "toy"))
    assert text.marks == THINK and text.decode([1, 0, 3]) == "<think>a</think>"
    assert text.decode([toy_text.EOS]) == "", "the others are still left out"
    assert all(text.backend.get_added_tokens_decoder()[mark].special for mark in (1, 3)), "the tokenizer is the bundle's own"


def test_http_reports_reasoning_content_complete_and_streamed(tmp_path, monkeypatch):
    app = open_app(thinking_bundle(tmp_path / "toy"), threads=1)
    script = [*ids(app.api.tokenizer, "<think>ac</think>eg"), toy_text.EOS]
    monkeypatch.setattr(Request, "_choose", lambda self, *_: Token(script[len(self.tokens)]))
    body = {"messages": [{"role": "user", "content": "h"}], "max_tokens": 9}
    with TestClient(app) as client:
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("ac", "eg")
        stream = client.post("/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
        deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in stream if event.startswith("data: {")]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "ac"
        assert "".join(delta.get("content", "") for delta in deltas) == "eg"
        # A completion has no chat, so its text is unchanged.
        text = client.post("/v1/completions", json={"prompt": "h", "max_tokens": 9}).json()["choices"][0]["text"]
        assert text == "<think>ac</think>eg"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_dims_reasoning_and_a_pipe_omits_it():
    for out, shown in ((Terminal(), "\x1b[2mhm\x1b[0m\x1b[2m, so\x1b[0m\n\nYes."), (io.StringIO(), "Yes.")):
        printed = AnswerOutput(out)
        for piece in (Reasoning("hm"), Reasoning(", so"), "Yes", "."):
            printed.write(piece)
        assert out.getvalue() == shown and not printed.thinking
    printed = AnswerOutput(Terminal())
    printed.write(Reasoning("hm"))
    # The end of a line is not an answer.
    printed.write("\n")
    assert printed.out.getvalue() == "\x1b[2mhm\x1b[0m\n" and printed.thinking


def test_a_terminal_escapes_control_sequences_of_a_model():
    """A pipe gets the bytes unchanged."""
    written = "a\x1b[31m\x1b]52;c;aGk=\x07 \x9b2J\tb\r\nc\rd\x08\u202eé\u200d\x7f"
    shown = r"a\x1b[31m\x1b]52;c;aGk=\x07 \x9b2J" + "\tb\n" + r"c\rd\x08\u202e" + "é\u200d" + r"\x7f"
    for kind, expected in ((Terminal(), shown), (io.StringIO(), written)):
        AnswerOutput(kind).write(written)
        assert kind.getvalue() == expected
    out = Terminal()
    AnswerOutput(out).write(Reasoning("\x1b[8m"))
    assert out.getvalue() == "\x1b[2m\\x1b[8m\x1b[0m"


@pytest.mark.parametrize(
    ("argv", "error_message"),
    [(["--template-arg", "thinking=1"], "does not read thinking"), (["--template-arg", "thinking=1", "--raw"], "--raw")],
)
def test_rejects_an_unknown_template_argument(tmp_path, argv, error_message, capsys):
    assert cli.main(["run", str(toy_text.write(tmp_path / "toy")), "abc", *argv]) == 1
    assert error_message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["run", "x", "abc", "--template-arg", "thinking"])


def test_run_passes_template_arguments(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(toy_text, "TEMPLATE_TEXT", toy_text.TEMPLATE_TEXT + "{% if more %}{{ more }}{% endif %}")
    path = str(toy_text.write(tmp_path / "toy"))
    sizes = []
    for argv in ([], ["--template-arg", 'more="ab"'], ["--template-arg", "more=abc"], ["--template-arg", "more=false"]):
        assert cli.main(["run", path, "abc", "-n", "1", "--ignore-eos", "--json", *argv]) == 0
        sizes.append(read_json(capsys.readouterr().out)["prompt_tokens"])
    assert [size - sizes[0] for size in sizes] == [0, 2, 3, 0]
