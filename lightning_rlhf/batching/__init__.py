"""Cutting rollouts into mini-batches and micro-batches, and laying them over ranks."""
