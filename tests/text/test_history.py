"""Chats of any form become prompts: nothing is rejected or lost, and a prompt goes on as it was."""

from __future__ import annotations

from os.path import commonprefix
from random import Random

import pytest

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.history import normal_messages
from tests.support import histories
from tests.support.histories import KINDS, Histories, api_of, prompt_of, tokenizer_of

COUNT = 40


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_of_an_odd_history_is_in_the_prompt(kind):
    api = api_of(KINDS[kind])
    for seed in range(COUNT):
        history = Histories(Random(seed))
        body = {"messages": history.messages(seed % 7), "tools": history.tools()}
        prompt = prompt_of(api, body)
        assert not [text for text in history.texts if text not in prompt], (seed, body, prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_renders_completely_is_rendered_in_the_same_way(kind):
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer, same = tokenizer_of(KINDS[kind]), 0
    for seed in range(COUNT):
        history = Histories(Random(seed), is_odd=False)
        messages, tools = history.messages(seed % 5), history.tools(histories.PARAMETERS[:1])
        found = tokenizer.render_chat(messages, tools=tools)
        try:
            (expected,), _ = render_jinja_template(
                [messages], tools=tools, chat_template=KINDS[kind], add_generation_prompt=True, **histories.SPECIAL
            )
        except Exception:
            continue
        if all(text in expected for text in history.texts) and (not tools or '"look"' in expected):
            assert found == expected, seed
            same += 1
    # HF's function does not convert a text to parts.
    assert (same > 0) == (kind != "parts")


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_leaves_the_prompt_before_it_as_it_is(kind):
    api = api_of(KINDS[kind])
    for seed in range(COUNT // 2):
        history = Histories(Random(seed))
        messages, tools = Histories(Random(seed), is_odd=False).messages(0), history.tools()
        if kind == "mistral":
            # The template has the system message in the last user's message.
            messages = [message for message in messages if message["role"] != "system"]
        before, cached = "", 0
        for _ in range(6):
            prompt = prompt_of(api, {"messages": messages, "tools": tools})
            now = len(commonprefix([prompt, before]))
            assert now >= cached, (seed, before, prompt)
            before, cached = prompt, now
            messages = messages + history.agent_turn()


def test_the_normal_form_of_messages():
    call = lambda arguments: {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    for arguments, expected in (
        ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("null", {}), ("[1]", {"input": [1]}), ("5", {"input": 5}),
        ('{"a": "b', {"input": '{"a": "b'}), ("a b", {"input": "a b"}), ([1], {"input": [1]}),
        ('{"a": "\\ud83d"}', {"input": '{"a": "\\ud83d"}'}), ("[" * 100_000, {"input": "[" * 100_000}),
    ):  # fmt: skip
        (message,) = normal_messages([call(arguments)])
        function = {"name": "f", "arguments": expected}
        assert message == {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content, text in ((None, ""), ("", ""), ("a", "a"), (parts, "ab"), ([], "")):
        assert normal_messages([{"role": "developer", "content": content}]) == [{"role": "system", "content": text}]
    (message,) = normal_messages([{"role": "assistant", "content": "a", "reasoning": {"text": "b"}, "thinking": "c"}])
    assert message == {"role": "assistant", "content": "a", "thinking": "c"}
    with pytest.raises(PipelineError, match="content of type 'image_url' is not supported: the model reads only text"):
        normal_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_results_get_the_names_and_ids_of_their_calls():
    calls = [{"id": id_, "function": {"name": name, "arguments": "{}"}} for id_, name in (("x", "f"), ("y", "g"), (None, "f"))]
    given = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "y"},
        {"role": "function", "name": "f"},
        {"role": "tool", "tool_call_id": "other"},
        {"role": "tool"},
        {"role": "tool"},
    ]
    results = [(message["name"], message["tool_call_id"]) for message in normal_messages(given)[1:]]
    assert results == [("g", "y"), ("f", "x"), ("f", "other"), ("f", "call00002"), ("tool", "call00003")]
