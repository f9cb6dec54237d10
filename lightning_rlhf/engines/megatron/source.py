"""Where an engine's model has its weights: a directory, an id, or a model of transformers in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_rlhf.engines.megatron.load import SafetensorsSource, StateDictSource, WeightSource


def weight_source(model: str | Path | nn.Module) -> WeightSource:
    """The weights of ``EngineConfig.model``. Collective.

    A model in memory takes the first rank's parameters on all ranks: those that were given, or have initialised, other
    weights would train a mosaic of them.

    Args:
        model: a directory with safetensors, an id of the Hugging Face hub, or a model of transformers.

    Raises:
        FileNotFoundError: if a directory holds no safetensors.
    """
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        return StateDictSource.of_model(model)
    if Path(model).is_dir():
        return SafetensorsSource(Path(model))
    from huggingface_hub import snapshot_download

    return SafetensorsSource(Path(snapshot_download(str(model), allow_patterns=["*.safetensors", "*.json"])))


def hf_config_of(model: str | Path | nn.Module) -> Any:
    """The Hugging Face configuration of a model that the back end can build.

    Raises:
        ValueError: for a module that is not of transformers.
    """
    from transformers import AutoConfig, PreTrainedModel  # seconds, also for a command that only checks a strategy

    if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"The megatron back end builds models itself, cut over ranks, from a Hugging Face configuration: it cannot "
            f"train a {type(model).__name__}. Pass a directory, an id or a model of transformers; or use "
            f"strategy='fsdp2_rl', which shards any module."
        )
    config = model.config if isinstance(model, PreTrainedModel) else AutoConfig.from_pretrained(str(model))
    return config.get_text_config()
