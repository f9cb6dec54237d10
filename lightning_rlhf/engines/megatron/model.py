"""Megatron's GPT model from a Hugging Face config: one chunk, or several where the pipeline is interleaved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_rlhf.engines.megatron.backend import MegatronBackend
from lightning_rlhf.engines.megatron.config import MoEOptions, Recompute, transformer_config
from lightning_rlhf.engines.megatron.families import inverse_frequencies, model_shape
from lightning_rlhf.engines.megatron.layout import MegatronLayout, padded_vocab_size
from lightning_rlhf.engines.megatron.value import ValueHead


def build_model(
    hf_config: Any,
    *,
    layout: MegatronLayout,
    backend: MegatronBackend,
    compute_dtype: torch.dtype = torch.float32,
    value_head: bool = False,
    recompute: Recompute = "none",
    moe: MoEOptions | None = None,
) -> list[nn.Module]:
    """Build this rank's part of the model; its parameters hold nothing yet, see ``load_parameters``.

    The caller has checked the layout, made its groups with ``initialize_groups``, and stands in ``backend.active()``.

    Args:
        hf_config: of a family in ``FAMILIES``.
        layout: the layout of the groups in place.
        backend: the machine.
        compute_dtype: of parameters and activations. Routers keep fp32 parameters.
        value_head: one number per token in place of the vocabulary.
        recompute: which activations the backward computes again.
        moe: options of a mixture of experts.

    Returns:
        ``virtual_pipeline_size`` modules, unwrapped. All share one ``config``, megatron's. Called as megatron calls
        them, with ``packed_seq_params``, the last stage gives ``[1, tokens, padded vocabulary / tp]`` logits, or
        ``[1, tokens, 1]`` fp32 values.
    """
    config = transformer_config(
        hf_config, layout=layout, backend=backend, compute_dtype=compute_dtype, recompute=recompute, moe=moe
    )
    _seed_random_states()
    frequencies = inverse_frequencies(hf_config)
    chunks = [
        _build_chunk(hf_config, config, layout, backend, value_head=value_head, index=index)
        for index in range(layout.virtual_pipeline_size)
    ]
    for chunk in chunks:
        _set_frequencies(chunk, frequencies)
        _keep_routers_fp32(chunk)
    return chunks


def _build_chunk(
    hf_config: Any, config: Any, layout: MegatronLayout, backend: MegatronBackend, *, value_head: bool, index: int
) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    shape = model_shape(hf_config)
    vp_stage = index if layout.virtual_pipeline_size > 1 else None
    chunk: Any = GPTModel(
        config=config,
        transformer_layer_spec=backend.block_spec(config, layout, vp_stage),
        vocab_size=padded_vocab_size(shape.vocab_size, layout),
        max_sequence_length=shape.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=shape.tied and not value_head,
        position_embedding_type="rope",
        rotary_percent=shape.rotated,
        vp_stage=vp_stage,
    )
    if value_head and chunk.post_process:
        chunk.output_layer = ValueHead(config)
    module: nn.Module = chunk
    return module


def _set_frequencies(chunk: Any, frequencies: Tensor) -> None:
    """The family's own rotary frequencies: megatron's llama3 scaling has some of its numbers fixed."""
    rotary = chunk.rotary_pos_emb
    rotary.inv_freq = frequencies.to(rotary.inv_freq.device)


def _keep_routers_fp32(chunk: nn.Module) -> None:
    """Which experts a token goes to flips with the last bits of a router's weight."""
    for name, parameter in chunk.named_parameters():
        if name.endswith(".router.weight"):
            parameter.data = parameter.data.float()


def _seed_random_states() -> None:
    """Megatron draws initial values inside named random states, which must exist; nothing is drawn from them here.

    The run's own generator is left as it was.
    """
    from megatron.core import tensor_parallel

    with torch.random.fork_rng():
        tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
