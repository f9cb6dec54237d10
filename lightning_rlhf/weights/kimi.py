"""The name of MoonshotAI's checkpoint-engine, which is refused: receiving from it means unpickling from a socket."""

from __future__ import annotations

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry

# Looked at in checkpoint-engine 0.4.2: `worker.update_weights_from_ipc` and `ParameterServer.gather_metas`,
# `init_process_group` and `_bind_zmq_socket`.
CheckpointEngineRegistry.refuse(
    "kimi",
    reason=(
        "There is no checkpoint engine 'kimi': MoonshotAI's checkpoint-engine cannot be used safely. Its workers "
        "unpickle what they read from a socket in Linux's abstract namespace, which has no file permissions, so that "
        "any process of the machine could run code in the rollout engine; its ranks exchange pickles as well; and its "
        "parameter server takes over and destroys the trainer's default process group. Use 'nccl' for its broadcast, "
        "'mooncake' or 'nixl' for its peer-to-peer reads, 'shm' on one machine."
    ),
)
