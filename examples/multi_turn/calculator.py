"""A calculator as a tool, on a reasoning-gym task whose own verifier scores the answer.

``python examples/multi_turn/calculator.py`` takes some steps with a tiny model in less than a minute on a CPU;
``--model PATH`` takes another. vLLM samples under a guide: each turn is a whole call or an answer, so that a model
which has never seen the form can learn when to call, what to ask, and what to do with the answer.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from tiny_model import write_tiny_model

import lightning_rlhf as rl
from lightning_rlhf.environments import Calculator
from lightning_rlhf.rewards import EnvironmentReward, ReasoningGymReward, WeightedRewards

TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
HOW = (
    "Answer by the number alone. You may ask a calculator first: "
    '<tool_call>{"name": "calculator", "arguments": {"expression": "31 - 17"}}</tool_call>'
)
CALL = r'<tool_call>\{"name": "calculator", "arguments": \{"expression": "[0-9]{1,3} [-+] [0-9]{1,3}"\}\}</tool_call>'
ANSWER = r"-?[0-9]{1,3}"


class PrintSteps(Callback):
    """Prints each RL step's rewards, and an episode of the last."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Reads the step's metrics and the transcript with the most turns."""
        metrics = pl_module.last_metrics
        shown = ("reward/mean", "reward/chain_sum", "reward/environment", "rollout/turns_mean")
        print(f"step {pl_module.rl_step:3d}  " + "  ".join(f"{name} {metrics[name]:.3f}" for name in shown))
        if pl_module.finished:
            episodes = [facts["episode"] for facts in batch.rollouts.metadata]
            print(f"  {'user':9} {batch.rollouts.prompts[0]!r}")
            for message in max(episodes, key=lambda episode: episode["turns"])["transcript"]:
                print(f"  {message['role']:9} {message['content']!r}")


def main() -> None:
    """Trains, and prints the rewards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face directory; without it a tiny model is made")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or write_tiny_model(Path(folder) / "model")
        reward = WeightedRewards(
            [
                (ReasoningGymReward("chain_sum", extract="last_integer", binary=True, task_config=TASK), 1.0),
                (EnvironmentReward(), 1.0),
            ]
        )
        rollout = rl.VLLMRollout(
            environment=partial(rl.ToolEnvironment, (Calculator(),), reward_per_call=0.1),
            turn_limits=rl.TurnLimits(max_turns=3, max_observation_tokens=32),
            guide=rl.Guide(regex=f"{CALL}|{ANSWER}"),
            num_rollouts=8,
            max_new_tokens=96,
            max_model_len=640,
            kv_cache_bytes=64 * 2**20 if arguments.model is None else 512 * 2**20,
        )
        module = rl.GRPO(
            model=model,
            reward=reward,
            optimizer=partial(torch.optim.AdamW, lr=3e-3 if arguments.model is None else 1e-5),
            max_rl_steps=arguments.steps,
        )
        prompts = rl.ReasoningGymPrompts("chain_sum", size=64, seed=0, suffix=f"\n{HOW}", task_config=TASK)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[rollout, rl.WeightSync(), PrintSteps()],
        )
        trainer.fit(module, rl.PromptDataModule(prompts, prompts_per_step=4))


if __name__ == "__main__":
    main()
