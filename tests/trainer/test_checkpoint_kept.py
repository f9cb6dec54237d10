"""Which checkpoints are kept, and what happens to those that are damaged or do not fit on the disk."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fork import DistributedError, run_distributed
from support.scripted import ScriptedGRPO, scripted_data, scripted_fit
from support.toy import Recorder, toy_data, toy_module, toy_trainer

from lightning_rlhf.callbacks import RLCheckpoint
from lightning_rlhf.callbacks.checkpoint import fault_of
from lightning_rlhf.cli.run import _continued, build
from lightning_rlhf.cli.run_checkpoints import wandb_run_id


def steps_kept(root: Path) -> list[int]:
    return sorted(int(path.stem.split("=")[1]) for path in (root / "checkpoints").glob("*.ckpt"))


def script(**scores: float) -> list[float | None]:
    """Rewards of 16 steps; those that are not named failed."""
    return [scores.get(f"s{step}") for step in range(1, 17)]


def run(
    root: Path, rewards: Sequence[float | None], *, until: int, resume: bool = False, **changes: Any
) -> RLCheckpoint:
    checkpoint = RLCheckpoint(**{"every_n_rl_steps": 2, "save_best": 1, **changes})
    module = ScriptedGRPO(rewards, max_rl_steps=until)
    scripted_fit(
        module, root, [checkpoint], enable_checkpointing=True, ckpt_path="last" if resume else None,
        data=scripted_data(prompts_per_step=2),
    )  # fmt: skip
    return checkpoint


def test_f02_the_best_is_remembered_over_a_resume(tmp_path: Path) -> None:
    rewards = script(s2=0.3, s10=0.62, s14=0.50, s16=0.70)
    run(tmp_path, rewards, until=12)
    assert steps_kept(tmp_path) == [10, 12]
    run(tmp_path, rewards, until=14, resume=True)
    assert steps_kept(tmp_path) == [10, 14]  # 0.50 changes nothing
    last = run(tmp_path, rewards, until=16, resume=True)
    assert steps_kept(tmp_path) == [16]  # 0.70 replaces it, and is the newest too
    assert Path(last.best_model_path).name == "rl_step=000016.ckpt"


@pytest.mark.parametrize(
    ("scores", "mode", "kept"),
    [
        ({"s10": -0.2, "s12": -0.5}, "max", [10, 16]),
        ({"s10": 0.0, "s12": -0.1}, "max", [10, 16]),
        ({"s10": 0.0, "s12": 0.0}, "max", [10, 16]),  # an equal score keeps the older
        ({"s10": 0.4, "s12": -0.3, "s14": 0.1}, "min", [12, 16]),
        ({"s10": 0.0, "s12": 0.1}, "min", [10, 16]),
        ({}, "max", [16]),
    ],
)
def test_f02_zero_and_negative_scores_are_scores(
    tmp_path: Path, scores: dict[str, float], mode: Any, kept: list[int]
) -> None:
    run(tmp_path, script(**scores), until=12, mode=mode)
    run(tmp_path, script(**scores), until=16, resume=True, mode=mode)
    assert steps_kept(tmp_path) == kept


def test_the_last_k_and_the_best_k_are_kept(tmp_path: Path) -> None:
    run(tmp_path, script(s2=0.9, s4=0.1, s6=0.8, s8=0.2, s10=0.3), until=14, save_top_k=2, save_best=2)
    assert steps_kept(tmp_path) == [2, 6, 12, 14]
    shutil.rmtree(tmp_path / "checkpoints")
    run(tmp_path, script(s2=0.9), until=6, save_top_k=-1)
    assert steps_kept(tmp_path) == [2, 4, 6]
    shutil.rmtree(tmp_path / "checkpoints")
    run(tmp_path, script(s2=0.9), until=6, save_top_k=0, save_best=0)
    assert not (tmp_path / "checkpoints").exists() or steps_kept(tmp_path) == []


def test_a_run_that_starts_anew_has_no_best_yet(tmp_path: Path) -> None:
    run(tmp_path, script(s2=0.9), until=4)
    assert steps_kept(tmp_path) == [2, 4]
    run(tmp_path, script(s4=0.1), until=4)
    assert steps_kept(tmp_path) == [4]


def test_the_best_by_validation(tmp_path: Path) -> None:
    scores = {2: 0.1, 4: 0.6, 6: 0.2, 8: 0.3}

    class Validated(ScriptedGRPO):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/reward", scores.get(self.rl_step, 9.0), batch_size=1)  # 9.0: not at a checkpoint

    checkpoint = RLCheckpoint(every_n_rl_steps=2, save_best=1, monitor="val/reward")
    data = scripted_data()
    data.val_source = data.source
    scripted_fit(
        Validated([0.5] * 8), tmp_path, [checkpoint], data=data, enable_checkpointing=True, num_sanity_val_steps=1
    )
    assert steps_kept(tmp_path) == [4, 8]
    assert checkpoint.scores == {"rl_step=000004.ckpt": pytest.approx(0.6)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every_n_rl_steps": 0}, "every_n_rl_steps must be at least 1"),
        ({"save_best": -1}, "save_best 0 or more"),
        ({"save_top_k": 0, "save_best": 1}, "with save_top_k=0 none is"),
        ({"mode": "most"}, "mode must be 'max' or 'min', got 'most'"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RLCheckpoint(**wrong)


# --- damage -------------------------------------------------------------------------------------------------------


def _fit(root: Path, model: Path, *, devices: int = 1, strategy: str = "fsdp2_rl", **settings: Any) -> list[int]:
    recorder = Recorder()
    dirpath, steps, ckpt = settings.get("dirpath"), settings.get("steps", 2), settings.get("ckpt_path")
    checkpoint = RLCheckpoint(every_n_rl_steps=1, save_top_k=-1, dirpath=dirpath)
    trainer = toy_trainer(root, callbacks=[checkpoint, recorder], strategy=strategy, devices=devices)
    trainer.fit(toy_module(model, max_rl_steps=steps), toy_data(), ckpt_path=ckpt)
    return [step["rl_step"] for step in recorder.steps]


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


DAMAGES = {
    "an empty folder": lambda path: (shutil.rmtree(path), path.mkdir()),
    "no loader state": lambda path: (path / "trainer.pt").unlink(),
    "a truncated optimizer": lambda path: next((path / "actor").glob("*.distcp")).write_bytes(b"x" * 10),
    "a changed byte": lambda path: _flip(next((path / "actor").glob("*.distcp"))),
    "a manifest cut short": lambda path: (path / "manifest.json").write_text('{"files": {'),
}


def test_f03_any_damage_is_passed_over_and_refused_by_name(tmp_path: Path, tiny_directory: Path) -> None:
    run_distributed(_fit, 1, tmp_path / "run", tiny_directory, init_process_group=False, timeout=120)
    newest = tmp_path / "run" / "checkpoints" / "rl_step=000002.ckpt"
    assert fault_of(newest) is None
    trainer = toy_trainer(tmp_path / "run", callbacks=[callback := RLCheckpoint()])
    for damage, harm in DAMAGES.items():
        kept = tmp_path / "kept"
        shutil.copytree(newest, kept)
        harm(newest)
        assert fault_of(newest) is not None, damage
        with pytest.warns(UserWarning, match=r"not whole: rl_step=000002\.ckpt"):
            (found,) = callback._find_last_checkpoints(trainer)
        assert Path(found).name == "rl_step=000001.ckpt", damage
        shutil.rmtree(newest)
        kept.rename(newest)
    assert callback._find_last_checkpoints(trainer) == {str(newest)}
    _flip(next((newest / "actor").glob("*.distcp")))
    with pytest.raises(DistributedError, match=r"rl_step=000002\.ckpt is damaged: actor"):
        run_distributed(
            _fit, 2, tmp_path / "run", tiny_directory, devices=2, ckpt_path=str(newest), steps=3,
            init_process_group=False, timeout=120,
        )  # fmt: skip
    (steps,) = run_distributed(
        _fit, 1, tmp_path / "run", tiny_directory, ckpt_path="last", steps=3, init_process_group=False, timeout=120
    )
    assert steps == [2, 3]


def test_f03_a_damaged_file_of_a_plain_strategy_is_passed_over(tmp_path: Path, tiny_directory: Path) -> None:
    assert _fit(tmp_path, tiny_directory, strategy="auto") == [1, 2]
    newest = tmp_path / "checkpoints" / "rl_step=000002.ckpt"
    _flip(newest)
    assert "damaged" in (fault_of(newest) or "")
    with pytest.warns(UserWarning, match=r"not whole: rl_step=000002\.ckpt \(damaged"):
        assert _fit(tmp_path, tiny_directory, strategy="auto", ckpt_path="last", steps=3) == [2, 3]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MiB, which holds one checkpoint of the tiny model and not two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("devices", [1, 2])
def test_f03_a_full_disk_keeps_the_old(tmp_path: Path, tiny_directory: Path, small_disk: Path, devices: int) -> None:
    folder = small_disk / "checkpoints"
    with pytest.raises(DistributedError, match="could not be written on every rank") as failure:
        run_distributed(
            _fit, devices, tmp_path / "run", tiny_directory, devices=devices, dirpath=folder, steps=4,
            init_process_group=False, timeout=60,
        )  # fmt: skip
    # PyTorch's own writer may only say that it is not where it should be in the file
    assert re.search(r"its file system has \d+ bytes free", str(failure.value))
    assert "were not done" not in str(failure.value)  # no rank hangs
    left = sorted(path.name for path in folder.iterdir())
    assert left
    assert not any(name.endswith(".part") for name in left)  # the next one has room again
    assert all(fault_of(folder / name) is None for name in left)


def test_a_resumed_run_goes_on_in_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger
    from omegaconf import OmegaConf

    monkeypatch.setenv("WANDB_SILENT", "true")

    def fit(until: int, ckpt_path: str | None) -> None:
        node = {"_target_": "lightning.pytorch.loggers.WandbLogger", "save_dir": str(tmp_path), "project": "p"}
        cfg = OmegaConf.create(
            {"run_dir": str(tmp_path), "ckpt_path": ckpt_path, "logger": {"wandb": {**node, "offline": True}}}
        )
        logger = build("logger.wandb", cfg, **_continued(cfg, cfg.logger.wandb))
        assert isinstance(logger, WandbLogger)
        scripted_fit(
            ScriptedGRPO([0.5] * 4, max_rl_steps=until), tmp_path, [RLCheckpoint(every_n_rl_steps=1)],
            enable_checkpointing=True, logger=logger, log_every_n_steps=1, ckpt_path=ckpt_path,
        )  # fmt: skip
        wandb.finish()

    fit(2, None)
    (first,) = {path.name.split("-")[3] for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert wandb_run_id(tmp_path / "checkpoints" / "rl_step=000002.ckpt") == first
    fit(4, "last")
    assert {path.name.split("-")[3] for path in (tmp_path / "wandb").glob("offline-run-*")} == {first}
    assert wandb_run_id(tmp_path / "checkpoints" / "rl_step=000004.ckpt") == first
    # a run that starts anew has a run of its own
    fit(1, None)
    assert len({path.name.split("-")[3] for path in (tmp_path / "wandb").glob("offline-run-*")}) == 2
