"""Every metric that is logged, once: its name, what it means, its unit. ``docs/metrics.md`` is made from this table.

How values are joined over micro-batches, mini-batches and ranks is said where they are formed (``metrics.Metric``): a
mean is weighted by what it counts, a minimum stays a minimum; a NaN is left out of means, minima and maxima, but shows
in sums and losses; a metric that observed nothing is not logged at all.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MetricName:
    """One row of the table.

    Attributes:
        name: as loggers see it; ``<...>`` stands for what differs from run to run.
        meaning: one line.
        unit: of its value; ``1`` for a plain number.
    """

    name: str
    meaning: str
    unit: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that the row stands for."""
        parts = re.split(r"<[^>]+>", self.name)
        return re.compile("[^/]+".join(map(re.escape, parts)))


_ROWS = """
reward/mean | mean reward of the rows that have one, over all ranks | reward
reward/std | standard deviation of those rewards (population) | reward
reward/failed | rows that were scored and have no reward; they do not train | rows
reward/groups_without_signal | share of groups whose rewards are all equal, over the rows that train | fraction
reward/<component> | mean of one of several rewards, unweighted | reward
reward/<component>/failed | rows on which that reward failed | rows
reward/overlong_penalty | mean penalty for long responses, taken off the rewards | reward
reward/length_penalty | mean of what the length penalty adds to the rewards | reward
reward/kl_penalty | mean KL penalty taken off the rewards, per response | reward
rollout/response_length | mean tokens that the policy sampled, per response | tokens
rollout/response_length_max | those of the longest response | tokens
rollout/num_tokens | prompt and response tokens of all rollouts | tokens
rollout/trained_tokens | response tokens that train | tokens
rollout/truncated_fraction | share of responses that hit the length limit | fraction
rollout/skipped | rows that were never sampled, dropped or aborted, or whose environment failed | rows
rollout/turns_mean | mean turns that the policy took, per episode | turns
rollout/turns_max | those of the longest episode | turns
rollout/observation_tokens | mean tokens said to the policy between its turns, per episode | tokens
rollout/failed_episodes | episodes whose environment failed or took too long; they do not train | episodes
rollout/refill_rounds | further draws of prompts that dynamic sampling made | draws
rollout/drawn_prompts | prompts that dynamic sampling drew for the step | prompts
rollout/kept_groups | groups that dynamic sampling kept | groups
rollout/dropped_groups | groups that it dropped | groups
rollout/staleness_mean | mean age of the weights that sampled a token, in policy versions | versions
rollout/staleness_max | the largest such age | versions
rollout/staleness_<age> | share of response tokens sampled from weights of this age | fraction
rollout/restarted_groups | groups that were sampled again after a push had cut them short | groups
actor/loss | the policy's loss, the weighted sum of its per-token terms; mean over optimizer steps | loss
actor/grad_norm | global norm of the gradient before clipping; mean over optimizer steps | 1
actor/lr | learning rate of the first parameter group; mean over optimizer steps | 1
actor/skipped_steps | optimizer steps not taken: gradient not finite, or nothing to train on | steps
actor/num_micro_batches | forward-backwards of each rank in an optimizer step; mean over optimizer steps | 1
actor/padding_fraction | share of the tokens computed in them, over all ranks, that are of no row (padding) | fraction
actor/advantage_mean | mean advantage of the tokens that train | 1
actor/advantage_std | standard deviation of those advantages (population) | 1
actor/advantage_min | the smallest of them | 1
actor/advantage_max | the largest of them | 1
actor/ratio_mean | mean of new over old probability of a token (or sequence, as the loss has it) | 1
actor/ratio_min | the smallest such ratio | 1
actor/ratio_max | the largest such ratio | 1
actor/clip_fraction_low | share of tokens without gradient since their ratio fell too far | fraction
actor/clip_fraction_high | share of tokens without gradient since their ratio rose too far | fraction
actor/dual_clip_fraction | share of tokens bounded by the dual clip | fraction
actor/selected_fraction | share of tokens that a covariance loss picked out | fraction
actor/approx_kl | KL of the policy before the update to the policy now (k3), per token | nats
actor/entropy | mean entropy of the distributions that tokens were drawn from | nats
actor/entropy_coef | weight of the entropy bonus, as it is now | 1
actor/ref_kl | mean KL to the reference, per token, by the chosen estimator | nats
actor/kl_coef | weight of the KL to the reference, as it is now | 1
actor/mismatch_abs_mean | mean difference of the trainer's and the rollout engine's log-probs | nats
actor/mismatch_abs_max | the largest such difference | nats
actor/mismatch_kl | KL of the rollout engine to the trainer (k3), per token | nats
actor/mismatch_chi_square | chi-square divergence of the trainer from the rollout engine | 1
actor/correction_weight_mean | mean weight of the rollout correction | 1
actor/correction_weight_square_mean | mean of the squared weights | 1
actor/correction_kept_fraction | share of tokens whose weight is not 0 | fraction
actor/effective_sample_size | squared mean weight over mean squared weight: share of samples that count | fraction
actor/expert_load_max | tokens of a layer's busiest expert over an even share (1 is even), mean over layers | 1
actor/idle_experts | share of a layer's experts that got no token of an optimizer step, mean over layers | fraction
critic/loss | the critic's loss; mean over optimizer steps | loss
critic/grad_norm | global norm of its gradient before clipping; mean over optimizer steps | 1
critic/lr | learning rate of its first parameter group; mean over optimizer steps | 1
critic/skipped_steps | its optimizer steps not taken | steps
critic/num_micro_batches | the same of the critic | 1
critic/padding_fraction | the same of the critic | fraction
critic/value_mean | mean value of the tokens that train | reward
critic/value_error_mean | mean difference of value and return | reward
critic/value_clip_fraction | share of tokens without gradient since the value moved too far | fraction
critic/expert_load_max | the same of the critic, where it is a mixture of experts | 1
critic/idle_experts | the same of the critic | fraction
critic/return_mean | mean return of the tokens that train | reward
critic/explained_variance | 1 - Var(return - value) / Var(return); 1 for a perfect critic | 1
sync/version | policy version of the last push | version
sync/probe_difference | largest difference of both sides' log-probs on the probe | nats
sync/tensors_compared | tensors whose samples were compared after the push | tensors
sync/unchanged | 1 if no sampled element differs from the push before | 0 or 1
time/step | the whole RL step, from its batch to its end | s
time/rollout | sampling of responses | s
time/reward | scoring of responses | s
time/experience | the global plan, the exchange of rows, advantages | s
time/old_log_probs | the trainer's log-probs before the update | s
time/ref_log_probs | the reference's log-probs | s
time/reference | moving the reference towards the actor | s
time/values | the critic's values | s
time/update | the actor's update | s
time/critic_update | the critic's update | s
time/sync | weight pushes | s
time/other | what of the step no other time covers | s
throughput/tokens_per_second | rollout/num_tokens over time/step | tokens/s
throughput/mfu | 6 x parameters x tokens x epochs over the peak of devices in time/update; with peak_flops | fraction
memory/peak_host | largest resident memory of rank 0's process so far | bytes
memory/peak_device | largest memory of its device that PyTorch gave out in the step; on CUDA | bytes
rl_step | training steps done | steps
policy_version | optimizer steps that moved the actor | version
val/reward | mean reward of a validation's responses (greedy) | reward
val/failed | its rows without a reward | rows
test/reward | mean reward of a test's responses (greedy) | reward
test/failed | its rows without a reward | rows
epoch | passes over the prompts, as Lightning counts them | epochs
"""

METRICS: tuple[MetricName, ...] = tuple(
    MetricName(name=name, meaning=meaning, unit=unit)
    for name, meaning, unit in (map(str.strip, line.split(" | ")) for line in _ROWS.strip().splitlines())
)


def describe(name: str) -> MetricName:
    """The row of a logged name.

    Raises:
        KeyError: if there is none.
    """
    exact = next((row for row in METRICS if row.name == name), None)
    found = exact or next((row for row in METRICS if row.pattern.fullmatch(name)), None)
    if found is None:
        raise KeyError(f"No metric {name!r} in lightning_rlhf.metric_names: add a row with its meaning and unit.")
    return found


def as_markdown() -> str:
    """The page of the documentation."""
    head = [
        "# Metrics",
        "",
        "What loggers, `module.last_metrics` and the curves of `lightning-rlhf plot` hold, by RL step. Made from",
        "`lightning_rlhf/metric_names.py`: `python -m lightning_rlhf.metric_names > docs/metrics.md`.",
        "",
        "A mean is weighted by the tokens, rows or steps that it counts, over micro-batches, mini-batches and ranks; a",
        "minimum or maximum is that of all of them. A NaN is left out of means, minima and maxima of observations, and",
        "shows in sums and losses. A metric that observed nothing in a step is absent from it. Times are rank 0's.",
        "",
        "| name | meaning | unit |",
        "|---|---|---|",
    ]
    rows = [f"| `{row.name}` | {row.meaning} | {row.unit} |" for row in METRICS]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
