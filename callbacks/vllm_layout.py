"""Whether vLLM's model can be shared by so many training processes, from sizes alone: before any model is loaded."""

from __future__ import annotations

from pathlib import Path

from torch import nn


def check_vllm_layout(
    tensor_parallel_size: int, *, num_nodes: int, processes_per_node: int, model: str | Path | nn.Module
) -> None:
    """Refuses sizes that do not fit the processes or the model's heads.

    Args:
        tensor_parallel_size: processes that share one model: neighbours, on one node.
        num_nodes: of the run.
        processes_per_node: training processes.
        model: directory or id, of which the configuration is read, or a module that has one.

    Raises:
        ValueError: with the sizes.
    """
    check_processes(tensor_parallel_size, num_nodes=num_nodes, processes_per_node=processes_per_node)
    num_heads, num_kv_heads = _heads(model)
    check_heads(tensor_parallel_size, num_heads=num_heads, num_kv_heads=num_kv_heads)


def check_processes(tensor_parallel_size: int, *, num_nodes: int, processes_per_node: int) -> None:
    """The first half of ``check_vllm_layout``."""
    if processes_per_node % tensor_parallel_size:
        raise ValueError(
            f"VLLMRollout(tensor_parallel_size={tensor_parallel_size}) shares one vLLM model among "
            f"{tensor_parallel_size} neighbouring training processes of a node, but this run has {processes_per_node} "
            f"process(es) on each of {num_nodes} node(s). Choose a divisor of {processes_per_node}, or "
            f"VLLMRollout(mode='server', tensor_parallel_size={tensor_parallel_size}) with devices of its own."
        )


def check_heads(tensor_parallel_size: int, *, num_heads: int, num_kv_heads: int) -> None:
    """The second half."""
    smaller, larger = sorted((num_kv_heads, tensor_parallel_size))
    if num_heads % tensor_parallel_size or larger % smaller:
        raise ValueError(
            f"VLLMRollout(tensor_parallel_size={tensor_parallel_size}) does not fit the model: it must divide its "
            f"{num_heads} attention heads, and divide its {num_kv_heads} key-value heads or be a multiple of them."
        )


def _heads(model: str | Path | nn.Module) -> tuple[int, int]:
    """Attention heads and key-value heads."""
    if isinstance(model, nn.Module):
        config = model.config
    else:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model)
    text = config.get_text_config()  # type: ignore[operator, union-attr]
    num_heads = int(text.num_attention_heads)
    return num_heads, int(getattr(text, "num_key_value_heads", None) or num_heads)
