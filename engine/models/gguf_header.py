"""The beginning of a GGUF file: what is said of the model and its tensors, read without the rest. Light.

::

    "GGUF"  version  tensors  pairs │ name, type, value …  │ name, dimensions, type, offset …  │ padding, the tensors
    4 bytes   u32      u64     u64  │ the pairs            │ of each tensor                    │

All numbers are little-endian; a string is its length (u64) and UTF-8. Lists of strings or numbers (the vocabulary) are
walked over and kept only where they are asked for.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine.models.errors import ModelLoadError

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value types of GGUF → those of :mod:`struct`."""
_STRING, _LIST = 8, 9
_LONGEST_STRING = 1 << 24
_MOST = 1 << 20
"""Pairs, or tensors: more is no model."""
_LARGEST_NUMBER = 2**31 - 1
_DEEPEST_LIST = 8
_MOST_VALUES = 1 << 48
"""Of a tensor."""
_OTHER_ORDER = (2 << 24, 3 << 24)
"""Versions, read from a file whose numbers are big-endian."""
TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4",
}  # fmt: skip


IMPORTED_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def imported_type(stored: str, quantised: str = "F16") -> str:
    """Type of safetensors that a tensor is written out as; ``quantised``: that of all that are quantised."""
    return stored if stored in IMPORTED_BYTES else quantised


@dataclass(frozen=True, slots=True)
class GgufTensor:
    shape: tuple[int, ...]
    """Rows first, as torch has it."""
    type: str
    number: int
    """Of its type."""
    offset: int
    """Its first byte behind :attr:`GgufHeader.data_begin`."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    fields: dict[str, Any]
    """Numbers and strings by name; of a list only its length, unless lists were asked for."""
    tensors: dict[str, GgufTensor]
    alignment: int
    """Bytes: every tensor begins at a multiple of it."""
    data_begin: int
    """Where the tensors begin in the file."""

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))

    @property
    def imported_bytes(self) -> int:
        """Of the tensors once they are written out."""
        return sum(math.prod(t.shape) * IMPORTED_BYTES[imported_type(t.type)] for t in self.tensors.values())

    @property
    def num_parts(self) -> int:
        """Of the files that the model lies in."""
        parts = self.fields.get("split.count")
        return parts if isinstance(parts, int) else 1

    def number(self, name: str, default: int = 0) -> int:
        """A number of the architecture's own: ``block_count``, ``context_length`` …; ``default`` where it is none."""
        value = self.fields.get(f"{self.architecture}.{name}", default)
        return value if isinstance(value, int) and 0 <= value <= _LARGEST_NUMBER else default


def read_gguf_header(path: Path, lists: bool = False) -> GgufHeader:
    """``lists``: whether they are kept. Raises :class:`ModelLoadError`, ``damaged``, where the file is none, or is cut
    short within its header."""
    try:
        if not path.is_file():  # reading a pipe would wait for ever
            raise ValueError("it is no ordinary file")
        with path.open("rb") as file:
            return _read(file, path, lists)
    except (struct.error, UnicodeDecodeError, ValueError, OSError) as error:
        why = "it ends within its header" if isinstance(error, struct.error) else str(error)
        raise ModelLoadError(f"{path} is no whole GGUF file: {why}; download it again.", "damaged") from error


def _read(file: BinaryIO, path: Path, lists: bool) -> GgufHeader:
    magic, version = file.read(4), _one(file, "I")
    if magic == b"GGUF" and version in _OTHER_ORDER:
        raise ModelLoadError(
            f"{path} was written for a big-endian machine, which Batchscope does not read. Take the ordinary file.",
            "unsupported",
        )
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r} and version {version}")
    num_tensors, num_pairs = _one(file, "Q"), _one(file, "Q")
    if max(num_tensors, num_pairs) > _MOST:
        raise ValueError(f"it names {num_tensors:,} tensors and {num_pairs:,} pairs")
    fields = {}
    for _ in range(num_pairs):
        name = _string(file)
        fields[name] = _value(file, _one(file, "I"), lists, 0)
    tensors = {}
    for _ in range(num_tensors):
        name = _string(file)
        dimensions = _one(file, "I")
        if dimensions > 8:
            raise ValueError(f"{name} has {dimensions:,} dimensions")
        shape = tuple(_one(file, "Q") for _ in range(dimensions))[::-1]
        kind, offset = _one(file, "I"), _one(file, "Q")
        if name in tensors:
            raise ValueError(f"it has two tensors {name}")
        if not shape or not 0 < math.prod(shape) <= _MOST_VALUES:
            raise ValueError(f"{name} has the shape {list(shape)}")
        tensors[name] = GgufTensor(shape, TENSOR_TYPES.get(kind, f"type {kind}"), kind, offset)
    if path.stat().st_size <= file.tell():
        raise ValueError("it ends with its header")
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    return GgufHeader(fields, tensors, alignment, -(-file.tell() // alignment) * alignment)


def _value(file: BinaryIO, kind: int, lists: bool, depth: int) -> Any:
    if kind in _NUMBERS:
        return _one(file, _NUMBERS[kind])
    if kind == _STRING:
        return _string(file)
    if kind != _LIST:
        raise ValueError(f"a value has the type {kind}")
    if depth == _DEEPEST_LIST:
        raise ValueError(f"it has lists within lists, more than {_DEEPEST_LIST} deep")
    inner, length = _one(file, "I"), _one(file, "Q")
    if inner in _NUMBERS:
        size = struct.calcsize("<" + _NUMBERS[inner]) * length
        _refuse_longer(file, size)
        if lists:
            return list(struct.unpack(f"<{length}{_NUMBERS[inner]}", file.read(size)))
        file.seek(size, 1)
        return length
    if lists:
        return [_value(file, inner, lists, depth + 1) for _ in range(length)]
    for _ in range(length):
        if inner == _STRING:
            size = _one(file, "Q")
            _refuse_longer(file, size)
            file.seek(size, 1)
        else:
            _value(file, inner, lists, depth + 1)
    return length


def _refuse_longer(file: BinaryIO, size: int) -> None:
    """Before it is read, or gone over, into a memory that is smaller than what a damaged length asks for."""
    if size > os.fstat(file.fileno()).st_size - file.tell():
        raise ValueError("it ends within its header")


def _string(file: BinaryIO) -> str:
    length = _one(file, "Q")
    if length > _LONGEST_STRING:
        raise ValueError(f"a string has {length:,} bytes")
    data = file.read(length)
    if len(data) < length:
        raise ValueError("it ends within a string")
    return data.decode("utf-8")


def _one(file: BinaryIO, kind: str) -> Any:
    size = struct.calcsize("<" + kind)
    return struct.unpack("<" + kind, file.read(size))[0]
