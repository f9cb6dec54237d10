"""Cutting rollouts into mini-batches and micro-batches, and laying them over ranks."""

from lightning_rlhf.batching.balance import balanced_partitions, sequence_costs
from lightning_rlhf.batching.micro_batch import plan_micro_batches

__all__ = ["balanced_partitions", "plan_micro_batches", "sequence_costs"]
