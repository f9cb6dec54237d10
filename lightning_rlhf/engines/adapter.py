"""Low-rank adapters (LoRA) by peft inside a model of transformers: the one place that imports peft."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lightning_rlhf.contracts.lora import LoRAConfig

_NAME = "default"
_BASE = ".base_layer."
_FACTORS = (".lora_A.", ".lora_B.")

_TAKEN = (
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "fan_in_fan_out",
    "use_rslora",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
)
"""Settings of peft under which an adapter is ``W + scale * B @ A`` with ``W`` as it was given."""

_ABOUT = frozenset({"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"}) | {
    "revision",
    "runtime_config",
    "task_type",
}
"""Settings that say nothing of the numbers."""


def adapter_facts(lora: object) -> dict[str, Any]:
    """The settings of an adapter as plain values, from which ``adapter_config`` makes it again.

    Args:
        lora: a ``LoRAConfig``, a ``peft.LoraConfig``, or what this function has given.

    Raises:
        ValueError: for a setting of peft that would make something else of the adapter than ``W + scale * B @ A``.
        TypeError: for anything else.
    """
    if isinstance(lora, Mapping):
        return dict(lora)
    if isinstance(lora, LoRAConfig):
        targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
        return {
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": targets,
            "use_rslora": lora.root_rank,
            "seed": lora.seed,
        }
    peft = _peft()
    if not isinstance(lora, peft.LoraConfig):
        raise TypeError(f"lora must be a LoRAConfig or a peft.LoraConfig, got {type(lora).__name__}.")
    given, default = lora.to_dict(), peft.LoraConfig().to_dict()
    unlike = [name for name in default if name not in _TAKEN and name not in _ABOUT and given[name] != default[name]]
    if unlike or given["init_lora_weights"] not in (True, "gaussian"):
        named = unlike or ["init_lora_weights"]
        raise ValueError(
            f"peft.LoraConfig({', '.join(f'{name}={given[name]!r}' for name in named)}) is not supported: adapters "
            f"here are W + scale * B @ A with W frozen, no dropout and B = 0 at first. Leave it at its default."
        )
    return {name: sorted(given[name]) if isinstance(given[name], set) else given[name] for name in _TAKEN}


def adapter_config(facts: Mapping[str, Any], **about: Any) -> Any:
    """``peft.LoraConfig`` of these facts.

    Args:
        facts: from ``adapter_facts``.
        **about: further arguments of peft that say nothing of the numbers.
    """
    return _peft().LoraConfig(**{name: value for name, value in facts.items() if name != "seed"}, **about)


def add_adapter(model: nn.Module, lora: object) -> None:
    """Puts an adapter into the model, in place: from then on its factors alone have gradients.

    Args:
        model: of transformers, its weights loaded or on the meta device; factors are made on the host in that case.
        lora: see ``adapter_facts``.

    Raises:
        ValueError: also if the adapter would reach an embedding or a head.
    """
    facts = adapter_facts(lora)
    peft = _peft()
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(adapter_config(facts), model, adapter_name=_NAME)
        for name, layer in adapter_layers(model):
            if not isinstance(layer.get_base_layer(), nn.Linear):
                raise ValueError(
                    f"lora reaches {name}, a {type(layer.get_base_layer()).__name__}; adapters are for linear layers "
                    f"of the decoder. Change target_modules."
                )
            if layer.get_base_layer().weight.is_meta:
                for factor in (layer.lora_A, layer.lora_B):
                    factor.to_empty(device="cpu")
        # drawn apart from the run's random numbers, alike on every rank and however the model is loaded
        torch.manual_seed(facts.get("seed", 0))
        for _, layer in adapter_layers(model):
            layer.reset_lora_parameters(_NAME, facts.get("init_lora_weights", True))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if any(layer is head for _, layer in adapter_layers(model)):
        raise ValueError(
            "lora reaches the head, which log-probs read as one matrix and which may be the embedding's. Take it out "
            "of target_modules."
        )


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have an adapter, by name."""
    layer_type = _peft().tuners.lora.LoraLayer
    return ((name, module) for name, module in model.named_modules() if isinstance(module, layer_type))


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Within it the model computes what its base alone does."""
    layers = [layer for _, layer in adapter_layers(model)]
    # Not enable_adapters(False): that also takes the factors' requires_grad, and FSDP, which reads it at the first
    # forward, would then train nothing.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def base_name(name: str) -> str:
    """A parameter's name in the model without an adapter."""
    return name.replace(_BASE, ".")


@torch.no_grad()
def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields ``(hf_name, full tensor)`` as if the adapter had been added to the base, which stays as it is. Collective.

    ``W + scale * B @ A``, in the dtype of ``W``, one at a time.
    """
    layers = dict(adapter_layers(model))
    for name, parameter in model.named_parameters():
        if _is_factor(name):
            continue
        tensor = whole(parameter)
        layer = layers.get(name.removesuffix(f"{_BASE}weight"))
        if layer is not None:
            change = whole(layer.lora_B[_NAME].weight) @ whole(layer.lora_A[_NAME].weight)
            tensor = tensor + layer.scaling[_NAME] * (change.T if layer.fan_in_fan_out else change)
        yield base_name(name), tensor


def merge_into(base: str, lora: object, stored: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields ``(hf_name, tensor)`` of a model with an adapter from a checkpoint merged into it, in fp32, one process.

    Args:
        base: directory or id of the model; it is loaded whole.
        lora: see ``adapter_facts``.
        stored: the checkpoint's tensors; of them the adapter's are read.

    Raises:
        ValueError: if the adapter is not of this model.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    add_adapter(model, lora)
    places = {name: value for name, value in model.named_parameters() if _is_factor(name)}
    found = {name: tensor for name, tensor in stored if _is_factor(name)}
    if found.keys() != places.keys() or any(found[name].shape != place.shape for name, place in places.items()):
        unlike = sorted(found.keys() ^ places.keys()) or ["a factor's shape"]
        raise ValueError(f"The adapter is not one of {base}: {unlike[0]} differs. Name the run's own model.")
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(found[name])
    yield from merged_parameters(model)


def write_adapter(
    folder: Path, lora: object, stored: Iterable[tuple[str, Tensor]], *, base: str, dtype: torch.dtype | None
) -> None:
    """Writes an adapter as the directory that peft and vLLM read.

    Args:
        folder: the directory.
        lora: see ``adapter_facts``.
        stored: an engine's tensors or a checkpoint's; of them the adapter's are written.
        base: directory or id of its model, which the directory names.
        dtype: of what is written; None keeps it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in stored
        if _is_factor(name)
    }
    save_file(written, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    about = adapter_config(adapter_facts(lora), task_type="CAUSAL_LM", base_model_name_or_path=base)
    about.inference_mode = True
    about.save_pretrained(folder)


def _is_factor(name: str) -> bool:
    return any(factor in name for factor in _FACTORS)


def whole(parameter: Tensor) -> Tensor:
    """The tensor of all ranks, detached. Collective if it is sharded."""
    detached = parameter.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _peft() -> Any:
    try:
        import peft
        import peft.tuners.lora
    except ImportError as error:
        raise ImportError("lora= needs peft: pip install 'lightning_rlhf[lora]'.") from error
    return peft
