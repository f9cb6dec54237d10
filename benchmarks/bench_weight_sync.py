"""What a weight sync between processes costs, against copying the same tensors in one process.

About 300 bf16 tensors of a small language model's shapes, back to back in one buffer, go from a sender to receivers on
the same machine, one thread each; the receivers copy every tensor into memory of their own. Each round times one plain
copy of the buffer and one sync, one after the other, so that what else the machine does hits both alike; medians over
the rounds are compared.

- ratio_to_memcpy: the copy's time over the sync's
- ratio_to_two_copies: the time that two processes take which copy as much at once, over the sync's: what crosses from
  process to process is written twice, so this is the limit that the memory bus sets
- gb_per_s: bytes of the model over the sync's time (10**9 bytes), to each receiver
- cpu_s_per_gb: computing time of sender and receivers together

    python benchmarks/bench_weight_sync.py --engines shm,nccl --gigabytes 1 --json
    python benchmarks/bench_weight_sync.py --engines shm,nccl,nixl,mooncake --fit --json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry, Invitation
from lightning_rlhf.weights import CheckpointEngineManager  # noqa: F401 (registers the engines)

HIDDEN, INTERMEDIATE, KEY_VALUE = 896, 4864, 128
LAYER: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEY_VALUE, HIDDEN),
    "self_attn.v_proj": (KEY_VALUE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
ROUNDS = 7
CORES = sorted(os.sched_getaffinity(0))


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """An embedding and whole layers: 32 layers at 1 GB; smaller and larger models have fewer and more."""
    layer_bytes = 2 * sum(int(np.prod(shape)) for shape in LAYER.values())
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (int(gigabytes * 56000), HIDDEN)}
    layers = round((gigabytes * 1e9 - 2 * found["model.embed_tokens.weight"][0] * HIDDEN) / layer_bytes)
    for layer in range(layers):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    return found


def tensors(gigabytes: float, *, value: float) -> dict[str, Tensor]:
    return {name: torch.full(shape, value, dtype=torch.bfloat16) for name, shape in shapes(gigabytes).items()}


def pin(side: int) -> None:
    """The sender on one core, receivers on the others, as on a machine where each has its own."""
    cores = CORES[:1] if side == 0 or len(CORES) == 1 else CORES[1:]
    os.sched_setaffinity(0, cores)


def views(flat: Tensor, wanted: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Consecutive parts of one buffer, so that the sync and the plain copy read the same memory."""
    parts = flat.split([math.prod(shape) for shape in wanted.values()])
    return {name: part.view(shape) for (name, shape), part in zip(wanted.items(), parts, strict=True)}


def receive(pipe: Connection, invitation: Invitation, gigabytes: float, *, direct: bool) -> None:
    """A receiver: has the tensors in memory of its own, or copies them there; reports its computing time."""
    torch.set_num_threads(1)
    pin(1)
    own = tensors(gigabytes, value=0.0)
    engine = CheckpointEngineRegistry.new(invitation.engine, **invitation.settings)
    engine.join(invitation)
    spare = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    while (order := pipe.recv()) != "stop":
        if order == "copy":
            for name, tensor in own.items():
                spare[name].copy_(tensor)
            pipe.send("copied")
            continue
        start = time.process_time()
        for name, tensor in engine.receive_weights(own if direct else None):
            if not direct:
                own[name].copy_(tensor)
        engine.finalize()
        pipe.send((time.process_time() - start, all(bool(t.view(-1)[-1] == t.view(-1)[0] != 0) for t in own.values())))
    engine.close()


class Bench:
    """One engine with its receivers."""

    def __init__(self, engine: str, *, gigabytes: float, receivers: int, bucket_mib: int, direct: bool) -> None:
        self.engine = CheckpointEngineRegistry.new(engine, bucket_bytes=bucket_mib << 20, timeout=120.0)
        self.engine.prepare()
        self.names = [f"receiver{index}" for index in range(receivers)]
        self.pipes, self.processes = [], []
        context = get_context("fork")
        for name in self.names:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=receive, args=(theirs, self.engine.invitation(name), gigabytes), kwargs={"direct": direct}
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def sync(self, source: dict[str, Tensor]) -> tuple[float, float]:
        """One sync; seconds by the clock and of computing."""
        for pipe in self.pipes:
            pipe.send("sync")
        start, computed = time.perf_counter(), time.process_time()
        self.engine.prepare()
        self.engine.init_process_group(self.engine.build_topology(trainer_world_size=1, receiver_ids=self.names))
        self.engine.send_weights(iter(source.items()))
        self.engine.finalize()
        seconds, computed = time.perf_counter() - start, time.process_time() - computed
        for pipe in self.pipes:
            more, right = pipe.recv()
            computed += more
            if not right:
                raise RuntimeError("A receiver does not hold what was sent.")
        return seconds, computed

    def copies_at_once(self, source: Tensor, target: Tensor) -> float:
        """Seconds until sender and receivers have each copied as much as a sync carries, all at the same time."""
        start = time.perf_counter()
        for pipe in self.pipes:
            pipe.send("copy")
        memcpy(source, target)
        for pipe in self.pipes:
            pipe.recv()
        return time.perf_counter() - start

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send("stop")
        for process in self.processes:
            process.join(20)
            process.kill()
        self.engine.close()


def memcpy(source: Tensor, target: Tensor) -> float:
    """Copies all of ``source``; a smaller target is filled several times."""
    start = time.perf_counter()
    for part in source.split(len(target)):
        target[: len(part)].copy_(part)
    return time.perf_counter() - start


def measure(
    engine: str, *, gigabytes: float, receivers: int, rounds: int, bucket_mib: int, direct: bool = True
) -> dict[str, Any]:
    """Rounds of one copy and one sync; the first round, which maps memory, is left out."""
    bench = Bench(
        engine, gigabytes=gigabytes, receivers=receivers, bucket_mib=bucket_mib, direct=direct
    )  # forks before memory grows
    try:
        flat = torch.full((sum(math.prod(shape) for shape in shapes(gigabytes).values()),), 1.5, dtype=torch.bfloat16)
        target, source = torch.zeros_like(flat[:500_000_000]), views(flat, shapes(gigabytes))
        size = flat.nbytes / 1e9
        results = [
            (memcpy(flat, target), *bench.sync(source), bench.copies_at_once(flat, target)) for _ in range(rounds + 1)
        ]
        copies, syncs, computed, at_once = zip(*results[1:], strict=True)
    finally:
        bench.close()
    ratios = [copy / sync for copy, sync in zip(copies, syncs, strict=True)]
    return {
        "gigabytes": round(size, 3),
        "tensors": len(shapes(gigabytes)),
        "receivers": receivers,
        "ratio_to_memcpy": round(statistics.median(copies) / statistics.median(syncs), 3),
        "ratio_to_two_copies": round(statistics.median(at_once) / statistics.median(syncs), 3),
        "ratio_of_pairs": {"lowest": round(min(ratios), 3), "highest": round(max(ratios), 3)},
        "gb_per_s": round(size / statistics.median(syncs), 3),
        "memcpy_gb_per_s": round(size / statistics.median(copies), 3),
        "cpu_s_per_gb": round(statistics.median(computed) / size, 3),
        "seconds": round(statistics.median(syncs), 4),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="shm,nccl", help="names, separated by commas")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--fit", action="store_true", help="also 0.1, 0.5 and 2 GB, and 2 and 3 receivers of 0.5 GB")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pin(0)
    before = os.getloadavg()[0]
    engines: dict[str, Any] = {}
    for engine in arguments.engines.split(","):
        rows = []
        for size, receivers in cases(arguments.gigabytes, with_fit=arguments.fit):
            rounds = arguments.rounds if (size, receivers) == (arguments.gigabytes, 1) else min(3, arguments.rounds)
            rows.append(
                measure(engine, gigabytes=size, receivers=receivers, rounds=rounds, bucket_mib=arguments.bucket_mib)
            )
            print(engine, rows[-1], file=sys.stderr)
        engines[engine] = rows[0] | ({"cost": rows, "fit": fit(rows)} if arguments.fit else {})
    result = {
        "benchmark": "weight_sync",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}",
        "load_average": {"before": round(before, 1), "after": round(os.getloadavg()[0], 1)},
        "bucket_mib": arguments.bucket_mib,
        "rounds": arguments.rounds,
        "engines": engines,
    }
    print(json.dumps(result, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
