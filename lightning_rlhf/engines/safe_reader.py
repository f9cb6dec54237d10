"""Reads torch.distributed.checkpoint folders without running code that a file names, and writes none that would."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Finds the classes that a checkpoint's metadata is made of, and no others."""

    allowed: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
            # the plans of all writers, which megatron-core keeps in its metadata
            *(
                ("torch.distributed.checkpoint.planner", name)
                for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
            ),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
            ("collections", "OrderedDict"),
        }
    )

    def find_class(self, module_name: str, global_name: str) -> Any:
        is_dtype = module_name == "torch" and global_name in _DTYPES
        if not is_dtype and (module_name, global_name) not in self.allowed:
            raise pickle.UnpicklingError(
                f"The checkpoint's metadata asks for {module_name}.{global_name}, which is no part of a checkpoint. "
                f"It was not loaded; take the checkpoint from where it was written."
            )
        return super().find_class(module_name, global_name)


_DTYPES = frozenset(
    {
        "bfloat16",
        "bool",
        "float16",
        "float32",
        "float64",
        "int16",
        "int32",
        "int64",
        "int8",
        "uint8",
    }
)


class SafeFileSystemReader(FileSystemReader):
    """A FileSystemReader whose metadata file can only name a checkpoint's own classes.

    PyTorch unpickles that file without limits; tensors it loads with ``weights_only=True`` already.

    Args:
        path: the checkpoint's folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata.

        Raises:
            pickle.UnpicklingError: if it names anything else.
        """
        found = _MetadataUnpickler(io.BytesIO((self._folder / ".metadata").read_bytes())).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"{self._folder / '.metadata'} holds a {type(found).__name__}, not metadata.")
        if found.storage_meta is None:
            raise pickle.UnpicklingError(f"{self._folder / '.metadata'} does not say how it was stored.")
        found.storage_meta.load_id = self.load_id
        return found


def check_loads(numbers: io.BytesIO) -> None:
    """Refuses to keep numbers that could not be read back: they are loaded with ``weights_only=True``.

    Args:
        numbers: what ``torch.save`` wrote of parameter groups and a learning-rate schedule.

    Raises:
        ValueError: if there is an object among them whose code would have to run.
    """
    numbers.seek(0)
    try:
        torch.load(numbers, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "The learning-rate schedule or a parameter group holds an object that cannot be loaded without running its "
            "code. Use a schedule whose state_dict() is plain numbers (functions, not callable objects, in LambdaLR)."
        ) from error
