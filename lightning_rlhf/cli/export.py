"""The command ``lightning-rlhf export``: a Hugging Face directory from a run's checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_rlhf.callbacks.export import configs_of, float_dtype, write_model_directory
from lightning_rlhf.cli.run_checkpoints import actor_weights, adapter_of, find_checkpoint, model_of_run, stored_actor
from lightning_rlhf.cli.run_records import RecordError
from lightning_rlhf.engines.adapter import write_adapter

REFUSED = 2
"""Exit status if there is nothing to export."""
MAX_FILE_BYTES = 4 * 2**30


def main(arguments: Sequence[str]) -> int:
    """Writes the directory and prints its path.

    Returns:
        The exit status: 2 if the checkpoint cannot be exported.
    """
    given = _parse(arguments)
    try:
        out = export(given.source, out=given.out, model=given.model, dtype=given.dtype, adapter=given.adapter)
    except (RecordError, ValueError, OSError) as error:
        print(f"lightning-rlhf export: {error}", file=sys.stderr)
        return REFUSED
    print(out)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf export",
        description="Writes the policy of a checkpoint as a directory that transformers and vLLM load.",
    )
    parser.add_argument(
        "source", type=Path, metavar="RUN", help="a run's folder (its newest whole checkpoint), or a checkpoint"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the directory to write")
    parser.add_argument("--dtype", metavar="NAME", help="of the weights, such as bfloat16 (default: as trained)")
    parser.add_argument(
        "--model", metavar="DIR", help="the model that the run started from (default: what the run's config.yaml says)"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="of a run with lora: its adapter as peft reads it, not a merged model"
    )
    return parser.parse_args(arguments)


def export(
    source: Path, *, out: Path, model: str | None = None, dtype: str | None = None, adapter: bool = False
) -> Path:
    """Writes the policy of a checkpoint, one tensor in memory at a time beside a file's worth.

    An adapter is merged into the model that the run started from, which is loaded whole for it.

    Args:
        source: a run's folder, or a checkpoint.
        out: the directory; a model in it is replaced once the new one is written.
        model: directory or id with config and tokenizer; None takes it from the run's configuration.
        dtype: of the weights; None keeps that of training.
        adapter: write an adapter by itself, as peft and vLLM read it.

    Returns:
        ``out``.

    Raises:
        RecordError: if there is no whole checkpoint, or none that can be read here; if there is no adapter to write.
        ValueError: for another dtype, or if the checkpoint is not of that model.
    """
    from transformers import AutoTokenizer

    wanted = float_dtype(dtype)
    checkpoint = find_checkpoint(source)
    base = model_of_run(checkpoint) if model is None else model
    if adapter:
        lora = adapter_of(checkpoint)
        if lora is None:
            raise RecordError(f"{checkpoint} holds a model's parameters, not an adapter; leave out --adapter.")
        write_adapter(out, lora, stored_actor(checkpoint), base=base, dtype=wanted)
        return out
    config, generation_config = configs_of(base)
    write_model_directory(
        out,
        actor_weights(checkpoint, base=base),
        config=config,
        generation_config=generation_config,
        tokenizer=AutoTokenizer.from_pretrained(base),
        dtype=wanted,
        max_file_bytes=MAX_FILE_BYTES,
    )
    return out
