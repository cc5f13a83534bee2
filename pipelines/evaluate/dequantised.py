"""Write a quantised HF directory in f32, so that transformers needs no other libraries."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from castiron.pipelines.checkpoints.hf_directory import CONFIG, SINGLE, quantization_config, tensors_of
from castiron.pipelines.checkpoints.hf_files import json_object
from castiron.pipelines.checkpoints.hf_quantised import column_orders, quantised_weights

# Methods for which transformers has no code of its own.
_WITH_LIBRARIES = ("awq", "bitsandbytes", "compressed-tensors", "gptq")
_OTHER_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


@contextmanager
def dequantised(path: Path) -> Iterator[Path]:
    """Yield an HF directory with the same model that transformers reads without other libraries.

    If the model's quantisation needs a library, as GPTQ does, this is a temporary copy with weights
    in f32, which is deleted at the end. Otherwise it is `path` itself.
    """
    full_config = json_object(path / CONFIG) if path.is_dir() else None
    config = quantization_config(full_config or {})
    if full_config is None or config is None or config.get("quant_method") not in _WITH_LIBRARIES:
        yield path
        return
    from safetensors.numpy import save_file

    found, _ = quantised_weights(path, config, tensors_of(path, True))
    found, orders = column_orders(found)
    values = {}
    for name, tensor in found.items():
        if name in orders.values():
            continue
        values[name] = tensor.dequantise()
        if order := orders.get(name):
            values[name] = values[name][:, np.argsort(found[order].dequantise())]
    text = full_config.get("text_config")
    for own in (full_config, text if isinstance(text, dict) else {}):
        own.pop("quantization_config", None)
    with TemporaryDirectory() as directory:
        copy = Path(directory)
        save_file({name: np.ascontiguousarray(each) for name, each in values.items()}, copy / SINGLE, {"format": "pt"})
        (copy / CONFIG).write_text(json.dumps(full_config), encoding="utf-8")
        for file in _OTHER_FILES:
            if (path / file).is_file():
                shutil.copy(path / file, copy)
        yield copy
