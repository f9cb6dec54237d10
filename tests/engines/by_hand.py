"""What the engine contract is held against: an engine class, and the same training by hand, one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.experience import make_experience, policy_gradient
from support.tiny import tiny_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, LossFunction
from lightning_rlhf.types import Experience, LossOutput, ModelOutputs

LENGTHS = [5, 30, 8, 17, 3, 40, 12, 10]
"""125 tokens: neither they nor most micro-batches divide by 2."""
MAX_GRAD_NORM = 0.5
LEARNING_RATE = 1e-3
TOLERANCE = 1e-5


def _halved_each_step(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def _regression(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    assert outputs.values is not None
    return LossOutput(terms=(outputs.values - micro_batch.advantages - 1.0) ** 2)


LOSSES: dict[str, LossFunction] = {"language_model": policy_gradient, "value_model": _regression}
_ADAMW = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=1e-4)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An engine class to be checked.

    Attributes:
        model_type: ``language_model`` or ``value_model``.
        make: builds the engine on this rank; ``initialize()`` is left to the checks.
    """

    model_type: str
    make: Callable[[EngineConfig], BaseEngine]

    @property
    def loss(self) -> LossFunction:
        return LOSSES[self.model_type]

    def engine(self, **changes: Any) -> BaseEngine:
        settings = {
            "model": tiny_model(),
            "optimizer": _ADAMW,
            "lr_schedule": _halved_each_step,
            "max_grad_norm": MAX_GRAD_NORM,
        }
        engine = self.make(EngineConfig(**{**settings, **changes}))
        engine.initialize()
        return engine


class ByHand:
    """The same model and optimizer, with nothing of the engines: one sequence at a time, sums written out."""

    def __init__(self, model_type: str) -> None:
        self.is_language_model = model_type == "language_model"
        self.loss = LOSSES[model_type]
        self.model = tiny_model()
        self.head = nn.Linear(self.model.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)
        self.parameters = dict(self.model.named_parameters())
        if not self.is_language_model:
            del self.parameters["lm_head.weight"]
            self.parameters["score.weight"] = self.head.weight
        self.optimizer = _ADAMW(self.parameters.values())
        self.schedule = _halved_each_step(self.optimizer)

    def outputs(self, row: Experience) -> ModelOutputs:
        """Of one sequence: the state at the token before speaks of a token."""
        tokens, mask = row.tokens, row.response_mask
        if not self.is_language_model:
            values = self.head(self.model.model(input_ids=tokens[None]).last_hidden_state[0])[:-1, 0]
            return ModelOutputs(values=F.pad(values, (1, 0)) * mask)
        log_p = (self.model(input_ids=tokens[None]).logits[0, :-1] / row.temperature).log_softmax(-1)
        chosen = log_p.gather(-1, tokens[1:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        return ModelOutputs(log_probs=F.pad(chosen, (1, 0)) * mask, entropy=F.pad(entropy, (1, 0)) * mask)

    @torch.no_grad()
    def infer(self, data: Experience) -> dict[str, Tensor]:
        rows = [vars(self.outputs(data.select([row]))) for row in range(len(data))]
        names = ("log_probs", "entropy") if self.is_language_model else ("values",)
        return {name: torch.cat([row[name] for row in rows]) for name in names}

    def step(self, data: Experience) -> dict[str, float]:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for index in range(len(data)):
            row = data.select([index])
            assert row.loss_weights is not None
            total = total + (self.loss(self.outputs(row), row).terms * row.loss_weights).sum()
        total.backward()
        gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, MAX_GRAD_NORM / norm))
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.schedule.step()
        return {"loss": total.item(), "grad_norm": norm, "lr": lr, "skipped_steps": 0.0}


def whole_batch() -> Experience:
    return make_experience(LENGTHS, temperature=0.7)


def own_rows(engine: BaseEngine) -> list[int]:
    return list(range(engine.data_parallel_rank, len(LENGTHS), engine.data_parallel_size))


def exported(engine: BaseEngine) -> dict[str, Tensor]:
    return {name: value.clone().cpu() for name, value in engine.get_per_tensor_param()}


def assert_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=TOLERANCE), f"{name}: {found[name]}, by hand {value}"


def assert_parameters(engine: BaseEngine, expected: ByHand, tolerance: float = TOLERANCE) -> None:
    found = exported(engine)
    assert found.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        difference = float((found[name] - value.detach()).abs().max())
        assert difference <= tolerance, f"{name} differs by {difference}"


def assert_outputs(found: ModelOutputs, expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        mine = getattr(found, name)
        assert mine is not None, f"no {name}"
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine.cpu(), value, atol=TOLERANCE, rtol=0)
