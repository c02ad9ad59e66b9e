#!/usr/bin/env bash
# One task of an srun step as one training process: gives the process the variables that torchrun would set, then runs
# the command. MASTER_ADDR is the step's first host and MASTER_PORT follows from the job's number, unless they are set.
#
#   srun --ntasks-per-node=8 scripts/launch/slurm_task.sh python train/run.py conf=kimi_k25 ...
set -euo pipefail
for name in SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_JOB_ID; do
  if [ -z "${!name:-}" ]; then
    echo "error: $name is not set: start this with srun" >&2
    exit 2
  fi
done
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
if [ -z "${MASTER_ADDR:-}" ]; then
  hosts=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}")
  export MASTER_ADDR=${hosts%%$'\n'*}
fi
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
exec "$@"
