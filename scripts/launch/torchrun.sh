#!/usr/bin/env bash
# One node's part of a training run over several nodes, by torchrun. Start it on every node, the first one included:
#
#   scripts/launch/torchrun.sh NODES NODE_RANK HEAD[:PORT] conf=kimi_k25 'stages=[train]' [key=value ...]
#
# HEAD is the host of node 0, reachable from all; the run folder and the store lie on a file system that all share.
# PROCESSES (8) processes are started on each node; PYTHON (python) is the interpreter.
set -euo pipefail
if [ $# -lt 4 ]; then
  echo "usage: $0 NODES NODE_RANK HEAD[:PORT] conf=PRESET [key=value ...]" >&2
  exit 2
fi
nodes=$1 rank=$2 head=${3%%:*} port=29500
case $3 in *:*) port=${3##*:} ;; esac
shift 3
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
processes=${PROCESSES:-8}
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes "$nodes" --node-rank "$rank" --nproc-per-node "$processes" \
  --master-addr "$head" --master-port "$port" \
  "$home/train/run.py" "$@" "train.nodes=$nodes" "train.processes=$processes"
