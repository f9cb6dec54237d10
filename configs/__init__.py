"""Hydra configuration, found as ``pkg://lightning_rlhf.configs``."""
