"""The megatron engine against a bare loop over megatron-core: the same model, the same micro-batches, the same step.

The bare loop has megatron's schedule, its DistributedDataParallel, its optimizer and its vocabulary-parallel cross
entropy; its micro-batches are packed before the clock starts. In the engine's step there are besides: checks,
the plan, packing, log-probs at any temperature, entropies, metrics over ranks. Steps come in pairs, side by side, and
which is first alternates.

    python benchmarks/bench_megatron_overhead.py --json > benchmarks/results/megatron_overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from measuring import CPU, experience, interleaved, loss, medians, ratios, smol_model, surroundings
from torch import Tensor

from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.megatron.data_parallel import DataParallelOptions, wrap
from lightning_rlhf.engines.megatron.engine import MegatronEngine
from lightning_rlhf.engines.megatron.layout import MegatronLayout
from lightning_rlhf.engines.megatron.load import StateDictSource, load_parameters
from lightning_rlhf.engines.megatron.model import build_model
from lightning_rlhf.engines.megatron.packed import PackedMicroBatch, pack
from lightning_rlhf.parity.processes import run_ranks
from lightning_rlhf.types import Experience

VOCABULARY = 4096
LEARNING_RATE, MAX_NORM = 1e-5, 1.0
ADAMW = partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.01)
ROWS, PROMPT, RESPONSE, ROWS_PER_MICRO_BATCH = 8, 16, 48, 4


class Bare:
    """Megatron-core without an engine; ``engine`` lends the machine and the groups, nothing of its step."""

    def __init__(self, engine: MegatronEngine, data: Experience) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        model = smol_model(layers=engine.bare_chunks[0].config.num_layers, vocabulary=VOCABULARY)
        self.machine = engine.machine
        with self.machine.active():
            chunks = build_model(model.config, layout=engine.layout, backend=self.machine)
            load_parameters(chunks, StateDictSource.of_model(model), hf_config=model.config)
            self.chunks = wrap(chunks, DataParallelOptions())
            config = OptimizerConfig(
                optimizer="adam",
                lr=LEARNING_RATE,
                weight_decay=0.01,
                clip_grad=MAX_NORM,
                params_dtype=torch.float32,
                use_distributed_optimizer=False,
            )
            self.optimizer = get_megatron_optimizer(config, self.chunks, use_gloo_process_groups=False)
        self.chunks[0].train()
        self._batches = [self._packed(data.select(rows)) for rows in torch.arange(ROWS).split(ROWS_PER_MICRO_BATCH)]
        self._num_tokens = data.num_tokens
        self._total = torch.zeros(())

    def _packed(self, rows: Experience) -> tuple[PackedMicroBatch, Tensor, Tensor]:
        """The rows, the next token at each position, and the weight of its log-prob."""
        assert rows.loss_weights is not None
        packed = pack(rows.tokens, rows.cu_seqlens, rows.response_mask, multiple=1)
        labels = rows.tokens.roll(-1)
        weights = (-rows.loss_weights * rows.advantages).roll(-1)
        return packed, labels[None], weights[None]

    def step(self) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        with self.machine.active():
            self.chunks[0].zero_grad_buffer()
            self.optimizer.zero_grad()
            self._total = torch.zeros(())
            get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=iter(self._batches),
                model=self.chunks[0],
                num_microbatches=len(self._batches),
                seq_length=ROWS_PER_MICRO_BATCH * (PROMPT + RESPONSE),
                micro_batch_size=1,
                forward_only=False,
            )
            self.optimizer.step()
        return float(self._total)

    def _forward(self, batches: Iterator[Any], chunk: Any) -> tuple[Tensor, Any]:
        packed, labels, weights = next(batches)
        losses = chunk(
            input_ids=packed.tokens,
            position_ids=packed.position_ids,
            attention_mask=None,
            labels=labels,
            packed_seq_params=packed.packed_seq_params(),
        )

        def total_and_tokens(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            total = -(output * weights).sum()
            self._total += total.detach()
            return total * self._num_tokens, torch.tensor(packed.num_local, dtype=torch.int), {}

        return losses, total_and_tokens


def _measure(layers: int, pairs: int, layout: MegatronLayout, folder: Path, rank: int) -> None:
    engine = MegatronEngine(
        EngineConfig(
            model=smol_model(layers=layers, vocabulary=VOCABULARY),
            optimizer=ADAMW,
            micro_batch_size=ROWS_PER_MICRO_BATCH,
            max_grad_norm=MAX_NORM,
        ),
        device=CPU,
        layout=layout,
    )
    engine.initialize()
    data = experience([PROMPT] * ROWS, [RESPONSE] * ROWS, vocabulary=VOCABULARY)
    bare = Bare(engine, data)
    losses: dict[str, list[float]] = {"engine": [], "bare": []}
    by_engine, by_bare = interleaved(
        lambda: losses["engine"].append(engine.train_batch(data, loss)["loss"]),
        lambda: losses["bare"].append(bare.step()),
        pairs=pairs,
        before=dist.barrier,
    )
    if rank == 0:
        apart = [abs(one - other) for one, other in zip(losses["engine"], losses["bare"], strict=True)]
        found = {"engine": by_engine, "bare": by_bare, "difference": max(apart)}
        (folder / "found.json").write_text(json.dumps(found))


def report(layers: int, pairs: int, tensor_parallel_size: int) -> dict[str, Any]:
    facts = surroundings()
    layout = MegatronLayout(tensor_parallel_size=tensor_parallel_size)
    with TemporaryDirectory() as folder:
        work = partial(_measure, layers, pairs, layout, Path(folder))
        run_ranks(work, world_size=tensor_parallel_size, device_type="cpu", folder=Path(folder), timeout_seconds=1800.0)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return {
        "benchmark": "megatron_overhead",
        **facts,
        "load_average_after": round(os.getloadavg()[0], 1),
        "model": f"Llama, {layers} layers with the widths of SmolLM2-135M, {VOCABULARY} tokens, tied, fp32",
        "layout": layout.describe(),
        "tokens_per_step": ROWS * (PROMPT + RESPONSE),
        "engine_over_bare": ratios(found["engine"], found["bare"]),
        "engine_seconds": medians(found["engine"]),
        "bare_seconds": medians(found["bare"]),
        "largest_difference_of_loss": found["difference"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The megatron engine against a bare loop over megatron-core.")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = report(arguments.layers, arguments.pairs, arguments.tensor_parallel_size)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['model']}; {found['layout']}; {found['machine']}; load average {found['load_average_before']}")
    for name, ratio in found["engine_over_bare"].items():
        low, high = ratio["interval"]
        print(f"engine over bare megatron-core, {name}: {ratio['median']} ({low} to {high}), {ratio['pairs']} pairs")
    print(f"largest difference of the loss: {found['largest_difference_of_loss']}")


if __name__ == "__main__":
    main()
