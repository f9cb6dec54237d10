"""MoonshotAI's parameter server without what is unsafe in it: no pickle, no zmq socket, no default process group.

Only `kimi` imports this module, inside functions: it needs checkpoint-engine.

The package's own are the plan of buckets, the loop that reads them into a double buffer, broadcasts each and lets all
ranks agree on errors, and the peer-to-peer store over Mooncake. None of its modules is changed: the loop runs as a copy
of the function that looks three names up here. What is left out of checkpoint-engine 0.4.2 (file:line),
and what is here for it:

- ps.py:172, a store on all interfaces, ten minutes of waiting, another current device: `KimiServer.__init__`.
- ps.py:437, metadata by ``all_gather_object``, which is pickle: JSON over the control channel, read by the package's
  pydantic models, and given to its ``load_metas``.
- ps.py:516 and 586, the default process group made and destroyed: `Collectives`, over a group of the engine's own.
- ps.py:594 and worker.py:63, a zmq socket in the abstract namespace, read by ``pickle``: `Handover`, in the process.
- ps.py:783, a CUDA IPC handle of the buffer: the buffer itself, which does not leave the process.
- ps.py:866, a full garbage collection in each process for the sake of such handles: none.
- ps.py:604, buckets as large as the free memory allows: buckets of the engine's size, or of its largest tensor's.
- ps.py:774, a new buffer for each update: `KeptMemory`, since to map new memory costs more than to fill it.
- ps.py:525, a barrier that blocks only the first time: receivers say ``taken`` before memory is used again.
- pin_memory.py:323, pinned memory, which needs an accelerator: `Portion`, pinned where there is one.
- device_utils.py:218, a device manager that raises without one: `HostDevice`.
- p2p_store.py:12, an address that others can reach: `LocalP2PStore`, on the address that the engine is given.
- p2p_store.py:80, a read that asks without a pause whether it is done: `mooncake.finish_read`, which pauses.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from queue import Empty, SimpleQueue
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_engine import ps  # noqa: TID253 (this module is imported inside functions)
from checkpoint_engine.data_types import MemoryBuffer, MemoryBufferMetaList  # noqa: TID253
from checkpoint_engine.device_utils import DeviceManager  # noqa: TID253
from checkpoint_engine.p2p_store import P2PStore  # noqa: TID253
from checkpoint_engine.worker import _extract_weights  # noqa: TID253
from loguru import logger
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.weights.mooncake import begin_read, finish_read, import_mooncake

KNOWN_VERSION = "0.4.2"
SENDER_RANK = 0
_NAME = "portion"

if version("checkpoint-engine") != KNOWN_VERSION:
    raise ImportError(
        f"checkpoint-engine {version('checkpoint-engine')} is installed. This is written for what {KNOWN_VERSION} does "
        f"inside: pip install checkpoint-engine=={KNOWN_VERSION}"
    )
if not __debug__:
    raise ImportError("checkpoint-engine reads and registers memory inside assert statements: run without python -O.")
logger.disable("checkpoint_engine")  # several lines for each bucket; what goes wrong is raised as well


class HostDevice:
    """What the loop asks of a device, for the host's memory: there is nothing to wait for, and nothing to hand back."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.device_module = SimpleNamespace(
            synchronize=lambda: None,
            empty_cache=lambda: None,
            ipc_collect=lambda: None,
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
            mem_get_info=lambda: (0, 0),
        )


class LocalP2PStore(P2PStore):  # type: ignore[misc] # the package is taken as Any
    """The package's store, on an address that is given.

    Args:
        host: where Mooncake listens.
        protocol: ``"tcp"`` or ``"rdma"``.
        timeout: of a read, in seconds.
    """

    def __init__(self, *, host: str, protocol: str, timeout: float) -> None:
        self._timeout = timeout
        self.rank = -1  # for its log
        self.device = ""  # Mooncake chooses
        self.ip = host
        self.engine = import_mooncake().TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", protocol, self.device) != 0:
            raise ConnectionError(f"Mooncake did not start on {host} with protocol {protocol!r}.")
        self.port = self.engine.get_rpc_port()
        self.named_tensors: dict[str, Tensor] = {}

    @override
    def batch_transfer_sync_read(
        self, target_hostname: str, buf_ptrs: list[int], remote_ptrs: list[int], lens: list[int]
    ) -> None:
        reads = [
            begin_read(self.engine, target_hostname, own=own, there=there, num_bytes=size)
            for own, there, size in zip(buf_ptrs, remote_ptrs, lens, strict=True)
        ]
        for read in reads:
            finish_read(self.engine, read, session=target_hostname, timeout=self._timeout)


class KeptMemory:
    """Memory for the loop's buffer, which stays from update to update; one update uses it at a time.

    On the host only: a GPU's memory is wanted by others between two updates, and torch keeps it mapped by itself.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def empty(self, size: int, *, dtype: torch.dtype, device: str) -> Tensor:
        """Stands for `torch.empty`: ``[size]`` of memory that has been used before."""
        if device != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        if self._memory.numel() < size or self._memory.dtype != dtype:
            self._memory = torch.empty(0, dtype=dtype)  # let go of the smaller one first
            self._memory = torch.empty(size, dtype=dtype)
        return self._memory[:size]


class Collectives:
    """What the loop knows as ``dist``: its collectives, over a group that is its own.

    Args:
        group: members of it call in the same order; None if this rank is alone.
        first_rank: the package's number of the group's rank 0.
    """

    def __init__(self, group: Any, *, first_rank: int) -> None:
        self._group = group
        self._alone = group is None
        self._first_rank = first_rank
        self._broken = False

    def is_initialized(self) -> bool:
        """The package checks it."""
        return True

    def broadcast(self, tensor: Tensor, src: int, group: None = None) -> None:
        """From the rank ``src``."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src - self._first_rank, 0
        self._wait(lambda: self._group.broadcast([tensor], options))

    def all_reduce(self, tensor: Tensor, op: Any, group: None = None) -> None:
        """In place."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._wait(lambda: self._group.allreduce([tensor], options))

    def barrier(self, group: None = None) -> None:
        """Of the group; the loop ends with one also after an error, which it would hide if the group is broken."""
        if not self._broken:
            self._wait(lambda: self._group.barrier())

    def close(self) -> None:
        """Lets go of the group: a gloo group ends with its last reference, NCCL's is ended."""
        if type(self._group).__name__ == "ProcessGroupNCCL":
            self._group.abort()
        self._group = None

    def _wait(self, start: Callable[[], dist.Work]) -> None:
        if self._alone:
            return
        if self._group is None:
            raise RuntimeError("The group was left.")
        try:
            start().wait()
        except BaseException:
            self._broken = True
            raise


class Handover:
    """Stands where the package has a socket to a worker: buckets go to a consumer on another thread.

    The loop sends the buffer, then what lies in it, bucket after bucket, and None at the end; it asks for an answer
    after each. It goes on with the next bucket, in the other half of the buffer, before it asks.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._events: SimpleQueue[list[tuple[str, Tensor]] | BaseException | None] = SimpleQueue()
        self._answers: SimpleQueue[bytes] = SimpleQueue()

    def send_pyobj(self, item: Any) -> None:
        """The loop's side. Nothing is pickled: the package calls it by this name."""
        if isinstance(item, list):
            self._events.put(_extract_weights(item, self._buffer))
            return
        self._buffer = item if isinstance(item, Tensor) else None
        self._answers.put(b"")

    def recv(self) -> bytes:
        """The loop's side: empty, or why the consumer has failed."""
        return self._answers.get()

    def close(self) -> None:
        """The package calls it."""

    def end(self, error: BaseException | None) -> None:
        """The loop has ended."""
        self._events.put(error)

    def next_event(self, *, timeout: float) -> list[tuple[str, Tensor]] | BaseException | None:
        """The consumer's side: a bucket's tensors; None at the end; the loop's error, or ``Empty`` for now."""
        try:
            return self._events.get(timeout=timeout)
        except Empty as nothing:
            return nothing

    def answer(self, failure: str = "") -> None:
        """The consumer's side: it is done with the bucket, or has failed."""
        self._answers.put(failure.encode())


class Unheard:
    """The sender's handover: it keeps nothing of what it broadcasts."""

    def send_pyobj(self, item: Any) -> None:
        """Nobody is there."""

    def recv(self) -> bytes:
        """Always content."""
        return b""

    def close(self) -> None:
        """Nothing to close."""


class KimiServer(ps.ParameterServer):  # type: ignore[misc] # the package is taken as Any
    """One rank of the package's update, for one portion of the weights.

    Args:
        rank: 0 sends; receivers count from 1.
        device: where the buckets are.
        bucket_bytes: size of a bucket; grows to the largest tensor.
        store: for peer-to-peer reads.
        metas: what the sender holds, and where.
        memory: the sender's portion; None in a receiver.
    """

    def __init__(
        self,
        *,
        rank: int,
        device: torch.device,
        bucket_bytes: int,
        store: P2PStore | None,
        metas: MemoryBufferMetaList,
        memory: Tensor | None = None,
    ) -> None:
        # These are what the methods in use read. The package's constructor is not called: see above.
        self._rank = rank
        self._gpu_count, self._world_size, self._local_rank = 1, 1, 1  # for its log
        self.device_manager = DeviceManager() if device.type == "cuda" else HostDevice()
        self._p2p_store = store
        self._current_shared_memory_pool_user = ""
        self._local_rdma_devices: dict[str, set[int]] = {}
        self.load_metas({SENDER_RANK: metas})
        self._memory_pool: dict[str, list[MemoryBuffer]] = {}
        if memory is not None:
            [only] = metas.memory_buffer_metas_list
            self._memory_pool[_NAME] = [MemoryBuffer(buffer=memory, size=only.size, metas=only.metas)]
        self._device = device
        self._bucket_bytes = bucket_bytes

    def run(
        self, handover: Handover | Unheard, collectives: Collectives, *, memory: KeptMemory, readers: list[int]
    ) -> None:
        """Runs the package's loop: all ranks of the broadcast at the same time, or all readers.

        Args:
            handover: takes the buckets.
            collectives: the loop's.
            memory: for the buckets; nobody else uses it until this has returned.
            readers: ranks that read from the sender by themselves; none for a broadcast from the sender.
        """
        self._handover = handover
        self._local_rdma_devices = {"": set(readers)}
        loop = ps.ParameterServer._update_per_bucket
        no_gc = SimpleNamespace(collect=lambda: 0)
        torch_in_the_loop = SimpleNamespace(
            empty=memory.empty,
            zeros=torch.zeros,
            uint8=torch.uint8,
            int64=torch.int64,
            distributed=torch.distributed,
        )
        mended = {
            **vars(ps),
            "dist": collectives,
            "reduce_tensor": lambda buffer: buffer,
            "gc": no_gc,
            "torch": torch_in_the_loop,
        }
        update = FunctionType(loop.__code__, mended, loop.__name__, loop.__defaults__)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                update(self, _NAME, lambda _: None, None, readers)
        else:
            update(self, _NAME, lambda _: None, None, readers)

    @override
    def _bind_zmq_socket(self) -> tuple[Handover | Unheard, list[tuple[str, str]]]:
        return self._handover, []

    @override
    def _detect_bucket_size(self, ranks_group: Any, *, disable_h2d_buffer: bool = False) -> tuple[int, bool]:
        largest = max(
            meta.aligned_size
            for metas in self._current_global_parameter_metas.values()
            for buffer in metas.memory_buffer_metas_list
            for meta in buffer.metas
        )
        # The second buffer lets owners copy to their devices at the same time; here one rank owns everything.
        return max(self._bucket_bytes, largest), True
