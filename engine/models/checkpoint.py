"""A model's folder: found, read and checked before a single weight is used.

A folder holds ``config.json`` and its weights as safetensors, one file (``model.safetensors``) or shards with
``model.safetensors.index.json``. Only the headers are read here; a tensor is mapped into memory when the backend asks
for it, and leaves it with the last use of it. Pickles (``*.bin``, ``*.pt``) are never opened.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from engine.config import STARTER_MODEL
from engine.models.architecture import expected_tensors, spec_from_config
from engine.models.config_values import read_object, shown
from engine.models.digest import weights_digest
from engine.models.errors import ModelLoadError, listed
from engine.models.families import runner_of, text_names
from engine.models.hub import find_in_hub_cache, is_repository
from engine.models.shards import Shard, find_shards
from engine.models.starter import Progress as Progress
from engine.models.starter import ensure_starter
from engine.models.transformers_spec import ModelSpec, TransformersSpec
from kernels.spec import DecoderSpec

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_COMPUTED_AT_LOAD = re.compile(r"\.rotary_emb\.inv_freq$")
"""Buffers that old checkpoints carry and every reader computes itself."""
_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def resolve_model(model: str, progress: Progress) -> Path:
    """The folder of a model: ``starter``, a folder, a GGUF file, which is imported first where it was not yet, or
    ``org/name`` in the Hugging Face cache (never the network).

    Raises :class:`ModelLoadError`, ``offline`` where the model is not on this machine.
    """
    if model == STARTER_MODEL:
        return ensure_starter(progress)
    try:
        folder = Path(model).expanduser()
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, a home that nobody has, a place nobody may look into
        why = (error.strerror if isinstance(error, OSError) else None) or str(error).rstrip(".")
        raise ModelLoadError(f"{shown(model)} cannot be opened: {why}.", "other") from error
    if is_folder:
        return folder.resolve()
    if is_file:
        if folder.suffix.lower() == ".gguf":
            from engine.models.gguf_cache import ensure_imported  # tokenizers and more, for this kind of model alone

            return ensure_imported(folder, progress)
        raise ModelLoadError(
            f"{folder} is a file; give the folder that holds config.json and the safetensors weights, or a GGUF file.",
            "unsupported",
        )
    if is_repository(model):
        return find_in_hub_cache(model)
    raise ModelLoadError(f"There is no folder {folder}. Give a folder, org/name, or {STARTER_MODEL!r}.", "other")


class Checkpoint:
    """A checked checkpoint: configuration, and where every tensor lies. Made by :meth:`open`."""

    def __init__(self, folder: Path, config: dict[str, Any], generation_config: dict[str, Any], shards: list[Shard]):
        self.folder = folder
        self.config = config
        self.generation_config = generation_config
        self.shards = shards
        self._shard_of: dict[str, Shard] = {}
        for shard in shards:
            for name in shard.tensors:
                if name in self._shard_of:
                    raise ModelLoadError(
                        f"The tensor {name} is in two files, {self._shard_of[name].path.name} and {shard.path.name}; "
                        "download the model again.",
                        "damaged",
                    )
                if not _COMPUTED_AT_LOAD.search(name):
                    self._shard_of[name] = shard

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the configuration and the headers of all weight files, and check the files' sizes.

        Raises :class:`ModelLoadError`; nothing is loaded then.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelLoadError(f"There is no folder {folder}.", "other")
        config = _read_config(folder)
        runner_of(config)  # first of all: whoever has the wrong model should not first be sent for its missing files
        checkpoint = cls(folder, config, _read_generation_config(folder), find_shards(folder))
        checkpoint.spec(torch.float32)
        _ = checkpoint.eos_token_ids
        return checkpoint

    @functools.cached_property
    def is_native(self) -> bool:
        """Whether our own decoder computes it; else the Transformers library does."""
        return runner_of(self.config)[1] == "native"

    @functools.cached_property
    def _head_is_own(self) -> bool:
        """Whether the file has a head that differs from the embedding: then it counts, whatever the config says."""
        if _HEAD not in self._shard_of or _EMBEDDING not in self._shard_of:
            return False
        if self._shape(_HEAD) != self._shape(_EMBEDDING):
            return True
        tensors = _MappedTensors({name: (self._shard_of[name], name) for name in (_HEAD, _EMBEDDING)})
        return not torch.equal(tensors[_HEAD], tensors[_EMBEDDING])

    def spec(
        self, dtype: torch.dtype, weight_dtype: torch.dtype | None = None, kv_dtype: torch.dtype | None = None
    ) -> ModelSpec:
        """The model to be computed in ``dtype``, its matrices kept in ``weight_dtype``, keys and values in ``kv_dtype``
        (None: the same); a native decoder's head is tied only where config and file agree on it, as in Transformers.
        Raises ValueError for another ``weight_dtype`` or ``kv_dtype`` of a model that is not native."""
        if not self.is_native:
            for kept in (weight_dtype, kv_dtype):
                if kept not in (None, dtype):
                    raise ValueError(f"the Transformers library keeps everything in {dtype}, nothing in {kept}")
            return dataclasses.replace(self._library_spec, dtype=dtype)
        spec = self._native_spec(dtype)
        return dataclasses.replace(spec, weight_dtype=weight_dtype, kv_dtype=kv_dtype)

    @functools.cached_property
    def _library_spec(self) -> TransformersSpec:
        # Only where it is needed: the library takes seconds to import.
        from engine.models.transformers_model import inspect_model

        return inspect_model(self.config, torch.float32)

    def _native_spec(self, dtype: torch.dtype) -> DecoderSpec:
        spec = spec_from_config(self.config, dtype)
        return dataclasses.replace(spec, tie_embeddings=spec.tie_embeddings and not self._head_is_own)

    def tensors(self, spec: ModelSpec) -> Mapping[str, torch.Tensor]:
        """The weights that ``spec`` needs, by name; each is mapped from its file when asked for, in its stored type.

        Raises :class:`ModelLoadError` that names a missing, unexpected or misshapen tensor, or an unsupported type. Of
        what the Transformers library computes these are all weights: it knows itself what it needs.
        """
        if isinstance(spec, TransformersSpec):
            return self._library_tensors()
        expected = expected_tensors(spec)
        source = {name: name for name in expected}
        if spec.tie_embeddings and _EMBEDDING not in self._shard_of and _HEAD in self._shard_of:
            source[_EMBEDDING] = _HEAD
        self._check_names(spec, source)
        for name, shape in expected.items():
            self._check_tensor(source[name], shape)
        return _MappedTensors({name: (self._shard_of[stored], stored) for name, stored in source.items()})

    def _library_tensors(self) -> Mapping[str, torch.Tensor]:
        names = text_names(self.config, self._shard_of)
        for stored in names.values():
            self._check_tensor(stored, self._shape(stored))
        return _MappedTensors({name: (self._shard_of[stored], stored) for name, stored in names.items()})

    def _check_names(self, spec: DecoderSpec, source: Mapping[str, str]) -> None:
        missing = [name for name, stored in source.items() if stored not in self._shard_of]
        if missing == [_HEAD]:
            raise ModelLoadError(
                "The file has no lm_head.weight and config.json does not tie the head to the embedding "
                "(tie_word_embeddings is false); one of the two is wrong.",
                "damaged",
            )
        if missing:
            raise ModelLoadError(f"The checkpoint lacks {listed(missing)}, which {spec.architecture} needs.", "damaged")
        dropped = {_HEAD} if spec.tie_embeddings else set()
        unexpected = sorted(set(self._shard_of) - set(source.values()) - dropped)
        if unexpected:
            raise ModelLoadError(
                f"The checkpoint has {listed(unexpected)}, which {spec.architecture} with this config.json "
                "does not use; the answers would be wrong.",
                "unsupported",
            )

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self._shard_of[name].tensors[name]
        if entry.shape != shape:
            raise ModelLoadError(
                f"The tensor {name} has the shape {list(entry.shape)}; config.json asks for {list(shape)}.", "damaged"
            )
        if entry.dtype not in _FLOAT_TYPES:
            raise ModelLoadError(
                f"The tensor {name} is stored as {entry.dtype}, which is not supported; "
                "float32, float16 and bfloat16 are.",
                "unsupported",
            )
        if entry.num_bytes != math.prod(shape) * _FLOAT_TYPES[entry.dtype].itemsize:
            raise ModelLoadError(
                f"The tensor {name} has {entry.num_bytes:,} bytes, which is not what {list(shape)} numbers of type "
                f"{entry.dtype} take; download the model again.",
                "damaged",
            )

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._shard_of[name].tensors[name].shape

    @functools.cached_property
    def parameters(self) -> int:
        """Weights of the model, a tied head counted once."""
        if not self.is_native:
            return self._library_spec.parameters
        return sum(math.prod(shape) for shape in expected_tensors(self._native_spec(torch.float32)).values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(entry.num_bytes for shard in self.shards for entry in shard.tensors.values())

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of the weights (:func:`engine.models.digest.weights_digest`); read once, then remembered."""
        return weights_digest([shard.path for shard in self.shards])

    @functools.cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer: the union of what generation_config and config name. Raises :class:`ModelLoadError`
        where that is no id."""
        ids: set[int] = set()
        for source, file in ((self.generation_config, "generation_config.json"), (self.config, "config.json")):
            named = source.get("eos_token_id")
            for token_id in named if isinstance(named, list) else [] if named is None else [named]:
                if isinstance(token_id, bool) or not isinstance(token_id, int):
                    raise ModelLoadError(
                        f"{file}: eos_token_id is {shown(named)}; it must be a token's id or a list of them.", "damaged"
                    )
                ids.add(token_id)
        return frozenset(ids)


class _MappedTensors(Mapping[str, torch.Tensor]):
    """Tensors by name; each is a mapping of its own part of a file, so that its pages count only while it is in use."""

    def __init__(self, where: Mapping[str, tuple[Shard, str]]) -> None:
        """``where``: the file of each tensor and its name there."""
        self._where = where

    def __getitem__(self, name: str) -> torch.Tensor:
        shard, stored = self._where[name]
        entry = shard.tensors[stored]
        dtype = _FLOAT_TYPES[entry.dtype]
        before = entry.begin % mmap.ALLOCATIONGRANULARITY
        place = {"length": before + entry.num_bytes, "offset": entry.begin - before}
        try:
            with shard.path.open("rb") as file:
                # Private: a write would not reach the file. torch wants memory that could be written.
                pages = mmap.mmap(file.fileno(), access=mmap.ACCESS_COPY, **place)
        except (ValueError, OSError) as error:
            raise ModelLoadError(f"{shard.path} cannot be read: {error}; download it again.", "damaged") from error
        values = torch.frombuffer(pages, dtype=torch.uint8, offset=before, count=entry.num_bytes)
        if values.data_ptr() % dtype.itemsize:  # a header of odd length
            values = values.clone()
        return values.view(dtype).view(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / "config.json")
    except FileNotFoundError:
        raise ModelLoadError(f"The folder {folder} has no config.json; it is no model's folder.", "damaged") from None


def _read_generation_config(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / "generation_config.json")
    except FileNotFoundError:
        return {}
