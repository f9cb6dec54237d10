"""Megatron-core's optimizer behind torch's interface: what the user's factory asks for, or a refusal by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from typing_extensions import override

from lightning_rlhf.contracts.engine import OptimizerFactory

_UNSUPPORTED: dict[type[Optimizer], dict[str, Any]] = {
    AdamW: {"amsgrad": False, "maximize": False},
    SGD: {"dampening": 0, "nesterov": False, "maximize": False},
}
"""Options of torch's optimizers that megatron's have not, with the only value that is taken."""
_SHARED: dict[type[Optimizer], tuple[str, ...]] = {AdamW: ("betas", "eps"), SGD: ("momentum",)}
"""Options that megatron's optimizers have once for all parameters."""


class MegatronOptimizer(Optimizer):
    """Steps megatron's optimizer with the hyper-parameters of a torch optimizer.

    The user's factory is called with this rank's parameters. What it returns never steps: its groups say which learning
    rate and weight decay each parameter has, schedules move them there, and ``step`` copies them to megatron's groups.
    (Megatron itself leaves out the decay of all one-dimensional parameters, and applies its multipliers only in a
    scheduler of its own.)

    Args:
        chunks: this rank's model chunks, wrapped in megatron's DistributedDataParallel.
        factory: builds the torch optimizer from parameters.
        params_dtype: of the model's parameters; with bf16 the optimizer keeps fp32 ones of its own.
        distributed: share optimizer state over data-parallel ranks.
        overlap_param_gather: gather updated parameters during the next forward; needs ``distributed``.

    Raises:
        ValueError: for another optimizer, an option that megatron lacks, or parameters that are in no group; the
            message names it.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        factory: OptimizerFactory,
        *,
        params_dtype: torch.dtype,
        distributed: bool,
        overlap_param_gather: bool,
    ) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        parameters = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
        wanted = factory(parameters)
        kind = check_optimizer(wanted, parameters, distributed=distributed)
        base = {name: max(float(group[name]) for group in wanted.param_groups) for name in ("lr", "weight_decay")}
        config = OptimizerConfig(
            optimizer="adam" if kind is AdamW else "sgd",
            **base,
            **_shared_options(wanted, kind),
            clip_grad=0.0,  # the engine clips, between measuring the norm and the step
            bf16=params_dtype is torch.bfloat16,
            params_dtype=params_dtype,
            use_distributed_optimizer=distributed,
            overlap_param_gather=overlap_param_gather,
        )
        self.chunks = chunks
        self.kind = kind
        self.inner: Any = get_megatron_optimizer(
            config, list(chunks), config_overrides=_groups_as_overrides(wanted, base), use_gloo_process_groups=False
        )
        if kind is SGD:
            for part in self.inner.chained_optimizers:
                part.init_state_fn = _empty_momenta
        self.param_groups = wanted.param_groups
        self.defaults = dict(wanted.defaults)
        # Optimizer.__init__ would make parameter groups of its own; this is how torch completes an unpickled optimizer.
        super().__setstate__({})

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Megatron's state, by (number of the part, parameter)."""
        return self.inner.state

    @torch.no_grad()
    def prepare_gradients(self) -> float:
        """Hands summed gradients to the optimizer, and returns their global norm. Collective."""
        self.inner.prepare_grads()
        return float(self.inner.get_grad_norm())

    @torch.no_grad()
    def clip_gradients(self, max_norm: float, norm: float) -> None:
        """Scales gradients down to ``max_norm`` if their norm is larger; after ``prepare_gradients``."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for part in self.inner.chained_optimizers:
            if part.get_parameters():
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=max_norm, total_norm=norm)

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates parameters from prepared gradients, at the groups' present learning rates. Collective."""
        if closure is not None:
            raise ValueError("Megatron's optimizer takes no closure.")
        self.push_settings()
        self.inner.step_with_ready_grads()

    def push_settings(self) -> None:
        """Copies learning rates and weight decays to megatron's groups."""
        for group in self.inner.param_groups:
            wanted = self.param_groups[group["wanted_group"]]
            group["lr"], group["weight_decay"] = wanted["lr"], wanted["weight_decay"]

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, and the buffers that they are summed in."""
        self.inner.zero_grad(set_to_none)
        zero_gradients(self.chunks)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Refused: the state is in parts over ranks.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("Megatron's optimizer state is cut over ranks; save it with engine.save_checkpoint(path).")

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused, as ``state_dict``.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("Megatron's optimizer state is cut over ranks; load it with engine.load_checkpoint(path).")

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: megatron's buffers are laid out when the optimizer is built.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("Megatron's optimizer takes no parameter group after it is built; put it into the factory.")


def zero_gradients(chunks: Iterable[Any]) -> None:
    """Empties the buffers that gradients are summed in, and forgets gradients that were shown to others."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.grad = None
        chunk.zero_grad_buffer()


def check_optimizer(wanted: Optimizer, parameters: Sequence[Tensor], *, distributed: bool) -> type[Optimizer]:
    """Which of megatron's optimizers computes what this torch optimizer does.

    Args:
        wanted: what the user's factory has returned.
        parameters: what it was given.
        distributed: whether optimizer state is shared over data-parallel ranks.

    Returns:
        ``AdamW`` or ``SGD``.

    Raises:
        ValueError: if none does; names the optimizer or the option.
    """
    kind = type(wanted)
    if kind not in _UNSUPPORTED:
        raise ValueError(
            f"The megatron back end maps torch.optim.AdamW and torch.optim.SGD to megatron's optimizers, not "
            f"{kind.__module__}.{kind.__qualname__}. Choose one of the two, or strategy='fsdp2_rl', which steps any."
        )
    for group in wanted.param_groups:
        for name, only in _UNSUPPORTED[kind].items():
            if group[name] != only:
                raise ValueError(f"Megatron's {kind.__name__} has no {name}={group[name]!r}; leave it at {only!r}.")
        for name in _SHARED[kind]:
            if group[name] != wanted.param_groups[0][name]:
                raise ValueError(
                    f"Megatron has one {name} for all parameter groups, got {wanted.param_groups[0][name]} and "
                    f"{group[name]}."
                )
    held = {id(parameter) for group in wanted.param_groups for parameter in group["params"]}
    missing = [parameter for parameter in parameters if id(parameter) not in held]
    if missing:
        raise ValueError(
            f"The optimizer leaves out {len(missing)} of {len(parameters)} parameters, the first of shape "
            f"{tuple(missing[0].shape)}; the megatron back end trains all of a model. Put each into a group."
        )
    if distributed and kind is not AdamW:
        raise ValueError(f"Megatron's distributed optimizer shares the state of AdamW alone, not of {kind.__name__}.")
    return kind


def _shared_options(wanted: Optimizer, kind: type[Optimizer]) -> dict[str, Any]:
    first = wanted.param_groups[0]
    if kind is SGD:
        return {"sgd_momentum": float(first["momentum"])}
    beta1, beta2 = first["betas"]
    return {"adam_beta1": float(beta1), "adam_beta2": float(beta2), "adam_eps": float(first["eps"])}


def _groups_as_overrides(wanted: Optimizer, base: dict[str, float]) -> dict[Any, Any]:
    """Megatron groups parameters by what a predicate overrides; each group of the torch optimizer becomes one.

    The multipliers also tell a checkpoint's groups apart.
    """
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    overrides: dict[Any, Any] = {}
    for index, group in enumerate(wanted.param_groups):
        members = {id(parameter) for parameter in group["params"]}
        key = ParamKey(predicate=ParamPredicate(name=f"group {index}", fn=_is_in(members)))
        overrides[key] = {
            "wanted_group": index,
            "wd_mult": float(group["weight_decay"]) / base["weight_decay"] if base["weight_decay"] else 1.0,
            "lr_mult": float(group["lr"]) / base["lr"] if base["lr"] else 1.0,
        }
    return overrides


def _is_in(members: set[int]) -> Any:
    return lambda parameter: id(parameter) in members


def _empty_momenta(optimizer: Optimizer, _: Any = None) -> None:
    """Gives each parameter the state that a checkpoint is loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["momentum"]:
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
