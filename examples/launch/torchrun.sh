#!/usr/bin/env bash
# One run over several processes and nodes with torchrun. On each node:
#
#   NODES=2 NODE_RANK=0 MASTER=node0 PROCESSES=8 examples/launch/torchrun.sh experiment=NAME key=value ...
#
# NODE_RANK differs from node to node, everything else is the same. On one node PROCESSES is all that is needed.
set -euo pipefail

NODES="${NODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
PROCESSES="${PROCESSES:?the number of processes on each node, one for each GPU}"
MASTER="${MASTER:-localhost}"
PORT="${PORT:-29500}"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$PROCESSES" \
    --master-addr "$MASTER" --master-port "$PORT" \
    -m lightning_rlhf.cli.train \
    "trainer.num_nodes=$NODES" "trainer.devices=$PROCESSES" "$@"
