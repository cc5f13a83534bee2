"""Tests that `make test` leaves to `make test-all`: they take long, or need more packages. The real
checkpoints of `tests/models` are left to `make test-models`.

A line is the beginning of pytest's node ids, where `*` stands for anything. A complete file that is
listed here is not even imported by the quick tests.
"""

from __future__ import annotations

import re

# What needs a package that only requirements-test-all.lock has.
PACKAGES = """
tests/emitter/test_ops.py::test_xla_agrees
tests/emitter/test_printer.py::test_every_16_bit
tests/emitter/test_printer.py::test_floats_come_back
tests/emitter/test_verifier.py::test_any_other_name
tests/emitter/test_emitter_guide.py::test_xla
tests/compile/test_emit.py::test_xla
tests/batch/test_batch_parquet.py
tests/cluster/test_bundle_source.py
tests/api/test_langchain.py
tests/api/test_messages.py
tests/api/test_ollama_client.py
tests/api/test_ollama_js.py
tests/server/test_openapi.py
tests/reference/test_interpreter.py::test_undefined_results
tests/test_cluster_page.py
tests/test_end_to_end.py::test_portable_text
tests/test_guides.py::test_the_container_passes
tests/test_guides.py::test_the_snippets
tests/test_packaging.py::test_the_lock_has*test-all
tests/test_scores_page.py
"""
# Kernels for other CPUs, of other cache types than f16, and more draws of each; canonical sums.
TARGETS = """
tests/emitter/test_*::test_kernels_*x86
tests/emitter/test_*::test_kernels_*aarch64
tests/emitter/test_attention.py::*[f16 rest
tests/emitter/test_matmul_kernels.py::*rest
tests/emitter/test_attention.py::*[f32
tests/emitter/test_attention.py::*[q8_0
tests/emitter/test_attention.py::test_a_ring
tests/emitter/test_integer_matmuls.py::*[aarch64
tests/emitter/test_integer_matmuls.py::*[x86-64-v
tests/emitter/test_integer_matmuls.py::test_host_matches_the_definition[rest]
tests/emitter/test_canonical.py::test_a_row
tests/emitter/test_scaled_codecs.py::test_a_row
tests/emitter/test_scaled_codecs.py::test_a_matrix
tests/emitter/test_scaled_codecs.py::test_int8_activations*64-
tests/emitter/test_experts.py::test_host*grouped
tests/emitter/test_experts.py::*[host-gemv
tests/emitter/test_experts.py::test_a_pair*gemv
tests/emitter/test_bf16_split.py::*aarch64
tests/emitter/test_bf16_split.py::*x86-64-v4
tests/test_canonical.py::test_every_way
tests/test_canonical.py::test_the_default
"""
# Families in a second and third shape; what every key of a config changes.
SHAPES = """
tests/emitter/test_models.py::*-1-
tests/emitter/test_models.py::*-2-
tests/emitter/test_models.py::test_logits*-1]
tests/emitter/test_models.py::test_logits*-2]
tests/emitter/test_models.py::test_a_prompt*-1]
tests/emitter/test_models.py::test_a_prompt*-2]
tests/emitter/test_models.py::test_the_last*-1]
tests/emitter/test_models.py::test_the_last*-2]
tests/emitter/test_models.py::test_the_kernels*-1]
tests/emitter/test_models.py::test_the_kernels*-2]
tests/emitter/test_models_rows.py::*-portable]
tests/emitter/test_models_spoilt.py
"""
# Measuring, tuning and calibrating; more families of a kind; slow compilations of `portable`.
SLOW = """
tests/api/test_described_fields.py::test_a_server
tests/emitter/test_kernels_guide.py::test_the_c
tests/vulkan/test_*.py
tests/compile/test_gpu_targets.py
tests/compile/test_gpu_dispatches.py
tests/evaluate/test_accuracy.py
tests/pipelines/test_python_api.py::test_a_type_checker
tests/evaluate/test_bench.py
tests/evaluate/test_bench_kernel.py
tests/compile/test_calibrate.py
tests/compile/test_emit.py::test_a_kernel_module_compiles
tests/compile/test_gguf_types.py
tests/checkpoints/test_hf_tokenizer.py::test_many
tests/checkpoints/test_hub.py::test_a_copy*all
tests/checkpoints/test_adapter.py::test_an_adapter_of_a_vision*[gemma4
tests/checkpoints/test_adapter.py::test_an_adapter_of_a_vision*[lfm
tests/checkpoints/test_adapter.py::test_an_adapter_of_a_vision*[mistral3
tests/checkpoints/test_adapter.py::test_an_adapter_of_a_vision*[qwen3_5
tests/checkpoints/test_adapter.py::test_an_adapter_of_a_vision*[smolvlm
tests/text/test_rerank.py::test_a_classifier_of_a_decoder
tests/checkpoints/test_hf_quantised.py::test_logits_of
tests/checkpoints/test_hf_quantised.py::test_bundles
tests/compile/test_weights.py::test_a_quantised_bundle
tests/emitter/test_bf16_split.py::test_matrix
tests/checkpoints/test_gguf_checkpoint.py::test_config_is_that_of_transformers[gemma3
tests/evaluate/test_evaluate.py
tests/engine/test_draft.py
tests/engine/test_states_text.py::*[lfm2
tests/mutants/test_mutants.py::test_a_share
tests/pipelines/test_python_api.py::test_the_examples
tests/test_deploy.py
tests/test_guides.py::test_a_command
tests/test_guides.py::test_the_fine_tune
tests/evaluate/test_explain.py
tests/compile/test_keep_intermediates.py
tests/evaluate/test_known_shapes.py
tests/engine/test_prefix_store.py::*[lfm2
tests/cli/test_bad_values.py::*[many
tests/engine/test_states_text.py::*[qwen3_5
tests/engine/test_states_text.py::*[granite
tests/checkpoints/test_gguf_tokenizer.py::test_gemma3
tests/evaluate/test_tune.py
tests/reference/test_tiny.py::test_every_weight
tests/evaluate/test_workload.py
tests/text/test_template_variables.py::test_a_bundle
tests/engine/test_longrope.py::*[portable
tests/engine/test_longrope.py::*[ring
tests/test_batch.py::*[portable
tests/test_caches.py::*[gemma3
tests/test_caches.py::*portable
tests/test_caches.py::*q8_0
tests/test_caches.py::test_the_cache_type
tests/test_canonical.py::test_every_kind_of_layer
tests/test_end_to_end.py::*[portable
tests/test_end_to_end.py::test_no_copy
tests/test_serving_page.py::test_the_image
tests/server/test_isolation.py::test_a_key*True
tests/server/test_isolation.py::test_a_stream_that_nobody
tests/server/test_isolation.py::test_streams_of_one_client
tests/cli/test_failures.py::test_little_memory*[24
tests/cli/test_failures.py::test_little_memory*[60
"""
FULL = [line for table in (PACKAGES, TARGETS, SHAPES, SLOW) for line in table.split("\n") if line]

MODELS = "tests/models/"
_FULL_IDS = re.compile("|".join(re.escape(line).replace(r"\*", ".*") for line in FULL))


def is_full(node_id: str) -> bool:
    """Whether only the full suite runs this test, or this file."""
    return _FULL_IDS.match(node_id) is not None


def is_in(node_id: str, tier: str) -> bool:
    """Whether a tier runs this test: quick, full, all (quick and full) or models."""
    if tier == "models" or node_id.startswith(MODELS):
        return tier == "models" and node_id.startswith(MODELS)
    return tier == "all" or is_full(node_id) == (tier == "full")
