"""The checkpoint engine through a folder: safetensors files with a manifest, for anything that can read a folder.

Each sync writes ``<folder>/<name>.part`` and renames it when it is whole, so that a reader sees all of a snapshot or
nothing. ``manifest.json`` lists the tensors in their order, each with its file and checksum;
``model.safetensors.index.json`` is what Hugging Face loaders look for. Receivers that have joined are told where the
snapshot is; others call `newest_snapshot` and `read_snapshot`.
"""

from __future__ import annotations

import itertools
import json
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights.bucket_header import BucketError
from lightning_rlhf.weights.channel import Channel
from lightning_rlhf.weights.checksum import checksum_of
from lightning_rlhf.weights.connected import ConnectedCheckpointEngine
from lightning_rlhf.weights.tensor_file import TensorFile

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"


@CheckpointEngineRegistry.register("disk")
class DiskCheckpointEngine(ConnectedCheckpointEngine):
    """Snapshots in a folder that sender and receivers see.

    Args:
        folder: where snapshots lie; made if it is not there.
        keep: snapshots that stay.
        **kwargs: those of `ConnectedCheckpointEngine`; a file holds up to ``bucket_bytes``, and at least one tensor.
    """

    name = "disk"

    def __init__(self, *, folder: str, keep: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest snapshot stays.")
        self.folder = Path(folder).absolute()  # receivers may run elsewhere in the tree
        self.keep = keep
        self._numbers = itertools.count()
        self._session = secrets.token_hex(4)

    @override
    def shared_settings(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "keep": self.keep}

    @override
    def send_body(self, stream: Iterator[tuple[str, Tensor]]) -> dict[str, Any]:
        name = f"snapshot-{next(self._numbers):08d}-{self._session}"
        part = self.folder / f"{name}.part"
        part.mkdir(parents=True)
        try:
            write_snapshot(part, stream, file_bytes=self.bucket_bytes, after_file=self._tell_progress)
            part.rename(self.folder / name)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return {"snapshot": name}

    def _tell_progress(self) -> None:
        self.tell({"type": "file"}, phase="receive")

    @override
    def receive_body(self, channel: Channel) -> Iterator[tuple[str, Tensor]]:
        while (message := self.expect(channel, ("file", "end"), phase="receive"))["type"] == "file":
            pass
        name = str(message["snapshot"])
        if Path(name).name != name:
            raise ValueError(f"The sender named the snapshot {name!r}, which is outside {self.folder}.")
        last_sign = time.monotonic()
        for named_tensor in read_snapshot(self.folder / name):
            yield named_tensor
            if time.monotonic() - last_sign > self.timeout / 4:
                last_sign = time.monotonic()
                channel.send({"type": "ack"}, phase="receive", timeout=self.timeout)

    @override
    def finalize(self) -> None:
        super().finalize()
        if self._hub is not None:
            for old in snapshots(self.folder)[: -self.keep]:
                shutil.rmtree(old)


def write_snapshot(
    directory: Path, stream: Iterator[tuple[str, Tensor]], *, file_bytes: int, after_file: Any = lambda: None
) -> None:
    """Writes tensors in files of about ``file_bytes``, then the manifest; ``after_file`` is called after each file."""
    files: dict[str, str] = {}
    checksums: dict[str, str] = {}
    names = (f"model-{index:05d}.safetensors" for index in itertools.count())
    file: TensorFile | None = None
    try:
        for name, tensor in stream:
            if name in checksums:
                raise ValueError(f"Weight push: {name!r} comes twice.")
            on_host = tensor.detach().cpu().contiguous()
            if file is not None and not (file.num_bytes + tensor.nbytes <= file_bytes and file.takes(name, tensor)):
                file.close()
                file = None
                after_file()
            if file is None:
                current = next(names)
                file = TensorFile(directory / current)
            checksums[name] = checksum_of(on_host)
            file.add(name, on_host)
            files[name] = current
        if file is not None:
            file.close()
            after_file()
    except BaseException:
        if file is not None:
            file.discard()
        raise
    tensors = [{"name": name, "file": files[name], "checksum": checksum} for name, checksum in checksums.items()]
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
    (directory / MANIFEST).write_text(json.dumps({"format": 1, "tensors": tensors}), encoding="utf-8")


def read_snapshot(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a snapshot in their order.

    Raises:
        BucketError: if a tensor is not what was written.
    """
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    for file, entries in itertools.groupby(manifest["tensors"], key=lambda entry: str(entry["file"])):
        if Path(file).name != file:
            raise BucketError(f"{directory / MANIFEST} names a file outside its folder: {file}.")
        with safe_open(directory / file, framework="pt") as content:
            for entry in entries:
                tensor = content.get_tensor(entry["name"])
                if checksum_of(tensor) != entry["checksum"]:
                    raise BucketError(f"{entry['name']} in {directory / file} is corrupted: its checksum differs.")
                yield entry["name"], tensor


def snapshots(folder: Path) -> list[Path]:
    """The complete snapshots in a folder, oldest first."""
    found = [path for path in folder.glob("snapshot-*") if path.suffix != ".part" and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: (path / MANIFEST).stat().st_mtime_ns)


def newest_snapshot(folder: Path) -> Path:
    """The newest complete snapshot.

    Raises:
        FileNotFoundError: if there is none.
    """
    found = snapshots(folder)
    if not found:
        raise FileNotFoundError(f"{folder} holds no complete snapshot.")
    return found[-1]
