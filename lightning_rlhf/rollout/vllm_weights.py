"""Replacing the weights of a vLLM model in place, and reading them back.

A plain ``model.load_weights`` fails on CPU, where linear weights are packed and the original freed. vLLM's layerwise
reload gives each layer an unpacked shadow, fills it, packs it into the storage in use. What is left to us:

1. the tied head on CPU has a packed copy of its own, which goes stale silently: it is packed again;
2. layers that get part of their tensors (q_proj without k_proj) are filled up with garbage: a push must be whole;
3. a tensor that waits for the others of its fused layer is kept by reference: it is copied, since a transport's buffer
   may be written again by then;
4. experts on CPU are packed at the first load only, and unpacked ones give wrong numbers silently: they are packed at
   every push;
5. a model whose own code writes into parameters, past their loaders, keeps the old ones silently: it is refused;
6. names are those of files, which transformers' own names need not be: `stored_form`;
7. the prefix cache stays: the manager of the push resets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_rlhf.rollout.model_directory import WeightNames


def load_in_place(
    model: Any, model_config: Any, named_tensors: Iterable[tuple[str, Tensor]], names: WeightNames
) -> None:
    """Loads a whole push into a worker's model.

    At most one tensor is held beside vLLM's own copies and the fused layers that are incomplete.

    Args:
        model: the model of vLLM's worker, in this process; with tensor parallel workers, its share.
        model_config: vLLM's configuration of it.
        named_tensors: Hugging Face names and full tensors, in any order and dtype; vLLM casts to what each layer keeps.
        names: those that a push must bring.

    Raises:
        ValueError: naming tensors that are unknown, of another shape, repeated or missing. The model then holds a
            mixture and must not be used; a later whole push repairs it.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    with _experts_packed_again(model):
        try:
            targets = {name: parameter for name, parameter in model.named_parameters() if name not in names.aliases}
            at_once = _loaded_at_once(targets)
            push = names.in_files(names.check(named_tensors))
            loaded = model.load_weights(_safe_to_keep(push, at_once, targets))
            forgotten = sorted(set(targets) - set(loaded))
            if forgotten:
                raise ValueError(f"Weight push: vLLM filled all but {forgotten[:8]} of its own parameters.")
            _refuse_lost(model, targets)
        finally:
            finalize_layerwise_reload(model, model_config)
            _pack_head_again(model, names)


def _loaded_at_once(targets: dict[str, nn.Parameter]) -> set[str]:
    """Parameters that are alone in their layer: vLLM copies such a tensor before it asks for the next one."""
    layers = [name.rpartition(".")[0] for name in targets]
    return {name for name, layer in zip(targets, layers, strict=True) if layers.count(layer) == 1}


def _safe_to_keep(
    named_tensors: Iterable[tuple[str, Tensor]], at_once: set[str], targets: dict[str, nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named_tensors:
        value = tensor.detach()
        # A padded parameter counts as incomplete until the push ends, so its tensor is kept as well.
        yield name, value if name in at_once and targets[name].shape == value.shape else value.clone()


def _refuse_lost(model: nn.Module, targets: Iterable[str]) -> None:
    """During a reload a parameter is on the meta device, where what is written past its loader is lost.

    Raises:
        ValueError: naming the parameters.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    lost = []
    for name in targets:
        layer, _, own_name = name.rpartition(".")
        info = get_layerwise_info(model.get_submodule(layer))
        if info.can_load() and own_name not in {loaded for loaded, _ in info.loaded_weights}:
            lost.append(name)
    if lost:
        raise ValueError(
            f"Weight push: vLLM's {type(model).__name__} writes {lost[:4]} past its own loaders, which loses them when "
            f"weights are replaced. Its weights cannot be pushed; sample with rl.HFRollout() or train another model."
        )


@contextmanager
def _experts_packed_again(model: nn.Module) -> Iterator[None]:
    """Has every mixture of experts that is loaded inside packed for vLLM's CPU kernel.

    vLLM's ``UnquantizedFusedMoEMethod`` packs in ``fused_experts.process_weights_after_loading``, which it calls when
    it builds the kernel and not when weights are replaced. The call is added where it belongs: on the unpacked shadow,
    before it is copied into the storage in use, since packing may pad.
    """
    from vllm.platforms import current_platform

    methods: list[Any] = [] if not current_platform.is_cpu() else _methods_of_experts(model)
    for method in methods:
        method.process_weights_after_loading = _then_packed(method)
    try:
        yield
    finally:
        for method in methods:
            del method.process_weights_after_loading  # the class's own is seen again


def _methods_of_experts(model: nn.Module) -> list[Any]:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    return [module for module in model.modules() if isinstance(module, UnquantizedFusedMoEMethod)]


def _then_packed(method: Any) -> Callable[[nn.Module], None]:
    process = method.process_weights_after_loading

    def process_and_pack(layer: nn.Module) -> None:
        built_now = method.moe_kernel is None
        process(layer)
        if not built_now:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return process_and_pack


def _pack_head_again(model: nn.Module, names: WeightNames) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and "lm_head.weight" in names.aliases:
        head: Any = model.get_submodule("lm_head")
        head.quant_method.process_weights_after_loading(head)


def read_own(model: nn.Module, wanted: Sequence[str], names: WeightNames) -> dict[str, Tensor]:
    """Copies of parameters that vLLM holds under the Hugging Face name and layout.

    On CPU those are norms, embedding and head: linear layers exist only packed. With CUDA, o_proj and down_proj, too;
    q/k/v and gate/up are one fused parameter each.

    Args:
        model: the model of vLLM's worker, in this process.
        wanted: Hugging Face names.
        names: the model's names, for shapes and ties.

    Returns:
        By name; a padded vocabulary is cut to the model's.
    """
    held = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Tensor] = {}
    for name in wanted:
        shape = names.shapes.get(names.aliases.get(name, name))
        own = held.get(name)
        if shape is None or own is None or own.ndim != len(shape):
            continue
        if own.shape[1:] == shape[1:] and own.shape[0] >= shape[0]:
            found[name] = own.detach()[: shape[0]].clone()
    return found
