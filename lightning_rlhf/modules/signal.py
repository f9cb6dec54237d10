"""Leaving rows out of the update whose advantages are all zero: their part of the gradient is zero."""

from __future__ import annotations

from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.types import Experience

PROPORTIONAL_LOSSES = ("cispo", "clip_cov", "dapo", "gpg", "ppo_clip", "reinforce", "sapo")
"""Policy losses whose every term is a multiple of its advantage."""


def check_skips(
    *,
    policy_loss: object,
    kl_coef: float,
    kl_in: str,
    kl_target: float | None,
    entropy_coef: float,
    entropy_target: float | None,
) -> None:
    """Says whether rows without advantage have no gradient, and whether nothing is steered by a mean over all rows.

    Raises:
        ValueError: naming the argument through which they have one.
    """
    others = {
        f"policy_loss={policy_loss!r}": policy_loss not in PROPORTIONAL_LOSSES,
        f"kl_coef={kl_coef} in the loss": kl_coef != 0 and kl_in == "loss",
        f"entropy_coef={entropy_coef}": entropy_coef != 0,
        f"kl_target={kl_target}": kl_target is not None,
        f"entropy_target={entropy_target}": entropy_target is not None,
    }
    found = [name for name, given in others.items() if given]
    if found:
        raise ValueError(
            f"skip_zero_advantages leaves out rows whose gradient is zero, but with {', '.join(found)} a row has a "
            f"gradient (or is measured) without an advantage. Leave one of them out; losses that go: "
            f"{', '.join(PROPORTIONAL_LOSSES)}."
        )


def check_engine_skips(engine: BaseEngine) -> None:
    """Says whether rows without advantage train nothing by the engine itself.

    Raises:
        ValueError: if they do.
    """
    if engine.trains_beside_the_loss:
        raise ValueError(
            "skip_zero_advantages leaves rows out, but every row trains the routers of this mixture of experts: a "
            "balancing loss, a z-loss or a bias that follows the load is on. Leave skip_zero_advantages out, or set "
            "moe_aux_loss_coef and moe_z_loss_coef to 0."
        )


def rows_with_signal(mini_batch: Experience) -> Experience:
    """The rows of which some token has an advantage, with the loss weights that they had among all.

    The weights hold the global counts of all rows, so the loss and its gradient stay what they were.
    """
    moved = (mini_batch.advantages != 0) & mini_batch.loss_mask
    return mini_batch.select(mini_batch.sequence_ids[moved].unique())
