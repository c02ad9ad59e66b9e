#!/usr/bin/env bash
# The real SGLang sources that the patch is tested on, under .cache/sglang_trees/VERSION (git-ignored): from each
# release's wheel or source archive only the model files, the two runners, the collector and the version are kept.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${PYTHON:=python3}" "${SGLANG_VERSIONS:=0.5.6.post2 0.5.9 0.5.10 0.5.12 0.5.13 0.5.14 0.5.23}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for version in $SGLANG_VERSIONS; do
  tree=.cache/sglang_trees/$version
  [ -d "$tree/sglang/srt/models" ] && { echo "SGLang $version: there"; continue; }
  mkdir -p "$work/$version"
  "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
    --only-binary=:all: --dest "$work/$version" "sglang==$version"
  "$PYTHON" - "$work/$version" "$work/tree-$version" <<'PYTHON'
import pathlib
import sys
import zipfile

KEPT = (
    "sglang/srt/models/",
    "sglang/srt/model_executor/cuda_graph_runner.py",
    "sglang/srt/model_executor/model_runner.py",
    "sglang/srt/layers/aux_hidden_states.py",
    "sglang/version.py",
    "sglang/_version.py",
)
(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    kept = [one for one in archive.namelist() if one.startswith(KEPT) or one.endswith(".dist-info/METADATA")]
    archive.extractall(sys.argv[2], kept)
PYTHON
  mkdir -p .cache/sglang_trees
  mv "$work/tree-$version" "$tree"
  echo "SGLang $version: fetched"
done
