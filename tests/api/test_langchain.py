"""An application written with langchain-openai works with castiron's address."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

import castiron
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from tests.support import encoders, served


class Weather(BaseModel):
    """A weather report without free text, because a random model would not end it."""

    sunny: bool
    checkpoint: Literal["here", "there"]


@tool
def look_out(closed: bool) -> str:
    """What is seen from a window, which may be closed."""
    return "trees"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    directory = tmp_path_factory.mktemp("langchain") / "tiny"
    checkpoint = served.checkpoint(directory, served.TOOLS_TEMPLATE, num_hidden_layers=1, max_position_embeddings=1024)
    return compile_model(checkpoint, checkpoint / "bundle", Options(context=1024, batch=(), verify_widths=())).bundle


@pytest.fixture(scope="module")
def chat(bundle, tmp_path_factory):
    with served.served(bundle, tmp_path_factory.mktemp("serve") / "log") as running:
        yield ChatOpenAI(
            base_url=f"{running.url}/v1", api_key="none", model="tiny", temperature=0, max_tokens=200, max_retries=0
        )


def test_it_answers_and_streams(chat, bundle):
    with castiron.load(bundle, threads=1) as model:
        generated = model.chat(served.MESSAGES, max_tokens=200).text
    answer = chat.invoke([("human", "Hello there")])
    assert answer.content == generated and answer.usage_metadata["input_tokens"] == len(served.RENDERED)
    pieces = list(chat.stream("Hello there"))
    assert "".join(piece.content for piece in pieces) == generated and len(pieces) > 2


def test_it_calls_tools_and_returns_structured_output(chat):
    answer = chat.bind_tools([look_out], tool_choice="look_out").invoke("Hello")
    (call,) = answer.tool_calls
    assert call["name"] == "look_out" and isinstance(call["args"]["closed"], bool)
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Weather, method=method).invoke("Hello"), Weather)


def test_embeddings_take_texts_as_they_are(tmp_path):
    """By default the client would download OpenAI's tokenizer and send its token ids."""
    made = encoders.write("bert", tmp_path / "model", pooling="cls", longest=20, num_hidden_layers=1)
    bundle = compile_model(made, tmp_path / "bundle", Options(embed=(20,))).bundle
    with castiron.load(bundle, threads=1) as model:
        vectors = model.embed(["Hello", "Ice"])
    with served.served(bundle, tmp_path / "log") as running:
        options = {"base_url": f"{running.url}/v1", "api_key": "none", "model": "model"}
        client = OpenAIEmbeddings(check_embedding_ctx_length=False, **options)
        np.testing.assert_allclose(client.embed_documents(["Hello", "Ice"]), vectors, atol=1e-7)
        np.testing.assert_allclose(client.embed_query("Ice"), vectors[1], atol=1e-7)
