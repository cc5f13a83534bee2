"""A chat answers as if every turn were read anew, feeds only what is new, and survives Ctrl-C and a full context."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from castiron.pipelines import cli
from castiron.pipelines.commands.settings import change, settings
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.chat import Chat
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.sampling import Sampling
from castiron.pipelines.generation.speculate import Speculator
from castiron.pipelines.generation.text import Text, load_text
from castiron.vmfb.bundle import open_bundle, pack_bundle
from castiron.vmfb.session import Session
from tests.pipelines import toy_text

CONTEXT, EOS = toy_text.CONTEXT, toy_text.EOS


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return toy_text.write(tmp_path_factory.mktemp("chat") / "toy")


@pytest.fixture
def make(path):
    bundle = open_bundle(path)

    def chat(template=None, **options) -> Chat:
        text = load_text(bundle)
        if template:
            text = Text(text.tokenizer, template, text.bos, text.eos)
        return Chat(Counting(bundle, 1), text, **{"max_tokens": 2, **options})

    return chat


class Counting(Session):
    """Counts the tokens that are fed, and is interrupted in a given step."""

    fed = steps = 0
    interrupt_at = None

    def prefill(self, tokens, progress=None):
        self.fed += len(tokens)
        return super().prefill(tokens, progress)

    def step(self, token):
        self.steps += 1
        if self.steps == self.interrupt_at:
            raise KeyboardInterrupt
        return super().step(token)


def say(chat: Chat, words: str) -> str:
    return "".join(chat.answer(words))


def anew(chat: Chat, messages: list[dict]) -> str:
    """What a session that has read nothing answers."""
    session = chat.session.fork()
    session.rewind(0)
    prompt = chat.text.encode_chat(messages)
    return chat.text.decode(list(Generation(session, prompt, max_tokens=2, stop_tokens=[EOS])))


REWRITING = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}a{% else %}{{ m.role[0] }}{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.mark.parametrize("template", [None, REWRITING])
def test_every_answer_is_the_one_that_reading_all_anew_gives(make, template):
    chat = make(template)
    for words in ("bc", "d", "efg"):
        messages = [*chat.messages, {"role": "user", "content": words}]
        expected = anew(chat, messages)
        assert say(chat, words) == expected and not chat.dropped
        assert chat.messages == [*messages, {"role": "assistant", "content": expected}]


def test_a_turn_feeds_only_what_is_new(make):
    chat = make()
    say(chat, "bcd")
    first, answer = chat.session.fed, chat.messages[-1]["content"]
    assert first == len("ubcda")
    say(chat, "ef")
    # The last token of the answer was never fed.
    assert chat.session.fed - first == len(answer[-1:] + "uefa") and chat.generation.prompt_tokens < 6


def test_a_full_context_drops_the_oldest_turns_and_keeps_the_system_message(make):
    chat = make(system="xy")
    turns = ["bcd", "efg", "hij", "klm"]
    dropped = []
    for words in turns:
        say(chat, words)
        dropped.append(chat.dropped)
        assert chat.messages[0] == {"role": "system", "content": "xy"}
        assert [m["role"] for m in chat.messages[1:]] == ["user", "assistant"] * (len(chat.messages) // 2)
        assert chat.messages[-2]["content"] == words and chat.session.position <= CONTEXT
    assert dropped[0] == 0 and any(count and count % 2 == 0 for count in dropped)


def test_a_full_context_makes_room_for_more_than_one_turn(make):
    """What stays is read anew, which must not come back with every turn."""
    chat = make(max_tokens=1)
    dropped, fed = [], []
    for words in "bcdefghijklmnopq":
        before = chat.session.fed
        say(chat, words)
        dropped.append(chat.dropped)
        fed.append(chat.session.fed - before)
    again = [index for index, count in enumerate(dropped) if count]
    assert len(again) > 2 and all(later - earlier > 1 for earlier, later in zip(again, again[1:]))
    # The answer's token, if it had one, which was never fed, and the question between two letters of the template.
    assert all(count <= 4 for index, count in enumerate(fed) if index and index not in again)


def test_another_try_takes_the_place_of_the_last_answer(make):
    chat = make(system="x")
    with pytest.raises(PipelineError, match="nothing has been asked"):
        chat.retry()
    say(chat, "bc")
    say(chat, "d")
    before, fed = list(chat.messages), chat.session.fed
    chat.max_tokens = 1
    again = "".join(chat.retry())
    assert chat.messages == [*before[:-1], {"role": "assistant", "content": again}]
    assert before[-1]["content"].startswith(again) and chat.session.fed - fed == 1


def test_what_is_taken_back_was_never_said(make):
    chat, other = make(), make()
    say(chat, "bc")
    say(chat, "d")
    assert chat.undo() == "d"
    say(other, "bc")
    assert chat.messages == other.messages and say(chat, "ef") == say(other, "ef")
    assert chat.undo() == "ef" and chat.undo() == "bc" and chat.messages == []
    with pytest.raises(PipelineError, match="nothing has been asked"):
        chat.undo()


def test_another_system_message_stands_before_the_same_conversation(make):
    chat = make(system="x")
    say(chat, "bc")
    said = chat.messages[1:]
    chat.instruct("yz")
    assert chat.messages == [{"role": "system", "content": "yz"}, *said]
    chat.instruct(None)
    assert chat.messages == said
    chat.reset()
    assert chat.messages == []


def test_settings_are_those_of_the_options(make):
    chat = make(max_tokens=None, usual_tokens=1024)
    assert settings(chat) == {
        "temperature": "0", "top-k": "0", "top-p": "1", "min-p": "0", "repeat-penalty": "1", "seed": "none",
        "max-tokens": "1024", "system": "none",
    }  # fmt: skip
    wanted = {"temperature": "0.7", "top-k": "40", "top-p": "0.9", "min-p": "0.05", "repeat-penalty": "1.1", "seed": "7",
              "max-tokens": "3", "system": "x y"}  # fmt: skip
    for name, value in wanted.items():
        change(chat, name, value)
        assert settings(chat, name) == {name: value}
    assert settings(chat) == wanted
    assert chat.sampler.sampling == Sampling(0.7, 40, 0.9, 0.05, 1.1, 7) and chat.max_tokens == 3
    for name in ("seed", "system"):
        change(chat, name, "none")
        assert settings(chat, name) == {name: "none"}
    change(chat, "max-tokens", "-1")
    assert (chat.max_tokens, chat.usual_tokens) == (None, None) and settings(chat, "max-tokens") == {"max-tokens": "-1"}


@pytest.mark.parametrize(("name", "value", "says"), [
    ("temperature", "hot", "temperature is a number, not 'hot'"), ("top-k", "1.5", "top-k is a whole number"),
    ("top-p", "2", "top-p is 2"), ("max-tokens", "0", "give 1 or more"), ("temprature", "1", "there are temperature, "),
])  # fmt: skip
def test_a_setting_that_is_none_changes_nothing(make, name, value, says):
    chat = make()
    before = settings(chat)
    with pytest.raises(PipelineError, match=says):
        change(chat, name, value)
    assert settings(chat) == before


def test_what_a_temperature_of_nothing_passes_over_is_said(make, capsys):
    chat = make()
    change(chat, "top-k", "5")
    assert "top-k counts once a temperature is set" in capsys.readouterr().err
    change(chat, "temperature", "0.7")
    change(chat, "top-k", "9")
    assert capsys.readouterr().err == ""


def test_a_message_that_does_not_fit_alone_changes_nothing(make):
    chat = make()
    say(chat, "bc")
    before = list(chat.messages)
    with pytest.raises(PipelineError, match=f"context is {CONTEXT}"):
        chat.answer("b" * CONTEXT)
    assert chat.messages == before
    assert say(chat, "d") == anew(chat, [*before, {"role": "user", "content": "d"}])


@pytest.mark.parametrize(("usual", "reason"), [(3, "length"), (1000, "context"), (None, "context")])
def test_a_usual_length_gives_way_to_the_context(make, usual, reason):
    chat = make(max_tokens=None, usual_tokens=usual)
    chat.text.eos = ()
    say(chat, "bcd")
    room = CONTEXT - len("ubcda") + 1
    assert chat.generation.finish_reason == reason and len(chat.generation.tokens) == (3 if usual == 3 else room)
    with pytest.raises(PipelineError, match="1000 for the answer"):
        make(max_tokens=1000).answer("bcd")


def test_an_interrupt_while_tokens_are_checked_leaves_no_trace(make, monkeypatch):
    """Between the call that has fed proposed tokens and the one that takes them back."""
    monkeypatch.setattr(Speculator, "_plan", lambda self: ("ngram", 3) if self.ngrams.length else (None, 0))
    chat = make(max_tokens=8, speculate=True)
    chat.text.eos = ()
    chat.session.manifest = SimpleNamespace(widths=lambda role: (4,), prefill_widths=toy_text.WIDTHS)
    chat.session.verify = lambda tokens: [chat.session.step(token) for token in tokens]

    def interrupted(*_):
        raise KeyboardInterrupt

    chat.session.verified_logits = interrupted
    with pytest.raises(KeyboardInterrupt):
        say(chat, "bcbcbcbc")
    kept = list(chat.messages)
    assert kept[-1]["role"] == "assistant"
    chat.max_tokens, chat.speculate, chat.text.eos = 2, False, (EOS,)
    fed = chat.session.fed
    assert say(chat, "d") == anew(chat, [*kept, {"role": "user", "content": "d"}])
    # What was said stays in the cache, but for its last token, with which the check began.
    assert chat.session.fed - fed == 1 + len("uda")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_stops_the_answer_and_the_chat_goes_on(make, at):
    chat = make(max_tokens=8)
    chat.text.eos = ()
    chat.session.interrupt_at = chat.session.steps + at
    with pytest.raises(KeyboardInterrupt):
        say(chat, "bc")
    kept = chat.messages[-1]["content"]
    assert chat.messages[-1]["role"] == "assistant" and len(kept) <= at
    chat.max_tokens, chat.text.eos = 2, (EOS,)
    assert say(chat, "d") == anew(chat, [*chat.messages[:2], {"role": "user", "content": "d"}])


def test_who_stops_listening_keeps_what_was_said(make):
    chat = make(max_tokens=8)
    answer = chat.answer("bc")
    first = next(answer)
    answer.close()
    assert chat.messages[-1] == {"role": "assistant", "content": first}


def test_stop_strings_end_an_answer_before_them(make):
    whole = make(max_tokens=8)
    whole.text.eos = ()
    words = say(whole, "bc")
    cut = make(max_tokens=8, stops=[words[2:4]])
    cut.text.eos = ()
    assert say(cut, "bc") == words[: words.index(words[2:4])] and cut.generation.finish_reason == "stop"


def test_a_saved_chat_goes_on_elsewhere(make, tmp_path):
    chat, other = make(system="x"), make()
    say(chat, "bc")
    chat.save(tmp_path / "chat.json")
    other.load(tmp_path / "chat.json")
    assert other.messages == chat.messages and say(other, "d") == say(chat, "d")
    other.reset()
    assert other.messages == [{"role": "system", "content": "x"}]


@pytest.mark.parametrize("data", ["", "[]", '{"messages": 3}', '{"messages": {}}', '{"messages": [{"role": "user"}]}', "\xff",
                                  '{"messages": [{"role": "x", "content": "y"}]}', '{"messages": [3]}', "[" * 100_000,
                                  '{"messages": [{"role": "user", "content": 5}]}',
                                  '{"messages": [{"role": "user", "content": "\\ud800"}]}'])  # fmt: skip
def test_a_file_that_is_no_chat_is_refused(make, tmp_path, data):
    (tmp_path / "bad").write_bytes(data.encode("latin-1"))
    chat = make(system="x")
    with pytest.raises(PipelineError, match="/save"):
        chat.load(tmp_path / "bad")
    assert chat.messages == [{"role": "system", "content": "x"}]


def test_what_cannot_be_saved_is_one_sentence_and_harms_nothing(make, tmp_path):
    chat = make(system="x")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "folder", Path("/proc/none")):
        with pytest.raises(PipelineError, match=f"{place} cannot be written"):
            chat.save(place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def piped(path, words: str, *argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "castiron", "chat", str(path), "-n", "2", *argv]
    return subprocess.run(command, input=words, capture_output=True, text=True, timeout=120, check=False)


def test_without_a_terminal_answers_alone_are_on_stdout(path, make, tmp_path):
    done = piped(path, f"bc\n\n/save {tmp_path}/c\nd\n/reset\n/nonsense\nbc\n/exit\nnever\n")
    chat = make()
    assert done.stdout.splitlines() == [say(chat, "bc"), say(chat, "d"), say(make(), "bc")]
    assert done.returncode == 0 and done.stderr.count("tok/s") >= 1 and "/help lists" in done.stderr


def test_a_packed_bundle_chats_as_its_directory(path, tmp_path):
    pack_bundle(open_bundle(path), tmp_path / "toy.castiron")
    assert piped(tmp_path / "toy.castiron", "bc\nd\n").stdout == piped(path, "bc\nd\n").stdout != ""


def test_an_error_without_a_terminal_shows_in_the_exit_status(path):
    done = piped(path, f"{'b' * CONTEXT}\nbc\n")
    assert done.returncode == 1 and "castiron: this message needs" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_lines_that_end_in_a_backslash_go_on(path, make):
    assert piped(path, "b\\\nc\n").stdout.splitlines() == [say(make(), "b\nc")]


@pytest.mark.parametrize("typed", ['"""\nb\nc\n"""\n', '"""b\nc"""\n', '"""b\nc\n', "b\\\nc\n"])
def test_what_stands_between_quotes_is_one_message(path, make, typed):
    assert piped(path, typed).stdout.splitlines() == [say(make(), "b\nc")]


def test_a_block_is_never_a_command(path, make):
    done = piped(path, '"""/quit"""\n/quit\nbc\n')
    assert done.stdout.splitlines() == [say(make(), "/quit")]


def test_commands_that_change_what_was_said(path, make):
    typed = "/retry\nbc\nd\n/undo\nef\n/set max_tokens 1\n/retry\n/set\n/set none\n/quit\nnever\n"
    done = piped(path, typed)
    chat = make()
    said = [say(chat, "bc"), say(chat, "d")]
    chat.undo()
    said.append(say(chat, "ef"))
    assert done.stdout.splitlines() == [*said, said[-1][:1]] and done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "positions" not in line]
    assert errors[:3] == ["castiron: nothing has been asked yet", "castiron: taken back: d", f"{'max-tokens':15}1"]
    assert errors[3:-1] == [f"{name:15}{value}" for name, value in {**settings(chat), "max-tokens": "1"}.items()]
    assert errors[-1].startswith("castiron: none is not a setting; there are temperature, ")


def test_the_last_line_tells_speed_and_context(path, make):
    chat = make()
    say(chat, "bc")
    speed, used = piped(path, "bc\n").stderr.strip().removeprefix("castiron: ").split(", ")
    assert re.fullmatch(r"\d+\.\d tok/s", speed) and used == f"{chat.session.position} of {CONTEXT} positions"
    assert piped(path, "bc\n", "--quiet").stderr == ""


def test_refusals_come_before_the_first_turn(path, capsys):
    for argv, says in ((["-n", "0"], "-n"), (["--stop", ""], "--stop"), (["--temperature", "-1"], "temperature")):
        assert cli.main(["chat", str(path), *argv]) == 1
        assert says in capsys.readouterr().err
