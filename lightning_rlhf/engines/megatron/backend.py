"""Two ways to run the same megatron-core: on CUDA as it is, and on a CPU with gloo, own kernels and a thin layer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from lightning_rlhf.engines.megatron.layout import MegatronLayout


class MegatronBackend(Protocol):
    """What differs between the machines; everything else is written once."""

    name: str
    """``cpu`` or ``cuda``."""
    communication: str
    """The backend of torch.distributed: ``gloo`` or ``nccl``."""
    device_type: str
    """Of parameters and batches."""

    def active(self) -> AbstractContextManager[None]:
        """The scope that every call into megatron-core stands in, from building the model to saving it."""
        ...

    def config_fields(self, layout: MegatronLayout) -> dict[str, Any]:
        """Fields of megatron's TransformerConfig that choose kernels, fusions and transport."""
        ...

    def block_spec(self, config: Any, layout: MegatronLayout, vp_stage: int | None) -> Any:
        """The modules of one model chunk's layers and its last norm."""
        ...


class CpuBackend:
    """gloo, the CPU compatibility layer inside ``active()``, and own norm and attention in megatron's local spec."""

    name = "cpu"
    communication = "gloo"
    device_type = "cpu"

    def active(self) -> AbstractContextManager[None]:
        """See ``cpu_compat``."""
        from lightning_rlhf.engines.megatron.cpu_compat import cpu_compat

        return cpu_compat()

    def config_fields(self, layout: MegatronLayout) -> dict[str, Any]:
        """All fusions off: they are CUDA kernels, or torch.compile, which costs more than it gains here."""
        from megatron.core.transformer.enums import AttnBackend

        interleaved = layout.virtual_pipeline_size > 1
        return {
            "transformer_impl": "local",
            "attention_backend": AttnBackend.local,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_dropout_fusion": False,
            "bias_activation_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "moe_router_fusion": False,
            "batch_p2p_sync": False,
            # with overlapped exchange over gloo the freed outputs are still being read: silently wrong
            "deallocate_pipeline_outputs": False,
            # two interleaved stages exchange in both directions at once, which batched exchange gets wrong on gloo
            "overlap_p2p_comm": interleaved,
            "batch_p2p_comm": not interleaved,
        }

    def block_spec(self, config: Any, layout: MegatronLayout, vp_stage: int | None) -> Any:
        """Megatron's local spec with ``RMSNorm`` and a packed core attention."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        from lightning_rlhf.engines.megatron.attention import AllGatherAttention, UlyssesAttention
        from lightning_rlhf.engines.megatron.norm import RMSNorm
        from lightning_rlhf.engines.megatron.ring_attention import RingAttention

        attention = {"allgather": AllGatherAttention, "ulysses": UlyssesAttention, "ring": RingAttention}
        block = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        _use_own_router(block)
        block.layer_norm = RMSNorm
        for layer in block.layer_specs:
            layer.submodules.input_layernorm = RMSNorm
            layer.submodules.pre_mlp_layernorm = RMSNorm
            attention_spec = layer.submodules.self_attention.submodules
            attention_spec.core_attention = attention[layout.context_parallel_attention]
            if config.qk_layernorm:
                attention_spec.q_layernorm = RMSNorm
                attention_spec.k_layernorm = RMSNorm
        return block


class CudaBackend:
    """NCCL and Transformer Engine's spec; megatron-core as it is.

    Raises:
        ImportError: if Transformer Engine is not installed.
    """

    name = "cuda"
    communication = "nccl"
    device_type = "cuda"

    def __init__(self) -> None:
        if find_spec("transformer_engine") is None:
            raise ImportError(
                "The megatron back end on CUDA uses Transformer Engine, which is not installed: "
                "pip install 'lightning_rlhf[megatron-cuda]'."
            )

    def active(self) -> AbstractContextManager[None]:
        """Nothing is changed."""
        return nullcontext()

    def config_fields(self, layout: MegatronLayout) -> dict[str, Any]:
        """Megatron's own fusions, and Transformer Engine's transport of keys and values."""
        from megatron.core.transformer.enums import AttnBackend

        exchange = {"allgather": "all_gather", "ulysses": "a2a", "ring": "p2p"}
        return {
            "transformer_impl": "transformer_engine",
            "attention_backend": AttnBackend.auto,
            "gradient_accumulation_fusion": False,
            "moe_grouped_gemm": True,
            "cp_comm_type": exchange[layout.context_parallel_attention],
            "deallocate_pipeline_outputs": layout.pipeline_parallel_size > 1,
            "overlap_p2p_comm": layout.virtual_pipeline_size > 1,
            "batch_p2p_comm": layout.virtual_pipeline_size == 1,
        }

    def block_spec(self, config: Any, layout: MegatronLayout, vp_stage: int | None) -> Any:
        """Megatron's Transformer Engine spec."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        _use_own_router(block)
        return block


def _use_own_router(block: Any) -> None:
    """Puts ``real_token_router`` into the layers that have experts."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from lightning_rlhf.engines.megatron.router import real_token_router

    for layer in block.layer_specs:
        if layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.router = real_token_router()


def choose_backend(device_type: str) -> MegatronBackend:
    """The back end for a kind of device.

    Args:
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ImportError: if megatron-core, or on CUDA Transformer Engine, is not installed.
        RuntimeError: for ``cpu`` where CUDA is available, or ``cuda`` where it is not.
        ValueError: for another kind.
    """
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise ImportError("The megatron back end needs megatron-core: pip install 'lightning_rlhf[megatron]'.")
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("The megatron back end was asked for CUDA, which is not available. Use device 'cpu'.")
        return CudaBackend()
    if device_type == "cpu":
        if torch.cuda.is_available():
            raise RuntimeError(
                "The megatron back end runs on CPUs only where CUDA is not available, since it replaces parts of "
                "torch.cuda there. Use the GPUs, or hide them with CUDA_VISIBLE_DEVICES=''."
            )
        return CpuBackend()
    raise ValueError(f"The megatron back end runs on 'cpu' or 'cuda', got {device_type!r}.")
