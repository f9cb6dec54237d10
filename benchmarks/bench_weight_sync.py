"""What a weight sync between processes costs, against copying the same tensors in one process.

About 300 bf16 tensors of a small language model's shapes, back to back in one buffer, go from a sender to receivers on
the same machine, one thread each, into memory that each receiver has for its tensors; with --in-place receivers copy
them there themselves, as rollout engines do that change a tensor while they load it. Each round changes 1% of the
elements, then times one plain copy of the buffer and one sync, one after the other, so that what else the machine does
hits both alike; medians over the rounds are compared. What arrived is compared with what was sent.

- ratio_to_memcpy: the copy's time over the sync's
- ratio_to_two_copies: the time that two processes take which copy as much at once, over the sync's: what crosses from
  process to process is written twice, so that nothing is faster unless it stays in a cache or goes past it
- gb_per_s: bytes of the model over the sync's time (10**9 bytes), to each receiver
- cpu_s_per_gb: computing time of sender and receivers together

An engine is a name, with a variant after a colon: ``kimi:p2p`` (its mode; broadcast without), ``delta:nccl`` (its
link; shm without). ``naive`` hands tensors over within the process; its consumer copies them. ``disk`` writes to a
temporary folder, by way of the page cache. Engines whose library is missing are named under ``skipped``. Each engine
runs in a process of its own. Mooncake's system library, libibverbs, is borrowed from NIXL's wheel if there is none.

    python benchmarks/bench_weight_sync.py --engines shm,nccl --gigabytes 1 --json
    python benchmarks/bench_weight_sync.py --engines all --fit shm,nccl,nixl --json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from weight_syncs import OtherProcesses, SameProcess, memcpy, pin, shapes, views

from lightning_rlhf.weights import DeltaCheckpointEngine

ALL = ("naive", "shm", "nccl", "nixl", "mooncake", "kimi", "kimi:p2p", "disk", "delta")
VARIANTS = {"kimi": "mode", "delta": "link"}
NEEDS_MOONCAKE = ("mooncake", "kimi:p2p")
ROUNDS = 7
CHANGED_EVERY = 100
PATIENCE = 600.0


def measure(
    label: str, *, gigabytes: float, receivers: int, rounds: int, bucket_mib: int, folder: str, in_place: bool
) -> dict[str, Any]:
    """Rounds of one copy and one sync; the first round, which maps memory, is left out."""
    name, _, variant = label.partition(":")
    settings: dict[str, Any] = {"bucket_bytes": bucket_mib << 20}
    settings |= {VARIANTS[name]: variant} if variant else {}
    settings |= {"folder": folder, "keep": 1} if "disk" in (name, variant) else {}
    syncs = (
        SameProcess(name, gigabytes=gigabytes)
        if name == "naive"
        # forks before memory grows
        else OtherProcesses(name, settings, gigabytes=gigabytes, receivers=receivers, in_place=in_place)
    )
    try:
        flat = torch.full((sum(math.prod(shape) for shape in shapes(gigabytes).values()),), 1.5, dtype=torch.bfloat16)
        target, source = torch.zeros_like(flat[:500_000_000]), views(flat, shapes(gigabytes))
        results = []
        for turn in range(rounds + 1):
            flat[turn % CHANGED_EVERY :: CHANGED_EVERY] += 1
            copy = memcpy(flat, target)
            results.append((copy, *syncs.sync(source), syncs.copies_at_once(flat, target)))
        payload = syncs.engine.payload_share if isinstance(syncs.engine, DeltaCheckpointEngine) else None
    finally:
        syncs.close()
    row = {"gigabytes": round(flat.nbytes / 1e9, 3), "tensors": len(source), "receivers": receivers}
    return (
        row
        | summary(results, size=flat.nbytes / 1e9)
        | ({} if payload is None else {"payload_share": round(payload, 3)})
    )


def summary(results: list[tuple[float, float, float, float | None]], *, size: float) -> dict[str, Any]:
    """Of rounds, the first of which does not count.

    Args:
        results: seconds of a copy, of a sync, of computing, and of copies at once, each round.
        size: of the model, in GB.
    """
    copies, syncs, computed, at_once = zip(*results[1:], strict=True)
    ratios = [copy / sync for copy, sync in zip(copies, syncs, strict=True)]
    seconds = statistics.median(syncs)
    both = {} if None in at_once else {"ratio_to_two_copies": round(statistics.median(at_once) / seconds, 3)}
    return {
        "ratio_to_memcpy": round(statistics.median(copies) / seconds, 3),
        **both,
        "ratio_of_pairs": {"lowest": round(min(ratios), 3), "highest": round(max(ratios), 3)},
        "gb_per_s": round(size / seconds, 3),
        "memcpy_gb_per_s": round(size / statistics.median(copies), 3),
        "cpu_s_per_gb": round(statistics.median(computed) / size, 3),
        "seconds": round(seconds, 4),
        "seconds_first_sync": round(results[0][1], 4),
    }


def fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Least squares of ``seconds = constant + per_gb * GB + per_gb_and_extra_receiver * GB * (receivers - 1)``."""
    table = np.array([[1.0, row["gigabytes"], row["gigabytes"] * (row["receivers"] - 1)] for row in rows])
    seconds = np.array([row["seconds"] for row in rows])
    solution, *_ = np.linalg.lstsq(table, seconds, rcond=None)
    left = seconds - table @ solution
    return {
        "constant_s": round(float(solution[0]), 4),
        "s_per_gb": round(float(solution[1]), 4),
        "s_per_gb_and_extra_receiver": round(float(solution[2]), 4),
        "r_squared": round(1 - float(left @ left) / float(((seconds - seconds.mean()) ** 2).sum()), 4),
    }


def cases(gigabytes: float, *, with_fit: bool) -> Iterator[tuple[float, int]]:
    """Sizes and numbers of receivers."""
    yield gigabytes, 1
    if with_fit:
        yield from ((size, 1) for size in (0.1, 0.5, 2.0))
        yield from ((0.5, receivers) for receivers in (2, 3))


def measure_cases(label: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of one engine; with a fit, also its other rows."""
    rows, with_fit = [], label in arguments.fit and label != "naive"
    for size, receivers in cases(arguments.gigabytes, with_fit=with_fit):
        rounds = arguments.rounds if (size, receivers) == (arguments.gigabytes, 1) else min(3, arguments.rounds)
        with tempfile.TemporaryDirectory() as folder:
            row = measure(
                label,
                gigabytes=size,
                receivers=receivers,
                rounds=rounds,
                bucket_mib=arguments.bucket_mib,
                folder=folder,
                in_place=arguments.in_place,
            )
        rows.append(row)
        print(label, row, file=sys.stderr)
    return rows[0] | ({"cost": rows, "fit": fit(rows)} if with_fit else {})


def _in_child(pipe: Connection, label: str, arguments: argparse.Namespace) -> None:
    os.dup2(2, 1)  # libraries log to the standard output, which is for the result
    torch.set_num_threads(1)
    pin(0)
    try:
        pipe.send(("engines", measure_cases(label, arguments)))
    except ImportError as error:
        pipe.send(("skipped", str(error)))
    except Exception as error:  # noqa: BLE001 (named in the result, which has the other engines as well)
        traceback.print_exc()
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
    sys.stderr.flush()
    os._exit(0)  # see `weight_syncs`


def in_process_of_its_own(label: str, arguments: argparse.Namespace) -> tuple[str, Any]:
    """What became of one engine, ``engines``, ``skipped`` or ``failed``, and its row or the reason."""
    # A new program, not a fork of this one, finds libraries at other places; the others need not import all again.
    context = get_context("spawn" if label in NEEDS_MOONCAKE else "fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_in_child, args=(theirs, label, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE):
            return "failed", f"no result after {PATIENCE:g} s"
        what, content = ours.recv()
    except EOFError:
        process.join()
        return "failed", f"its process ended with status {process.exitcode}"
    finally:
        process.join(5)
        process.kill()
    return what, content


def borrow_libibverbs(folder: str) -> None:
    """For programs started from here, and only if the system has no such library."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        spec = find_spec("nixl_cu12")
        site = Path(spec.origin).parents[1] / "nixl_cu12.libs" if spec is not None and spec.origin else Path(folder)
        for copy in site.glob("libibverbs-*"):
            Path(folder, "libibverbs.so.1").symlink_to(copy)
            os.environ["LD_LIBRARY_PATH"] = f"{folder}:{site}:{os.environ.get('LD_LIBRARY_PATH', '')}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="shm,nccl", help=f"separated by commas, or all: {','.join(ALL)}")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--in-place", action="store_true", help="receivers copy tensors from where they arrive")
    parser.add_argument(
        "--fit",
        nargs="?",
        const="",
        metavar="ENGINES",
        help="of these, or all that are measured: also 0.1, 0.5 and 2 GB, and 2 and 3 receivers of 0.5 GB",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON, and nothing else on standard output")
    arguments = parser.parse_args()
    arguments.engines = list(ALL) if arguments.engines == "all" else arguments.engines.split(",")
    for label in arguments.engines:
        name, _, variant = label.partition(":")
        if label not in ALL and (name not in VARIANTS or not variant):
            parser.error(f"--engines {label}: known are {', '.join(ALL)}, and delta:<link>")
    arguments.fit = [] if arguments.fit is None else arguments.fit.split(",") if arguments.fit else arguments.engines
    if unknown := set(arguments.fit) - set(arguments.engines):
        parser.error(f"--fit {','.join(sorted(unknown))}: not among --engines {','.join(arguments.engines)}")
    return arguments


def main() -> None:
    arguments = _arguments()
    from measuring import surroundings  # not in each engine's process

    result: dict[str, Any] = {"benchmark": "weight_sync", **surroundings()}
    result |= {"threads": 1, "bucket_mib": arguments.bucket_mib, "rounds": arguments.rounds}
    result |= {"in_place": arguments.in_place}
    result |= {"engines": {}, "skipped": {}, "failed": {}}
    with tempfile.TemporaryDirectory() as folder:
        borrow_libibverbs(folder)
        for label in arguments.engines:
            what, content = in_process_of_its_own(label, arguments)
            result[what][label] = content
            print(label, what, "" if what == "engines" else content, file=sys.stderr)
    result["load_average_after"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result, indent=None if arguments.json else 1))
    if not result["engines"] or result["failed"]:
        sys.exit("\n".join(f"{label}: {why}" for label, why in {**result["skipped"], **result["failed"]}.items()))


if __name__ == "__main__":
    main()
