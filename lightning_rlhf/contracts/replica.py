"""The replica contract: a rollout engine as the manager of the pushes sees it, wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

Verb = Literal["pause", "load", "refresh", "read", "serve", "score", "restore", "retire"]
"""What a push asks of a replica:

- ``pause``: no token is sampled from now on; out of service; room is made for the weights. ``abort`` ends requests.
- ``load``: receive all tensors; ``invitations``, one for each receiver.
- ``refresh``: forget keys and values of older weights.
- ``read``: samples of the replica's own copies of ``names``, as ``{name: {"dtype": ..., "bytes": hexadecimal}}``.
- ``serve``: back in service, with ``version``.
- ``score``: log-probs of ``token_ids``, as ``{"log_probs": [...]}``.
- ``restore``: the push failed: back to the old version if no weight was touched, else out of service.
- ``retire``: out of service.
"""


class Replica(ABC):
    """Calls come in pairs, ``start`` and ``finish``, so that several replicas work at the same time.

    Attributes:
        replica_id: its name.
        receiver_ids: who receives weights for it: itself, or each of its workers.
        weight_version: of the weights that it samples from; None while it is out of service.
    """

    replica_id: str
    receiver_ids: tuple[str, ...]
    weight_version: int | None

    @abstractmethod
    def start(self, verb: Verb, **arguments: Any) -> None:
        """Asks for something; ``arguments`` are JSON values."""

    def weights_may_change(self) -> None:  # noqa: B027 (optional)
        """From now on, until it serves a version again, its weights may be a mixture: ``restore`` restores none.

        For replicas that do not find out by themselves whether a push has touched them.
        """

    @abstractmethod
    def finish(self, *, timeout: float) -> dict[str, Any]:
        """Waits for the answer to the call that was started.

        Raises:
            RuntimeError: if the replica failed, is gone, or is silent for ``timeout`` seconds; names it.
        """
