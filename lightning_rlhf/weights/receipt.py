"""The receipt of a push: evidence, cheap enough for every step, that the rollout engine holds what the trainer sent.

Two independent looks. Samples of the elements of tensors that the engine can be asked for again are compared exactly,
in the engine's dtype: they catch a tensor that was not loaded, or loaded in another's place. A probe sequence is scored
by both sides: it catches what cannot be read back (packed or fused weights, a stale tied head, a stale cache).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.contracts.rollout import TensorRows
from lightning_rlhf.types import Experience

DIVERGED = (
    "of the trainer is NaN or infinite: the policy itself is broken, not the push. Go on from the last checkpoint, "
    "with a lower learning rate or max_grad_norm."
)
SAMPLED_ELEMENTS = 64
TENSORS_READ_BACK = 8


@dataclass
class SentSamples:
    """A few elements of every tensor that passed by.

    Attributes:
        samples: by name, up to ``SAMPLED_ELEMENTS`` evenly spaced elements, on the host.
    """

    samples: dict[str, Tensor] = field(default_factory=dict)

    def watch(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes the stream through and keeps samples of it."""
        for name, tensor in named_tensors:
            self.samples[name] = sample_elements(tensor)
            yield name, tensor


def sample_elements(tensor: Tensor) -> Tensor:
    """A copy of up to ``SAMPLED_ELEMENTS`` elements at fixed, evenly spaced places, on the host."""
    flat = tensor.detach().reshape(-1)
    return flat[_places(flat.numel()).to(flat.device)].cpu()


def sample_rows(part: TensorRows) -> tuple[Tensor, int]:
    """Those of the whole tensor's sampled elements that lie in a rank's rows, and the number of the first of them."""
    row = part.rows[0].numel()
    places = _places(part.num_rows * row) - part.first * row
    own = (places >= 0) & (places < part.rows.numel())
    flat = part.rows.detach().reshape(-1)
    return flat[places[own].to(flat.device)].cpu(), int((places < 0).sum())


def _places(num_elements: int) -> Tensor:
    count = min(SAMPLED_ELEMENTS, num_elements)
    return torch.linspace(0, num_elements - 1, count, dtype=torch.float64).round().long()


def names_to_read(sent: Mapping[str, Tensor], *, version: int) -> list[str]:
    """Some of the tensors, others at each version.

    Raises:
        RuntimeError: if there is none.
    """
    names = sorted(sent)
    if not names:
        raise RuntimeError("The push carried no tensor.")
    start = (version * TENSORS_READ_BACK) % len(names)
    return [names[(start + offset) % len(names)] for offset in range(min(TENSORS_READ_BACK, len(names)))]


def check_read_back(
    sent: Mapping[str, Tensor], held: Mapping[str, tuple[Tensor, int]], *, version: int, where: str
) -> int:
    """Compares samples of what was sent with samples of what an engine holds, in the engine's dtype.

    Args:
        sent: samples by name.
        held: by name those that the engine has, one after the other, and the number of the first.
        version: for the message.
        where: for the message.

    Returns:
        How many tensors were compared.

    Raises:
        RuntimeError: naming the first tensor that differs, or that is not finite on the trainer's side.
    """
    for name, (actual, first) in held.items():
        expected = sent[name][first : first + actual.numel()].to(actual.dtype).reshape(-1)
        if not torch.equal(expected, actual):
            if not sent[name].isfinite().all():
                raise RuntimeError(f"Weight sync to version {version}: {name} {DIVERGED}")
            worst = (expected.float() - actual.float()).abs().max().item()
            raise RuntimeError(
                f"Weight sync to version {version}: {name} in the rollout engine ({where}) differs from the trainer's "
                f"by up to {worst:.3g}. The engine must not sample with it; check its load_weights for this tensor."
            )
    return len(held)


def probe_experience(token_ids: list[int], *, device: torch.device) -> Experience:
    """One sequence to be scored by trainer and rollout engine; every token but the first counts."""
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=device)
    scored = torch.ones_like(tokens, dtype=torch.bool)
    scored[0] = False
    zeros = torch.zeros(len(token_ids), dtype=torch.float32, device=device)
    return Experience(
        tokens=tokens,
        cu_seqlens=torch.tensor([0, len(token_ids)], dtype=torch.int64, device=device),
        response_mask=scored,
        loss_mask=scored,
        rollout_log_probs=zeros,
        advantages=zeros,
        uids=["probe"],
        sample_indices=[0],
    )


def probe_log_probs(engine: BaseEngine, token_ids: list[int]) -> Tensor:
    """The trainer's log-probs of the probe's tokens, ``fp32 [n]`` on the host, the first one 0. Collective."""
    log_probs = engine.infer_batch(probe_experience(token_ids, device=engine.device)).log_probs
    if log_probs is None:
        raise RuntimeError("The engine gave no log-probs for the probe; weight sync needs a language model.")
    return log_probs.cpu()


def probe_difference(trainer: Tensor, rollout: list[float]) -> float:
    """Largest difference of the two sides' log-probs over the probe, in nats; infinity where the rollout's are NaN.

    Raises:
        RuntimeError: if the trainer's own are not finite.
    """
    if not trainer.isfinite().all():
        raise RuntimeError(f"Weight sync: the probe's log-prob {DIVERGED}")
    difference = (trainer[1:] - torch.tensor(rollout, dtype=torch.float32)[1:]).abs().max().item()
    return math.inf if math.isnan(difference) else difference  # a NaN would be lost among other replicas' numbers
