"""Test chats: answers equal those without the cache, and Ctrl-C does not end a chat."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.cli.chat import change, settings
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.sampling import Sampling
from castiron.pipelines.engine.speculation import Speculator
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.conversation import Chat
from castiron.pipelines.text.tokenizer import Tokenizer, load_tokenizer
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Session
from tests.support import toy_text
from tests.support.generating import Generation

path, CONTEXT, EOS = toy_text.bundle, toy_text.CONTEXT, toy_text.EOS


@pytest.fixture
def make(path):
    bundle = open_bundle(path)

    def chat(template=None, ngrams=False, **options) -> Chat:
        text = load_tokenizer(bundle)
        if template:
            text = Tokenizer(text.backend, template, text.bos, text.eos)
        return Chat(Engine(Counting(bundle, 1), ngrams=ngrams), text, **{"max_tokens": 2, **options})

    return chat


class Counting(Session):
    """A session that counts the tokens fed and raises KeyboardInterrupt in a given step."""

    fed = steps = 0
    interrupt_at = None

    def prefill(self, tokens, progress=None, total=0):
        self.fed += len(tokens)
        return super().prefill(tokens, progress, total)

    def step(self, token):
        self.steps += 1
        if self.steps == self.interrupt_at:
            raise KeyboardInterrupt
        return super().step(token)


def session_of(chat: Chat) -> Counting:
    return chat.engine.scheduler.batch.slots[0]


def reply(chat: Chat, words: str) -> str:
    return "".join(chat.answer(words))


def anew(chat: Chat, messages: list[dict]) -> str:
    """Return the answer of a session with an empty cache."""
    session = session_of(chat).fork()
    session.rewind(0)
    prompt = chat.tokenizer.encode_chat(messages)
    return chat.tokenizer.decode(list(Generation(session, prompt, max_tokens=2, stop_tokens=[EOS])))


REWRITING = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}a{% else %}{{ m.role[0] }}{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.mark.parametrize("template", [None, REWRITING])
def test_every_answer_equals_one_computed_without_the_cache(make, template):
    chat = make(template)
    for words in ("bc", "d", "efg"):
        messages = [*chat.messages, {"role": "user", "content": words}]
        expected = anew(chat, messages)
        assert reply(chat, words) == expected and not chat.dropped
        assert chat.messages == [*messages, {"role": "assistant", "content": expected}]


def test_a_turn_feeds_only_what_is_new(make):
    chat = make()
    reply(chat, "bcd")
    first, answer = session_of(chat).fed, chat.messages[-1]["content"]
    assert first == len("ubcda")
    reply(chat, "ef")
    # The last token of the answer was never fed.
    assert (
        session_of(chat).fed - first == len(answer[-1:] + "uefa")
        and len(chat.stream.request.prompt) - chat.stream.request.cached < 6
    )


def test_a_full_context_drops_the_oldest_turns_and_keeps_the_system_message(make):
    chat = make(system="xy")
    turns = ["bcd", "efg", "hij", "klm"]
    dropped = []
    for words in turns:
        reply(chat, words)
        dropped.append(chat.dropped)
        assert chat.messages[0] == {"role": "system", "content": "xy"}
        assert [m["role"] for m in chat.messages[1:]] == ["user", "assistant"] * (len(chat.messages) // 2)
        assert chat.messages[-2]["content"] == words and session_of(chat).position <= CONTEXT
    assert dropped[0] == 0 and any(count and count % 2 == 0 for count in dropped)


def test_a_full_context_drops_enough_for_more_turns(make):
    """The remaining turns are prefilled again, which must not happen in every turn."""
    chat = make(max_tokens=1)
    dropped, fed = [], []
    for words in "bcdefghijklmnopq":
        before = session_of(chat).fed
        reply(chat, words)
        dropped.append(chat.dropped)
        fed.append(session_of(chat).fed - before)
    again = [index for index, count in enumerate(dropped) if count]
    assert len(again) > 2 and all(later - earlier > 1 for earlier, later in zip(again, again[1:]))
    # The last token of the answer, if any, and the question between two letters of the template.
    assert all(count <= 4 for index, count in enumerate(fed) if index and index not in again)


def test_retry_replaces_the_last_answer(make):
    chat = make(system="x")
    with pytest.raises(PipelineError, match="nothing has been asked"):
        chat.retry()
    reply(chat, "bc")
    reply(chat, "d")
    before, fed = list(chat.messages), session_of(chat).fed
    chat.max_tokens = 1
    again = "".join(chat.retry())
    assert chat.messages == [*before[:-1], {"role": "assistant", "content": again}]
    assert before[-1]["content"].startswith(again) and session_of(chat).fed - fed == 1


def test_undo_removes_a_question_completely(make):
    chat, other = make(), make()
    reply(chat, "bc")
    reply(chat, "d")
    assert chat.undo() == "d"
    reply(other, "bc")
    assert chat.messages == other.messages and reply(chat, "ef") == reply(other, "ef")
    assert chat.undo() == "ef" and chat.undo() == "bc" and chat.messages == []
    with pytest.raises(PipelineError, match="nothing has been asked"):
        chat.undo()


def test_a_new_system_message_keeps_the_conversation(make):
    chat = make(system="x")
    reply(chat, "bc")
    replies = chat.messages[1:]
    chat.set_system_prompt("yz")
    assert chat.messages == [{"role": "system", "content": "yz"}, *replies]
    chat.set_system_prompt(None)
    assert chat.messages == replies
    chat.reset()
    assert chat.messages == []


def test_set_changes_every_sampling_option(make):
    chat = make(max_tokens=1024)
    assert settings(chat) == {
        "temperature": "0", "top-k": "0", "top-p": "1", "min-p": "0", "repeat-penalty": "1", "repeat-last-n": "64", "seed": "none",
        "max-tokens": "1024", "system": "none",
    }  # fmt: skip
    wanted = {"temperature": "0.7", "top-k": "40", "top-p": "0.9", "min-p": "0.05", "repeat-penalty": "1.1",
              "repeat-last-n": "-1", "seed": "7", "max-tokens": "3", "system": "x y"}  # fmt: skip
    for name, value in wanted.items():
        change(chat, name, value)
        assert settings(chat, name) == {name: value}
    assert settings(chat) == wanted
    assert chat.sampler.sampling == Sampling(0.7, 40, 0.9, 0.05, 1.1, 7, repeat_last_n=-1) and chat.max_tokens == 3
    for name in ("seed", "system"):
        change(chat, name, "none")
        assert settings(chat, name) == {name: "none"}
    change(chat, "max-tokens", "-1")
    assert chat.max_tokens is None and settings(chat, "max-tokens") == {"max-tokens": "-1"}


@pytest.mark.parametrize(("name", "value", "message"), [
    ("temperature", "hot", "invalid temperature: 'hot'; give a number"), ("top-k", "1.5", "invalid top-k: '1.5'; give an integer"),
    ("top-p", "2", "top-p is 2"), ("max-tokens", "0", "give at least 1"), ("temprature", "1", "choose from temperature, "),
])  # fmt: skip
def test_an_invalid_setting_changes_nothing(make, name, value, message):
    chat = make()
    before = settings(chat)
    with pytest.raises(PipelineError, match=message):
        change(chat, name, value)
    assert settings(chat) == before


def test_reports_settings_without_effect_in_greedy_decoding(make, capsys):
    chat = make()
    change(chat, "top-k", "5")
    assert "top-k has no effect without a temperature" in capsys.readouterr().err
    change(chat, "temperature", "0.7")
    change(chat, "top-k", "9")
    assert capsys.readouterr().err == ""


def test_a_message_over_the_context_changes_nothing(make):
    chat = make()
    reply(chat, "bc")
    before = list(chat.messages)
    with pytest.raises(PipelineError, match=f"context is {CONTEXT}"):
        chat.answer("b" * CONTEXT)
    assert chat.messages == before
    assert reply(chat, "d") == anew(chat, [*before, {"role": "user", "content": "d"}])


@pytest.mark.parametrize(("limit", "reason"), [(3, "length"), (1000, "context"), (None, "context")])
def test_the_context_limits_the_length_too(make, limit, reason):
    chat = make(max_tokens=limit)
    chat.tokenizer.eos = ()
    reply(chat, "bcd")
    space = CONTEXT - len("ubcda") + 1
    assert chat.stream.finish_reason == reason and len(chat.stream.tokens) == (3 if limit == 3 else space)


def test_an_interrupt_during_speculation_leaves_a_valid_cache(make, monkeypatch):
    """The interrupt comes after proposed tokens were fed and before they are taken back."""
    monkeypatch.setattr(Speculator, "_plan", lambda self: ("ngram", 3) if self.ngrams.length else (None, 0))
    chat = make(max_tokens=8, ngrams=True)
    chat.tokenizer.eos = ()
    widths = {"verify": (4,), "prefill": toy_text.WIDTHS}.__getitem__
    session_of(chat).manifest = SimpleNamespace(widths=widths, is_long=lambda total: False)
    session_of(chat).verify = lambda tokens: [session_of(chat).step(token) for token in tokens]

    def interrupted(*_):
        raise KeyboardInterrupt

    session_of(chat).verified_logits = interrupted
    with pytest.raises(KeyboardInterrupt):
        reply(chat, "bcbcbcbc")
    stored = list(chat.messages)
    assert stored[-1]["role"] == "assistant"
    chat.max_tokens, chat.engine.scheduler.ngrams, chat.tokenizer.eos = 2, False, (EOS,)
    fed = session_of(chat).fed
    assert reply(chat, "d") == anew(chat, [*stored, {"role": "user", "content": "d"}])
    # All tokens of the answer are cached except the last, with which the check began.
    assert session_of(chat).fed - fed == 1 + len("uda")


@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupt_stops_the_answer_and_the_chat_goes_on(make, at):
    chat = make(max_tokens=8)
    chat.tokenizer.eos = ()
    session_of(chat).interrupt_at = session_of(chat).steps + at
    with pytest.raises(KeyboardInterrupt):
        reply(chat, "bc")
    stored = chat.messages[-1]["content"]
    assert chat.messages[-1]["role"] == "assistant" and len(stored) <= at
    chat.max_tokens, chat.tokenizer.eos = 2, (EOS,)
    assert reply(chat, "d") == anew(chat, [*chat.messages[:2], {"role": "user", "content": "d"}])


def test_stop_strings_end_an_answer_before_them(make):
    complete = make(max_tokens=8)
    complete.tokenizer.eos = ()
    words = reply(complete, "bc")
    cut = make(max_tokens=8, stops=[words[2:4]])
    cut.tokenizer.eos = ()
    assert reply(cut, "bc") == words[: words.index(words[2:4])] and cut.stream.finish_reason == "stop"


def test_a_saved_chat_continues_in_another_session(make, tmp_path):
    chat, other = make(system="x"), make()
    reply(chat, "bc")
    chat.save(tmp_path / "chat.json")
    other.load(tmp_path / "chat.json")
    assert other.messages == chat.messages and reply(other, "d") == reply(chat, "d")
    other.reset()
    assert other.messages == [{"role": "system", "content": "x"}]


@pytest.mark.parametrize("data", ["", "[]", '{"messages": 3}', '{"messages": {}}', '{"messages": [{"role": "user"}]}', "\xff",
                                  '{"messages": [{"role": "x", "content": "y"}]}', '{"messages": [3]}', "[" * 100_000,
                                  '{"messages": [{"role": "user", "content": 5}]}',
                                  '{"messages": [{"role": "user", "content": "\\ud800"}]}'])  # fmt: skip
def test_an_invalid_chat_file_is_rejected(make, tmp_path, data):
    (tmp_path / "bad").write_bytes(data.encode("latin-1"))
    chat = make(system="x")
    with pytest.raises(PipelineError, match="/save"):
        chat.load(tmp_path / "bad")
    assert chat.messages == [{"role": "system", "content": "x"}]


def test_a_failed_save_is_one_error_line(make, tmp_path):
    chat = make(system="x")
    (tmp_path / "folder").mkdir()
    for location in (tmp_path / "folder", Path("/proc/none")):
        with pytest.raises(PipelineError, match=f"cannot write {location}"):
            chat.save(location)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def piped(path, words: str, *argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "castiron", "chat", str(path), "-n", "2", *argv]
    return subprocess.run(command, input=words, capture_output=True, text=True, timeout=120, check=False)


def test_without_a_terminal_stdout_has_only_answers(path, make, tmp_path):
    done = piped(path, f"bc\n\n/save {tmp_path}/c\nd\n/reset\n/nonsense\nbc\n/exit\nnever\n")
    chat = make()
    assert done.stdout.splitlines() == [reply(chat, "bc"), reply(chat, "d"), reply(make(), "bc")]
    assert done.returncode == 0 and done.stderr.count("tok/s") >= 1 and "type /help" in done.stderr


def test_an_error_without_a_terminal_shows_in_the_exit_status(path):
    done = piped(path, f"{'b' * CONTEXT}\nbc\n")
    assert done.returncode == 1 and "castiron: the message needs" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_quotes_join_lines_to_one_message(path, make):
    """Text between quotes is never a command."""
    blocks = ('"""/quit"""\n', '"""\nb\nc\n"""\n', '"""b\nc"""\n', '"""b\nc\n')
    answers = [reply(make(), "/quit"), *[reply(make(), "b\nc")] * 3]
    assert piped(path, "/reset\n".join(blocks)).stdout.splitlines() == answers


def test_commands_change_the_conversation(path, make):
    typed = "/retry\nbc\nd\n/undo\nef\n/set max_tokens 1\n/retry\n/set\n/set none\n/quit\nnever\n"
    done = piped(path, typed)
    chat = make()
    replies = [reply(chat, "bc"), reply(chat, "d")]
    chat.undo()
    replies.append(reply(chat, "ef"))
    assert done.stdout.splitlines() == [*replies, replies[-1][:1]] and done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "positions" not in line]
    assert errors[:3] == [
        "castiron: nothing has been asked yet; send a message first",
        "castiron: removed: d",
        f"{'max-tokens':15}1",
    ]
    assert errors[3:-1] == [f"{name:15}{value}" for name, value in {**settings(chat), "max-tokens": "1"}.items()]
    assert errors[-1].startswith("castiron: unknown setting: none; choose from temperature, ")


def test_commands_of_ollama_and_llama_cpp_work(path, make):
    done = piped(path, "/?\n/system x y\n/show\nbc\n/clear\n/system none\n/sytem\n/bye\nnever\n")
    assert done.stdout.splitlines() == [reply(make(system="x y"), "bc")] and done.returncode == 0
    shown = [line for line in done.stderr.splitlines() if "positions," not in line]
    assert (
        f"{'system':15}x y" in shown and f"{'family':15}llama" in shown and f"{'context':15}0 of {CONTEXT} positions" in shown
    )
    assert shown[0].startswith("/retry") and shown[-3:] == [
        "castiron: a new conversation", f"{'system':15}none",
        "castiron: /sytem is not a command; did you mean /system?; type /help to list the commands",
    ]  # fmt: skip


def test_the_last_line_has_speed_and_context(path, make):
    chat = make()
    reply(chat, "bc")
    speed, used, cut = piped(path, "bc\n").stderr.strip().removeprefix("castiron: ").split(", ")
    assert cut == "stopped at 2 tokens; /set max-tokens -1 for no limit"
    assert re.fullmatch(r"\d+\.\d tok/s", speed) and used == f"{session_of(chat).position} of {CONTEXT} positions"
    assert piped(path, "bc\n", "--quiet").stderr == ""


def test_invalid_options_are_rejected_before_the_first_turn(path, capsys):
    for argv, message in ((["-n", "0"], "-n"), (["--stop", ""], "--stop"), (["--temperature", "-1"], "temperature")):
        assert cli.main(["chat", str(path), *argv]) == 1
        assert message in capsys.readouterr().err
