"""The command ``lightning-rlhf train``: a hydra application, run as ``__main__`` on every rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.cli.groups import CONFIGS
from lightning_rlhf.cli.overrides import allow_defaults, explain
from lightning_rlhf.cli.run import run
from lightning_rlhf.cli.targets import ConfigError
from lightning_rlhf.cli.trial import run_trial

BAD_CONFIG = 2
"""Exit status when the configuration cannot be run; other failures have 1."""


def main() -> None:
    """Composes the configuration from ``sys.argv`` and runs it.

    Raises:
        SystemExit: with status 2 and a line on stderr if the configuration cannot be run.
    """
    sys.argv[1:] = allow_defaults(sys.argv[1:])
    # the console script does not look for modules in the working directory, `python -m` on the other ranks does
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra then raises, where it would print and exit
    composed = False

    @hydra.main(version_base="1.3", config_path=f"pkg://{CONFIGS}", config_name="train")
    def application(cfg: DictConfig) -> float | None:
        nonlocal composed
        composed = True
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return run_trial()
        try:
            run(cfg)
        except ConfigError as error:
            _refuse(str(error))
        return None

    try:
        application()
    except (HydraException, OmegaConfBaseException) as error:
        if composed:
            raise
        _refuse(explain(error))


def _refuse(message: str) -> None:
    for line in message.splitlines():
        print(f"lightning-rlhf train: {line}", file=sys.stderr, flush=True)
    raise SystemExit(BAD_CONFIG)


if __name__ == "__main__":
    main()
