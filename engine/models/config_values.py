"""Values of a model's ``config.json``: read, checked, and named where they are impossible. Light: no torch.

Whoever wrote the file may have written anything: every value is looked at before anything is computed with it or made
in its size.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.models.errors import ModelLoadError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""Scalings of rotary positions that the native decoder knows."""

_MOST = 2**31 - 1
"""No size of a model is larger."""
_MOST_LAYERS = 1024
_MOST_HEAD_DIM = 8192
_MOST_CONTEXT = 1 << 25
_MOST_NUMBER = 1e15
_LARGEST_FILE = 64 << 20
"""More bytes are no configuration, nor an index of weights."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def shown(value: Any) -> str:
    """A value as a message has it, its middle left out where it is long."""
    return _short.repr(value)


def parsed(content: bytes) -> Any:
    """JSON in UTF-8. Raises ValueError."""
    try:
        value = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if b"\\u" in content:  # halves of surrogate pairs, which no message could pass on
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises :class:`ModelLoadError`, ``damaged``, and FileNotFoundError."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise ValueError("it is no ordinary file")
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise ValueError(f"it has more than {_LARGEST_FILE >> 20} MB")
        value = parsed(content)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.", "damaged") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object.", "damaged")
    return value


def num_kv_heads(values: Mapping[str, Any]) -> int:
    num_heads = count(values, "num_attention_heads")
    kv_heads = num_heads if values.get("num_key_value_heads") is None else count(values, "num_key_value_heads")
    if num_heads % kv_heads:
        raise damaged(f"num_attention_heads is {num_heads}; it must be a multiple of num_key_value_heads, {kv_heads}")
    return kv_heads


def head_dim(values: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if values.get("head_dim") is None:
        if hidden_size % num_heads:
            raise damaged(f"hidden_size is {hidden_size}; it must be a multiple of num_attention_heads, {num_heads}")
        size = hidden_size // num_heads
    else:
        size = count(values, "head_dim")
    if size > _MOST_HEAD_DIM:
        raise damaged(f"the heads have {size:,} dimensions; more than {_MOST_HEAD_DIM:,} are no model's")
    if size % 2:
        raise damaged(f"the heads have {size} dimensions; rotary positions need an even number")
    return size


def named_context(values: Mapping[str, Any], name: str = "max_position_embeddings") -> int:
    """A length in tokens; some files have it as 4096.0."""
    length = int(positive_number(values, name))
    if not 1 <= length <= _MOST_CONTEXT:
        raise damaged(f"{name} is {shown(values[name])}; it must be between 1 and {_MOST_CONTEXT:,}")
    return length


def longest_context(named: int, rotary: Mapping[str, Any]) -> int:
    """Tokens that the rotary positions are meant for: YaRN stretches what is ``named`` without it."""
    if rotary.get("rope_type") != "yarn":
        return named
    original, factor = yarn_stretch(rotary, named)
    return min(max(named, int(original * factor)), _MOST_CONTEXT)


def rotary_section(config: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """One flat dict with ``rope_type`` and ``rope_theta``, whichever form the configuration has them in.

    Raises :class:`ModelLoadError`, ``unsupported`` for a scaling that the native decoder does not know (named).
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ModelLoadError(f"config.json: rope_scaling is {shown(scaling)}; it must be an object.", "damaged")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelLoadError(
            "This model has other rotary positions in some layers than in others (rope_parameters by layer type), "
            "which Batchscope does not support.",
            "unsupported",
        )
    parameters = dict(scaling)
    rope_type = parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ModelLoadError(
            f"This model's rotary positions are scaled by {shown(rope_type)}, which Batchscope does not know; it knows "
            f"{', '.join(ROPE_TYPES)}.",
            "unsupported",
        )
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = config.get("rope_theta") or default_theta
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelLoadError(
            f"This model rotates only a part of each head (partial_rotary_factor {shown(partial)}), which its family "
            "does not define; Batchscope does not guess.",
            "unsupported",
        )
    if rope_type in ("llama3", "yarn"):
        original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    return parameters


def yarn_stretch(parameters: Mapping[str, Any], max_position: int) -> tuple[float, float]:
    """The length that YaRN starts from, in tokens, and its factor."""
    original = positive_number(parameters, "original_max_position_embeddings")
    given = parameters.get("factor") is not None
    return original, positive_number(parameters, "factor") if given else max_position / original


def count(values: Mapping[str, Any], name: str, most: int = _MOST) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise damaged(f"{name} is {shown(value)}; it must be a whole number above 0")
    if value > most:
        raise damaged(f"{name} is {shown(value)}; more than {most:,} is no model's")
    return value


def num_layers(values: Mapping[str, Any]) -> int:
    return count(values, "num_hidden_layers", _MOST_LAYERS)


def natural(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise damaged(f"{name} is {shown(value)}; it must be a whole number")
    return value


def optional_list(values: Mapping[str, Any], name: str) -> list[Any] | None:
    value = values.get(name)
    if value is not None and not isinstance(value, list):
        raise damaged(f"{name} is {shown(value)}; it must be a list")
    return value


def positive_number(parameters: Mapping[str, Any], name: str) -> float:
    """A number of ``config.json``. Raises :class:`ModelLoadError`, ``damaged``, with its name where it is none."""
    value = parameters.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST_NUMBER:
        raise damaged(f"{name} is {shown(value)}; it must be a number above 0")
    return value


def damaged(what: str) -> ModelLoadError:
    return ModelLoadError(f"config.json: {what}.", "damaged")
