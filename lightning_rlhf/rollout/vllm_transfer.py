"""The weight-transfer back end that lightning_rlhf adds to vLLM's own registry, as ``lightning_rlhf``.

vLLM calls `register` in each of its processes: through the entry point ``vllm.general_plugins`` of this package, or
through `vllm_worker.WorkerExtension` as ``worker_extension_cls``. So weights reach the model the same way in the
trainer's process, in worker processes, with tensor or data parallel workers, and in vLLM's own HTTP server:
``start_weight_update``, one ``update_weights`` that brings a whole push, ``finish_weight_update(version)``.

Everything happens inside ``update_weights``, so that a push which fails half-way cannot leave a layerwise reload open.
What vLLM's loader leaves to be done is in `vllm_weights`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry, Invitation
from lightning_rlhf.rollout.model_directory import WeightNames, weight_names_at
from lightning_rlhf.rollout.vllm_weights import load_in_place
from lightning_rlhf.rollout.weight_snapshot import read_snapshot

BACKEND = "lightning_rlhf"
WORKER_EXTENSION = "lightning_rlhf.rollout.vllm_worker.WorkerExtension"
SNAPSHOT = "snapshot"
INVITATION = "invitation"


def update_info(source: str, **arguments: Any) -> dict[str, Any]:
    """What ``update_weights`` is to be called with; JSON throughout.

    Args:
        source: ``snapshot``, or ``invitation`` of a checkpoint engine.
        **arguments: ``folder=`` of the snapshot, or the fields of the invitation.
    """
    return {"source": source, "arguments": arguments}


def register() -> None:
    """Adds the back end to vLLM's registry; a second call does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())


class Receivers:
    """The receiving ends of checkpoint engines in one worker; connections stay from push to push."""

    def __init__(self) -> None:
        self._joined: dict[str, tuple[Invitation, CheckpointEngine]] = {}

    def receive(self, source: str, arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one push.

        Raises:
            ValueError: for a source that is not known.
            RuntimeError: if the sender is gone, silent, or gave up.
        """
        if source == SNAPSHOT:
            yield from read_snapshot(**arguments)
        elif source == INVITATION:
            engine = self._engine(Invitation.from_json(arguments))
            try:
                # not `yield from`, which would hand a close of this one on before finalize
                for named_tensor in engine.receive_weights():  # noqa: UP028
                    yield named_tensor
            finally:
                engine.finalize()
        else:
            raise ValueError(f"Weights cannot come from {source!r}; known are {SNAPSHOT!r} and {INVITATION!r}.")

    def _engine(self, invitation: Invitation) -> CheckpointEngine:
        known = self._joined.get(invitation.engine)
        if known is None or known[0] != invitation:
            if known is not None:
                known[1].close()
            # by name, as a package that adds engines would be: rollout does not depend on weights
            importlib.import_module("lightning_rlhf.weights")
            known = (invitation, CheckpointEngineRegistry.new(invitation.engine, **invitation.settings))
            self._joined[invitation.engine] = known
        known[1].join(invitation)
        return known[1]

    def close(self) -> None:
        """Leaves the senders."""
        for _, engine in self._joined.values():
            engine.close()
        self._joined.clear()


@cache
def _engine_class() -> type[Any]:
    """The class, made on first use: its bases are vLLM's."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
        """Nothing is set up before the first push."""

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
        """Where a push comes from."""

        source: str
        arguments: dict[str, Any] = field(default_factory=dict)

    class Transfer(WeightTransferEngine):  # type: ignore[misc]
        """Loads whole pushes; see the module."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        supports_draft_weight_update = False

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.receivers = Receivers()

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            """Nothing to set up."""

        def start_weight_update(self) -> None:
            """Left to `receive_weights`."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Receives a push, and waits until the device has it."""
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":  # where vLLM's own version of this fails
                import torch

                torch.accelerator.synchronize()

        def receive_weights(self, update_info: UpdateInfo) -> None:
            """Loads the whole push."""
            named_tensors = self.receivers.receive(update_info.source, update_info.arguments)
            load_in_place(self.model, self.model_config, named_tensors, names_of(self.model_config.model))

        def finish_weight_update(self) -> None:
            """Left to `receive_weights`."""

        def shutdown(self) -> None:
            """Leaves the senders."""
            self.receivers.close()

    return Transfer


@cache
def names_of(model: str) -> WeightNames:
    """The names that a push must bring, for a model's directory; built once a process."""
    return weight_names_at(model)
