"""Verify real models and measure random ones on this machine's GPUs; `tests/gpu/run.sh` starts it.

The JSON is written after every step, so that an interrupted run leaves what it has measured. A step
is left out when the time is over.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np

from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.evaluate import random_checkpoint
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.bundle.manifest import WEIGHTS
from castiron.vmfb.device.gpus import DeviceError, devices_of
from castiron.vmfb.run.session import Batch

MODELS = ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct")
FOLDER = Path("build/gpu")
_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 32768}
SHAPES = {
    # Qwen/Qwen2.5-1.5B, Qwen/Qwen3-8B, and Qwen/Qwen3-32B with 52 layers, which makes 27B.
    "1.5b": {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
             "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True, **_QWEN},
    "8b": random_checkpoint.SHAPES["qwen3-8b"],
    "27b": {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600,
            "num_hidden_layers": 52, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
            "tie_word_embeddings": False, **_QWEN},
}  # fmt: skip
# By a part of the GPU's name: memory bandwidth in GB/s, and dense bf16 TFLOP/s, from NVIDIA's data sheets.
PEAKS = {"H200": (4800, 989), "H100": (3350, 989), "A100": (2039, 312), "L40S": (864, 362), "L4": (300, 121),
         "A10": (600, 125), "RTX 4090": (1008, 165), "RTX 3090": (936, 71)}  # fmt: skip
PROMPT, STEPS, SLOTS, CONTEXT = 512, 48, 8, 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--minutes", type=float, default=10.0, help="time after which no step is started (default: 10)")
    parser.add_argument("--models", type=Path, help="folder with the models (default: fetch them by name)")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"shapes to measure (default: {','.join(SHAPES)})")
    parser.add_argument("--drivers", default="cuda,vulkan", help="drivers to use (default: cuda,vulkan)")
    parser.add_argument("--no-hf", action="store_true", help="do not measure HF transformers")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    devices = []
    for driver in args.drivers.split(","):
        with suppress(DeviceError):
            devices.extend(devices_of(driver))
    first = {device.driver: device for device in reversed(devices)}
    result: dict = {"devices": [vars(device) for device in devices], "steps": {}}

    def step(name: str, work: Callable[[], dict]) -> None:
        start = time.monotonic()
        if start > end:
            found: dict = {"skipped": f"after {args.minutes:g} minutes"}
        else:
            try:
                found = work()
            except Exception as error:  # A step that fails must not stop the others.
                found = {"error": f"{type(error).__name__}: {error}"[:2000]}
        result["steps"][name] = found | {"seconds": round(time.monotonic() - start, 1)}
        args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
        print(name, json.dumps(result["steps"][name], default=str), flush=True)

    for driver in (driver for driver in ("cuda", "vulkan") if driver in first):
        for model in MODELS:
            step(f"verify {model} {driver}", lambda model=model, driver=driver: verify(model, driver, args.models))
    for shape in args.shapes.split(","):
        for driver in (driver for driver in ("cuda", "vulkan") if driver in first):
            name = first[driver].name
            step(f"castiron {shape} {driver}", lambda shape=shape, driver=driver, name=name: measure(shape, driver, name))
        if not args.no_hf:
            step(f"hf {shape}", lambda shape=shape: measure_hf(shape))
    failed = [name for name, found in result["steps"].items() if "error" in found or found.get("exact") is False]
    print(f"{args.out}: {len(result['steps'])} steps, failed: {', '.join(failed) or 'none'}")
    return 1 if failed or not devices else 0


def castiron(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "castiron", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def source_of(model: str, folder: Path | None) -> Path | str:
    if folder is not None:
        return next(path for path in (folder / f"{model}.gguf", folder / model) if path.exists())
    if model == "smollm2-135m-instruct":
        return model
    from tests.models.checkpoints import fetch

    return fetch(model) / "model.gguf"


def verify(model: str, driver: str, folder: Path | None) -> dict:
    """Return what `castiron verify` reports over 8 prompts of 32 tokens."""
    out, prompts = FOLDER / f"{model}-{driver}", FOLDER / "prompts.jsonl"
    text = (Path(random_checkpoint.__file__).parent / "verify_prompts.jsonl").read_text(encoding="utf-8")
    prompts.write_text("\n".join(sorted(text.splitlines(), key=len)[:8]), encoding="utf-8")
    made = castiron("compile", source_of(model, folder), "-o", out, "--target", driver, "--context", CONTEXT)
    if made.returncode:
        return {"error": made.stderr.strip()}
    done = castiron("verify", out, "--prompts", prompts, "-n", 32, "--json")
    if not done.stdout:
        return {"error": done.stderr.strip()}
    found = json.loads(done.stdout)
    if "prompts" not in found:
        return found
    wrong = [prompt for prompt in found["prompts"] if not prompt["exact"]]
    return {"exact": found["exact"], "compared": found["compared"], "different": wrong}


def peaks(name: str) -> tuple[float, float] | None:
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def timed(work: Callable[[], object], rounds: int = 3) -> float:
    """Return the median seconds of `work`, after one run that is not counted."""
    work()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return median(found)


def measure(shape: str, driver: str, device: str) -> dict:
    """Return decode and prefill speeds of random Q4_K_M weights, for one and eight sequences."""
    random_checkpoint.SHAPES[shape] = SHAPES[shape]
    checkpoint = random_checkpoint.random_checkpoint(shape, "q4_k", lambda stage, done: None)
    options = Options(context=CONTEXT, target=driver, prefill=(PROMPT,), batch=(SLOTS,), verify_widths=())
    path = compile_model(checkpoint, FOLDER / f"{shape}-{driver}", options).bundle
    start = time.perf_counter()
    batch = Batch(open_bundle(path))
    opened = time.perf_counter() - start
    manifest, slot = batch.program.manifest, batch.slots[0]
    tokens = np.random.default_rng(0).integers(3, min(1000, slot.vocab), PROMPT).tolist()

    def prefill() -> None:
        slot.rewind(0)
        slot.prefill(tokens)

    def decode(slots: int) -> Callable[[], None]:
        def run() -> None:
            for session in batch.slots[:slots]:
                session.rewind(0)
            for token in range(STEPS):
                batch.step(dict.fromkeys(range(slots), token + 3))

        return run

    weight_bytes, peak = manifest.files[WEIGHTS].size, peaks(device)
    parameters = sum(np.prod(tensor.shape) for tensor in random_checkpoint.checkpoint_of(shape, SHAPES[shape]).tensors.values())
    found: dict = {"weights_gb": weight_bytes / 1e9, "parameters": int(parameters), "open_s": round(opened, 2)}
    seconds = timed(prefill)
    found["prefill_tok_s"] = PROMPT / seconds
    if peak:
        found["prefill_share_of_bf16_peak"] = 2 * float(parameters) * PROMPT / seconds / (peak[1] * 1e12)
    for slots in (1, SLOTS):
        step = timed(decode(slots)) / STEPS
        found[f"decode_{slots}_tok_s"] = slots / step
        if peak:
            found[f"decode_{slots}_share_of_bandwidth"] = weight_bytes / step / (peak[0] * 1e9)
    return found


def measure_hf(shape: str) -> dict:
    """Return the speeds of HF transformers in bf16 with random weights on the same GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not torch.cuda.is_available():
        return {"skipped": "torch finds no GPU"}
    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    found: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def prefill(sequences: int):
        ids = torch.randint(3, 1000, (sequences, PROMPT), device="cuda")
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        torch.cuda.synchronize()
        return cache

    def decode(sequences: int) -> None:
        cache, ids = None, torch.full((sequences, 1), 5, device="cuda")
        for _ in range(STEPS):
            answer = model(ids, past_key_values=cache, use_cache=True)
            cache, ids = answer.past_key_values, answer.logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()

    with torch.inference_mode():
        found["prefill_tok_s"] = PROMPT / timed(lambda: prefill(1))
        for sequences in (1, SLOTS):
            found[f"decode_{sequences}_tok_s"] = sequences * STEPS / timed(lambda n=sequences: decode(n))

    return found


if __name__ == "__main__":
    sys.exit(main())
