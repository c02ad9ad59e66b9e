#!/usr/bin/env bash
# A training run over several nodes from one of them, by DeepSpeed's launcher over ssh (pdsh):
#
#   scripts/launch/hostfile.sh HOSTFILE HEAD[:PORT] conf=kimi_k25 'stages=[train]' [key=value ...]
#
# HOSTFILE has a line `host slots=8` for each node (the slots must be equal); HEAD is the host of its first line. All
# nodes share the run folder, the store and this installation, and pdsh reaches them without a password.
# PYTHON (python) is the interpreter.
set -euo pipefail
if [ $# -lt 3 ]; then
  echo "usage: $0 HOSTFILE HEAD[:PORT] conf=PRESET [key=value ...]" >&2
  exit 2
fi
if [ ! -f "$1" ]; then
  echo "error: no such hostfile [$1]. To mend: give a file with a line 'host slots=N' for each node" >&2
  exit 2
fi
hostfile=$1 head=${2%%:*} port=29500
case $2 in *:*) port=${2##*:} ;; esac
shift 2
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
lines=$(grep -cE '^[^#[:space:]].*slots=' "$hostfile" || true)
slots=$(sed -nE 's/^[^#].*slots=([0-9]+).*/\1/p' "$hostfile" | sort -u)
if [ "$lines" -lt 1 ] || [ "$(wc -w <<<"$slots")" -ne 1 ]; then
  echo "error: not a hostfile [$hostfile]. To mend: write lines 'host slots=N' with one and the same N on every node" >&2
  exit 2
fi
# The launcher's own --local_rank option would look like a setting to the front door.
exec "${PYTHON:-python}" -m deepspeed.launcher.runner --hostfile "$hostfile" --no_ssh_check --force_multi \
  --master_addr "$head" --master_port "$port" --no_local_rank \
  "$home/train/run.py" "$@" "train.nodes=$lines" "train.processes=$slots"
