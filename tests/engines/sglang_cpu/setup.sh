#!/usr/bin/env bash
# The real SGLang on a CPU, in a virtual environment of its own (its pins disagree with the product's).
# sglang, triton and torchvision go in without their dependencies: those would pull the CUDA stack.
# With REDRAFT_CACHE set, the environment is kept there, by the hash of what it is made from, and linked here.
set -euo pipefail
cd "$(dirname "$0")/../../.."
: "${PYTHON:=python3}" "${SGLANG_VENV:=.venv-sglang}"
here=tests/engines/sglang_cpu
if [ -n "${REDRAFT_CACHE:-}" ]; then
  made_from=$({ cat "$here/requirements.txt" "$here/setup.sh"; "$PYTHON" --version; } | sha256sum | cut -c1-12)
  kept=$REDRAFT_CACHE/sglang-$made_from
  mkdir -p "$kept"
  rm -rf "$SGLANG_VENV"
  ln -s "$kept" "$SGLANG_VENV"
  if [ -e "$kept/.whole" ]; then
    echo "SGLang: taken from $kept"
    exit 0
  fi
fi
place=$(readlink -f "$SGLANG_VENV") # venv makes no environment through a link
[ -x "$place/bin/python" ] || "$PYTHON" -m venv "$place"
pip() { "$SGLANG_VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

echo "[1/3] torch 2.13.0 (CPU)"
pip "torch==2.13.0+cpu" 2>/dev/null || pip "torch==2.13.0"
echo "[2/3] what SGLang imports ($here/requirements.txt)"
pip -r "$here/requirements.txt"
echo "[3/3] SGLang 0.5.23"
pip --no-deps sglang==0.5.23 triton==3.7.1 torchvision==0.28.0
touch "$SGLANG_VENV/.whole"
