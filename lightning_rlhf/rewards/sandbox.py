"""Running a Python program that is not trusted: in a process of its own, under limits, without a network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

Isolation: TypeAlias = Literal["kernel", "best_effort"]
Ending: TypeAlias = Literal["exited", "wall", "cpu", "killed"]


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one program may take.

    Attributes:
        seconds: wall time.
        cpu_seconds: processor time, whole seconds.
        memory_bytes: address space.
        file_bytes: size of any file that it writes, its output and its errors included.
        isolation: ``"kernel"`` has the Linux kernel (Landlock and seccomp) keep the program to its folder, one process
            and no network, and refuses to run it where the kernel cannot; ``"best_effort"`` stops Python's own calls
            for these alone, which a program that means it gets around.
    """

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    isolation: Isolation = "kernel"

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        for name in ("seconds", "cpu_seconds", "memory_bytes", "file_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        if self.isolation not in ("kernel", "best_effort"):
            raise ValueError(f"isolation must be 'kernel' or 'best_effort', got {self.isolation!r}.")


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """How a program ended.

    Attributes:
        ending: ``exited`` by itself, over its ``wall`` or ``cpu`` time, or ``killed`` by a signal.
        exit_code: of ``exited``; negative is the signal.
        stdout: what it printed, at most ``file_bytes``.
        stderr: its errors, at most ``file_bytes``.
    """

    ending: Ending
    exit_code: int
    stdout: str
    stderr: str

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself without an error."""
        return self.ending == "exited" and self.exit_code == 0


def run_sandboxed(sources: dict[str, str], *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Writes a program into an empty folder of its own and runs ``main.py`` there.

    The process leads a session and a process group, which are killed when it ends or is over its wall time; the folder
    is removed. Its environment holds nothing of this process's. Safe to call from several threads.

    Args:
        sources: file names and contents; ``main.py`` among them.
        stdin: what the program reads.
        limits: see there.

    Returns:
        How it ended and what it printed.

    Raises:
        RuntimeError: if the kernel cannot isolate it as asked; the program has not run.
    """
    limits = limits or SandboxLimits()
    with TemporaryDirectory(prefix="lightning_rlhf_sandbox_", ignore_cleanup_errors=True) as name:
        outside = Path(name).resolve()
        folder = outside / "work"
        folder.mkdir()
        for file, content in sources.items():
            (folder / file).write_text(content, encoding="utf-8", errors="surrogatepass")
        (outside / "stdin").write_text(stdin, encoding="utf-8", errors="surrogatepass")
        ending, exit_code, report = _run(outside, folder, limits)
        if report != "ready":
            raise RuntimeError(
                f"The kernel cannot isolate a program here ({report or 'the launcher did not start'}), which needs "
                f"Linux 5.13 with Landlock and seccomp on x86_64 or aarch64. Nothing was run. To run programs that are "
                f"trusted not to attack this machine, say isolation='best_effort'."
            )
        return SandboxResult(
            ending=ending,
            exit_code=exit_code,
            stdout=_text(outside / "stdout", limits.file_bytes),
            stderr=_text(outside / "stderr", limits.file_bytes),
        )


def _run(outside: Path, folder: Path, limits: SandboxLimits) -> tuple[Ending, int, str]:
    read, write = os.pipe()
    try:
        with (
            (outside / "stdin").open("rb") as stdin,
            (outside / "stdout").open("wb") as stdout,
            (outside / "stderr").open("wb") as stderr,
        ):
            process = subprocess.Popen(
                # -S: the launcher needs no packages; the program that it starts finds those that are installed
                [sys.executable, "-I", "-B", *(["-S"] if limits.isolation == "kernel" else []),
                 str(files("lightning_rlhf.rewards") / "sandbox_launcher.py"), _settings(folder, limits, write)],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env=_environment(folder),
                pass_fds=[write],
                start_new_session=True,
            )  # fmt: skip
    finally:
        os.close(write)
    try:
        code: int | None = process.wait(limits.seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        # the group also after a normal end: with best_effort it may have left others behind
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with os.fdopen(read, encoding="utf-8", errors="replace") as pipe:
            report = pipe.read()
    if code is None:
        return "wall", process.returncode, report
    if code == -signal.SIGXCPU:
        return "cpu", code, report
    return ("killed" if code < 0 else "exited"), code, report


def _settings(folder: Path, limits: SandboxLimits, report: int) -> str:
    return json.dumps(
        {
            "limits": {
                "RLIMIT_CPU": limits.cpu_seconds,
                "RLIMIT_AS": limits.memory_bytes,
                "RLIMIT_FSIZE": limits.file_bytes,
                "RLIMIT_CORE": 0,
                "RLIMIT_NOFILE": 64,
            },
            "strict": limits.isolation == "kernel",
            "readable": sorted(
                {
                    *map(str, (sys.prefix, sys.base_prefix, Path(sys.executable).resolve().parent)),
                    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
                    *("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"),
                }
            ),
            "writable": str(folder),
            "report": report,
            "program": str(folder / "main.py"),
            "arguments": [],
        }
    )


def _environment(folder: Path) -> dict[str, str]:
    return {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # -I ignores it; a program that starts Python some other way does not
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _text(path: Path, limit: int) -> str:
    with path.open("rb") as file:
        return file.read(limit).decode("utf-8", errors="replace")
