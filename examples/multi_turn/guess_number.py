"""A game over several turns: the policy guesses a digit, the environment says higher or lower.

``python examples/multi_turn/guess_number.py`` trains a tiny model in less than a minute on a CPU; ``--model PATH``
takes another, ``--vllm`` samples with vLLM, ``--ahead`` does so in a process of its own while the model trains.
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
from lightning_rlhf.data import ListPrompts, Prompt
from lightning_rlhf.rewards import EnvironmentReward

DIGITS = tuple("0123456789")


class GuessNumber(rl.Environment):
    """Hides a digit: ``metadata["hidden"]``. A guess that earlier hints allow earns a little, the digit itself 1."""

    def reset(self, task: rl.Task) -> None:
        """Remembers the hidden digit, and what the policy can know of it."""
        self.hidden = int(task.metadata["hidden"])
        self.low, self.high = 0, 9

    def step(self, action: rl.Action) -> rl.StepResult:
        """The last character of a turn is the guess: a digit ends the turn, see ``stop=`` below."""
        guess = action.text[-1:]
        if not ("0" <= guess <= "9"):
            return rl.StepResult(done=True)
        if int(guess) == self.hidden:
            return rl.StepResult(reward=1.0, done=True)
        reward = 0.1 if self.low <= int(guess) <= self.high else 0.0
        if int(guess) < self.hidden:
            self.low = max(self.low, int(guess) + 1)
            return rl.StepResult(observation="higher", reward=reward)
        self.high = min(self.high, int(guess) - 1)
        return rl.StepResult(observation="lower", reward=reward)


class PrintSteps(Callback):
    """Prints each RL step's mean reward and turns, and an episode of the last."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Reads the step's metrics and the first row's transcript."""
        metrics = pl_module.last_metrics
        reward, turns = metrics["reward/mean"], metrics["rollout/turns_mean"]
        print(f"step {pl_module.rl_step:3d}  reward {reward:.3f}  turns {turns:.2f}")
        if pl_module.finished:
            for message in batch.rollouts.metadata[0]["episode"]["transcript"]:
                print(f"  {message['role']:9} {message['content']!r}")


def main() -> None:
    """Trains, and prints how the reward grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face directory; without it a tiny model is made")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--vllm", action="store_true", help="sample with vLLM")
    parser.add_argument("--ahead", action="store_true", help="play the next step's episodes while this one trains")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or write_tiny_model(Path(folder) / "model")
        prompts = [Prompt(uid=str(n), prompt="guess", metadata={"hidden": n % 10}) for n in range(40)]
        make_rollout = rl.VLLMRollout if arguments.vllm else rl.HFRollout
        if arguments.ahead:
            make_rollout = partial(rl.VLLMRollout, mode="server", max_staleness=1, server={"threads": 1})
        rollout = make_rollout(
            environment=GuessNumber,
            turn_limits=rl.TurnLimits(max_turns=4),
            stop=DIGITS,
            num_rollouts=8,
            max_new_tokens=3,
            max_model_len=128,
        )
        module = rl.GRPO(
            model=model,
            reward=EnvironmentReward(),
            optimizer=partial(torch.optim.AdamW, lr=3e-3 if arguments.model is None else 1e-5),
            max_rl_steps=arguments.steps,
        )
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
        trainer.fit(module, rl.PromptDataModule(ListPrompts(prompts), prompts_per_step=4))


if __name__ == "__main__":
    main()
