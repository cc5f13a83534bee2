"""A bundle's chat template gets the special tokens of its checkpoint, and the template for tools."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.text.chat_template import variables_of
from castiron.pipelines.text.tokenizer import Tokenizer, load_tokenizer
from castiron.pipelines.text.tool_formats import ToolFormat
from castiron.reference.tiny import tiny_model
from castiron.vmfb.bundle.bundle import open_bundle
from tests.support import served
from tests.support.tiny_gguf import write_llama
from tests.support.tokenizer_directories import base, write
from tests.support.valid_checkpoints import SENTENCEPIECE

DEFAULT = (
    "[{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}]"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
WITH_TOOLS = "{{ tools | tojson }}" + DEFAULT
MESSAGES = [{"role": "user", "content": "the cat"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tiny_model("llama", tmp_path_factory.mktemp("tiny"), vocab_size=310, bos_token_id=0, eos_token_id=1)
    templates = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": WITH_TOOLS}]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<pad>",
        "unk_token": "<unk>", "image_token": "<image>", "chat_template": templates,
        "added_tokens_decoder": {str(300 + n): {"content": text, "special": True} for n, text in enumerate(("<|im_start|>", "<pad>"))},
    }  # fmt: skip
    return write(folder, {"tokenizer.json": base("gpt2"), "tokenizer_config.json": json.dumps(config)})


@pytest.fixture(scope="module")
def bundle(checkpoint, tmp_path_factory):
    options = Options(context=8, batch=(), verify_widths=(), lowering="portable")
    return compile_model(checkpoint, tmp_path_factory.mktemp("bundle") / "tiny", options).bundle


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_bundle_renders_and_encodes_as_transformers(lazy, tools, checkpoint, bundle):
    own, peer = load_tokenizer(bundle, lazy=lazy), AutoTokenizer.from_pretrained(checkpoint)
    own = Tokenizer(own.backend, own.chat_template, own.bos, own.eos, tool_format=ToolFormat("json"), special=own.special)
    assert own.render_chat(MESSAGES, tools=tools) == peer.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    ids = peer.apply_chat_template(MESSAGES, tools=tools, return_dict=False)
    assert own.encode_chat(MESSAGES, tools=tools, add_generation_prompt=False) == ids
    assert set(own.eos) == {1, peer.eos_token_id} and own.special == peer.special_tokens_map


def test_special_tokens_are_no_variables_of_a_request():
    assert variables_of(DEFAULT + "{{ enable_thinking }}") == ["enable_thinking"]


def test_the_manifest_has_the_texts_of_special_tokens(tmp_path_factory):
    """The config has a BOS, the tokenizer has none."""
    made = open_bundle(served.bundle(tmp_path_factory.getbasetemp()))
    assert made.manifest.tokens.bos == 1 and made.manifest.tokens.special == {"eos_token": "</s>"}
    assert load_tokenizer(made).special == {"eos_token": "</s>"}


def test_a_gguf_file_gives_its_special_tokens_and_its_template_for_tools(tmp_path):
    metadata = SENTENCEPIECE | {
        "tokenizer.chat_template": DEFAULT, "tokenizer.chat_template.tool_use": WITH_TOOLS,
        "tokenizer.ggml.padding_token_id": 3,
    }  # fmt: skip
    found = open_checkpoint(write_llama(tmp_path / "x.gguf", metadata))
    texts = metadata["tokenizer.ggml.tokens"]
    assert found.special_tokens == {
        "bos_token": texts[1], "eos_token": texts[2], "unk_token": texts[0], "pad_token": texts[3],
    }  # fmt: skip
    assert WITH_TOOLS in found.chat_template and DEFAULT in found.chat_template
