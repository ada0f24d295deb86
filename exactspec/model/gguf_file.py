"""The GGUF container: header, metadata and tensor table (format version 2 and 3, little endian).

Read here rather than with gguf.GGUFReader, which takes seconds on a large vocabulary because it builds an
array object per string. Dequantisation is the gguf library's.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exactspec.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MOST_NESTED = 8  # arrays in arrays; known keys have none
_UINT64 = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` in torch order (slowest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """One memory-mapped GGUF file. `metadata` values are Python numbers, strings and lists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        if size < 24:
            raise CheckpointError(f"{path}: {size} bytes are too few for a GGUF file")
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self.metadata, self.tensors = self._read_header(size)
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise CheckpointError(
                f"{path}: the GGUF header is damaged or cut off at byte {self._at}: {error}"
            ) from error

    def _read_header(self, size: int) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._data[:4] != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file (it starts with {self._data[:4]!r})")
        version, num_tensors, num_fields = struct.unpack_from("<IQQ", self._data, 4)
        if version not in (2, 3):
            raise CheckpointError(f"{self.path}: GGUF version {version} is not supported, expected 2 or 3")
        self._at = 24
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            metadata[key] = self._value(self._take("I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment: must be an integer >= 1, got {alignment!r:.80}")
        data_start = -(-self._at // alignment) * alignment
        infos = [
            self._tensor_info(name, shape, kind, data_start + offset, size) for name, shape, kind, offset in entries
        ]
        return metadata, {info.name: info for info in infos}

    def _take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        (length,) = _UINT64.unpack_from(self._data, self._at)
        start = self._at + 8
        if start + length > len(self._data):
            raise IndexError(f"a string of {length} bytes runs past the end")
        self._at = start + length
        return self._data[start : self._at].decode("utf-8")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise IndexError(f"unknown metadata type {kind}")
        if depth >= _MOST_NESTED:
            raise IndexError(f"arrays nested more than {_MOST_NESTED} deep")
        element, count = self._take("I"), self._take("Q")
        if element in _SCALARS:
            code = f"<{count}{_SCALARS[element]}"
            values = list(struct.unpack_from(code, self._data, self._at))
            self._at += struct.calcsize(code)
            return values
        return [self._value(element, depth + 1) for _ in range(count)]

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._take("I")
        dims = tuple(self._take("Q") for _ in range(num_dims))
        return name, dims[::-1], self._take("I"), self._take("Q")

    def _tensor_info(self, name: str, shape: tuple[int, ...], kind: int, start: int, size: int) -> TensorInfo:
        import gguf

        try:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} has the unknown GGML type {kind}") from error
        elements = math.prod(shape)  # of Python's integers: nothing wraps around
        if shape and shape[-1] % block:
            raise CheckpointError(f"{self.path}: tensor {name} has rows of {shape[-1]}, expected a multiple of {block}")
        num_bytes = elements // block * block_bytes
        if start + num_bytes > size:
            raise CheckpointError(
                f"{self.path}: tensor {name} {list(shape)} needs bytes {start} to {start + num_bytes}, "
                f"but the file ends at {size} (truncated?)"
            )
        return TensorInfo(name, shape, kind, start, num_bytes)

    def type_name(self, name: str) -> str:
        """F32, Q4_K, ..."""
        import gguf

        return str(gguf.GGMLQuantizationType(self.tensors[name].type_id).name)

    def read(self, name: str) -> Tensor:
        """float32, dequantised. Raises CheckpointError where the gguf library knows no way."""
        import gguf

        info = self.tensors[name]
        kind = gguf.GGMLQuantizationType(info.type_id)
        rows = int(np.prod(info.shape[:-1], dtype=np.int64))
        raw = np.frombuffer(self._data, dtype=np.uint8, count=info.num_bytes, offset=info.start).reshape(rows, -1)
        try:
            values = gguf.quants.dequantize(raw, kind)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.path}: tensor {name}: no dequantisation for type {kind.name}") from error
        array = values if values.flags.writeable else values.copy()  # F32 comes back as a view of the file
        return torch.from_numpy(array).reshape(info.shape)
