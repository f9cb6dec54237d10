"""A replica started by hand, for ``VLLMRollout(mode="server", urls=[...])``.

``LIGHTNING_RLHF_REPLICA_TOKEN=... python -m lightning_rlhf.rollout.serve MODEL --port 8100 --max-model-len 2048``

It serves nothing but 401 to who does not know the token, and nothing but 409 until the trainer has pushed weights. Its
weights come from a folder of the trainer's machine, or through a checkpoint engine.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence

from lightning_rlhf.rollout.replica_process import ReplicaConfig, prepare_process, serve

TOKEN_VARIABLE = "LIGHTNING_RLHF_REPLICA_TOKEN"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and serves until ended."""
    parser = argparse.ArgumentParser(prog="python -m lightning_rlhf.rollout.serve", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="directory with config and tokenizer")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="anything but loopback opens the port to the network")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--kv-cache-bytes", type=int, default=512 << 20)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of a worker")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        sys.exit(f"Set {TOKEN_VARIABLE}: whoever reaches the port could read and replace the weights.")
    config = ReplicaConfig(
        model=given.model,
        max_model_len=given.max_model_len,
        max_num_seqs=given.max_num_seqs,
        kv_cache_bytes=given.kv_cache_bytes,
        dtype=given.dtype,
        tensor_parallel_size=given.tensor_parallel_size,
        num_threads=given.threads,
        seed=given.seed,
    )
    prepare_process()
    serve(config, socket.create_server((given.host, given.port), backlog=1024), token=token)


if __name__ == "__main__":
    main()
