"""A safetensors file that is written tensor by tensor, straight from where the tensors lie."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from lightning_rlhf.weights.checksum import as_bytes

HEADER_BYTES = 64 << 10
"""Room for the header, which comes first in such a file and is known last; what is over is spaces."""
_LENGTH_BYTES = 8
_LONGEST_NUMBERS = 256  # of an entry: dtype, up to a dozen sizes, two offsets, punctuation
_START: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls the dtypes that its readers know."""


class TensorFile:
    """Eight bytes with the length of the header, the header as JSON, and the tensors one after the other.

    That is the format of https://github.com/huggingface/safetensors, whose ``save_file`` copies every tensor and needs
    all of them at once.

    Args:
        path: of the new file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._file.seek(HEADER_BYTES)
        self._entries = dict(_START)
        self._header_bytes = _LENGTH_BYTES + len(json.dumps(_START))
        self.num_bytes = 0
        """Of the tensors in it."""

    def takes(self, name: str, tensor: Tensor) -> bool:
        """Whether the header has room for one more, and the tensor would begin at a multiple of its element's size."""
        room = HEADER_BYTES - self._header_bytes - len(json.dumps(name)) - _LONGEST_NUMBERS
        return room >= 0 and self.num_bytes % tensor.element_size() == 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor.

        Raises:
            ValueError: if the format has no such dtype, or there is no room (`takes`).
        """
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name}: {tensor.dtype} is not written to files; known: {', '.join(map(str, _NAMES))}.")
        if not self.takes(name, tensor):
            raise ValueError(f"{name}: there is no room for it in this file's header, or it would not be aligned.")
        begin, self.num_bytes = self.num_bytes, self.num_bytes + tensor.nbytes
        entry: dict[str, object] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, self.num_bytes],
        }
        self._entries[name] = entry
        self._header_bytes += len(json.dumps({name: entry}))
        self._file.write(as_bytes(tensor.cpu()).numpy().data)

    def close(self) -> None:
        """Writes the header."""
        header = json.dumps(self._entries).encode().ljust(HEADER_BYTES - _LENGTH_BYTES)
        with self._file as file:
            file.seek(0)
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)

    def discard(self) -> None:
        """Leaves the file without a header."""
        self._file.close()
