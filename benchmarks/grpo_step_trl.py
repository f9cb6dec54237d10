"""GRPO steps of TRL, timed: the peer's half of bench_grpo_step.py, run by it in TRL's own environment.

The prompts and the reward are this product's own objects, so that both sides answer and score the same questions; all
else is TRL's. Reads its settings as one JSON argument; the last line it prints is one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from lightning_rlhf.data import ReasoningGymPrompts
from lightning_rlhf.rewards import ReasoningGymReward

PARTS = {
    # nested calls: a method's time is its own, without that of the methods inside it
    "_generate": "rollout",
    "_calculate_rewards": "reward",
    "_get_per_token_logps_and_entropies": "log_probs",
    "training_step": "update",
}


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Wall time of each optimizer step, and of the parts of it that `PARTS` names."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._parts: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []
        self._started = 0.0

    def watch(self, owner: Any, method: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._inside.append(0.0)
            try:
                return inner(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - start
                self._parts[part] += elapsed - self._inside.pop()
                if self._inside:
                    self._inside[-1] += elapsed

        setattr(owner, method, timed)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._parts.clear()
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._started
        known = sum(self._parts.values())
        self.steps.append({"step": seconds, **self._parts, "optimizer_and_rest": seconds - known})


def main(settings: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(settings["threads"])
    prompts = ReasoningGymPrompts(**settings["source"]).load()
    by_text = {json.dumps(prompt.prompt): prompt for prompt in prompts}
    verifier = ReasoningGymReward(**settings["reward"])

    def reward(prompts: list[Any], completions: list[Any], **_columns: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        known = [by_text[json.dumps(prompt)] for prompt in prompts]
        return list(verifier([prompt.text for prompt in known], texts, [prompt.metadata for prompt in known]))

    num_rollouts, prompts_per_step = settings["num_rollouts"], settings["prompts_per_step"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": prompt.prompt} for prompt in prompts]),
        args=GRPOConfig(
            output_dir=settings["output_dir"],
            use_cpu=True,
            bf16=settings["bf16"],
            seed=settings["seed"],
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["trl_micro_batch_size"],
            gradient_accumulation_steps=num_rollouts * prompts_per_step // settings["trl_micro_batch_size"],
            num_generations=num_rollouts,
            max_completion_length=settings["max_new_tokens"],
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",  # one global token count: this product's token-mean
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    clock = StepClock()
    for method, part in PARTS.items():
        clock.watch(trainer, method, part)
    trainer.add_callback(clock)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "steps": clock.steps,
        "rewards": [entry["reward"] for entry in logs],
        "completion_tokens": [entry["completions/mean_length"] * num_rollouts * prompts_per_step for entry in logs],
    }


if __name__ == "__main__":
    result = main(json.loads(sys.argv[1]))
    print("\n" + json.dumps(result))
