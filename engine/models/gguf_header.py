"""The beginning of a GGUF file: what is said of the model and its tensors, read without the rest. Light.

::

    "GGUF"  version  tensors  pairs │ name, type, value …  │ name, dimensions, type, offset …  │ padding, the tensors
    4 bytes   u32      u64     u64  │ the pairs            │ of each tensor                    │

All numbers are little-endian; a string is its length (u64) and UTF-8. Lists of strings or numbers (the vocabulary) are
walked over and kept only where they are asked for.
"""

from __future__ import annotations

import math
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
    data_begin: int
    """Where the tensors begin in the file."""

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))

    @property
    def imported_bytes(self) -> int:
        """Of the tensors once they are written out."""
        return sum(math.prod(t.shape) * IMPORTED_BYTES[imported_type(t.type)] for t in self.tensors.values())

    def number(self, name: str, default: int = 0) -> int:
        """A number of the architecture's own: ``block_count``, ``context_length`` …"""
        value = self.fields.get(f"{self.architecture}.{name}", default)
        return int(value) if isinstance(value, int | float) else default


def read_gguf_header(path: Path, lists: bool = False) -> GgufHeader:
    """``lists``: whether they are kept. Raises :class:`ModelLoadError`, ``damaged``, where the file is none, or is cut
    short within its header."""
    try:
        with path.open("rb") as file:
            return _read(file, path, lists)
    except (struct.error, UnicodeDecodeError, ValueError, OSError) as error:
        raise ModelLoadError(f"{path} is no whole GGUF file: {error}; download it again.", "damaged") from error


def _read(file: BinaryIO, path: Path, lists: bool) -> GgufHeader:
    magic, version = file.read(4), _one(file, "I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r} and version {version}")
    num_tensors, num_pairs = _one(file, "Q"), _one(file, "Q")
    if max(num_tensors, num_pairs) > _MOST:
        raise ValueError(f"it names {num_tensors:,} tensors and {num_pairs:,} pairs")
    fields = {}
    for _ in range(num_pairs):
        name = _string(file)
        fields[name] = _value(file, _one(file, "I"), lists)
    tensors = {}
    for _ in range(num_tensors):
        name = _string(file)
        dimensions = _one(file, "I")
        if dimensions > 8:
            raise ValueError(f"{name} has {dimensions:,} dimensions")
        shape = tuple(_one(file, "Q") for _ in range(dimensions))[::-1]
        kind, offset = _one(file, "I"), _one(file, "Q")
        tensors[name] = GgufTensor(shape, TENSOR_TYPES.get(kind, f"type {kind}"), kind, offset)
    if path.stat().st_size <= file.tell():
        raise ValueError("it ends with its header")
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    return GgufHeader(fields, tensors, -(-file.tell() // alignment) * alignment)


def _value(file: BinaryIO, kind: int, lists: bool) -> Any:
    if kind in _NUMBERS:
        return _one(file, _NUMBERS[kind])
    if kind == _STRING:
        return _string(file)
    if kind != _LIST:
        raise ValueError(f"a value has the type {kind}")
    inner, length = _one(file, "I"), _one(file, "Q")
    if lists:
        if inner in _NUMBERS:
            form = f"<{length}{_NUMBERS[inner]}"
            return list(struct.unpack(form, file.read(struct.calcsize(form))))
        return [_value(file, inner, lists) for _ in range(length)]
    if inner in _NUMBERS:
        file.seek(struct.calcsize("<" + _NUMBERS[inner]) * length, 1)
    else:
        for _ in range(length):
            if inner == _STRING:
                file.seek(_one(file, "Q"), 1)
            else:
                _value(file, inner, lists)
    return length


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
