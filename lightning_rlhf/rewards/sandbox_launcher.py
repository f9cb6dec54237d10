"""Puts itself under limits that it cannot lift again, then becomes the program that is not trusted.

``rewards.sandbox`` runs this file by its path, with the settings as JSON; it needs the standard library alone. A limit
that the kernel does not have is an error, unless ``strict`` is off: then the program runs in this interpreter, under an
audit hook that stops what a program of good will may do by mistake and no attack.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import runpy
import struct
import sys
from collections.abc import Sequence
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

# --- files: Landlock ------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _PATH_BENEATH = 444, 445, 446, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_NEWEST_FIRST = ((5, (1 << 16) - 1), (3, (1 << 15) - 1), (2, (1 << 14) - 1), (1, (1 << 13) - 1))
"""By the oldest version of Landlock that has them, all accesses to files that it can deny."""


def restrict_files(*, readable: Sequence[str], writable: str) -> None:
    """Leaves reading and executing below some folders, and everything below one; hides all other files.

    Raises:
        OSError: if the kernel has no Landlock.
    """
    version = _syscall(_CREATE_RULESET, None, 0, 1)
    every = next(access for since, access in _NEWEST_FIRST if version >= since)
    network, scope = (0b11, 0b11)  # TCP bind and connect; abstract sockets and signals to the outside
    attribute = struct.pack("QQQ", every, network if version >= 4 else 0, scope if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall(_CREATE_RULESET, attribute, size, 0)
    for path in readable:
        _allow(ruleset, path, (_EXECUTE | _READ_FILE | _READ_DIR) & every)
    for path in ("/dev/null", "/dev/zero", "/dev/urandom"):
        _allow(ruleset, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & every)
    _allow(ruleset, writable, every)
    _syscall(_RESTRICT_SELF, ruleset, 0, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):  # noqa: PTH112 - this file starts for each program; pathlib is a sixth of its time
        access &= ~_READ_DIR
    _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", access, place), 0)
    os.close(place)


# --- system calls: seccomp ------------------------------------------------------------------------------------------

# by machine: the audit architecture, then the numbers of system calls
_MACHINES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "socketpair": 53, "fork": 57, "vfork": 58, "ptrace": 101, "setpgid": 109, "setsid": 112,
            "rt_sigqueueinfo": 129, "mount": 165, "tkill": 200, "add_key": 248, "request_key": 249, "keyctl": 250,
            "unshare": 272, "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "setns": 308, "process_vm_readv": 310,
            "process_vm_writev": 311, "bpf": 321, "shmget": 29, "semget": 64, "msgget": 68,
            "clone": 56, "kill": 62, "tgkill": 234,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198, "socketpair": 199, "ptrace": 117, "setpgid": 154, "setsid": 157, "rt_sigqueueinfo": 138,
            "mount": 40, "tkill": 130, "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97,
            "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "setns": 268, "process_vm_readv": 270,
            "process_vm_writev": 271, "bpf": 280, "shmget": 194, "semget": 190, "msgget": 186,
            "clone": 220, "kill": 129, "tgkill": 131,
        },
    ),
}  # fmt: skip
_SAME_EVERYWHERE = {"pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_open": 434}
_CLONE3, _CLONE_THREAD, _X32 = 435, 0x10000, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


def deny_system_calls() -> None:
    """Denies sockets, further processes, signals to others, tracing, and leaving the process group; threads stay.

    Raises:
        OSError: if the kernel has no seccomp, or the machine is unknown here.
    """
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {platform.machine()}")
    architecture, numbers = _MACHINES[platform.machine()]
    numbers = numbers | _SAME_EVERYWHERE
    denied = _ERROR | errno.EPERM
    own = os.getpid()
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER)]
    if platform.machine() == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, denied)]
    # glibc tries clone3, whose flags a filter cannot read, and falls back to clone
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    for name, number in numbers.items():
        if name == "clone":
            program += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 1, 0, _CLONE_THREAD)]
        elif name in ("kill", "tgkill"):
            program += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, own)]
        else:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, denied)]
            continue
        program += [(_RETURN, 0, 0, denied), (_RETURN, 0, 0, _ALLOW)]
    program += [(_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP" if struct.calcsize("P") == 8 else "HxxP", len(program), ctypes.addressof(code))
    if _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _syscall(number: int, *arguments: Any) -> int:
    found: int = _LIBC.syscall(ctypes.c_long(number), *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return found


# --- without the kernel's help --------------------------------------------------------------------------------------

_STOPPED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system", "os.kill", "ctypes.", "pty.")


def _hook(event: str, _: tuple[Any, ...]) -> None:
    if event.startswith(_STOPPED):
        raise PermissionError(f"{event} is not allowed here")


def main() -> None:
    """Reads the settings, restricts this process and runs the program."""
    settings = json.loads(sys.argv[1])
    for name, value in settings["limits"].items():
        # processor time: a signal that says so first, a second later the kill
        resource.setrlimit(getattr(resource, name), (value, value + (name == "RLIMIT_CPU")))
    report = settings["report"]
    os.set_inheritable(report, False)
    program, arguments = settings["program"], settings["arguments"]
    if not settings["strict"]:
        os.write(report, b"ready")
        os.close(report)
        sys.argv = [program, *arguments]
        sys.addaudithook(_hook)
        runpy.run_path(program, run_name="__main__")
        return
    try:
        if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "no_new_privs")
        restrict_files(readable=settings["readable"], writable=settings["writable"])
        deny_system_calls()
    except OSError as error:
        os.write(report, str(error).encode()[:1000])
        os._exit(1)
    os.write(report, b"ready")
    os.execv(sys.executable, [sys.executable, "-I", "-B", program, *arguments])


if __name__ == "__main__":
    main()
