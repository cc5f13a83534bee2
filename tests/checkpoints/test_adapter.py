"""LoRA adapters are merged as peft merges them; other adapters are rejected by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from castiron.pipelines.checkpoints.adapter import Adapter, merge, open_adapter
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, Tensor
from castiron.pipelines.checkpoints.gguf.gguf_file import read_gguf
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import inspect
from castiron.pipelines.compile.build_model import open_source
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.quantise_gguf import quantise
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate.verify import adapter_of, load_reference
from castiron.reference import hf, tiny
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Session
from tests.checkpoints.test_text_part import MODELS, vision_model
from tests.compile.test_quantise import quiet
from tests.support import tokenizer_directories
from tests.support.encoders import write
from tests.support.tiny_gguf import write_llama
from tests.test_end_to_end import greedy

CASES = {
    "plain": {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 6},
    "all": {"target_modules": "all-linear", "r": 3, "lora_alpha": 7},
    "rank-stabilised": {"target_modules": ["up_proj"], "r": 9, "lora_alpha": 4, "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 4,
        "rank_pattern": {"layers.1.self_attn.q_proj": 7, "down_proj": 2}, "alpha_pattern": {r"layers\.[02]\..*": 11},
    },
    "some layers": {"target_modules": ["o_proj"], "layers_to_transform": [2], "r": 4},
    "embedding and head": {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"], "r": 4},
    "biases": {"target_modules": ["q_proj"], "bias": "all", "r": 2},
    "fan in, fan out": {"target_modules": ["q_proj"], "fan_in_fan_out": True, "r": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    options = {"attention_bias": True, "tie_word_embeddings": False}
    return tiny.tiny_model("llama", tmp_path_factory.mktemp("base") / "llama", **options)


def train(base: Path, out: Path, **config) -> Path:
    """Save an adapter of random matrices, which change the weights visibly."""
    torch.manual_seed(0)
    model = get_peft_model(hf.load(base, 1), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
            elif parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(out)
    return out


def merged_by_peft(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = hf.load(base, 1).to(dtype)
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().state_dict()


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return train(base, tmp_path_factory.mktemp("adapter") / "lora", **CASES["patterns"])


@pytest.fixture
def copy(adapter, tmp_path) -> Path:
    """A copy of the adapter that the test may change."""
    return shutil.copytree(adapter, tmp_path / "lora")


@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("case", CASES)
def test_the_merge_is_that_of_peft(base, tmp_path, case):
    adapter = train(base, tmp_path / "lora", **CASES[case])
    before, found = open_checkpoint(base), open_source(base, Options(adapter=str(adapter)))
    expected = merged_by_peft(base, adapter)
    assert set(expected) == set(found.tensors)
    changed = 0
    for name, values in expected.items():
        np.testing.assert_allclose(found.tensors[name].dequantise(), values.numpy(), rtol=0, atol=2e-6, err_msg=name)
        changed += not np.allclose(before.tensors[name].dequantise(), values.numpy(), atol=1e-3)
    names = {*open_adapter(adapter).pairs, *open_adapter(adapter).replaced}
    assert len(open_adapter(adapter).pairs) <= changed <= len(names)


def test_the_merge_transposes_gpt2s_weights(tmp_path):
    base = tiny.tiny_model("gpt2", tmp_path / "gpt2")
    adapter = train(base, tmp_path / "lora", target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True, r=3)
    found, expected = open_source(base, Options(adapter=str(adapter))), merged_by_peft(base, adapter)
    for name in open_adapter(adapter).pairs:
        np.testing.assert_allclose(found.tensors[name].dequantise(), expected[name].numpy().T, rtol=0, atol=2e-6, err_msg=name)


def test_a_bf16_checkpoint_stays_one(tmp_path):
    """The merge is computed in f32 and rounded once, as by peft."""
    base = tiny.tiny_model("llama", tmp_path / "llama", dtype=torch.bfloat16)
    adapter = train(base, tmp_path / "lora", **CASES["all"])
    found = open_source(base, Options(adapter=str(adapter)))
    for name, values in merged_by_peft(base, adapter, torch.bfloat16).items():
        if name in found.tensors:
            assert found.tensors[name].codec == "bf16"
            ours = torch.from_numpy(found.tensors[name].dequantise())
            # Sums in another order are sometimes rounded to the other side.
            assert (ours == values.float()).float().mean() > 0.998, name
            torch.testing.assert_close(ours, values.float(), rtol=2**-7, atol=1e-6)


def test_a_bundle_with_an_adapter_gives_hfs_tokens(base, adapter, tmp_path):
    options = Options(context=48, batch=(), verify_widths=(), adapter=str(adapter))
    bundle = open_bundle(compile_model(base, tmp_path / "out", options).bundle)
    tokens = np.random.default_rng(5).integers(3, 211, 30).tolist()
    adapted = PeftModel.from_pretrained(hf.load(base, 1), str(adapter)).base_model.model
    expected = hf.greedy(adapted, tokens, 12)
    found = greedy(Session(bundle, 1), tokens, 12)
    assert min(expected.margins) > 1e-4 and found == expected.tokens
    assert found != hf.greedy(hf.load(base, 1), tokens, 12).tokens
    # verify compares with the adapted model, and the manifest names the adapter.
    assert hf.greedy(load_reference(base, "native", 1, adapter_of(bundle)), tokens, 12).tokens == found
    _, lines = inspect.bundle(str(bundle.path))
    assert any(line.startswith("adapter") and str(adapter) in line and "rank 4" in line for line in lines)


def test_a_changed_adapter_makes_a_new_bundle(base, copy, tmp_path):
    options = Options(context=16, lowering="portable", batch=(), verify_widths=(), adapter=str(copy))
    bundle = open_bundle(compile_model(base, tmp_path / "out", options).bundle)
    assert compile_model(base, tmp_path / "out", options).up_to_date
    tensors = {name: tensor * 2 for name, tensor in load_file(copy / "adapter_model.safetensors").items()}
    save_file(tensors, copy / "adapter_model.safetensors")
    with pytest.raises(PipelineError, match="is missing or has changed: .*; compile the bundle again"):
        adapter_of(bundle)
    assert not compile_model(base, tmp_path / "out", options).up_to_date
    assert compile_model(base, tmp_path / "out", options).up_to_date
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert not compile_model(base, tmp_path / "out", options).up_to_date


def test_an_adapters_end_token_ends_answers_too(base, copy):
    config = {"eos_token": "<|im_end|>", "pad_token": "<unk>"}
    tokenizer_directories.write(
        copy, {"tokenizer.json": tokenizer_directories.base("gpt2"), "tokenizer_config.json": json.dumps(config)}
    )
    before, found = open_checkpoint(base), open_source(base, Options(adapter=str(copy)))
    assert found.special_tokens == config
    end = {token["content"]: token["id"] for token in found.tokenizer["added_tokens"]}["<|im_end|>"]
    assert found.eos_token_ids == (end, *before.eos_token_ids)


def test_the_adapters_tokenizer_and_template_are_used(base, copy):
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    (copy / "tokenizer.json").write_text('{"model": {}}')
    found = open_source(base, Options(adapter=str(copy)))
    assert (found.chat_template, found.tokenizer) == ("{{ messages }}", {"model": {}})


@pytest.mark.parametrize(
    ("change", "expected_message"),
    [
        ({"peft_type": "IA3"}, "adapter of type 'IA3', not LORA"), ({"use_dora": True}, "uses use_dora"),
        ({"target_parameters": ["mlp.experts"]}, "uses target_parameters"), ({"novelty": 1}, "uses novelty"),
        ({"init_lora_weights": "pissa"}, "initialised by pissa"),
        ({"r": "4"}, "r is .4., not a number below"), ({"rank_pattern": [1]}, "rank_pattern is .*, not an object of numbers"),
        ({"r": 5}, "q_proj has LoRA matrices of rank 4 and 4, but adapter_config.json states 5"),
        ({"rank_pattern": {"(": 1}}, "the invalid pattern"),
    ],
)  # fmt: skip
def test_rejects_variants_of_lora_by_name(copy, change, expected_message):
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | change))
    assert_rejected(copy, expected_message)


def assert_rejected(adapter: Path, expected_message: str) -> None:
    with pytest.raises(CheckpointError, match=expected_message) as error:
        open_adapter(adapter)
    assert str(adapter) in str(error.value) and "\n" not in str(error.value)


def test_rejects_folders_without_an_adapter(base, copy):
    assert_rejected(base, "has no adapter_config.json")
    (copy / "adapter_model.safetensors").unlink()
    assert_rejected(copy, "has no adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "expected_message"),
    [
        (lambda t: t.popitem(), "only one of the two LoRA matrices"),
        (lambda t: t.update({"base_model.model.x.lora_magnitude_vector": torch.ones(3)}), "not a plain LoRA matrix"),
        (
            lambda t: t.update({"base_model.model.model.x.lora_A.weight": torch.ones(3)}),
            "has 1 dimensions, not 2; merge the adapter with peft",
        ),
    ],
)
def test_rejects_tensors_that_are_not_lora(copy, change, expected_message):
    tensors = load_file(copy / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, copy / "adapter_model.safetensors")
    assert_rejected(copy, expected_message)


def test_rejects_the_adapter_of_a_different_model(base, adapter, tmp_path):
    narrow = open_checkpoint(tiny.tiny_model("llama", tmp_path / "narrow", hidden_size=32))
    with pytest.raises(CheckpointError, match="give the base model that the adapter was trained on"):
        merge(narrow, open_adapter(adapter))
    short = open_checkpoint(tiny.tiny_model("llama", tmp_path / "short", num_hidden_layers=1))
    with pytest.raises(
        CheckpointError, match=r"adapts model.layers.*, which .* lacks; give the base model that the adapter was trained on"
    ):
        merge(short, open_adapter(adapter))


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word_embeddings")
def test_rejects_changes_of_a_tied_head(base, tmp_path):
    tied = tiny.tiny_model("llama", tmp_path / "tied", tie_word_embeddings=True)
    adapter = open_adapter(train(tied, tmp_path / "lora", target_modules=["q_proj", "embed_tokens"], r=2))
    with pytest.raises(CheckpointError, match="adapts model.embed_tokens.weight, which is shared by embedding and"):
        merge(open_checkpoint(tied), adapter)
    plain = train(tied, tmp_path / "plain", target_modules=["q_proj"], r=2)
    tensors = load_file(plain / "adapter_model.safetensors")
    embedding = torch.from_numpy(open_checkpoint(tied).tensors["model.embed_tokens.weight"].dequantise())
    save_file(tensors | {"base_model.model.model.embed_tokens.weight": embedding}, plain / "adapter_model.safetensors")
    assert merge(open_checkpoint(tied), open_adapter(plain)).tensors.keys() == open_checkpoint(tied).tensors.keys()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_merging_into_gguf_equals_merging_into_the_directory(base, copy, tmp_path):
    """The metadata is that of the file, except for the template and the model's name."""
    (copy / "chat_template.jinja").write_text("{{ trained }}")
    out = lambda name: tmp_path / f"{name}.gguf"
    plain = quantise(base, out("plain"), Options(weights="f32"), quiet).file
    for weights in ("f32", "q8_0"):
        options = Options(weights=weights, adapter=str(copy))
        straight, by_way = (
            quantise(base, out("straight"), options, quiet).file,
            quantise(plain, out("by-way"), options, quiet).file,
        )
        one, other = read_gguf(straight), read_gguf(by_way)
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in one.tensors.items():
            assert np.array_equal(tensor.data, other.tensors[name].data), name
        changed = {key: other.metadata[key] for key in ("general.name", "general.file_type")}
        assert other.metadata == read_gguf(plain).metadata | changed | {"tokenizer.chat_template": "{{ trained }}"}


def test_rejects_adapters_for_quantised_checkpoints(base, tmp_path):
    import gguf

    adapter = train(base, tmp_path / "lora", target_modules=["q_proj"], r=2)
    q8 = gguf.GGMLQuantizationType.Q8_0
    tensors = {f"blk.{n}.attn_q.weight": (np.ones((64, 64), np.float32), q8) for n in range(2)}
    path = write_llama(tmp_path / "m.gguf", tensors=tensors)
    three = {name: pair for name, pair in open_adapter(adapter).pairs.items() if ".2." not in name}
    with pytest.raises(CheckpointError, match="quantised .q8_0.; give a base in f32"):
        merge(open_checkpoint(path), type(open_adapter(adapter))(adapter, 2, three, {}))


def vision_adapter(complete: str, folder: Path) -> tuple[Path, Path, Path]:
    """Return a vision model, an adapter of all its linear layers, and peft's merge of both."""
    base = vision_model(complete, folder)
    torch.manual_seed(0)
    load = lambda: AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    # Vision models often have several layers of one name, of which some have other names than text models.
    linear = [name for name, module in load().named_modules() if isinstance(module, torch.nn.Linear) and "lm_head" not in name]
    model = get_peft_model(load(), LoraConfig(init_lora_weights=False, r=2, target_modules=linear))
    model.save_pretrained(folder / "lora")
    model.merge_and_unload().save_pretrained(folder / "merged")
    return base, folder / "lora", folder / "merged"


def with_names(adapter: Path, path: Path, pattern: str, name: str) -> Path:
    """Copy an adapter, with other names of tensors."""
    shutil.copytree(adapter, path)
    tensors = load_file(path / "adapter_model.safetensors")
    save_file({re.sub(pattern, name, key): tensor for key, tensor in tensors.items()}, path / "adapter_model.safetensors")
    return path


@pytest.mark.parametrize("complete", MODELS)
def test_an_adapter_of_a_vision_model_changes_its_text_part(complete, tmp_path):
    """The text part has a prefix by the version of transformers, or a third without the head."""
    base, adapter, merged = vision_adapter(complete, tmp_path)
    part = "text_model" if complete == "smolvlm" else "language_model"
    prefixes = {"new": rf"model.{part}.", "without head": rf"{part}."} | (
        {} if part == "text_model" else {"old": f"{part}.model."}
    )
    expected, plain = open_checkpoint(merged), open_checkpoint(base)
    names = [name for name in load_file(adapter / "adapter_model.safetensors") if "lora_A" in name]
    vision = sum(f".model.{part}." not in name for name in names)
    assert 0 < vision < len(names)
    for kind, prefix in prefixes.items():
        own = with_names(adapter, tmp_path / kind, rf"^base_model\.model\.model\.{part}\.", f"base_model.model.{prefix}")
        # The base may be a text model that was taken out of the vision model.
        for directory in (base, tmp_path / "text"):
            found = merge(open_checkpoint(directory), open_adapter(own))
            assert found.tensors.keys() == expected.tensors.keys()
            assert_close(found.tensors, expected.tensors)
            dropped = {name: count for name, count in found.left_out.items() if name.endswith(" of the adapter")}
            assert sum(dropped.values()) == vision and found.left_out == {**open_checkpoint(directory).left_out, **dropped}
    assert sum(not np.array_equal(t.dequantise(), plain.tensors[n].dequantise()) for n, t in expected.tensors.items()) >= 7


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor.dequantise(), expected[name].dequantise(), rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("saved", [[], ["c_fc", "attn.c_proj", "ln_f"]])
@pytest.mark.parametrize("load", [AutoModel, AutoModelForCausalLM])
def test_an_adapter_of_gpt2_changes_transposed_weights(load, saved, tmp_path):
    """So are weights that were trained completely; without the head, names lack `transformer.`."""
    base = tiny.tiny_model("gpt2", tmp_path / "gpt2")
    torch.manual_seed(0)
    config = LoraConfig(init_lora_weights=False, r=2, target_modules=["c_attn"], modules_to_save=saved, fan_in_fan_out=True)
    model = get_peft_model(load.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape) if parameter.requires_grad else 0
    model.save_pretrained(tmp_path / "lora")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    found = merge(open_checkpoint(base), open_adapter(tmp_path / "lora"))
    assert_close(found.tensors, open_checkpoint(tmp_path / "merged").tensors)


def test_an_adapter_of_a_model_without_its_head(tmp_path):
    base = tiny.tiny_model("qwen3", tmp_path / "qwen3")
    adapter = train(base, tmp_path / "lora", target_modules=["q_proj", "down_proj"], modules_to_save=["norm"], r=2)
    bare = with_names(adapter, tmp_path / "bare", r"^base_model\.model\.model\.", "base_model.model.")
    found, expected = (merge(open_checkpoint(base), open_adapter(path)) for path in (bare, adapter))
    assert found.tensors.keys() == expected.tensors.keys()
    assert_close(found.tensors, expected.tensors)


def test_rejects_changes_of_layers_that_the_base_does_not_run(base, tmp_path):
    """A rule that drops a base's tensor must not drop an adapter's, which training changed."""
    made = write("bert", tmp_path / "bert", pooling="cls", num_hidden_layers=1)
    change = {"classifier.weight": (np.ones((1, 2), np.float32), np.ones((2, 64), np.float32), 1.0)}
    with pytest.raises(CheckpointError, match="adapts classifier.weight, which .* lacks"):
        merge(open_checkpoint(made), Adapter(tmp_path, 2, change, {}))
