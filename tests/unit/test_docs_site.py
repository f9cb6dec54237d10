"""The documentation builds strictly: no broken link, no name that is not there, no page that is left out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "api.html").read_text()
    for name in ("GRPO", "FSDP2RLStrategy", "VLLMRollout", "BaseEngine"):
        assert 'id="lightning_rlhf.' in page
        assert name in page
    assert (tmp_path / "site" / "images" / "batches.svg").exists()


def test_a_broken_link_would_fail(tmp_path: Path) -> None:
    pytest.importorskip("material")
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# A\n\n[nowhere](nowhere.md), [no such part](#b)\n")
    real = re.sub(r"!!python/name:\S+", "null", (ROOT / "mkdocs.yml").read_text())
    config = {name: value for name, value in yaml.safe_load(real).items() if name in ("site_name", "validation")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "#b" in done.stderr


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_links_from_the_readme_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_picture_of_batches_is_what_its_script_draws() -> None:
    spec = spec_from_file_location("draw_batches", DOCS / "draw_batches.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "images" / "batches.svg").read_text() == module.draw()


def test_keys_and_metrics_of_the_troubleshooting_page_exist() -> None:
    from lightning_rlhf.cli.show_config import compose_run
    from lightning_rlhf.cli.validate import known_keys
    from lightning_rlhf.metric_names import describe

    page = (DOCS / "troubleshooting.md").read_text()
    words = re.findall(r"`([^`\s]+)`", page)
    for word in words:
        if re.fullmatch(r"[a-z_]+/[a-z_0-9]+", word) and not word.startswith("outputs/"):
            describe(word)
    keys = known_keys(compose_run([])) | known_keys(compose_run(["algorithm=dr_grpo"]))
    for word in words:
        key = word.partition("=")[0]
        if re.fullmatch(r"(algorithm|rollout|data|trainer|strategy)\.[a-z_.]+", key) and "_target_" not in key:
            assert key in keys, word
