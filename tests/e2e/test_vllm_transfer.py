"""The weight-transfer back end in real vLLM, wherever its workers run: log-probs after a push are the trainer's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.experience import make_experience
from support.fork import run_distributed
from support.rollout import naive_log_probs, perturb
from support.sharded import CPU, LENGTHS, engine_config, train
from support.tiny import tiny_model, write_tiny_model
from support.tiny_experts import tiny_experts, write_tiny_experts
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.engines.ulysses import UlyssesEngine
from lightning_rlhf.rollout.vllm_process import fenced_process, import_vllm
from lightning_rlhf.rollout.vllm_transfer import (
    BACKEND,
    INVITATION,
    SNAPSHOT,
    WORKER_EXTENSION,
    register,
    update_info,
)
from lightning_rlhf.rollout.weight_snapshot import MANIFEST, WeightSnapshot, read_snapshot
from lightning_rlhf.weights import ShmCheckpointEngine  # noqa: F401 (registers the engines)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

PROMPT = [5 + i % 50 for i in range(70)]  # more than two blocks of the prefix cache
NUM_TOKENS = 16


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """vLLM is imported once; every engine is built in a fork of this process."""
    with fenced_process():
        import_vllm()


def named_tensors(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    return list(model.state_dict().items())


def difference(model: PreTrainedModel, ids: Sequence[int], log_probs: Sequence[float]) -> float:
    expected = naive_log_probs(model, [*PROMPT, *ids])[len(PROMPT) :]
    assert len(expected) == NUM_TOKENS
    return max(abs(a - b) for a, b in zip(log_probs, expected, strict=True))


def engine_arguments(path: Path) -> dict[str, Any]:
    return {
        "model": str(path),
        "dtype": "float32",
        "max_model_len": 128,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 32 << 20,
        "max_num_seqs": 8,
        "block_size": 32,
        "disable_log_stats": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
    }


def sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, logprobs=0, ignore_eos=True, seed=3)


def sampled(output: Any) -> tuple[list[int], list[float]]:
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    return ids, [float(of[token].logprob) for of, token in zip(completion.logprobs, ids, strict=True)]


def in_process(path: Path, pushes: Iterator[dict[str, Any]]) -> Iterator[tuple[list[int], list[float], str]]:
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = LLM(**engine_arguments(path), distributed_executor_backend="uni")
    for number, info in enumerate(pushes):
        llm.start_weight_update()
        llm.update_weights({"update_info": info})
        llm.finish_weight_update(f"v{number}")
        llm.reset_prefix_cache()
        ids, log_probs = sampled(llm.generate([{"prompt_token_ids": PROMPT}], sampling(), use_tqdm=False)[0])
        yield ids, log_probs, llm.get_weight_version()


def in_own_processes(
    path: Path, pushes: Iterator[dict[str, Any]], **layout: int
) -> Iterator[tuple[list[int], list[float], str]]:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine.async_llm import AsyncLLM

    check = CpuPlatform.check_and_update_config.__func__

    def by_fork(cls: type, config: Any) -> None:
        check(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # or every process imports vLLM for itself

    CpuPlatform.check_and_update_config = classmethod(by_fork)
    os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="fork", VLLM_CPU_OMP_THREADS_BIND="nobind")
    loop = asyncio.new_event_loop()

    async def build() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(path), **layout))

    async def after(number: int, info: dict[str, Any]) -> list[tuple[list[int], list[float], str]]:
        await engine.pause_generation(mode="keep", clear_cache=True)
        await engine.start_weight_update()
        await engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        await engine.finish_weight_update(f"v{number}")
        await engine.resume_generation()

        async def one(replica: int) -> tuple[list[int], list[float], str]:
            rank = {"data_parallel_rank": replica} if layout.get("data_parallel_size", 1) > 1 else {}
            stream = engine.generate({"prompt_token_ids": PROMPT}, sampling(), f"{number}-{replica}", **rank)
            *_, last = [output async for output in stream]
            return *sampled(last), await engine.get_weight_version()

        return [await one(replica) for replica in range(layout.get("data_parallel_size", 1))]

    engine = loop.run_until_complete(build())
    try:
        for number, info in enumerate(pushes):
            yield from loop.run_until_complete(after(number, info))
    finally:
        engine.shutdown()


def fresh_model(experts: bool, tied: bool) -> PreTrainedModel:
    return (tiny_experts("mixtral") if experts else tiny_model(tied=tied)).eval()


def tp2(path: Path, pushes: Iterator[dict[str, Any]]) -> Iterable[tuple[list[int], list[float], str]]:
    return in_own_processes(path, pushes, tensor_parallel_size=2)


def dp2(path: Path, pushes: Iterator[dict[str, Any]]) -> Iterable[tuple[list[int], list[float], str]]:
    return in_own_processes(path, pushes, data_parallel_size=2)


@pytest.mark.parametrize(
    ("layout", "tied", "replicas", "experts"),
    [
        (in_process, True, 1, False),
        (in_process, False, 1, False),
        (tp2, True, 1, False),
        (dp2, False, 2, False),
        pytest.param(tp2, False, 1, True, marks=pytest.mark.slow),
    ],
)
def test_d04_d05_log_probs_follow_two_pushes(
    tmp_path: Path, layout: Callable[..., Any], tied: bool, replicas: int, experts: bool
) -> None:
    """D05: the prompt is in the prefix cache when the second push comes."""
    if experts:
        path = write_tiny_experts(tmp_path / "model", "mixtral")
    else:
        path = write_tiny_model(tmp_path / "model", tied=tied, seed=7)

    def run() -> list[tuple[float, float, str]]:
        register()
        model, before = fresh_model(experts, tied), fresh_model(experts, tied)

        def pushes() -> Iterator[dict[str, Any]]:
            for seed in range(2):
                before.load_state_dict(model.state_dict())
                perturb(model, seed=seed, scale=0.3)
                snapshot = WeightSnapshot.write(
                    named_tensors(model), parent=tmp_path, version=seed, bucket_bytes=20_000
                )
                yield update_info(SNAPSHOT, folder=str(snapshot.folder))
                snapshot.remove()

        return [
            (difference(model, ids, log_probs), difference(before, ids, log_probs), version)
            for ids, log_probs, version in layout(path, pushes())
        ]

    found = run_distributed(run, 1, init_process_group=False, timeout=120)[0]
    assert [version for _, _, version in found] == [f"v{number}" for number in range(2) for _ in range(replicas)]
    for new, old, _ in found:
        assert new < 1e-5
        assert old > 1e-2, "the weights hardly move: this test shows nothing"


def test_d04_each_tensor_parallel_worker_receives_from_a_checkpoint_engine(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", seed=7)

    def run() -> list[float]:
        register()
        model = tiny_model().eval()
        carrier = CheckpointEngineRegistry.new("shm", bucket_bytes=40_000)
        receivers = ("worker-0", "worker-1")

        def send() -> None:
            carrier.init_process_group(carrier.build_topology(trainer_world_size=1, receiver_ids=receivers))
            carrier.send_weights(iter(named_tensors(model)))

        def pushes() -> Iterator[list[dict[str, Any]]]:
            for seed in range(2):
                perturb(model, seed=seed, scale=0.3)
                carrier.prepare()
                sender = threading.Thread(target=send)
                sender.start()
                yield [update_info(INVITATION, **carrier.invitation(name).to_json()) for name in receivers]
                sender.join()
                carrier.finalize()

        return [difference(model, ids, log_probs) for ids, log_probs, _ in tp2(path, pushes())]  # type: ignore[arg-type]

    found = run_distributed(run, 1, init_process_group=False, timeout=120)[0]
    assert len(found) == 2
    assert max(found) < 1e-5


def test_a_snapshot_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    snapshot = WeightSnapshot.write(named_tensors(model), parent=tmp_path, version=3, bucket_bytes=20_000)
    read = dict(read_snapshot(snapshot.folder))
    assert read.keys() == dict(named_tensors(model)).keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in named_tensors(model))
    file = sorted(snapshot.folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut off"):
        list(read_snapshot(snapshot.folder))
    (snapshot.folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match="written last"):
        list(read_snapshot(snapshot.folder))

    def full() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(4)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        WeightSnapshot.write(full(), parent=tmp_path, version=4)
    assert not list(tmp_path.glob("version-4-*"))
    snapshot.remove()
    assert not list(tmp_path.iterdir())


def entry_points_on_path(tmp_path: Path) -> str:
    """This package's entry points as an installed distribution shows them."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = tmp_path / "site" / "lightning_rlhf_entry_points-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning_rlhf_entry_points\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return str(info.parent)


def http_server(path: Path, tmp_path: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "m", "--dtype", "float32", "--max-model-len", "128"]
    command += ["--enforce-eager", "--kv-cache-memory-bytes", str(32 << 20), "--max-num-seqs", "8"]
    command += ["--block-size", "32", "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
    environment = {
        **os.environ,
        "PYTHONPATH": entry_points_on_path(tmp_path),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return subprocess.Popen(command, env=environment, start_new_session=True)


def one_process(seed: int, folder: Path) -> tuple[WeightSnapshot, dict[str, Tensor]]:
    model = tiny_model(tied=True)
    perturb(model, seed=seed, scale=0.3)
    return WeightSnapshot.write(named_tensors(model), parent=folder, version=seed), dict(named_tensors(model))


def one_process_of_experts(seed: int, folder: Path) -> tuple[WeightSnapshot, dict[str, Tensor]]:
    model = tiny_experts("mixtral")
    perturb(model, seed=seed, scale=0.3)
    return WeightSnapshot.write(named_tensors(model), parent=folder, version=seed), dict(named_tensors(model))


def two_ulysses_ranks(seed: int, folder: Path) -> tuple[WeightSnapshot, dict[str, Tensor]]:
    """Ranks that share each sequence train a step, and the first one writes what both gather."""

    def export() -> tuple[WeightSnapshot | None, dict[str, Tensor]]:
        mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "sp"))
        engine = UlyssesEngine(engine_config(tied=True, seed=seed + 20), device=CPU, mesh=mesh)
        engine.initialize()
        state = train(engine, make_experience(LENGTHS), steps=1)[1]
        leads = dist.get_rank() == 0
        return WeightSnapshot.write(state.items(), parent=folder, version=seed) if leads else None, state

    first, _ = run_distributed(export, 2, timeout=120.0)
    return first  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [one_process, two_ulysses_ranks, one_process_of_experts])
def test_over_vllms_own_http_server_found_by_the_entry_point(
    tmp_path: Path, trainer: Callable[[int, Path], tuple[WeightSnapshot, dict[str, Tensor]]]
) -> None:
    import signal
    import socket

    import requests

    experts = trainer is one_process_of_experts
    if experts:
        path = write_tiny_experts(tmp_path / "model", "mixtral")
    else:
        path = write_tiny_model(tmp_path / "model", tied=True, seed=7)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = http_server(path, tmp_path, port)
    try:
        end = time.monotonic() + 300
        while True:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < end, "the server does not answer"
            try:
                if requests.get(f"{url}/health", timeout=5).ok:
                    break
            except (requests.ConnectionError, requests.Timeout):
                time.sleep(0.2)

        def post(route: str, body: Any = None) -> Any:
            response = requests.post(f"{url}/{route}", json=body, timeout=60)
            response.raise_for_status()
            return response.json()

        model = fresh_model(experts, True)
        for seed in range(2):
            snapshot, state = trainer(seed, tmp_path)
            model.load_state_dict(state, strict=False)
            model.tie_weights()
            post("start_weight_update")
            post("update_weights", {"update_info": update_info(SNAPSHOT, folder=str(snapshot.folder))})
            post("finish_weight_update", {"weight_version": f"v{seed}"})
            requests.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
            body = {"model": "m", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 3}
            choice = post("v1/completions", {**body, "logprobs": 0, "ignore_eos": True, "return_token_ids": True})
            choice = choice["choices"][0]
            assert difference(model, choice["token_ids"], choice["logprobs"]["token_logprobs"]) < 1e-5
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(10)
