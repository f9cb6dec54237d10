"""The engine contract over the real megatron-core: tensor, pipeline, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_rlhf.batching.exchange import equal_on_all_ranks
from lightning_rlhf.contracts.engine import LossFunction, OptimizerStepResult
from lightning_rlhf.engines.megatron import heads
from lightning_rlhf.engines.megatron.data_parallel import show_gradients
from lightning_rlhf.engines.megatron.engine_model import MegatronModel
from lightning_rlhf.engines.megatron.expert_load import LOAD_METRICS
from lightning_rlhf.engines.megatron.last_stage import share_columns, share_metrics
from lightning_rlhf.engines.megatron.micro_batches import MicroBatchPlan, agree_micro_batches
from lightning_rlhf.engines.megatron.optimizer import zero_gradients
from lightning_rlhf.engines.megatron.packed import PackedMicroBatch, alignment, pack
from lightning_rlhf.engines.megatron.router_replay import FREE
from lightning_rlhf.engines.megatron.rows import NO_LOSS_WEIGHTS, digest, token_places, weighted_loss
from lightning_rlhf.engines.megatron.schedule import run_schedule
from lightning_rlhf.metrics import Metric, merge_metrics
from lightning_rlhf.types import Experience, ModelOutputs


class MegatronEngine(MegatronModel):
    """Trains a language model with megatron-core, cut as the layout says.

    The ranks of a model-parallel group (``tp x cp x pp``) hold the same rows; each of them gets every output and every
    metric. Gradients are summed over data- and context-parallel ranks, losses and metrics over data-parallel ones. A
    micro-batch is the group's: ``max_tokens_per_micro_batch`` counts its tokens before they are padded and cut.

    ``forward_backward_batch`` starts from empty gradients: they do not add up over calls.

    Arguments are those of ``MegatronModel``.
    """

    own_metrics = LOAD_METRICS

    # --- micro-batches ------------------------------------------------------------------------------------------

    @override
    def forward_backward_batch(
        self, data: Experience, loss_function: LossFunction, *, forward_only: bool = False
    ) -> dict[str, Metric]:
        """Runs all micro-batches of this rank's share of a mini-batch; see ``BaseEngine``. Collective.

        ``loss_function`` is called on the last pipeline stage, for empty micro-batches as well; its metrics are told to
        all stages. Gradients from before are dropped.

        Raises:
            ValueError: if ``data`` has no ``loss_weights``, or a sequence is longer than a micro-batch may be.
            RuntimeError: if another rank cannot cut its share, or ranks of a model-parallel group hold other rows.
        """
        plan = self._plan(data, refused=None if data.loss_weights is not None else NO_LOSS_WEIGHTS)
        self.last_counts = plan.counts(num_tokens=data.num_tokens)
        data = data.to(self.device)
        micro_batches = [data.select(rows) for rows in plan.rows]
        packed = self._pack(micro_batches, plan)
        parts: list[dict[str, Metric]] = []

        def last_stage(index: int, chunk: nn.Module, output: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self._score(packed[index], chunk, output, micro_batches[index].temperature, entropy=True)
            loss, metrics = weighted_loss(outputs, micro_batches[index], loss_function)
            parts.append({**metrics, "loss": Metric.sum(loss)})
            # megatron divides gradients by the sum of what is reported here: num_tokens over all ranks
            num_real = torch.tensor(packed[index].num_real, dtype=torch.int, device=self.device)
            return loss * plan.num_tokens, num_real

        with self.machine.active(), torch.set_grad_enabled(torch.is_grad_enabled() and not forward_only):
            if not forward_only:
                zero_gradients(self.chunks)
            with self._replaying(micro_batches, packed):
                run_schedule(self.chunks, packed, last_stage, forward_only=forward_only)
            if not forward_only and not self.data_parallel.distributed_optimizer:
                show_gradients(self.chunks)
            load = {} if self._expert_load is None or forward_only else self._expert_load.metrics()
        return {**share_metrics(merge_metrics(parts), group=_pipeline_group(), device=self.device), **load}

    @override
    def infer_batch(self, data: Experience, *, entropy: bool = False) -> ModelOutputs:
        """Forward without gradients over this rank's rows, outputs in the caller's order. Collective.

        Args:
            data: this rank's rows; may hold none.
            entropy: a language model's entropies as well.

        Returns:
            ``[num_tokens]`` where ``response_mask``, 0 elsewhere, on the engine's device and on every rank of the
            model-parallel group: log-probs (and entropies), or values. With ``router_replay`` the actor's choices of
            experts as well: those of ``data``, which it follows, or, if there are none, its own.

        Raises:
            ValueError: if a sequence is longer than a micro-batch may be.
            RuntimeError: if another rank cannot cut its share, or ranks of a model-parallel group hold other rows.
        """
        plan = self._plan(data)
        data = data.to(self.device)
        micro_batches = [data.select(rows) for rows in plan.rows]
        packed = self._pack(micro_batches, plan)
        names = self._output_names(entropy)
        found = {name: torch.zeros(data.num_tokens, device=self.device) for name in names}

        def last_stage(index: int, chunk: nn.Module, output: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self._score(packed[index], chunk, output, data.temperature, entropy=entropy)
            places = token_places(data.cu_seqlens, plan.rows[index])
            for name in names:
                found[name][places] = getattr(outputs, name)
            return output.new_zeros(()), torch.zeros((), dtype=torch.int, device=self.device)

        experts = data.routed_experts if self._expert_choices is not None else None
        with self.eval_mode(), self.machine.active():
            if self._expert_choices is not None and experts is None:
                with self._expert_choices.recording() as recorded:
                    run_schedule(self.chunks, packed, last_stage, forward_only=True)
                experts = self._at_tokens(recorded, packed, plan, data)
            else:
                with self._replaying(micro_batches, packed):
                    run_schedule(self.chunks, packed, last_stage, forward_only=True)
            share_columns(list(found.values()), group=_pipeline_group())
        return ModelOutputs(**found, routed_experts=experts)

    @contextmanager
    def _replaying(self, micro_batches: list[Experience], packed: list[PackedMicroBatch]) -> Iterator[None]:
        """Sends tokens to the experts that the rows name, if they do and this engine follows them."""
        given = [
            one.at_positions(rows.routed_experts, fill=FREE, group=self._context_group())
            for rows, one in zip(micro_batches, packed, strict=True)
            if rows.routed_experts is not None
        ]
        if self._expert_choices is None or not given:
            yield
            return
        with self._expert_choices.replaying(given):
            yield

    def _at_tokens(
        self, recorded: list[Tensor], packed: list[PackedMicroBatch], plan: MicroBatchPlan, data: Experience
    ) -> Tensor:
        """Recorded choices in the order of the rows. Collective over context-parallel ranks."""
        experts = recorded[0].new_full((data.num_tokens, *recorded[0].shape[1:]), FREE)
        for choices, one, rows in zip(recorded, packed, plan.rows, strict=True):
            experts[token_places(data.cu_seqlens, rows)] = one.of_tokens(choices, group=self._context_group())
        return experts

    def _output_names(self, entropy: bool) -> tuple[str, ...]:
        return ("log_probs", "entropy") if entropy else ("log_probs",)

    def _score(
        self, packed: PackedMicroBatch, chunk: Any, output: Tensor, temperature: float, *, entropy: bool
    ) -> ModelOutputs:
        from megatron.core import parallel_state

        bare = chunk.module if self.optimizer is not None else chunk
        return heads.log_probs_of(
            output,
            packed,
            weight=heads.head_weight(bare),
            vocab_size=self._hf_config.vocab_size,
            temperature=temperature,
            chunk_size=self.config.logits_chunk_size,
            entropy=entropy,
            tensor_group=parallel_state.get_tensor_model_parallel_group(),
            context_group=self._context_group(),
        )

    def _context_group(self) -> dist.ProcessGroup | None:
        from megatron.core import parallel_state

        group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        return group if self.layout.context_parallel_size > 1 else None

    def _pack(self, micro_batches: list[Experience], plan: MicroBatchPlan) -> list[PackedMicroBatch]:
        group = self._context_group()
        return [
            pack(
                rows.tokens,
                rows.cu_seqlens,
                rows.response_mask,
                multiple=self._alignment,
                total=size,
                rank=0 if group is None else dist.get_rank(group),
                size=self.layout.context_parallel_size,
            )
            for rows, size in zip(micro_batches, plan.padded_sizes, strict=True)
        ]

    @property
    def _alignment(self) -> int:
        return alignment(
            tensor_parallel_size=self.layout.tensor_parallel_size,
            context_parallel_size=self.layout.context_parallel_size,
            sequence_parallel=self.layout.sequence_parallel,
        )

    def _plan(self, data: Experience, *, refused: str | None = None) -> MicroBatchPlan:
        """Cuts this rank's rows, and agrees with the others on numbers. Collective."""
        groups = self.groups
        if self.layout.model_parallel_size > 1 and not equal_on_all_ranks(
            digest(data), group=groups.model_parallel_group, device=self.device
        ):
            raise RuntimeError(
                "The ranks of a model-parallel group were given different rows. They train on the same ones: share "
                "rows out by data_parallel_rank, which they have in common."
            )
        megatron_config = self.bare_chunks[0].config
        return agree_micro_batches(
            data.lengths.tolist(),
            self.config,
            hidden_size=self._hf_config.hidden_size,
            multiple=self._alignment,
            number_divisible_by=self.layout.pipeline_parallel_size if self.layout.virtual_pipeline_size > 1 else 1,
            equal_sizes=not megatron_config.variable_seq_lengths,
            group=groups.data_parallel_group,
            device=self.device,
            refused=refused,
        )

    # --- the step -----------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self) -> OptimizerStepResult:
        """Clips, steps optimizer and schedule, and returns the global gradient norm. Collective.

        With a norm that is not finite nothing moves: neither parameters, nor moments, nor the learning rate.

        Raises:
            RuntimeError: if the engine has no optimizer.
        """
        optimizer = self._megatron_optimizer()
        with self.machine.active():
            norm = torch.tensor(optimizer.prepare_gradients())
            stepped = bool(norm.isfinite())
            if stepped:
                if self.config.max_grad_norm is not None:
                    optimizer.clip_gradients(self.config.max_grad_norm, float(norm))
                optimizer.step()
                self.lr_scheduler_step()
        self.last_step = OptimizerStepResult(grad_norm=float(norm), stepped=stepped)
        return self.last_step


def _pipeline_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
    return group
