"""LightningModules that say what one RL step does."""
