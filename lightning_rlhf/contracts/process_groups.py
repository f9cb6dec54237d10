"""What process groups are for, where that decides how they are treated."""

from __future__ import annotations

BESIDE_TRAINING = "lightning_rlhf: beside training"
"""Description of a group whose collectives run in threads beside training, at their own pace."""
