#!/usr/bin/env bash
# The peers' training code, each in a virtual environment of its own: setup.sh specforge|speculators FOLDER
# Both are installed without their dependencies: SpecForge's would pull the whole of SGLang, those of speculators
# torchvision and torchaudio, and both pin other releases of torch. What their EAGLE-3 training imports is in the
# requirements beside this file. torch is the product's own version, so that all sides compute with the same kernels.
set -euo pipefail
cd "$(dirname "$0")/../.."
peer=${1:?specforge or speculators} venv=${2:?the folder of the environment}
: "${PYTHON:=python3}"
case "$peer" in
  specforge) packages=(specforge==0.2.0) ;;
  speculators) packages=(speculators==0.9.0 hs-connectors==0.9.0) ;;
  *) echo "error: no such peer: $peer. To mend: specforge or speculators" >&2; exit 2 ;;
esac
[ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

echo "[1/3] torch 2.13.0 (${TORCH:=cpu})"
if [ "$TORCH" = cuda ]; then pip torch==2.13.0; else pip "torch==2.13.0+cpu" 2>/dev/null || pip torch==2.13.0; fi
echo "[2/3] what $peer imports (benchmarks/peers/requirements-$peer.txt)"
pip -r "benchmarks/peers/requirements-$peer.txt"
echo "[3/3] ${packages[*]}"
pip --no-deps "${packages[@]}" triton==3.7.1
