"""Safetensors files: read as views of the mapped file, written tensor by tensor, so neither ever holds the whole model.

The format: eight bytes (little-endian length of the header), the header as JSON (name -> dtype, shape, data_offsets), the data.
Source: huggingface.co/docs/safetensors, 'Format'. Tests read our files with the library and theirs with this.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(bool),
}
"""Safetensors' name of each element type."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_LIMIT = 100 << 20


class Tensor(NamedTuple):
    """One tensor in a file, not read yet."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""

    def view(self) -> np.ndarray:
        """The tensor as a view of the mapped file: bytes are read as they are used."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        return (
            np.memmap(self.path, np.uint8, "r", self.start, (math.prod(self.shape) * self.dtype.itemsize,))
            .view(self.dtype)
            .reshape(self.shape)
        )


def index(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, by name.  Raises ValueError for a damaged or cut file, saying where."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise ValueError(f"{path} is not a whole safetensors file: {size} bytes, with a header of {length}. Copy or download it again.")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: its header is not JSON ({error}). Copy or download it again.") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{path}: tensor {name} has element type {entry['dtype']}, which is not implemented. These are: {', '.join(DTYPES)}."
            )
        dtype, shape, (start, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if end - start != math.prod(shape) * dtype.itemsize or start < 0 or 8 + length + end > size:
            raise ValueError(
                f"{path} is damaged or cut: tensor {name} should end at byte {8 + length + end} of {size}. Copy or download it again."
            )
        tensors[name] = Tensor(path, dtype, shape, 8 + length + start)
    return tensors


def write(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], data: Iterable[np.ndarray]) -> None:
    """Writes a file.  tensors: name -> (shape, dtype).  data: their values, one after the other in that order; cast to their dtype."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, dtype) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x, (name, (shape, dtype)) in zip(data, tensors.items(), strict=True):
            assert x.shape == tuple(shape), (name, x.shape, shape)
            file.write(np.ascontiguousarray(x, dtype).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
