#!/usr/bin/env bash
# Verify and measure castiron on the GPU of this machine in about ten minutes, and write JSON.
#
#   tests/gpu/run.sh [OUT.json] [measure.py's options, such as --minutes 20 --models DIR]
#
# It needs Python 3.11 or newer, a driver (libcuda.so; for Vulkan libvulkan.so.1 and the GPU's ICD),
# 20 GB of disk, and these wheels:
#   requirements.lock, requirements-test.lock   castiron, the compiler and transformers
#   torch with CUDA instead of the locked one   HF in bf16 on the same GPU (--no-hf leaves it out)
# Without a network, set PYTHON to a venv that has them, or WHEELS to a folder with the wheels.
# Models are fetched by name unless --models names a folder with NAME.gguf files or HF directories.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-build/gpu/result.json}
shift || true
mkdir -p build/gpu "$(dirname "$out")"
if [ -z "${PYTHON:-}" ]; then
  PYTHON=build/gpu/venv/bin/python
  if [ ! -x "$PYTHON" ]; then
    python3 -m venv build/gpu/venv
    find=${WHEELS:+--no-index --find-links "$WHEELS"}
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install --quiet $find torch
    grep -v '^torch==' requirements-test.lock >build/gpu/test.lock
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install --quiet $find -r requirements.lock -r build/gpu/test.lock
  fi
fi
export PYTHONPATH=$PWD CASTIRON_CACHE=${CASTIRON_CACHE:-$PWD/build/gpu/cache}
nvidia-smi || true
"$PYTHON" -m castiron devices
exec "$PYTHON" -m tests.gpu.measure "$out" "$@"
