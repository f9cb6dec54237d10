#!/usr/bin/env bash
# One run under SLURM, a task for each GPU. The folder of the run must be one that all nodes see.
#
#   sbatch --nodes 4 examples/launch/slurm.sh experiment=grpo-qwen3_32b-4n8r-ulysses_rl data.source.path=...
#
# Ten minutes before its time is up, or when it is preempted, SLURM sends USR1: Lightning then writes a checkpoint and queues
# the job again, which goes on from it.
#SBATCH --job-name=lightning-rlhf
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=SIGUSR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
export HYDRA_FULL_ERROR=1

arguments=("trainer.num_nodes=${SLURM_NNODES:-1}" "trainer.devices=${SLURM_NTASKS_PER_NODE:-8}" "$@")
# a job that SLURM started again takes up its own newest checkpoint
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    arguments+=("ckpt_path=last")
fi

exec srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m lightning_rlhf.cli.train "${arguments[@]}"
