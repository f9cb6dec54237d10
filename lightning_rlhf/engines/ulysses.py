"""FSDP2 with an axis of ranks that share one stream of tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from lightning_rlhf.batching.exchange import equal_on_all_ranks
from lightning_rlhf.batching.shared_prompts import SharedPrefix, check_shared_prompts
from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.fsdp2 import FSDP2Engine
from lightning_rlhf.engines.hf_model import PackedCausalLM, PackedModel
from lightning_rlhf.engines.sequence_parallel import (
    ULYSSES_ATTENTION,
    SlicedLayout,
    check_heads,
    cut_slice,
    gather_slices,
)
from lightning_rlhf.engines.shared_stream import SharedStream
from lightning_rlhf.engines.value_head import PackedValueModel, ValueModel
from lightning_rlhf.types import Experience


class UlyssesEngine(FSDP2Engine):
    """FSDP2 over ``dp_shard x sp``; the ``sp`` ranks of a group hold the same rows and a slice each of their tokens.

    Every ``sp`` rank gets the log-probs of all tokens and computes the whole loss, so a loss function sees what it sees
    on one rank. Gradients are summed over all ranks, losses and metrics over the data-parallel ones. A micro-batch is
    the group's: ``max_tokens_per_micro_batch`` counts its tokens before they are cut, and a rank holds ``1 / sp`` of
    them.

    Args:
        config: how to train.
        device: where this rank computes.
        mesh: ``dp_replicate x dp_shard x sp``.
        reshard_after_forward: frees a layer's full parameters between its forward and backward.
        cpu_offload: see ``FSDP2Engine``.

    Raises:
        ValueError: if the mesh has other axes, or prompts are to be shared over more than one ``sp`` rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: torch.device,
        mesh: DeviceMesh,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
    ) -> None:
        if mesh.mesh_dim_names != ("dp_replicate", "dp_shard", "sp"):
            raise ValueError(f"UlyssesEngine takes dp_replicate x dp_shard x sp, got axes {mesh.mesh_dim_names}.")
        shards = mesh["dp_shard", "sp"]._flatten("dp_shard_sp")
        if mesh["dp_replicate"].size() > 1:
            shards = DeviceMesh._concatenate([mesh["dp_replicate"], shards])
        check_shared_prompts(share_prompts=config.share_prompts, sp_size=mesh["sp"].size())
        super().__init__(
            config, device=device, mesh=shards, reshard_after_forward=reshard_after_forward, cpu_offload=cpu_offload
        )
        self._rows = mesh["dp_replicate", "dp_shard"]._flatten("dp")
        self._sp = mesh["sp"]

    @override
    def initialize(self) -> None:
        """Checks heads against ``sp``, then loads, shards and builds. Collective.

        Raises:
            ValueError: if the model's heads cannot be dealt to ``sp`` ranks; before its weights are read.
        """
        config = _config_of(self.config.model)
        num_heads: int = config.num_attention_heads
        # a config without key-value heads is of a model whose attention heads all have their own
        num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
        check_heads(num_heads=num_heads, num_kv_heads=num_kv_heads, sp_size=self._sp.size())
        super().initialize()

    @override
    def wrap(self, causal_lm: PreTrainedModel) -> PackedModel:
        causal_lm.set_attn_implementation(ULYSSES_ATTENTION)
        return SlicedCausalLM(causal_lm, logits_chunk_size=self.config.logits_chunk_size, group=self._sp.get_group())

    @override
    def _plan(
        self, data: Experience, shared: Sequence[SharedPrefix] = (), *, refused: str | None = None
    ) -> list[list[int]]:
        if not equal_on_all_ranks(_digest(data), group=self._sp.get_group(), device=self.device):
            raise RuntimeError(
                "The ranks of a sequence-parallel group were given different rows. They train on slices of the same "
                "ones: share rows out by data_parallel_rank, which they have in common."
            )
        return super()._plan(data, shared, refused=refused)

    @property
    @override
    def token_multiple(self) -> int:
        """The ``sp`` ranks hold equally many tokens."""
        return self._sp.size()

    @property
    @override
    def data_parallel_rank(self) -> int:
        """This rank's group's place among the groups that hold different rows."""
        return self._rows.get_local_rank()

    @property
    @override
    def data_parallel_size(self) -> int:
        """Groups that hold different rows: ``dp_replicate x dp_shard``."""
        return self._rows.size()

    @property
    @override
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """One rank of each such group: those with this rank's place in its own."""
        return self._rows.get_group()

    @property
    @override
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ``sp`` ranks that hold the same rows."""
        return self._sp.get_group()

    @property
    @override
    def state_group(self) -> dist.ProcessGroup | None:
        """All ranks of the mesh."""
        return self._group


class UlyssesValueEngine(UlyssesEngine):
    """A value model with sequence parallelism; see ``UlyssesEngine``."""

    @override
    def wrap(self, causal_lm: PreTrainedModel) -> PackedModel:
        causal_lm.set_attn_implementation(ULYSSES_ATTENTION)
        return SlicedValueModel(ValueModel(causal_lm), group=self._sp.get_group())


class SlicedModel(PackedModel):
    """Scores packed sequences by a group of ranks, each on a slice of their tokens.

    Args:
        *args: of the class that says with which head.
        group: the ranks, in the order of their slices.
        **kwargs: as ``args``.
    """

    def __init__(self, *args: Any, group: dist.ProcessGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    @override
    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        score_mask: Tensor,
        temperature: float,
        entropy: bool,
        stream: SharedStream | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Scores the tokens that ``score_mask`` marks; arguments and results as on one rank. Collective.

        Raises:
            ValueError: for a stream with shared prompts that is to be cut into slices.
        """
        if dist.get_world_size(self.group) == 1:
            return super().forward(tokens, cu_seqlens, score_mask, temperature, entropy, stream)
        check_shared_prompts(share_prompts=stream is not None, sp_size=dist.get_world_size(self.group))
        layout = SlicedLayout(cu_seqlens, group=self.group)
        own = cut_slice(tokens, layout, score_mask, rank=layout.rank, size=layout.size)
        states: Tensor = self._model.base_model(
            input_ids=own.tokens[None], position_ids=own.position_ids[None], use_cache=False, packed_layout=layout
        ).last_hidden_state[0]
        scored = torch.nonzero(own.scored).squeeze(-1)
        scores = self.score(states[scored], own.labels[scored], temperature=temperature, entropy=entropy)
        columns = torch.stack([values for values in scores if values is not None], dim=-1)
        local = columns.new_zeros(len(own.tokens), columns.shape[1]).index_copy(0, scored, columns)
        whole = gather_slices(local, layout)[: len(tokens) - 1]
        # From the token that predicts to the one that is predicted. Each column is a tensor of its own: a view would
        # lose FSDP's hook to an operation in place.
        at_tokens = (F.pad(whole[:, column], (1, 0)) for column in range(whole.shape[1]))
        return tuple(None if values is None else next(at_tokens) for values in scores)


class SlicedCausalLM(SlicedModel, PackedCausalLM):
    """Log-probs and entropies of packed sequences in slices."""


class SlicedValueModel(SlicedModel, PackedValueModel):
    """Values of packed sequences in slices."""


def _config_of(model: str | Path | nn.Module) -> PreTrainedConfig:
    config = model.config if isinstance(model, PreTrainedModel) else AutoConfig.from_pretrained(str(model))
    return config.get_text_config()


def _digest(data: Experience) -> int:
    """A 62-bit digest of all that a loss can read of the rows."""
    digest = hashlib.blake2b(digest_size=8)
    for spec in dataclasses.fields(data):
        value = getattr(data, spec.name)
        if isinstance(value, Tensor):
            digest.update(spec.name.encode() + value.detach().cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") >> 2
