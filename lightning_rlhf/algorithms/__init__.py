"""The mathematics of RL for language models: pure tensors in, pure tensors out.

* ``advantages``: rewards to advantages, ``gae``, and where rewards and advantages sit among the tokens.
* ``losses``: policy and value losses as per-token terms.
* ``aggregation``: how terms are averaged, as one weight per token.
* ``kl``: estimates of the divergence from a reference.
* ``corrections``: the gap between rollout engine and trainer.
* ``log_probs``: log-probs and entropy without a tensor of all logits.
"""
