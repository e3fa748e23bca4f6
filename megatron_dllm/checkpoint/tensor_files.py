"""Safetensors files written tensor by tensor, and read rectangle by rectangle: memory holds a piece, never a file.

The library writes a file from a dictionary of whole tensors. Here the header, which needs shapes alone, is written first and the tensors
follow as they come, each in as many pieces as the caller likes; a SHA-256 is computed on the way.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
WRITE_BYTES = 32 << 20  # a piece of a tensor that is copied, hashed and written at once
READ_BYTES = 256 << 20  # a piece of a tensor that a stream reads at once


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a file before it is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def size(self) -> torch.Size:
        return torch.Size(self.shape)


@dataclass(frozen=True)
class FileRecord:
    """What a written file must be found to be."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Read a file; OSError where that fails."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


class TensorFileWriter:
    """Writes the tensors of `specs` into a new file, in this order. `add` gives the next elements; `close` returns once they are on the
    disk.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None):
        self.path, self.specs = path, tuple(specs)
        header, place = {}, 0
        if metadata:
            header["__metadata__"] = dict(metadata)
        for spec in self.specs:
            assert spec.name not in header, f"{spec.name} twice in {path}"
            header[spec.name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape),
                                 "data_offsets": [place, place + spec.num_bytes]}
            place += spec.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._digest, self._left, self._expected = hashlib.sha256(), place, iter(self.specs)
        self._num_bytes = 8 + len(text) + place
        self._current, self._missing = None, 0
        self._file = path.open("xb", buffering=0)
        self._put(memoryview(len(text).to_bytes(8, "little") + text))

    def add(self, name: str, piece: Tensor) -> None:
        """The next elements of tensor `name`, on any device, in the dtype of the file."""
        if not piece.numel():
            return
        if self._missing == 0:
            self._current = next(spec for spec in self._expected if spec.num_bytes)
            self._missing = self._current.num_bytes
        spec = self._current
        assert (spec.name, spec.dtype) == (name, piece.dtype), f"{self.path}: {name} {piece.dtype} came, {spec.name} {spec.dtype} was due"
        flat = piece.detach().reshape(-1)
        step = max(WRITE_BYTES // piece.itemsize, 1)
        for start in range(0, flat.numel(), step):
            self._put(memoryview(flat[start:start + step].cpu().contiguous().view(torch.uint8).numpy()))
        self._missing -= flat.numel() * piece.itemsize
        assert self._missing >= 0, f"{self.path}: more elements of {name} than its shape {spec.shape} has"

    def close(self) -> FileRecord:
        """Flush to the disk. Every tensor must have been given whole."""
        left = [spec.name for spec in self._expected if spec.num_bytes]
        assert not self._missing and not left, f"{self.path}: elements of {left or self._current.name} were not given"
        with naming(self.path):
            os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._num_bytes, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def _put(self, data: memoryview) -> None:
        self._digest.update(data)
        with naming(self.path):
            while len(data):
                data = data[self._file.write(data):]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file to an OSError that lacks it, as those of writing and flushing do."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def open_safetensors(file: Path):
    """An open safetensors file; ValueError that names it when it is missing or cut short."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; copy or download it again")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}; copy or download it again") from None


def read_rectangle(file: Path, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
    """A rectangle of a tensor of a file, in the dtype of the file. The file is opened anew each time, since an open one keeps what it has
    read.
    """
    with open_safetensors(file) as opened:
        if not offset:
            return opened.get_tensor(name)
        return opened.get_slice(name)[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]


def read_specs(file: Path) -> list[TensorSpec]:
    """Name, dtype and shape of every tensor of a file, which must be whole."""
    with open_safetensors(file) as opened:
        slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 (not a mapping)
        return [TensorSpec(name, DTYPES[piece.get_dtype()], tuple(piece.get_shape())) for name, piece in slices]


def row_blocks(shape: Sequence[int], itemsize: int, block_bytes: int = READ_BYTES) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, extent) of blocks of rows that make up a tensor in order, each of about `block_bytes` at most (one row at least)."""
    if not shape:
        yield (), ()
        return
    row_bytes = math.prod(shape[1:]) * itemsize
    step = max(block_bytes // max(row_bytes, 1), 1)
    for start in range(0, shape[0], step):
        yield (start,) + (0,) * (len(shape) - 1), (min(step, shape[0] - start), *shape[1:])
