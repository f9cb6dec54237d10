"""One version of the weights in files that any process of the machine can read: how a replica gets the current ones.

A snapshot is a folder of safetensors files, each a bucket of whole tensors, with a manifest that is written last. On
tmpfs (``/dev/shm``) writing and reading are memory copies. A replica that starts, or starts again, loads the newest
snapshot without the trainer's ranks having to gather anything for it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from torch import Tensor

MANIFEST = "manifest.json"
BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class WeightSnapshot:
    """A folder with one version of the weights.

    Attributes:
        folder: where it is.
        version: the policy version that it holds.
    """

    folder: Path
    version: int

    @classmethod
    def write(
        cls,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        parent: Path,
        version: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> WeightSnapshot:
        """Drains the tensors into a new folder; at most a bucket of them is held beside it.

        Args:
            named_tensors: Hugging Face names and full tensors.
            parent: an existing folder.
            version: the policy version.
            bucket_bytes: size of a file; a larger tensor has a file of its own.

        Raises:
            OSError: if the files cannot be written, for want of space for instance; what was written is removed.
        """
        folder = Path(mkdtemp(prefix=f"version-{version}-", dir=parent))
        try:
            files = [_write_bucket(folder, index, b) for index, b in enumerate(_buckets(named_tensors, bucket_bytes))]
            manifest = {"version": version, "files": [{"name": f.name, "bytes": f.stat().st_size} for f in files]}
            (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                error.add_note(f"Writing version {version} of the weights below {parent} failed; is there space?")
            raise
        return cls(folder=folder, version=version)

    def remove(self) -> None:
        """Removes the files; who has mapped them keeps what is mapped."""
        shutil.rmtree(self.folder, ignore_errors=True)


def read_snapshot(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a snapshot, one at a time, as views of the mapped files.

    Raises:
        ValueError: if it is not whole.
    """
    from safetensors import safe_open

    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} holds no whole snapshot of weights: {MANIFEST} is missing, which is written last.")
    for entry in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]:
        file = folder / Path(entry["name"]).name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise ValueError(f"{file} is missing or has not {entry['bytes']} bytes: the snapshot was cut off.")
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                yield name, opened.get_tensor(name)


def _buckets(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        # a copy of its own: tied tensors share memory, which safetensors refuses, and a source may reuse its buffer
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += nbytes
    if bucket:
        yield bucket


def _write_bucket(folder: Path, index: int, bucket: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    file = folder / f"bucket-{index:05d}.safetensors"
    save_file(bucket, str(file))
    return file
