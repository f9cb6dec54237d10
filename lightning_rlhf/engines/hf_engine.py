"""What the engines for Hugging Face models share: the micro-batch loop, the step, inference and export."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rlhf.batching.micro_batch import count_computed, plan_micro_batches
from lightning_rlhf.batching.shared_prompts import SharedPrefix, among, find_shared_prefixes
from lightning_rlhf.contracts.engine import BaseEngine, EngineConfig, LossFunction, OptimizerStepResult
from lightning_rlhf.engines import checkpoint
from lightning_rlhf.engines.adapter import adapter_disabled, base_name, merged_parameters, whole
from lightning_rlhf.engines.hf_model import PackedCausalLM, PackedModel, load_causal_lm, stored_buffers
from lightning_rlhf.engines.residence import Residence
from lightning_rlhf.engines.shared_stream import shared_stream
from lightning_rlhf.metrics import Metric, merge_metrics
from lightning_rlhf.types import Experience, ModelOutputs

_CANNOT_PLAN = 2**40
"""Sent in place of a number of micro-batches by a rank that must raise, so that no other waits for it."""


class HFEngine(BaseEngine):
    """Trains a model of transformers on packed micro-batches.

    ``module`` is a ``PackedModel``; the model itself is ``hf_model``. A subclass places parameters on ranks and
    sees to it that ``forward_backward_batch`` leaves gradients summed, not averaged, over data-parallel ranks.
    """

    can_share_prompts = True
    can_adapt = True

    def __init__(self, config: EngineConfig, *, device: torch.device) -> None:
        super().__init__(config, device=device)
        self.residence = Residence(self)

    @abstractmethod
    def place(self, model: PackedModel) -> None:
        """Puts parameters where they train, in place. Called once, before the optimizer is built. Collective."""

    @abstractmethod
    def set_gradient_sync(self, sync: bool) -> None:
        """Whether the next backward sums gradients over ranks; without, they add up locally."""

    def finish_gradients(self) -> None:
        """Called after the last backward of a mini-batch. Collective."""

    @property
    def token_multiple(self) -> int:
        """What the tokens of a micro-batch are padded to a multiple of."""
        return 1

    # --- building -----------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Loads the model, places it, builds optimizer and schedule. Collective."""
        trained = self.config.optimizer is not None
        model = self.build()
        self.module = model.train(trained)
        if self.config.optimizer is not None:
            self.optimizer = self.config.optimizer(
                parameter for parameter in self.module.parameters() if parameter.requires_grad
            )
            if self.config.lr_schedule is not None:
                self.lr_scheduler = self.config.lr_schedule(self.optimizer)
        self.residence.leave()

    def build(self) -> PackedModel:
        """Loads the model, checks that it can be trained packed, and places it. Collective."""
        model = self.wrap(load_causal_lm(self.config.model, **self.preparations))
        model.check()
        self.place(model)
        return model

    @property
    def preparations(self) -> dict[str, Any]:
        """What ``prepare_causal_lm`` is told of this engine's model."""
        return {
            "trained": self.config.optimizer is not None,
            "gradient_checkpointing": self.config.gradient_checkpointing,
            "lora": self.config.lora,
        }

    def wrap(self, causal_lm: PreTrainedModel) -> PackedModel:
        """The module that scores packed sequences with this model; here by its log-probs."""
        return PackedCausalLM(causal_lm, logits_chunk_size=self.config.logits_chunk_size)

    @property
    def packed(self) -> PackedModel:
        """The packed model, sharded or not.

        Raises:
            RuntimeError: before ``initialize``.
        """
        if not isinstance(self.module, PackedModel):
            raise RuntimeError(f"{type(self).__name__} has no model yet: call initialize() first.")
        return self.module

    @property
    def hf_model(self) -> nn.Module:
        """The model, whose parameters have Hugging Face names."""
        return self.packed.hf_model

    @property
    def causal_lm(self) -> nn.Module:
        """``hf_model`` of an engine that trains a language model."""
        return self.hf_model

    # --- modes --------------------------------------------------------------------------------------------------

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Training mode, with gradients; parameters, gradients and optimizer state on the device."""
        with self.residence.on_device(optimizer=True), self._mode(True), torch.enable_grad():
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Evaluation mode, without gradients; parameters on the device.

        Not ``inference_mode``: FSDP2 cannot train after a forward inside it.
        """
        with self.residence.on_device(optimizer=False), self._mode(False), torch.no_grad():
            yield

    @contextmanager
    def _mode(self, train: bool) -> Iterator[None]:
        was_training = self.packed.training
        self.packed.train(train)
        try:
            yield
        finally:
            self.packed.train(was_training)

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self.packed.zero_grad(set_to_none=True)

    # --- micro-batches ------------------------------------------------------------------------------------------

    def forward_backward_batch(
        self, data: Experience, loss_function: LossFunction, *, forward_only: bool = False
    ) -> dict[str, Metric]:
        """Runs all micro-batches of this rank's share of a mini-batch; see ``BaseEngine``. Collective.

        Outputs are what the model scores tokens by (log-probs and entropies, or values), where ``response_mask``, 0
        elsewhere. ``loss_function`` is called for empty micro-batches as well, so that every rank has every metric.

        Raises:
            ValueError: if ``data`` has no ``loss_weights``, or a sequence is longer than a micro-batch may be.
            RuntimeError: if another rank cannot cut its share.
        """
        shared = self._shared_prefixes(data)
        plan = self._plan(data, shared, refused=None if data.loss_weights is not None else _NO_LOSS_WEIGHTS)
        self.last_counts = count_computed(data.lengths.tolist(), plan, shared=shared, multiple=self.token_multiple)
        data = data.to(self.device)
        parts: list[dict[str, Metric]] = []
        for index, rows in enumerate(plan):
            micro_batch, in_common = data.select(rows), among(shared, rows)
            if forward_only:
                with torch.no_grad():
                    loss, metrics = self._loss(micro_batch, in_common, loss_function)
            else:
                self.set_gradient_sync(index == len(plan) - 1)
                loss, metrics = self._loss(micro_batch, in_common, loss_function)
                loss.backward()
            parts.append({**metrics, "loss": Metric.sum(loss)})
        if not forward_only:
            self.finish_gradients()
        return merge_metrics(parts)

    def _loss(
        self, micro_batch: Experience, shared: Sequence[SharedPrefix], loss_function: LossFunction
    ) -> tuple[Tensor, dict[str, Metric]]:
        outputs = self._forward(micro_batch, shared, entropy=True)
        result = loss_function(outputs, micro_batch)
        if result.terms.shape != micro_batch.tokens.shape:
            raise ValueError(
                f"The loss function must give one term per token, [{micro_batch.num_tokens}], got "
                f"{tuple(result.terms.shape)}. Leave masking and averaging to loss_weights."
            )
        weights = micro_batch.loss_weights
        anchor = outputs.values if outputs.log_probs is None else outputs.log_probs
        if weights is None or anchor is None:
            raise ValueError(_NO_LOSS_WEIGHTS)
        # The sum over no element is 0 and still leads back through every layer: also a micro-batch without rows, or a
        # loss that reads no output, takes part in the collectives of the backward.
        return (result.terms * weights).sum() + anchor[:0].sum(), result.metrics

    def infer_batch(self, data: Experience, *, entropy: bool = False) -> ModelOutputs:
        """Forward without gradients over this rank's rows, outputs in the caller's order. Collective.

        Args:
            data: this rank's rows; may hold none.
            entropy: a language model's entropies as well.

        Returns:
            ``[num_tokens]`` where ``response_mask``, 0 elsewhere, on the engine's device: log-probs (and entropies), or
            values.

        Raises:
            ValueError: if a sequence is longer than a micro-batch may be.
            RuntimeError: if another rank cannot cut its share.
        """
        shared = self._shared_prefixes(data)
        plan = self._plan(data, shared)
        data = data.to(self.device)
        found: dict[str, Tensor] = {}
        with self.eval_mode():
            for rows in plan:
                outputs = self._forward(data.select(rows), among(shared, rows), entropy=entropy)
                places = _token_places(data.cu_seqlens, rows)
                for name in self.packed.output_names:
                    values: Tensor | None = getattr(outputs, name)
                    if values is not None:
                        found.setdefault(name, torch.zeros(data.num_tokens, device=self.device))[places] = values
        return ModelOutputs(**found)

    def _forward(self, micro_batch: Experience, shared: Sequence[SharedPrefix], *, entropy: bool) -> ModelOutputs:
        stream = shared_stream(micro_batch.cu_seqlens, shared) if shared else None
        tokens, cu_seqlens, mask = micro_batch.tokens, micro_batch.cu_seqlens, micro_batch.response_mask
        num_tokens = micro_batch.num_tokens
        if num_tokens == 0:  # one token that nobody reads, so that this rank joins the others' collectives
            tokens, mask = tokens.new_zeros(1), mask.new_zeros(1)
            cu_seqlens = torch.tensor([0, 1], device=self.device)
        with self.autocast():
            scores = self.packed(tokens, cu_seqlens, mask, micro_batch.temperature, entropy, stream)
        named = zip(self.packed.output_names, scores, strict=True)
        return ModelOutputs(**{name: None if values is None else values[:num_tokens] for name, values in named})

    def autocast(self) -> torch.autocast:
        """Context of a forward; a back end that casts parameters itself leaves it off."""
        return torch.autocast(self.device.type, enabled=False)

    def _shared_prefixes(self, data: Experience) -> list[SharedPrefix]:
        """What rows have in common, if it is to be computed once."""
        if not self.config.share_prompts:
            return []
        return find_shared_prefixes(data.tokens.cpu().numpy(), data.cu_seqlens.cpu().numpy(), data.uids)

    def _plan(
        self, data: Experience, shared: Sequence[SharedPrefix] = (), *, refused: str | None = None
    ) -> list[list[int]]:
        """Cuts this rank's rows, and agrees with the others on the number of micro-batches. Collective."""
        own: ValueError | None = None if refused is None else ValueError(refused)
        lengths = data.lengths.tolist()
        plan = partial(
            plan_micro_batches,
            lengths,
            micro_batch_size=self.config.micro_batch_size,
            max_tokens=self.config.max_tokens_per_micro_batch,
            hidden_size=self.packed.hidden_size,
            shared=shared,
        )
        number = _CANNOT_PLAN
        if own is None:
            try:
                number = max(len(plan()), 1)
            except ValueError as error:
                own = error
        if self.data_parallel_size > 1:
            agreed = torch.tensor(number, device=self.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.data_parallel_group)
            number = int(agreed)
        if own is not None:
            raise own
        if number == _CANNOT_PLAN:
            raise RuntimeError("Another data-parallel rank cannot cut its share into micro-batches; see its error.")
        return plan(num_micro_batches=number)

    # --- the step -----------------------------------------------------------------------------------------------

    def optimizer_step(self) -> OptimizerStepResult:
        """Clips, steps optimizer and schedule, and returns the global gradient norm. Collective.

        With a norm that is not finite nothing moves: neither parameters, nor moments, nor the learning rate.

        Raises:
            RuntimeError: if the engine has no optimizer.
        """
        if self.optimizer is None:
            raise RuntimeError(f"The {self.config.role} engine has no optimizer; its config names none.")
        parameters = [parameter for parameter in self.packed.parameters() if parameter.grad is not None]
        total = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norm = total.full_tensor() if isinstance(total, DTensor) else total
        stepped = bool(norm.isfinite())
        if stepped:
            if self.config.max_grad_norm is not None:
                clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
            self.optimizer.step()
            self.lr_scheduler_step()
        self.last_step = OptimizerStepResult(grad_norm=float(norm), stepped=stepped)
        return self.last_step

    # --- weights ------------------------------------------------------------------------------------------------

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yields ``(hf_name, full tensor)``, one at a time, detached, in the model's order. Collective.

        Buffers that files hold come first. A head tied to the embedding has no entry of its own. Every rank must drain
        the generator: a consumer that fails on one rank goes on drawing, or the others wait for it in a gather. An
        adapter is merged into copies. Parameters that are offloaded come to the device for as long as it is drawn from.
        """
        with self.residence.reachable():
            for name, buffer in stored_buffers(self.hf_model):
                yield base_name(name), buffer
            if self.config.lora is not None:
                yield from merged_parameters(self.hf_model)
                return
            for name, parameter in self.hf_model.named_parameters():
                yield name, whole(parameter)

    @override
    def disable_adapter(self) -> AbstractContextManager[None]:
        """Within it the model is the frozen base of its adapter; for forward passes without gradients."""
        return super().disable_adapter() if self.config.lora is None else adapter_disabled(self.hf_model)

    @property
    def state_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold parts of the model's state, and write and read checkpoints together."""
        return self.data_parallel_group

    def save_checkpoint(self, path: Path) -> None:
        """Writes parameters, optimizer state and schedule into the folder ``path``. Collective."""
        checkpoint.save(path, self._state(), group=self.state_group)

    @override
    def checkpoint_writer(self, group: dist.ProcessGroup | None) -> Callable[[Path], None]:
        """Copies to the host what ``save_checkpoint`` writes, and returns what writes the copy."""
        return partial(checkpoint.save, state=self._state().on_host(), group=group)

    def _state(self) -> checkpoint.State:
        return checkpoint.state_of(
            self.hf_model, self.optimizer, self.lr_scheduler, trained_only=self.config.lora is not None
        )

    def load_checkpoint(self, path: Path) -> None:
        """Reads what ``save_checkpoint`` wrote, also on another number of ranks. Collective."""
        checkpoint.load(
            path,
            self.hf_model,
            self.optimizer,
            self.lr_scheduler,
            group=self.state_group,
            trained_only=self.config.lora is not None,
        )

    def to(self, device: torch.device, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves the named parts between device and host memory.

        PyTorch keeps a gradient where its parameter is, so gradients move with the model; ``grad`` by itself moves
        nothing.

        Raises:
            ValueError: if only one of model and gradients is to move while there are gradients.
        """
        here = next(self.packed.parameters()).device
        if model and here != device:
            if not grad and any(parameter.grad is not None for parameter in self.packed.parameters()):
                raise ValueError(
                    "Parameters cannot leave without their gradients: call zero_grad() first, or grad=True."
                )
            self.packed.to(device)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                for key, value in state.items():
                    # a step counter is kept on the host by PyTorch's optimizers
                    if isinstance(value, Tensor) and value.ndim and value.device != device:
                        state[key] = value.to(device)


_NO_LOSS_WEIGHTS = (
    "The experience has no loss_weights, so the loss has no denominator. Set one weight per token, from the "
    "mini-batch's global counts, before forward_backward_batch."
)


def _token_places(cu_seqlens: Tensor, rows: Iterable[int]) -> Tensor:
    """``[tokens of rows]``: where the tokens of ``batch.select(rows)`` stand in ``batch``."""
    index = torch.as_tensor(list(rows), dtype=torch.int64, device=cu_seqlens.device)
    lengths = cu_seqlens.diff()[index]
    starts = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(cu_seqlens[:-1][index] - starts, lengths)
    return torch.arange(len(shift), device=shift.device) + shift
