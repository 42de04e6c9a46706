"""The weight files of a folder, and the headers of safetensors files.

A safetensors file: 8 bytes, little-endian, length of the header; the header, JSON: name → dtype, shape, [begin, end) in
what follows; the tensors, end to end. So a file cut short is known from its header and its size, before anything is
loaded.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from engine.failures import describe
from engine.models.config_values import parsed, read_object, shown
from engine.models.errors import ModelLoadError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$")
_LONGEST_NAME = 255
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LONGEST_HEADER = 100_000_000
_MOST_DIMENSIONS = 16
_VALUES_IN_A_BYTE = 2
"""Of the smallest type that safetensors has."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str
    """As safetensors names it: F32, BF16 …"""
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    path: Path
    tensors: dict[str, StoredTensor]


def find_shards(folder: Path) -> list[Shard]:
    """All weight files of a folder, each checked to be whole. Raises :class:`ModelLoadError`."""
    if (folder / _SINGLE).exists():
        return [read_shard(folder / _SINGLE)]
    if (folder / _INDEX).exists():
        return _indexed(folder)
    raise _no_weights(folder)


def _indexed(folder: Path) -> list[Shard]:
    index = read_object(folder / _INDEX)
    listed = index.get("weight_map")
    if not isinstance(listed, dict):
        raise ModelLoadError(f"{folder / _INDEX} has no weight_map, which says where each tensor is.", "damaged")
    weight_map = {name: str(file) for name, file in listed.items()}
    files = sorted(set(weight_map.values()))
    if not files:
        raise ModelLoadError(f"{folder / _INDEX} names no files.", "damaged")
    for file in files:
        if Path(file).name != file or not file.isprintable() or len(file) > _LONGEST_NAME:
            raise ModelLoadError(f"{_INDEX} names {shown(file)}, which is not a file of its own folder.", "damaged")
        if not (folder / file).exists():
            raise ModelLoadError(
                f"{_INDEX} names {file}, which is not in {folder}; download the model again.", "damaged"
            )
    shards = [read_shard(folder / file) for file in files]
    held = {shard.path.name: shard.tensors for shard in shards}
    for name, file in weight_map.items():
        if name not in held[file]:
            raise ModelLoadError(f"{_INDEX} says that {name} is in {file}, but it is not.", "damaged")
    return shards


def _no_weights(folder: Path) -> ModelLoadError:
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    for name in others:
        shard = _SHARD.search(name)
        if shard:
            return ModelLoadError(
                f"{folder} has {len(others)} of {int(shard[1])} shards but no {_INDEX}, which says what is in them; "
                "download the model again.",
                "damaged",
            )
    if others:
        return ModelLoadError(f"{folder} has {', '.join(others[:3])}, but no {_SINGLE} and no {_INDEX}.", "damaged")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return ModelLoadError(
            f"{folder} holds its weights as pickles ({', '.join(pickles[:3])}), which can run code when they are "
            "opened; Batchscope reads only safetensors. Take the model in that form, or convert it.",
            "unsupported",
        )
    if any(folder.glob("*.gguf")):
        return ModelLoadError(
            f"{folder} holds GGUF files and no safetensors; give the path of the GGUF file that is meant.",
            "unsupported",
        )
    return ModelLoadError(f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}.", "damaged")


def read_shard(path: Path) -> Shard:
    """The header of one file, checked against the file's size. Raises :class:`ModelLoadError`."""
    try:
        if not path.is_file():  # reading a pipe would wait for ever
            raise ValueError("it is no ordinary file")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ModelLoadError(
                    f"{path} is no whole safetensors file: it has {size:,} bytes and its header should have "
                    f"{length:,}; download it again.",
                    "damaged",
                )
            header = parsed(file.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _entry(value, 8 + length) for name, value in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        why = error if isinstance(error, ValueError) else describe(error)
        raise ModelLoadError(f"{path} is no safetensors file: {why}.", "damaged") from error
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin != end:
            raise ModelLoadError(
                f"{path} contradicts itself: {name} begins at byte {tensor.begin:,} and not where the tensor before it "
                f"ends, at {end:,}; download it again.",
                "damaged",
            )
        end += tensor.num_bytes
    if end != size:
        raise ModelLoadError(
            f"{path} has {size:,} bytes; its header asks for {end:,}. It was cut short or changed; download it again.",
            "damaged",
        )
    return Shard(path, tensors)


def _entry(value: dict[str, object], data_begin: int) -> StoredTensor:
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError(f"a header entry is {shown(value)}")
    begin, end = offsets
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)) or begin > end:
        raise ValueError(f"a header entry has the shape {shown(shape)} and the place {shown(offsets)}")
    if len(shape) > _MOST_DIMENSIONS or math.prod(shape) > (end - begin) * _VALUES_IN_A_BYTE:
        raise ValueError(f"{end - begin:,} bytes cannot hold a tensor of the shape {shown(shape)}")
    return StoredTensor(str(value["dtype"]), tuple(shape), data_begin + begin, end - begin)
