"""What a program that is not trusted can and cannot do."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from lightning_rlhf.rewards.sandbox import SandboxLimits, SandboxResult, run_sandboxed


def run(source: str, *, stdin: str = "", **limits: object) -> SandboxResult:
    return run_sandboxed({"main.py": source}, stdin=stdin, limits=SandboxLimits(**limits))  # type: ignore[arg-type]


def denied(source: str) -> None:
    """The statement raises, and the program can go on."""
    result = run(f"try:\n    {source}\nexcept PermissionError:\n    print('denied')\nelse:\n    print('allowed')")
    assert (result.stdout, result.exit_code) == ("denied\n", 0), result


def test_it_reads_and_prints() -> None:
    result = run("import sys\nprint(input()[::-1])\nprint('oops', file=sys.stderr)", stdin="h\u00e9llo\n")
    assert result == SandboxResult(ending="exited", exit_code=0, stdout="oll\u00e9h\n", stderr="oops\n")
    assert result.succeeded
    failed = run("raise KeyError('x')")
    assert failed.exit_code == 1
    assert "KeyError: 'x'" in failed.stderr
    assert not failed.succeeded


def test_packages_and_threads_work() -> None:
    source = "import threading, numpy\nt = threading.Thread(target=lambda: print(numpy.arange(3).sum()))\n"
    assert run(source + "t.start()\nt.join()").stdout == "3\n"


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        denied(f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)")
        denied("import socket; socket.socketpair()")
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_there_is_one_process_that_cannot_leave_its_group_or_signal_others() -> None:
    denied("import os; os.fork()")
    denied("import subprocess; subprocess.run(['/bin/true'])")
    denied("import os; os.posix_spawn('/bin/true', ['true'], {})")
    denied("import os; os.setsid()")
    denied(f"import os; os.kill({os.getpid()}, 0)")
    denied("import os; os.kill(-1, 0)")
    assert run("import os; os.kill(os.getpid(), 15)").ending == "killed"


def test_it_sees_its_own_folder_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    denied(f"open({str(secret)!r})")
    denied(f"open({str(tmp_path / 'new')!r}, 'w')")
    denied("open('../stdout', 'w')")
    denied(f"open('/proc/{os.getpid()}/environ')")
    denied("import os; os.listdir('/')")
    result = run("import os\nopen('a', 'w').write('b')\nprint(sorted(os.listdir()), os.getcwd(), dict(os.environ))")
    assert result.stdout.startswith("['a', 'main.py'] ")
    assert "PYTEST" not in result.stdout
    assert not Path(result.stdout.split()[2]).exists()  # removed at the end


def test_the_environment_does_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "sesame")
    assert "sesame" not in run("import os; print(dict(os.environ))").stdout


@pytest.mark.parametrize(
    ("source", "limits", "ending"),
    [
        ("while True: pass", {"cpu_seconds": 1, "seconds": 60.0}, "cpu"),
        ("import time; time.sleep(1000)", {"seconds": 0.5}, "wall"),
        ("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)", {"seconds": 0.5}, "wall"),
        ("x = bytearray(300 << 20)", {"memory_bytes": 200 << 20}, "exited"),
        ("while True: open('big', 'ab', 0).write(bytes(1000))", {"file_bytes": 5000}, "exited"),
        ("import threading\nwhile True: threading.Thread(target=input).start()", {"seconds": 20.0}, "exited"),
    ],
)
def test_limits_end_it(source: str, limits: dict[str, float], ending: str) -> None:
    begun = time.monotonic()
    result = run(source, **limits)
    assert time.monotonic() - begun < 60.0
    assert result.ending == ending
    assert not result.succeeded


def test_its_output_is_bounded() -> None:
    result = run("while True: print('x' * 99)", file_bytes=5000, seconds=30.0)
    assert 0 < len(result.stdout) <= 5000
    assert not result.succeeded


def test_it_runs_from_several_threads() -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(run("print(input())", stdin=str(i)).stdout)) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"{i}\n" for i in range(6)]


def test_without_the_kernel_pythons_own_calls_are_stopped() -> None:
    assert run("print(input())", stdin="a", isolation="best_effort").stdout == "a\n"
    for source in ("import socket; socket.socket()", "import os; os.fork()", "import subprocess; subprocess.run('ls')"):
        result = run(source, isolation="best_effort")
        assert result.exit_code == 1
        assert "is not allowed here" in result.stderr
    assert run("while True: pass", cpu_seconds=1, seconds=60.0, isolation="best_effort").ending == "cpu"


def test_a_kernel_that_cannot_isolate_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stands for such a kernel: a folder that is not there cannot be made the only writable one."""
    from lightning_rlhf.rewards import sandbox

    settings = sandbox._settings

    def broken(folder: Path, limits: SandboxLimits, report: int) -> str:
        return settings(folder, limits, report).replace('"readable": [', '"readable": ["/dev/null/x", ')

    monkeypatch.setattr(sandbox, "_settings", broken)
    with pytest.raises(RuntimeError, match=r"cannot isolate a program here.*Nothing was run"):
        run(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"cpu_seconds": -1}, {"isolation": "none"}])
def test_limits_that_cannot_be_meant_are_refused(limits: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        SandboxLimits(**limits)  # type: ignore[arg-type]
