"""The engine contract over the real megatron-core: tensor, pipeline, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_rlhf.batching.exchange import equal_on_all_ranks
from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, LossFunction, OptimizerStepResult
from lightning_rlhf.engines.megatron import checkpoint, heads
from lightning_rlhf.engines.megatron.backend import MegatronBackend, choose_backend
from lightning_rlhf.engines.megatron.config import MoEOptions, Recompute
from lightning_rlhf.engines.megatron.data_parallel import (
    DataParallelOptions,
    gather_gradients,
    main_gradient,
    show_gradients,
    whole_parameters,
    wrap,
)
from lightning_rlhf.engines.megatron.embedding import freeze_padding_row
from lightning_rlhf.engines.megatron.export import export_parameters
from lightning_rlhf.engines.megatron.last_stage import share_columns, share_metrics
from lightning_rlhf.engines.megatron.layout import MegatronLayout, ParallelGroups, check_layout, initialize_groups
from lightning_rlhf.engines.megatron.load import load_parameters
from lightning_rlhf.engines.megatron.micro_batches import MicroBatchPlan, agree_micro_batches
from lightning_rlhf.engines.megatron.model import build_model
from lightning_rlhf.engines.megatron.optimizer import MegatronOptimizer, zero_gradients
from lightning_rlhf.engines.megatron.packed import PackedMicroBatch, alignment, pack
from lightning_rlhf.engines.megatron.rows import NO_LOSS_WEIGHTS, digest, token_places, weighted_loss
from lightning_rlhf.engines.megatron.schedule import run_schedule
from lightning_rlhf.engines.megatron.source import hf_config_of, weight_source
from lightning_rlhf.metrics import Metric, merge_metrics
from lightning_rlhf.types import Experience, ModelOutputs


class MegatronEngine(BaseEngine):
    """Trains a language model with megatron-core, cut as the layout says.

    The ranks of a model-parallel group (``tp x cp x pp``) hold the same rows; each of them gets every output and every
    metric. Gradients are summed over data- and context-parallel ranks, losses and metrics over data-parallel ones. A
    micro-batch is the group's: ``max_tokens_per_micro_batch`` counts its tokens before they are padded and cut.

    ``forward_backward_batch`` starts from empty gradients: they do not add up over calls.

    Args:
        config: how to train; ``gradient_checkpointing`` recomputes each layer, unless ``recompute`` says which part.
        device: where this rank computes.
        layout: sizes of the axes.
        data_parallel: how gradients and optimizer state lie on data-parallel ranks.
        recompute: which activations the backward computes again; None: as ``config.gradient_checkpointing`` says.
        moe: options of a mixture of experts; None: the defaults.
    """

    value_head: ClassVar[bool] = False

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: torch.device,
        layout: MegatronLayout | None = None,
        data_parallel: DataParallelOptions | None = None,
        recompute: Recompute | None = None,
        moe: MoEOptions | None = None,
    ) -> None:
        super().__init__(config, device=device)
        self.layout = layout or MegatronLayout()
        self.data_parallel = data_parallel or DataParallelOptions()
        self.recompute: Recompute = recompute or ("full" if config.gradient_checkpointing else "none")
        self.moe = moe
        self.chunks: list[Any] = []
        self._hf_config: Any = None
        self._groups: ParallelGroups | None = None
        self._machine: MegatronBackend | None = None

    # --- building -----------------------------------------------------------------------------------------------

    @override
    def initialize(self) -> None:
        """Checks the layout, makes megatron's groups, builds and fills this rank's part. Collective.

        Raises:
            ValueError: if the layout does not fit the processes or the model; before weights are read.
        """
        self._machine = choose_backend(self.device.type)
        hf_config = self._hf_config = hf_config_of(self.config.model)
        check_layout(self.layout, hf_config, dist.get_world_size())
        source = weight_source(self.config.model)
        with self._machine.active():
            self._groups = initialize_groups(self.layout)
            chunks = build_model(
                hf_config,
                layout=self.layout,
                backend=self._machine,
                compute_dtype=self.config.compute_dtype,
                value_head=self.value_head,
                recompute=self.recompute,
                moe=self.moe,
            )
            load_parameters(chunks, source, hf_config=hf_config)
            self._prepare(chunks)
        self.module = nn.ModuleList(self.chunks).train(self.config.optimizer is not None)

    def _prepare(self, chunks: list[nn.Module]) -> None:
        for chunk in chunks:
            if vars(chunk)["pre_process"]:
                freeze_padding_row(chunk, self._hf_config.pad_token_id)
            if vars(chunk)["post_process"] and not self.value_head:
                heads.give_hidden_states(chunk)
        if self.config.optimizer is None:
            self.chunks = [chunk.requires_grad_(False) for chunk in chunks]
            return
        self.chunks = wrap(chunks, self.data_parallel)
        self.optimizer = MegatronOptimizer(
            self.chunks,
            self.config.optimizer,
            params_dtype=self.config.compute_dtype,
            distributed=self.data_parallel.distributed_optimizer,
            overlap_param_gather=self.data_parallel.overlap_param_gather,
        )
        if self.config.lr_schedule is not None:
            self.lr_scheduler = self.config.lr_schedule(self.optimizer)

    @property
    def machine(self) -> MegatronBackend:
        """The back end in whose scope every call into megatron stands.

        Raises:
            RuntimeError: before ``initialize``.
        """
        if self._machine is None:
            raise RuntimeError(f"{type(self).__name__} has no model yet: call initialize() first.")
        return self._machine

    @property
    def groups(self) -> ParallelGroups:
        """This rank's place in megatron's groups.

        Raises:
            RuntimeError: before ``initialize``.
        """
        if self._groups is None:
            raise RuntimeError(f"{type(self).__name__} has no groups yet: call initialize() first.")
        return self._groups

    @property
    def bare_chunks(self) -> list[Any]:
        """The model chunks without megatron's DistributedDataParallel around them."""
        return [chunk.module for chunk in self.chunks] if self.optimizer is not None else self.chunks

    # --- modes --------------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Training mode, with gradients; parameters, gradients and optimizer state on the device."""
        self.to(self.device)
        with self._mode(True), torch.enable_grad():
            yield

    @override
    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Evaluation mode, without gradients; parameters on the device."""
        self.to(self.device, optimizer=False)
        with self._mode(False), torch.no_grad():
            yield

    @contextmanager
    def _mode(self, train: bool) -> Iterator[None]:
        was_training = self.module.training
        self.module.train(train)
        try:
            yield
        finally:
            self.module.train(was_training)

    @override
    def zero_grad(self) -> None:
        """Drops all gradients."""
        if self.optimizer is not None:
            with self.machine.active():
                self.optimizer.zero_grad(set_to_none=True)

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
        data = data.to(self.device)
        micro_batches = [data.select(rows) for rows in plan.rows]
        packed = self._pack(micro_batches, plan)
        parts: list[dict[str, Metric]] = []

        def last_stage(index: int, chunk: nn.Module, output: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self._score(packed[index], chunk, output, micro_batches[index].temperature, entropy=True)
            loss, metrics = weighted_loss(outputs, micro_batches[index], loss_function)
            parts.append({**metrics, "loss": Metric.sum(loss)})
            # megatron divides gradients by the sum of what is reported here: num_tokens over all ranks
            num_local = torch.tensor(packed[index].num_local, dtype=torch.int, device=self.device)
            return loss * plan.num_tokens, num_local

        with self.machine.active(), torch.set_grad_enabled(torch.is_grad_enabled() and not forward_only):
            if not forward_only:
                zero_gradients(self.chunks)
            run_schedule(self.chunks, packed, last_stage, forward_only=forward_only)
            if not forward_only and not self.data_parallel.distributed_optimizer:
                show_gradients(self.chunks)
        return share_metrics(merge_metrics(parts), group=_pipeline_group(), device=self.device)

    @override
    def infer_batch(self, data: Experience, *, entropy: bool = False) -> ModelOutputs:
        """Forward without gradients over this rank's rows, outputs in the caller's order. Collective.

        Args:
            data: this rank's rows; may hold none.
            entropy: a language model's entropies as well.

        Returns:
            ``[num_tokens]`` where ``response_mask``, 0 elsewhere, on the engine's device and on every rank of the
            model-parallel group: log-probs (and entropies), or values.

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

        with self.eval_mode(), self.machine.active():
            run_schedule(self.chunks, packed, last_stage, forward_only=True)
            share_columns(list(found.values()), group=_pipeline_group())
        return ModelOutputs(**found)

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

    def _megatron_optimizer(self) -> MegatronOptimizer:
        if not isinstance(self.optimizer, MegatronOptimizer):
            raise RuntimeError(f"The {self.config.role} engine has no optimizer; its config names none.")
        return self.optimizer

    # --- weights ------------------------------------------------------------------------------------------------

    @override
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yields ``(hf_name, full tensor)``, one at a time, detached. Collective; every rank drains it.

        A tensor is valid until the next one is asked for. A head tied to the embedding has no entry of its own.
        """
        return self._export(lambda parameter: parameter)

    def get_per_tensor_grad(self) -> Iterator[tuple[str, Tensor]]:
        """Yields ``(hf_name, full gradient)`` of what ``forward_backward_batch`` has left. Collective."""
        self._megatron_optimizer()
        with self.machine.active():
            gather_gradients(self.chunks, self.data_parallel)
        return self._export(main_gradient)

    def _export(self, tensor_of: Any) -> Iterator[tuple[str, Tensor]]:
        # The consumer's own work between two tensors must not run inside megatron's scope.
        tensors = export_parameters(self.bare_chunks, hf_config=self._hf_config, tensor_of=tensor_of)
        with self.machine.active(), whole_parameters(self.chunks, self.data_parallel):
            pass
        while True:
            with self.machine.active(), torch.no_grad():
                item = next(tensors, None)
            if item is None:
                return
            yield item

    @override
    def save_checkpoint(self, path: Path) -> None:
        """Writes parameters, optimizer state and schedule into the folder ``path``. Collective."""
        with self.machine.active(), whole_parameters(self.chunks, self.data_parallel):
            checkpoint.save(path, self._checkpointed())

    @override
    def load_checkpoint(self, path: Path) -> None:
        """Reads what ``save_checkpoint`` wrote, also in another layout; see ``checkpoint.load``. Collective."""
        with self.machine.active():
            checkpoint.load(path, self._checkpointed())

    def _checkpointed(self) -> checkpoint.Checkpointed:
        return checkpoint.Checkpointed(
            chunks=self.bare_chunks,
            optimizer=self._megatron_optimizer() if self.optimizer is not None else None,
            lr_scheduler=self.lr_scheduler,
            layout=self.layout,
            data_parallel=self.data_parallel,
        )

    @override
    def to(self, device: torch.device, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves the named parts between device and host memory."""
        if device.type == self.device.type == "cpu":
            return
        raise NotImplementedError

    # --- places -------------------------------------------------------------------------------------------------

    @property
    @override
    def data_parallel_rank(self) -> int:
        """This rank's model-parallel group's place among those that hold other rows."""
        return self.groups.data_parallel_rank

    @property
    @override
    def data_parallel_size(self) -> int:
        """Model-parallel groups."""
        return self.groups.data_parallel_size

    @property
    @override
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """One rank of each such group: those with this rank's place in its own; None for one."""
        group: dist.ProcessGroup = self.groups.data_parallel_group
        return group if self.groups.data_parallel_size > 1 else None

    @property
    @override
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ``tp x cp x pp`` ranks that hold the same rows; None for one."""
        group: dist.ProcessGroup = self.groups.model_parallel_group
        return group if self.layout.model_parallel_size > 1 else None


def _pipeline_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
    return group
