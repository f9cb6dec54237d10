"""Checkpoint engines, which carry weights from trainer ranks to rollout replicas."""
