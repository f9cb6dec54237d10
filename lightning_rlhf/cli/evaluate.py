"""The command ``lightning-rlhf evaluate``: pass@k and mean reward of a model, or of a run's checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_rlhf.callbacks.rollout_dump import sampled_rows
from lightning_rlhf.callbacks.rollout_files import FOLDER, dump_path, write_rows
from lightning_rlhf.cli.export import export
from lightning_rlhf.cli.overrides import explain
from lightning_rlhf.cli.pass_at_k import PromptResult, by_task, summarize
from lightning_rlhf.cli.run import CONFIG_FILE, build
from lightning_rlhf.cli.run_records import RecordError, if_absent
from lightning_rlhf.cli.show_config import compose_run
from lightning_rlhf.cli.targets import ConfigError
from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig
from lightning_rlhf.data.encode import encode_prompts
from lightning_rlhf.data.loader import collate_prompts
from lightning_rlhf.rewards import score
from lightning_rlhf.types import PromptBatch, Rollouts

DEFAULT_MODEL_LEN = 2048
"""Tokens of prompt and response together, for a model with that many positions."""
REFUSED = 2
"""Exit status if it cannot be evaluated."""


def main(arguments: Sequence[str]) -> int:
    """Samples, scores and prints.

    Returns:
        The exit status: 2 if the model, the prompts or the reward are not there.
    """
    given = _parse(arguments)
    if absent := if_absent(given.source):
        return _refuse(absent.strip())
    try:
        sampling = _sampling(given)
        config = _config(given.source, given.overrides)
        with _model_directory(given) as model:
            report = evaluate(model, config, sampling, given)
    except HydraException as error:
        return _refuse(explain(error))
    except (RecordError, ConfigError, ValueError, ImportError, OSError) as error:
        return _refuse(str(error))
    if given.json:
        print(json.dumps(report), flush=True)
    else:
        _print(Console(), report)
    return 0


def _refuse(message: str) -> int:
    for line in message.splitlines():
        print(f"lightning-rlhf evaluate: {line}", file=sys.stderr)
    return REFUSED


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf evaluate",
        description="Samples responses to a prompt set and scores them. Prompts and reward are those of the run, or "
        "those of the configuration that KEY=VALUE compose, such as data=jsonl data.source.path=FILE reward=gsm8k.",
    )
    parser.add_argument(
        "source", type=Path, metavar="MODEL", help="a model's directory, a run's folder, or a checkpoint"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of train; data and reward are read")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="of each prompt (default: 1)")
    parser.add_argument("--k", default="1", metavar="K,...", help="for pass@k (default: 1)")
    parser.add_argument(
        "--threshold", type=float, default=1.0, metavar="X", help="reward of a correct sample (default: 1)"
    )
    parser.add_argument("--temperature", type=float, default=None, help="(default: 0 for one sample, else 1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default: 128)")
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="(default: 2048, or the model's positions if they are fewer)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N prompts alone")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: 0)")
    parser.add_argument("--rollout", choices=["vllm", "hf"], default="vllm", help="what samples (default: vllm)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(default: float32)")
    parser.add_argument("--task-key", default="task", metavar="KEY", help="of a prompt's metadata (default: task)")
    parser.add_argument("--model", metavar="DIR", help="of a checkpoint: the model that its run started from")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write the samples, for `lightning-rlhf inspect DIR`")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    return parser.parse_intermixed_args(arguments)


def _sampling(given: argparse.Namespace) -> SamplingConfig:
    ks = _ks(given)
    if any(k < 1 or k > given.num_samples for k in ks):
        raise RecordError(f"--k {given.k}: each k must lie between 1 and --num-samples {given.num_samples}.")
    temperature = given.temperature
    if temperature is None:
        temperature = 0.0 if given.num_samples == 1 else 1.0
    if temperature == 0 and given.num_samples > 1:
        raise RecordError(f"--temperature 0 gives the same sample {given.num_samples} times; use --num-samples 1.")
    return SamplingConfig(
        n=given.num_samples,
        max_new_tokens=given.max_new_tokens,
        temperature=temperature,
        top_p=given.top_p,
        seed=given.seed,
    )


def _ks(given: argparse.Namespace) -> list[int]:
    try:
        return sorted({int(k) for k in given.k.split(",")})
    except ValueError as error:
        raise RecordError(f"--k {given.k}: expected whole numbers, such as 1,4,8.") from error


def _config(source: Path, overrides: Sequence[str]) -> DictConfig:
    """The run's own configuration, or what the overrides compose."""
    if overrides:
        return compose_run(["model.path=unused", *overrides])
    for folder in (source, *source.resolve().parents[:2]):
        if (folder / CONFIG_FILE).is_file():
            loaded = OmegaConf.load(folder / CONFIG_FILE)
            if isinstance(loaded, DictConfig):
                return loaded
    raise RecordError(
        f"{source} has no {CONFIG_FILE} that says which prompts and which reward; name them, such as data=jsonl "
        f"data.source.path=FILE reward=gsm8k."
    )


@contextmanager
def _model_directory(given: argparse.Namespace) -> Iterator[str]:
    """Where the model lies; that of a checkpoint is exported for as long as it is needed."""
    if (given.source / "config.json").is_file():
        yield str(given.source)
        return
    with tempfile.TemporaryDirectory(prefix="lightning_rlhf_evaluate_") as folder:
        yield str(export(given.source, out=Path(folder) / "hf", model=given.model, dtype=given.dtype))


def evaluate(model: str, config: DictConfig, sampling: SamplingConfig, given: argparse.Namespace) -> dict[str, Any]:
    """Samples and scores every prompt; the numbers as plain values.

    Args:
        model: a Hugging Face directory.
        config: has ``data.source`` and ``reward``.
        sampling: how to draw.
        given: the command's arguments.

    Raises:
        RecordError: if there is no prompt.
    """
    reward = build("reward", config)
    batch = _prompts(model, config, limit=given.limit)
    start = time.perf_counter()
    engine = _engine(model, given)
    try:
        rollouts = engine.generate(batch, sampling, rl_step=0)
    finally:
        engine.shutdown()
    seconds = time.perf_counter() - start
    scores = score(reward, rollouts.prompts, rollouts.responses, rollouts.metadata)
    rollouts.rewards = scores.rewards
    for message in scores.errors:
        print(f"lightning-rlhf evaluate: a reward failed: {message}", file=sys.stderr)
    if given.dump is not None:
        write_rows(
            dump_path(given.dump / FOLDER, 0),
            ({"rl_step": 0, "advantage": None, **row} for row in sampled_rows(rollouts)),
        )
    results, ks = results_of(rollouts, task_key=given.task_key), _ks(given)
    return {
        "model": str(given.source),
        "num_samples": sampling.n,
        "temperature": sampling.temperature,
        "threshold": given.threshold,
        "rollout": given.rollout,
        "seconds": round(seconds, 3),
        "all": summarize(results, ks=ks, threshold=given.threshold),
        "tasks": {task: summarize(part, ks=ks, threshold=given.threshold) for task, part in by_task(results).items()},
    }


def _prompts(model: str, config: DictConfig, *, limit: int | None) -> PromptBatch:
    from transformers import AutoTokenizer

    prompts = build("data.source", config).load()[:limit]
    if not prompts:
        raise RecordError(f"There is no prompt to evaluate (--limit {limit}).")
    encoded, _ = encode_prompts(AutoTokenizer.from_pretrained(model), prompts, max_prompt_tokens=None, overlong="error")
    return collate_prompts(encoded)


def _engine(model: str, given: argparse.Namespace) -> RolloutEngine:
    import torch

    engine: RolloutEngine
    max_model_len = given.max_model_len or _positions(model)
    if given.rollout == "vllm":
        from lightning_rlhf.rollout.vllm import VLLMEngine

        engine = VLLMEngine(
            model,
            dtype=given.dtype,
            max_model_len=max_model_len,
            kv_cache_bytes=2**30,
            load_format="auto",
            seed=given.seed,
        )
    else:
        from transformers import AutoModelForCausalLM

        from lightning_rlhf.rollout.hf import HFReferenceEngine

        dtype = getattr(torch, given.dtype)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        engine = HFReferenceEngine(model, max_model_len=max_model_len, dtype=dtype, device=device)
        engine.load_weights(iter(AutoModelForCausalLM.from_pretrained(model, dtype=dtype).named_parameters()))
    engine.weight_version = 0
    return engine


def _positions(model: str) -> int:
    from transformers import AutoConfig

    return min(DEFAULT_MODEL_LEN, int(AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings))


def results_of(rollouts: Rollouts, *, task_key: str) -> list[PromptResult]:
    """The samples of each prompt, joined by uid; prompts without the key are the task ``all``."""
    rows: dict[str, list[int]] = {}
    for index, uid in enumerate(rollouts.uids):
        rows.setdefault(uid, []).append(index)
    if rollouts.rewards is None:
        raise ValueError("The rollouts have no rewards: score them first.")
    rewards, lengths = rollouts.rewards.tolist(), rollouts.response_lengths.tolist()
    return [
        PromptResult(
            uid=uid,
            task=str(rollouts.metadata[found[0]].get(task_key, "all")),
            rewards=tuple(rewards[row] for row in found),
            lengths=tuple(lengths[row] for row in found),
            truncated=sum(rollouts.finish_reasons[row] == "length" for row in found),
        )
        for uid, found in rows.items()
    ]


def _print(console: Console, report: dict[str, Any]) -> None:
    overall = report["all"]
    columns = ["mean", *(name for name in overall if name.startswith("pass@")), "truncated_fraction", "response_length"]
    title = f"{report['model']}: {report['num_samples']} sample(s) a prompt, temperature {report['temperature']:g}"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("task")
    for name in ("prompts", *columns, "failed"):
        label = f"mean@{report['num_samples']}" if name == "mean" else name.replace("_", " ")
        table.add_column(label, justify="right")
    tasks = report["tasks"]
    for task, numbers in [*tasks.items(), *([("all tasks", overall)] if len(tasks) > 1 else [])]:
        cells = [_cell(numbers[name]) for name in columns]
        table.add_row(Text(task), str(numbers["num_prompts"]), *cells, str(numbers["failed"]))
    console.print(table)


def _cell(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
