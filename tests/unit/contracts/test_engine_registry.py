"""Engines by name: built in, from another package, and unknown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_rlhf.contracts.engine import EngineRegistry
from lightning_rlhf.engines.torch import TorchEngine

TOY_MODULE = '''
from lightning_rlhf.contracts.engine import EngineRegistry
from lightning_rlhf.engines.torch import TorchEngine


@EngineRegistry.register(model_type="language_model", backend="toy", device="cpu")
class ToyEngine(TorchEngine):
    """One process, under another name."""
'''

USE_IT = """
import sys

import torch
from support.experience import make_experience, policy_gradient
from support.tiny import tiny_model

from lightning_rlhf.contracts.engine import EngineConfig, EngineRegistry

assert "toy_engines" not in sys.modules
EngineRegistry.get("language_model", "torch", "cpu")
assert "toy_engines" not in sys.modules, "a built-in engine needs no other package"
config = EngineConfig(model=tiny_model(), optimizer=torch.optim.AdamW)
engine = EngineRegistry.new("language_model", "toy", config, device=torch.device("cpu"))
engine.initialize()
loss = engine.train_batch(make_experience([5, 8]), policy_gradient)["loss"]
print(type(engine).__module__, type(engine).__name__, engine.backend, loss == loss)
try:
    EngineRegistry.get("language_model", "toi", "cpu")
except KeyError as error:
    print(error)
"""


def _install(site: Path) -> None:
    """What an installer leaves: the module and its metadata."""
    (site / "toy_engines.py").write_text(TOY_MODULE)
    metadata = site / "toy_engines-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engines\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[lightning_rlhf.engines]\ntoy = toy_engines\n")


def test_an_engine_of_another_installed_package_is_found(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    _install(tmp_path)
    paths = [str(tmp_path), str(pytestconfig.rootpath / "tests"), str(pytestconfig.rootpath)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # in a process of its own: the registry is one for each process, and so are the modules that registered
    done = subprocess.run([sys.executable, "-c", USE_IT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "toy_engines ToyEngine toy True"
    assert "backend='toi'" in second
    for known in ("language_model/toy/cpu", "language_model/fsdp2/cuda", "value_model/ulysses/cpu"):
        assert known in second


def test_unknown_names_list_what_is_registered() -> None:
    for names in (("language_model", "fsdp3", "cpu"), ("reward", "fsdp2", "cpu"), ("value_model", "torch", "tpu")):
        with pytest.raises(KeyError) as caught:
            EngineRegistry.get(*names)
        message = str(caught.value)
        assert f"model_type={names[0]!r}, backend={names[1]!r}, device={names[2]!r}" in message
        for model_type in ("language_model", "value_model"):
            for backend in ("torch", "fsdp2", "ulysses"):
                assert f"{model_type}/{backend}/cpu" in message


def test_a_place_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineRegistry, "_classes", dict(EngineRegistry._classes))
    register = EngineRegistry.register(model_type="language_model", backend="mine", device="cpu")

    class Mine(TorchEngine):
        pass

    class Other(TorchEngine):
        pass

    assert register(Mine) is Mine
    assert register(Mine) is Mine  # a module that is imported again
    with pytest.raises(ValueError, match="registered already"):
        register(Other)
    assert EngineRegistry.get("language_model", "mine", torch.device("cpu").type) is Mine
