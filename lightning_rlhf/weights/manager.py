"""The protocol of one weight sync, phase after phase."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngine
from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.contracts.rollout import RolloutEngine
from lightning_rlhf.weights.receipt import SentSamples, check_read_back, probe_difference

PROBE_TOLERANCE_FP32 = 1e-2
PROBE_TOLERANCE_BF16 = 1.0


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a sync found.

    Attributes:
        version: the policy version that the rollout engine holds now.
        probe_difference: largest log-prob difference on the probe, in nats.
        tensors_compared: tensors whose samples were read back and were equal.
        unchanged: whether no sampled element differs from the sync before.
    """

    version: int
    probe_difference: float
    tensors_compared: int
    unchanged: bool


class CheckpointEngineManager:
    """Brings the trainer's weights into the rollout engine of this process.

    Args:
        engine: the actor's engine.
        rollout: the engine that samples.
        checkpoint_engine: carries the tensors.
        probe_token_ids: a short sequence that both sides score after each push; at least two ids.
        probe_tolerance: largest difference allowed on it, in nats.
    """

    def __init__(
        self,
        *,
        engine: BaseEngine,
        rollout: RolloutEngine,
        checkpoint_engine: CheckpointEngine,
        probe_token_ids: list[int],
        probe_tolerance: float,
    ) -> None:
        if len(probe_token_ids) < 2:
            raise ValueError(f"The probe needs at least two token ids, got {probe_token_ids}.")
        self.engine = engine
        self.rollout = rollout
        self.checkpoint_engine = checkpoint_engine
        self.probe_token_ids = probe_token_ids
        self.probe_tolerance = probe_tolerance
        self.num_pushes = 0
        self._last_samples: dict[str, Tensor] = {}

    def ensure_fresh(self, version: int) -> Receipt | None:
        """Pushes if the rollout engine does not hold ``version``. Collective: all ranks hold the same version."""
        return None if self.rollout.weight_version == version else self.update_weights(version)

    def update_weights(self, version: int) -> Receipt:
        """Pushes the trainer's weights. Collective.

        In this order:

        1. pause: no token is sampled while weights change
        2. out of service: the rollout engine has no version until the push is whole
        3. wake the weights' memory
        4. prepare, topology, group
        5. send and receive, tensor by tensor
        6. finalize
        7. reset the prefix cache, which older weights filled
        8. read back samples; set the version; resume; wake the cache's memory
        9. score the probe on both sides

        A failure leaves the rollout engine without a version: it refuses to generate.

        Raises:
            RuntimeError: if the receipt does not hold; the message names the tensor or the difference.
        """
        rollout, carrier = self.rollout, self.checkpoint_engine
        sent = SentSamples()
        rollout.pause()
        rollout.weight_version = None
        rollout.wake_up(["weights"])
        carrier.prepare()
        # each process holds its own rollout engine: seen from here there is one sender and one receiver
        carrier.init_process_group(carrier.build_topology(trainer_world_size=1, receiver_ids=("local",)))
        parameters = self.engine.get_per_tensor_param()
        try:
            carrier.send_weights(parameters)
            rollout.load_weights(sent.watch(carrier.receive_weights()))
        finally:
            # each tensor is gathered by all ranks: the others wait for this one even if its receiver gave up
            deque(parameters, maxlen=0)
        carrier.finalize()
        rollout.reset_prefix_cache()
        compared = check_read_back(sent.samples, rollout, version=version)
        rollout.wake_up(["kv_cache"])
        rollout.resume()
        rollout.weight_version = version
        difference = self._check_probe(version)
        unchanged = self._note_changes(sent.samples)
        self.num_pushes += 1
        return Receipt(version=version, probe_difference=difference, tensors_compared=compared, unchanged=unchanged)

    def _check_probe(self, version: int) -> float:
        difference = probe_difference(self.engine, self.rollout, self.probe_token_ids)
        if not difference <= self.probe_tolerance:
            self.rollout.weight_version = None
            raise RuntimeError(
                f"Weight sync to version {version}: trainer and rollout engine differ by {difference:.3g} nats on the "
                f"probe (allowed {self.probe_tolerance:g}), though the tensors read back are equal. What cannot "
                f"be read back is stale: a fused or tied weight, or the prefix cache."
            )
        return difference

    def _note_changes(self, samples: dict[str, Tensor]) -> bool:
        last, self._last_samples = self._last_samples, samples
        return bool(last) and all(name in last and tensor.equal(last[name]) for name, tensor in samples.items())
