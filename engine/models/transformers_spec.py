"""What the engine must know of a model that the Transformers library computes: plain data, no model code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One place of a model where tokens look at each other."""

    module: str
    """Name of the module in the model."""
    num_kv_heads: int
    key_dim: int
    """Numbers of a key in one head."""
    value_dim: int
    window: int | None
    """A query at position p sees keys at positions > p - window; None: all keys."""

    @property
    def values_per_token(self) -> int:
        """Numbers that the keys and values of one token are."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class TransformersSpec:
    """Made by :func:`engine.models.transformers_model.inspect_model`; the counterpart of
    :class:`kernels.spec.DecoderSpec`."""

    architecture: str
    """The checkpoint's own name for it."""
    config: Mapping[str, Any]
    """``config.json``, or the text part of it, from which the library builds the model."""
    library: str
    """Its name and version: another one may compute other numbers."""
    vocab_size: int
    max_position: int
    """Longest context in tokens."""
    limit_reason: str
    """Why that is shorter than the checkpoint's own; empty where it is not."""
    parameters: int
    """Weights, a tied head counted once."""
    dtype: torch.dtype
    """Of weights, activations, keys and values."""
    layers: tuple[AttentionLayer, ...]

    @property
    def weight_dtype(self) -> None:
        """All weights are kept in ``dtype``."""
        return None

    @property
    def kv_dtype(self) -> None:
        """Keys and values are kept in ``dtype``."""
        return None

    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token occupies over all layers."""
        return sum(layer.values_per_token for layer in self.layers) * self.dtype.itemsize

    def fingerprint(self) -> bytes:
        """Of whatever, beside the weights, changes keys and values."""
        return f"{self.library}|{self.dtype}|{json.dumps(self.config, sort_keys=True)}".encode()


ModelSpec = DecoderSpec | TransformersSpec
