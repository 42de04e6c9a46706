"""What a model is, told from its ``config.json`` and the headers of its weight files, for a list of models. Light: no
torch, no tensor is read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.model_catalog import ModelEntry, Source, State
from engine.models.config_values import read_object
from engine.models.errors import ModelLoadError
from engine.models.families import GGUF, NATIVE, Outline, outline, text_names
from engine.models.footprint import COMPUTED_BYTES, weight_bytes, working_bytes
from engine.models.gguf_header import GgufHeader, read_gguf_header
from engine.models.shards import Shard, find_shards

_COMPUTED_AT_LOAD = re.compile(r"\.rotary_emb\.inv_freq$")
_HEAD = "lm_head.weight"
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")


def describe_folder(folder: Path, source: Source) -> ModelEntry:
    """A folder that holds a model, or what is left of one."""
    given: dict[str, Any] = {
        "model": str(folder),
        "name": folder.name,
        "source": source,
        "path": str(folder),
        "disk_bytes": sum(_size(path) for path in folder.iterdir() if path.is_file()),
        "modified": max((path.stat().st_mtime for path in _weight_files(folder)), default=0.0),
    }
    config: dict[str, Any] = {}
    shards: list[Shard] = []
    problem: ModelLoadError | None = None
    try:
        config = _config(folder)
        shards = find_shards(folder)
        found = outline(config)
    except ModelLoadError as error:
        problem = error
    except OSError as error:
        problem = ModelLoadError(f"{folder} cannot be read: {error.strerror or error}.", "damaged")
    else:
        shapes = _shapes(shards, tied=found.tied, names=_loaded_names(config, found, shards))
        return ModelEntry(state="ready", **given, **_outlined(found, shapes), **_stored(shards))
    if config and not shards:  # what is wrong with the weights counts only where the architecture is none of ours
        try:
            outline(config)
        except ModelLoadError as error:
            problem = error if error.kind == "unsupported" else problem
    state: State = "unsupported" if problem.kind == "unsupported" else "damaged"
    return ModelEntry(
        state=state, reason=problem.message, architecture=_named(config),
        parameters=_parameters(_shapes(shards, tied=False)), **given, **_stored(shards),
    )  # fmt: skip


def describe_gguf(path: Path) -> ModelEntry:
    """A GGUF file. It is written out as safetensors when it is loaded first."""
    given: dict[str, Any] = {
        "model": str(path),
        "name": path.stem,
        "source": "gguf",
        "path": str(path),
        "disk_bytes": _size(path),
        "modified": path.stat().st_mtime,
    }
    try:
        header = read_gguf_header(path)
    except ModelLoadError as error:
        return ModelEntry(state="damaged", reason=error.message, **given)
    shapes = [tensor.shape for tensor in header.tensors.values()]
    types = Counter[str]()
    for tensor in header.tensors.values():
        types[tensor.type] += math.prod(tensor.shape)
    stored = types.most_common(1)[0][0] if types else ""
    named = header.architecture or "an architecture that it does not name"
    if header.architecture not in GGUF:
        return ModelEntry(
            state="unsupported", architecture=named, parameters=_parameters(shapes), dtype=stored, **given,
            reason=f"The GGUF file holds {named}; Batchscope imports {', '.join(GGUF)}.",
        )  # fmt: skip
    if header.num_parts > 1:
        return ModelEntry(
            state="unsupported", architecture=named, dtype=stored, **given,
            reason="The GGUF file is one of several parts; join them with llama-gguf-split --merge.",
        )  # fmt: skip
    reason = f"It is written out as safetensors when it is loaded first, {header.imported_bytes / 1e9:,.1f} GB."
    return ModelEntry(
        state="importable", reason=reason, dtype=stored, **given, **_outlined(_gguf_outline(header), shapes)
    )


def _gguf_outline(header: GgufHeader) -> Outline:
    architecture, hidden, heads = GGUF[header.architecture], header.number("embedding_length"), 1
    heads = max(1, header.number("attention.head_count", 1))
    return Outline(
        architecture=architecture,
        runner="native" if architecture in NATIVE else "transformers",
        num_layers=header.number("block_count"),
        hidden_size=hidden,
        intermediate_size=header.number("feed_forward_length"),
        num_kv_heads=header.number("attention.head_count_kv", heads),
        head_dim=header.number("attention.key_length", hidden // heads),
        max_position=header.number("context_length"),
        tied="output.weight" not in header.tensors,
    )


def _outlined(found: Outline, shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    types = {dtype: size for dtype, size in COMPUTED_BYTES.items() if found.runner == "native" or dtype != "int8"}
    return {
        "architecture": found.architecture,
        "runner": found.runner,
        "parameters": _parameters(shapes),
        "max_position": found.max_position,
        "kv_values": found.kv_values,
        "weight_bytes": {dtype: weight_bytes(shapes, dtype, size) for dtype, size in types.items()},
        "working_bytes": working_bytes(found.hidden_size, found.intermediate_size),
    }


def _stored(shards: list[Shard]) -> dict[str, Any]:
    types = Counter[str]()
    for shard in shards:
        for tensor in shard.tensors.values():
            types[tensor.dtype] += tensor.num_bytes
    most = types.most_common(1)[0][0] if types else ""
    return {"dtype": _TYPES.get(most, most)}


def _loaded_names(config: dict[str, Any], found: Outline, shards: list[Shard]) -> set[str]:
    """Of the tensors in the files: without those of parts (a picture's encoder) that are not run."""
    names = {name for shard in shards for name in shard.tensors}
    return names if found.runner == "native" else set(text_names(config, names).values())


def _shapes(shards: list[Shard], *, tied: bool, names: set[str] | None = None) -> list[tuple[int, ...]]:
    """Of the tensors that are loaded, ``names`` (None: all); a head that is the embedding counts once."""
    return [
        tensor.shape
        for shard in shards
        for name, tensor in shard.tensors.items()
        if not _COMPUTED_AT_LOAD.search(name) and not (tied and name == _HEAD) and (names is None or name in names)
    ]


def _parameters(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if (folder / "adapter_config.json").exists() and not path.exists():
        raise ModelLoadError("It is an adapter (LoRA), not a model; merge it into its model first.", "unsupported")
    try:
        return read_object(path)
    except FileNotFoundError:
        raise ModelLoadError("It has weights but no config.json, which says what they are.", "damaged") from None


def _named(config: dict[str, Any]) -> str:
    listed = config.get("architectures")
    if isinstance(listed, list) and listed:
        return str(listed[0])
    return str(config.get("model_type") or "")


def _weight_files(folder: Path) -> list[Path]:
    return [path for pattern in _WEIGHTS for path in folder.glob(pattern) if path.exists()]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
