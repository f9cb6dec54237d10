"""The trained policy as a Hugging Face directory."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import rich
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import override

from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.modules.on_policy import OnPolicyModule
from lightning_rlhf.rollout.model_directory import weight_names_of


class HFExport(pl.Callback):
    """Writes the actor at the end of training: config, weights (safetensors) and tokenizer.

    ``transformers`` and vLLM load the directory. Weights are gathered one by one over all ranks, and rank 0 holds no
    more than one file's worth of them. An earlier export in the directory is replaced.

    Args:
        dirpath: the directory; None is ``hf`` in the Trainer's ``default_root_dir``.
        dtype: of the written weights, such as ``"bfloat16"``; None keeps that of the training.
        max_file_bytes: weights are split over files of at most this size; a single larger tensor has its own file.
        console: where the path is printed; None is rich's own.
    """

    def __init__(
        self,
        *,
        dirpath: str | Path | None = None,
        dtype: str | torch.dtype | None = None,
        max_file_bytes: int = 4 * 2**30,
        console: Console | None = None,
    ) -> None:
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.dtype = float_dtype(dtype)
        self.max_file_bytes = max_file_bytes
        self.console = rich.get_console() if console is None else console

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = Path(trainer.default_root_dir) / "hf" if self.dirpath is None else self.dirpath
        self.export(trainer, as_on_policy(pl_module, callback=self), folder)

    def export(self, trainer: pl.Trainer, module: OnPolicyModule, folder: Path) -> None:
        """Writes the actor as it is now. Collective.

        Raises:
            RuntimeError: on every rank, if rank 0 could not write.
        """
        params = module.actor.get_per_tensor_param()
        failure: Exception | None = None
        if trainer.is_global_zero:
            try:
                self._write(module, params, folder)
            except Exception as error:  # noqa: BLE001  # raised below, once no rank waits for this one any more
                failure = error
        # The generator gathers over all ranks: every rank draws it to its end, also after a failure.
        for _ in params:
            pass
        message = trainer.strategy.broadcast(None if failure is None else f"{type(failure).__name__}: {failure}")
        if message is not None:
            raise RuntimeError(f"Rank 0 could not export the model to {folder}: {message}") from failure
        if trainer.is_global_zero:
            self.console.print(f"model: {folder}", markup=False, highlight=False, soft_wrap=True)

    def _write(self, module: OnPolicyModule, params: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        config, generation_config = configs_of(module.actor_config.model)
        write_model_directory(
            folder,
            params,
            config=config,
            generation_config=generation_config,
            tokenizer=module.tokenizer,
            dtype=self.dtype,
            max_file_bytes=self.max_file_bytes,
        )


def write_model_directory(
    folder: Path,
    params: Iterable[tuple[str, Tensor]],
    *,
    config: Any,
    generation_config: Any,
    tokenizer: Any,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    """Writes a directory that ``transformers`` and vLLM load; an earlier model in it is replaced at the end.

    Args:
        folder: the directory.
        params: every weight by Hugging Face name, full.
        config: of the model.
        generation_config: of the model, or None.
        tokenizer: of the model.
        dtype: of the written weights; None keeps theirs.
        max_file_bytes: weights are split over files of at most this size.

    Raises:
        ValueError: if the weights are not those of the config's model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".partial"
    partial.mkdir(exist_ok=True)
    for left_over in partial.iterdir():
        left_over.unlink()
    dtypes = _write_weights(partial, _checked(config, params), dtype=dtype, max_file_bytes=max_file_bytes)
    # Loaders build the model in this dtype, whatever the files hold.
    config.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    config.save_pretrained(partial)
    if generation_config is not None:
        generation_config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for old in (*folder.glob("model*.safetensors"), *folder.glob("model.safetensors.index.json")):
        old.unlink()
    for new in sorted(partial.iterdir()):
        new.replace(folder / new.name)
    partial.rmdir()


def _write_weights(
    folder: Path, params: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None, max_file_bytes: int
) -> set[torch.dtype]:
    """Writes ``model.safetensors``, or numbered files with an index; returns the floating dtypes written."""
    files: list[dict[str, Tensor]] = []
    names: list[list[str]] = []
    dtypes: set[torch.dtype] = set()
    total_bytes, file_bytes = 0, 0

    def close() -> None:
        if files:
            save_file(files.pop(), folder / f"{len(names):05d}.part", metadata={"format": "pt"})

    for name, tensor in params:
        floating = tensor.is_floating_point()
        # A copy: the engine may yield a live parameter, or one buffer again and again.
        kept = tensor.detach().to("cpu", dtype if floating else None, copy=True).contiguous()
        if floating:
            dtypes.add(kept.dtype)
        if not files or file_bytes + kept.nbytes > max_file_bytes:
            close()
            files.append({})
            names.append([])
            file_bytes = 0
        files[-1][name] = kept
        names[-1].append(name)
        file_bytes += kept.nbytes
        total_bytes += kept.nbytes
    close()
    _name_files(folder, names, total_bytes=total_bytes)
    return dtypes


def _name_files(folder: Path, names: list[list[str]], *, total_bytes: int) -> None:
    """Gives the files the names that loaders expect; their number is known only now."""
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(names, start=1):
        final = "model.safetensors" if len(names) == 1 else f"model-{number:05d}-of-{len(names):05d}.safetensors"
        (folder / f"{number:05d}.part").rename(folder / final)
        weight_map.update(dict.fromkeys(tensors, final))
    if len(names) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _checked(config: Any, params: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Passes the weights through and raises unless they are those that the config's model has, each once.

    The second name of a tied tensor is left out: loaders tie it again, as the config says.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return weight_names_of(model).check(params)


def configs_of(model: str | Path | nn.Module) -> tuple[Any, Any]:
    """Config and generation config (or None) of what the actor was made from, as copies."""
    from transformers import AutoConfig, GenerationConfig, PreTrainedModel

    if isinstance(model, PreTrainedModel):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        return config, copy.deepcopy(model.generation_config)
    if isinstance(model, nn.Module):
        raise TypeError(
            f"HFExport writes models of transformers, got a {type(model).__name__}, for which there is no config. "
            "Remove the callback, or train a transformers model."
        )
    config = AutoConfig.from_pretrained(str(model))
    try:
        generation_config = GenerationConfig.from_pretrained(str(model))
    except OSError:  # transformers' way to say that there is no such file
        generation_config = None
    return config, generation_config


def float_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The floating dtype of this name; None stays None.

    Raises:
        ValueError: for anything else.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype must name a floating dtype such as 'bfloat16', got {dtype!r}.")
    return found
