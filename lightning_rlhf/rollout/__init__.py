"""Engines that sample responses, each behind ``RolloutEngine``."""
