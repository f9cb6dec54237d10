"""What share of the weights the `delta` checkpoint engine sends, over real GRPO steps.

A run on the CPU samples, rewards and trains as usual. After each optimizer step the weights pass through the engine's
own sender and receiver, as fp32 master weights and as a bf16 rollout engine takes them; what comes out is compared bit
by bit with what went in.

    python benchmarks/bench_delta_payload.py --model models/SmolLM2-135M-Instruct --task chain_sum --dtypes bfloat16 \\
        --rollouts 4 --new-tokens 12 --lr 1e-6
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from measuring import quiet_trainer, surroundings

from lightning_rlhf.callbacks import HFRollout, WeightSync
from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback
from lightning_rlhf.data import ListPrompts, PromptDataModule, PromptSource, ReasoningGymPrompts
from lightning_rlhf.modules import GRPO, OnPolicyModule
from lightning_rlhf.rewards import ReasoningGymReward
from lightning_rlhf.weights.delta import DeltaTransform

DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
ONE_DIGIT_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def digits(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:  # noqa: ARG001
    """The share of a response's characters that are digits: every group has better and worse ones."""
    return [sum(c.isdigit() for c in response) / max(len(response), 1) for response in responses]


class Payload(RLCallback):
    """Notes the share of the payload after each optimizer step, first whole (step 0), then changes alone.

    Args:
        dtypes: that the matrices are rounded to, by name.
    """

    def __init__(self, dtypes: list[str]) -> None:
        self.shares: dict[str, list[float]] = {name: [] for name in dtypes}
        self.rewards: list[float] = []
        self._pairs = {
            name: tuple(DeltaTransform(dense_every=10**6, dtype=DTYPES[name]) for _ in range(2)) for name in dtypes
        }

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The first push, whole."""
        self._push(pl_module)

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        """A push."""
        if step.stepped:
            self._push(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *unused: Any) -> None:
        """The step's mean reward."""
        self.rewards.append(round(float(trainer.callback_metrics["reward/mean"]), 4))

    def _push(self, module: pl.LightningModule) -> None:
        assert isinstance(module, OnPolicyModule)
        for name, (sender, receiver) in self._pairs.items():
            stream = sender.encode(module.actor.get_per_tensor_param(), bases=[receiver.base])
            got = dict(receiver.decode(stream))
            for key, tensor in module.actor.get_per_tensor_param():
                if not torch.equal(got[key], tensor.to(got[key].dtype)):
                    raise RuntimeError(f"{key}: what came out of the changes is not what the trainer has.")
            sender.sent()
            receiver.received()
            self.shares[name].append(round(sender.payload_share, 5))


def task_of(arguments: argparse.Namespace) -> tuple[PromptSource, Any, int]:
    """Prompts, reward, and room for a prompt in tokens."""
    count = arguments.prompts * arguments.steps
    if arguments.task == "digits":
        return ListPrompts([f"{i} + {i + 1} =" for i in range(count)]), digits, 32
    source = ReasoningGymPrompts(
        "chain_sum",
        size=count,
        seed=0,
        system_prompt="Answer with the number only.",
        task_config=ONE_DIGIT_SUMS,
    )
    reward = ReasoningGymReward("chain_sum", extract="last_integer", binary=True, task_config=ONE_DIGIT_SUMS)
    return source, reward, 96


def main() -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--task", choices=["digits", "chain_sum"], default="digits", help="chain_sum: one-digit sums")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--prompts", type=int, default=4, help="of one step")
    parser.add_argument("--rollouts", type=int, default=4, help="of one prompt")
    parser.add_argument("--new-tokens", type=int, default=8)
    arguments = parser.parse_args()
    around = surroundings()
    payload = Payload(arguments.dtypes)
    source, reward, prompt_tokens = task_of(arguments)
    rollout = HFRollout(
        num_rollouts=arguments.rollouts,
        max_new_tokens=arguments.new_tokens,
        max_model_len=prompt_tokens + arguments.new_tokens,
    )
    module = GRPO(
        model=arguments.model,
        reward=reward,
        optimizer=partial(torch.optim.AdamW, lr=arguments.lr, weight_decay=0.0),
        max_rl_steps=arguments.steps,
        max_tokens_per_micro_batch=512,
    )
    with TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, [rollout, WeightSync(every="rollout"), payload])
        trainer.fit(module, PromptDataModule(source, prompts_per_step=arguments.prompts))
    result = {
        "benchmark": "delta_payload",
        **around,
        "model": arguments.model.name,
        "task": arguments.task,
        "lr": arguments.lr,
        "steps": module.rl_step,
        "payload_share": payload.shares,
        "reward_mean": payload.rewards,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
