"""Whether the batch sizes of a run fit together, from the numbers alone, before anything is loaded."""

from __future__ import annotations


def check_batch_sizes(
    *,
    prompts_per_step: int,
    rollouts_per_prompt: int,
    data_parallel_size: int,
    mini_batch_size: int | None = None,
    critic_mini_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    max_tokens_per_micro_batch: int | None = None,
) -> None:
    """Refuses sizes that would drop, repeat or starve rollouts.

    A step samples ``B = prompts_per_step * rollouts_per_prompt`` rollouts over all ranks. ``mini_batch_size`` counts
    rollouts, not prompts, over all data-parallel ranks; ``micro_batch_size`` counts rollouts on one rank, and
    ``max_tokens_per_micro_batch`` tokens on one rank in its place. A micro-batch size that does not divide a rank's
    share is fine: the last micro-batch is smaller, and the maths is the same.

    Args:
        prompts_per_step: prompts of one RL step over all ranks.
        rollouts_per_prompt: size of a group.
        data_parallel_size: ranks that hold different rows.
        mini_batch_size: rollouts of one optimizer step over all ranks; None takes the step's.
        critic_mini_batch_size: the same for the critic; None takes ``mini_batch_size``.
        micro_batch_size: rollouts of one forward-backward on one rank; None takes the rank's whole share.
        max_tokens_per_micro_batch: tokens of one forward-backward on one rank.

    Raises:
        ValueError: with the numbers that do not fit, and numbers that would.
    """
    sizes = {
        "prompts_per_step": prompts_per_step,
        "rollouts_per_prompt": rollouts_per_prompt,
        "data_parallel_size": data_parallel_size,
        "mini_batch_size": mini_batch_size,
        "critic_mini_batch_size": critic_mini_batch_size,
        "micro_batch_size": micro_batch_size,
        "max_tokens_per_micro_batch": max_tokens_per_micro_batch,
    }
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1.")
    if prompts_per_step % data_parallel_size:
        below, above = (prompts_per_step // data_parallel_size + k for k in (0, 1))
        fitting = " or ".join(str(n * data_parallel_size) for n in (below, above) if n)
        raise ValueError(
            f"prompts_per_step={prompts_per_step} does not divide over {data_parallel_size} data-parallel ranks: every "
            f"rank samples for the same number of prompts. Use {fitting}."
        )
    num_rollouts = prompts_per_step * rollouts_per_prompt
    own = num_rollouts if mini_batch_size is None else mini_batch_size
    critic = own if critic_mini_batch_size is None else critic_mini_batch_size
    for name, size in {"mini_batch_size": own, "critic_mini_batch_size": critic}.items():
        _check_mini_batch(name, size, num_rollouts, data_parallel_size, prompts_per_step, rollouts_per_prompt)
    if micro_batch_size is None:
        return
    if max_tokens_per_micro_batch is not None:
        raise ValueError(
            f"micro_batch_size={micro_batch_size} and max_tokens_per_micro_batch={max_tokens_per_micro_batch} both cut "
            "micro-batches. Set one of them to null."
        )
    share = own // data_parallel_size
    if micro_batch_size > share:
        raise ValueError(
            f"micro_batch_size={micro_batch_size} is larger than a rank's share of the mini-batch, which is "
            f"mini_batch_size={own} / {data_parallel_size} data-parallel ranks = {share} rollouts. "
            f"Use micro_batch_size={share} or less, or mini_batch_size={micro_batch_size * data_parallel_size} or more."
        )


def _check_mini_batch(
    name: str, size: int, num_rollouts: int, data_parallel_size: int, prompts: int, group: int
) -> None:
    step = f"{num_rollouts} rollouts of a step ({prompts} prompts x {group} rollouts)"
    fitting = [n for n in range(data_parallel_size, num_rollouts + 1, data_parallel_size) if num_rollouts % n == 0]
    remedy = f"{name} counts rollouts over all ranks; use one of {', '.join(map(str, fitting))}."
    if size > num_rollouts:
        raise ValueError(f"{name}={size} is larger than the {step}. {remedy}")
    if size < data_parallel_size:
        raise ValueError(
            f"{name}={size} leaves some of the {data_parallel_size} data-parallel ranks without a rollout. {remedy}"
        )
    if num_rollouts % size:
        raise ValueError(f"{name}={size} does not divide the {step}: {num_rollouts % size} would be lost. {remedy}")
    if size % data_parallel_size:
        raise ValueError(f"{name}={size} does not divide over {data_parallel_size} data-parallel ranks. {remedy}")
