"""The mathematics of RL for language models: pure tensors in, pure tensors out."""
