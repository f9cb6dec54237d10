"""A training step whose rollouts compute their prompt once, against one that computes it for each.

One step is forward, backward and AdamW on the torch engine. The ceiling is what the counted FLOPs allow: matrix
products of the layers for every token that is computed, causal attention for every pair that is seen, the head for
every token that is scored (forward, once more in the backward, and two products for gradients), in both ways. What is
not a matrix product (norms, activations, softmax, the optimizer) is not counted.

    python benchmarks/bench_shared_prompts.py --json > benchmarks/results/shared_prompts.json
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from typing import Any

import torch
from measuring import CPU, experience, interleaved, loss, medians, ratios, smol_model, surroundings
from transformers import LlamaForCausalLM

from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.types import Experience


def vocabulary(layers: int) -> int:
    """So that the head has the weight beside the layers that it has in SmolLM2-135M."""
    return layers * 49152 // 30


def flops(model: LlamaForCausalLM, *, prompt: int, response: int, rollouts: int, share: bool, infer: bool) -> float:
    """Of the matrix products of one step, or of scoring alone."""
    config = model.config
    heads_size = config.num_attention_heads * config.head_dim
    layer = sum(parameter.numel() for parameter in model.model.layers.parameters() if parameter.ndim == 2)
    tokens = rollouts * response + (1 if share else rollouts) * prompt

    def pairs(before: int, own: int) -> int:
        return before * own + own * (own + 1) // 2

    seen = rollouts * pairs(prompt, response) + (1 if share else rollouts) * pairs(0, prompt)
    decoder = 2 * layer * tokens + 4 * heads_size * config.num_hidden_layers * seen
    head = 2 * config.vocab_size * config.hidden_size * rollouts * response
    return float(decoder + head if infer else 3 * decoder + 4 * head)


def engine(share: bool, layers: int) -> BaseEngine:
    config = EngineConfig(
        model=smol_model(layers=layers, vocabulary=vocabulary(layers)),
        optimizer=partial(torch.optim.AdamW, lr=1e-5),
        share_prompts=share,
    )
    made = TorchEngine(config, device=CPU)
    made.initialize()
    return made


def compare(
    engines: dict[bool, BaseEngine], *, prompt: int, response: int, rollouts: int, pairs: int, infer: bool
) -> dict[str, Any]:
    data = experience([prompt], [response] * rollouts, rollouts=rollouts)
    work = {share: partial(_run, engines[share], data, infer) for share in engines}
    plain, shared = interleaved(work[False], work[True], pairs=pairs)
    model: Any = engines[True].module.hf_model
    counted = {
        share: flops(model, prompt=prompt, response=response, rollouts=rollouts, share=share, infer=infer)
        for share in engines
    }
    ceiling, speedup = counted[False] / counted[True], ratios(plain, shared)
    return {
        "what": "infer_batch" if infer else "train_batch",
        "prompt": prompt,
        "response": response,
        "rollouts": rollouts,
        "unshared_seconds": medians(plain),
        "shared_seconds": medians(shared),
        "gflops": {"unshared": round(counted[False] / 1e9, 1), "shared": round(counted[True] / 1e9, 1)},
        "speedup": speedup,
        "ceiling": round(ceiling, 3),
        "fraction_of_ceiling": {name: round(found["median"] / ceiling, 3) for name, found in speedup.items()},
    }


def _run(one: BaseEngine, data: Experience, infer: bool) -> None:
    if infer:
        one.infer_batch(data)
    else:
        one.train_batch(data, loss)


def largest_difference(engines: dict[bool, BaseEngine]) -> float:
    """Of log-probs, before any step."""
    data = experience([192], [64] * 8, rollouts=8)
    found = [engines[share].infer_batch(data).log_probs for share in (False, True)]
    assert found[0] is not None
    assert found[1] is not None
    return float((found[0] - found[1]).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompts computed once against once for each rollout.")
    parser.add_argument("--layers", type=int, default=8, help="of the model, whose widths are SmolLM2-135M's")
    parser.add_argument("--pairs", type=int, default=9, help="of steps at the asked size; others have half")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--only-asked", action="store_true", help="8 rollouts, prompts three times the response")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = surroundings()
    engines = {share: engine(share, arguments.layers) for share in (False, True)}
    difference = largest_difference(engines)
    response = arguments.response
    sizes = [(3 * response, 8, arguments.pairs, False)]
    if not arguments.only_asked:
        few = max(arguments.pairs // 2, 1)
        sizes += [(3 * response, 8, few, True), (response, 8, few, False), (3 * response, 2, few, False)]
        sizes += [(response // 8, 8, few, False)]
    rows = [
        compare(engines, prompt=prompt, response=response, rollouts=rollouts, pairs=pairs, infer=infer)
        for prompt, rollouts, pairs, infer in sizes
    ]
    found = {
        "benchmark": "shared_prompts",
        **facts,
        "load_average_after": round(os.getloadavg()[0], 1),
        "model": f"Llama, {arguments.layers} layers with the widths of SmolLM2-135M, "
        f"{vocabulary(arguments.layers)} tokens, tied, fp32",
        "largest_difference_of_log_probs": difference,
        "rows": rows,
    }
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['model']}; {found['machine']}; load average {found['load_average_before']}")
    print("what          prompt  response  rollouts  speedup, computing (interval)   clock  ceiling  reached")
    for row in rows:
        computing, (low, high) = row["speedup"]["computing"]["median"], row["speedup"]["computing"]["interval"]
        print(
            f"{row['what']:<12s}  {row['prompt']:6d}  {row['response']:8d}  {row['rollouts']:8d}  "
            f"{computing:7.2f}  ({low:.2f} to {high:.2f})           {row['speedup']['clock']['median']:7.2f}  "
            f"{row['ceiling']:7.2f}  {row['fraction_of_ceiling']['computing']:7.1%}"
        )


if __name__ == "__main__":
    main()
