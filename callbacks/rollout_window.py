"""Groups under way ahead of the training step that takes them, with a bound on how old their weights may be.

Each training step begins as many groups as it takes. With a bound of ``k`` policy versions the groups of ``k`` steps
are under way beside those that a step takes, and while the step trains, the replicas go on. A step takes groups as they
finish, except that those which would be too old for the next step come first, and are waited for. Groups that are too
old without having been taken (there are some with over-sampling) are ended and begun again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from lightning_rlhf.callbacks.group_buffer import FinishedGroup, GroupBuffer, restore
from lightning_rlhf.types import PromptBatch, RolloutSequence

Prompt = dict[str, Any]
Begin = Callable[[Prompt, int], Future[list[RolloutSequence]]]
LOOK_SECONDS = 1.0


@dataclass(kw_only=True)
class RunningGroup:
    """A group that replicas work on.

    Attributes:
        prompt: whose.
        version: policy version at which it was begun.
        future: its responses.
    """

    prompt: Prompt
    version: int
    future: Future[list[RolloutSequence]]


def prompts_of(batch: PromptBatch, *, rl_step: int) -> list[Prompt]:
    """A batch's prompts one by one.

    The uid gets the step: a prompt that comes again in the next epoch is another group, though both may be under way.
    """
    return [
        {"uid": f"{uid}@{rl_step}", "prompt_token_ids": list(ids), "prompt": text, "metadata": metadata}
        for uid, ids, text, metadata in zip(
            batch.uids, batch.prompt_token_ids, batch.prompts, batch.metadata, strict=True
        )
    ]


def batch_of(prompts: Sequence[Prompt]) -> PromptBatch:
    """The batch of these prompts."""
    return PromptBatch(
        uids=[p["uid"] for p in prompts],
        prompt_token_ids=[p["prompt_token_ids"] for p in prompts],
        prompts=[p["prompt"] for p in prompts],
        metadata=[p["metadata"] for p in prompts],
    )


class RolloutWindow:
    """One rank's groups; none is lost and none is trained on twice.

    Args:
        begin: begins the group of a prompt, given the policy version that it is tagged with.
        capacity: groups that may be under way or wait.
        max_staleness: policy versions between a group's beginning and the step that takes it, at most.

    Attributes:
        restarted: groups that were ended and begun again, because they were too old.
    """

    def __init__(self, begin: Begin, *, capacity: int, max_staleness: int) -> None:
        self._begin = begin
        self.capacity = capacity
        self.max_staleness = max_staleness
        self.restarted = 0
        self._waiting: deque[Prompt] = deque()
        self._running: list[RunningGroup] = []
        self._finished = GroupBuffer(capacity)
        self._arrived: SimpleQueue[Future[list[RolloutSequence]]] = SimpleQueue()

    def __len__(self) -> int:
        """Groups under way, waiting, or finished and not taken."""
        return len(self._waiting) + len(self._running) + len(self._finished)

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Takes prompts in, to be begun."""
        self._waiting.extend(prompts)

    def begin_all(self, *, version: int) -> None:
        """Begins every group that waits."""
        while self._waiting:
            prompt = self._waiting.popleft()
            future = self._begin(prompt, version)
            self._running.append(RunningGroup(prompt=prompt, version=version, future=future))
            future.add_done_callback(self._arrived.put)

    def take(
        self, count: int, *, version: int, versions_per_step: int, on_wait: Callable[[], None] = lambda: None
    ) -> list[FinishedGroup]:
        """Waits for and removes the groups of one training step.

        Args:
            count: groups of the step on this rank.
            version: the policy's now.
            versions_per_step: by how many versions a training step advances the policy.
            on_wait: called about once a second while the step waits.

        Raises:
            RuntimeError: if a group failed, or there are fewer than ``count``.
        """
        if len(self._running) + len(self._finished) < count:
            raise RuntimeError(f"A step takes {count} groups, but only {len(self)} are under way.")
        oldest_next = version + versions_per_step - self.max_staleness
        while True:
            self._collect(0.0)
            ageing = sum(group.version < oldest_next for group in self._running)
            finished_ageing = self._finished.count_older(oldest_next)
            enough = finished_ageing >= min(count, ageing + finished_ageing) and len(self._finished) >= count
            if enough:
                break
            on_wait()
            self._collect(LOOK_SECONDS)
        taken = self._finished.take(count, older_first=oldest_next)
        stale = max(version - group.version for group in taken)
        if stale > self.max_staleness:
            raise RuntimeError(f"A group is {stale} policy versions old, allowed are {self.max_staleness}.")
        self._end_older(oldest_next)
        return taken

    def _collect(self, seconds: float) -> None:
        """Takes in what has finished, in that order; waits for the first for up to ``seconds``."""
        with suppress(Empty):
            while True:
                future = self._arrived.get(timeout=seconds) if seconds else self._arrived.get_nowait()
                seconds = 0.0
                for group in [group for group in self._running if group.future is future]:  # none, if it was ended
                    sequences = future.result()
                    self._running.remove(group)
                    self._finished.put(FinishedGroup(prompt=group.prompt, version=group.version, sequences=sequences))

    def _end_older(self, version: int) -> None:
        """Ends what was begun before ``version``; it waits to be begun again."""
        for group in [group for group in self._running if group.version < version]:
            self._running.remove(group)
            group.future.cancel()
            self._waiting.append(group.prompt)
            self.restarted += 1
        for finished in self._finished.take(self._finished.count_older(version), older_first=version):
            self._waiting.append(finished.prompt)
            self.restarted += 1

    def close(self) -> None:
        """Ends all that is under way."""
        for group in self._running:
            group.future.cancel()
        self._running.clear()

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint holds: finished groups whole, of the others the prompts, in the order to begin them."""
        prompts = [group.prompt for group in self._running] + list(self._waiting)
        return {"prompts": prompts, "finished": [group.to_json() for group in self._finished.in_order()]}

    def load(self, parts: Sequence[Mapping[str, Any]], *, rank: int, num_ranks: int) -> None:
        """Takes this rank's share of what all ranks had; there may have been another number of them."""
        prompts = [prompt for part in parts for prompt in part["prompts"]]
        finished = [group for part in parts for group in part["finished"]]
        # dealt out together, so that each rank has as many groups as the others, whatever their states are
        mine = [*finished, *prompts][rank::num_ranks]
        self._finished = restore(self.capacity, [one for one in mine if "sequences" in one])
        self._waiting = deque(one for one in mine if "sequences" not in one)
