"""The families of models that Batchscope runs, and how: one table for the engine and for who lists models without
loading any. Light: no torch.

A native family is computed by our own decoder. A family of ``TRANSFORMERS`` is computed by the Transformers library,
with our paged attention in place of its own. Whatever is in neither is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.models.errors import ModelLoadError

Runner = Literal["native", "transformers"]


@dataclass(frozen=True, slots=True)
class Family:
    """A native family."""

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that ``config.json`` lacks, where they differ from the common ones."""
    qkv_bias: bool | None = None
    """None: as ``attention_bias`` says, and then the output projection has one too."""
    mlp_bias: bool = False
    """Whether ``mlp_bias`` means anything here."""
    qk_norm: bool = False


COMMON_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "rope_theta_default": 10_000.0,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

NATIVE: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", {"max_position_embeddings": 2048}, mlp_bias=True),
    "MistralForCausalLM": Family(
        "mistral", {"max_position_embeddings": 131_072, "num_key_value_heads": 8}, qkv_bias=False
    ),
    "Qwen2ForCausalLM": Family("qwen2", {"num_key_value_heads": 32}, qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", {"num_key_value_heads": 32, "head_dim": 128}, qk_norm=True),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {"num_key_value_heads": 4, "sliding_window": None, "tie_word_embeddings": True, "rope_theta_default": 2e6},
        mlp_bias=True,
    ),
}

TRANSFORMERS: dict[str, str] = {}
"""Architecture → ``model_type``."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""Scalings of rotary positions that the native decoder knows."""

GGUF: dict[str, str] = {"llama": "LlamaForCausalLM"}
"""``general.architecture`` of a GGUF file that can be imported → the architecture it becomes."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What a ``config.json`` says of a model's size."""

    architecture: str
    runner: Runner
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest context in tokens."""
    tied: bool
    """Whether the head is the embedding."""

    @property
    def kv_values(self) -> int:
        """Numbers that the keys and values of one token are, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def outline(config: Mapping[str, Any]) -> Outline:
    """Raises :class:`ModelLoadError`: ``unsupported`` names the architecture or the feature, ``damaged`` the missing or
    impossible number."""
    architecture, runner = runner_of(config)
    if runner == "native":
        values = {**COMMON_DEFAULTS, **NATIVE[architecture].defaults, **config}
        refuse_unsupported_features(architecture, values)
        rotary = rotary_section(values, values["rope_theta_default"])
    else:
        values = {"tie_word_embeddings": True, **config}
        refuse_quantised(values)
        rotary = {}
    hidden_size, num_heads = count(values, "hidden_size"), count(values, "num_attention_heads")
    return Outline(
        architecture=architecture,
        runner=runner,
        num_layers=count(values, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=count(values, "intermediate_size"),
        num_kv_heads=num_kv_heads(values),
        head_dim=head_dim(values, hidden_size, num_heads),
        max_position=longest_context(int(positive_number(values, "max_position_embeddings")), rotary),
        tied=bool(values["tie_word_embeddings"]),
    )


def runner_of(config: Mapping[str, Any]) -> tuple[str, Runner]:
    """The architecture that ``config.json`` names, and what computes it. Raises :class:`ModelLoadError`."""
    listed = config.get("architectures") or ()
    named = [listed] if isinstance(listed, str) else [str(name) for name in listed]
    for name in named:
        if name in NATIVE:
            return name, "native"
        if name in TRANSFORMERS:
            return name, "transformers"
    model_type = config.get("model_type")
    if not named:
        for name, family in NATIVE.items():
            if family.model_type == model_type:
                return name, "native"
        for name, its_type in TRANSFORMERS.items():
            if its_type == model_type:
                return name, "transformers"
    shown = ", ".join(named) or model_type
    if not shown:
        raise damaged("it names no architecture (neither architectures nor model_type)")
    raise ModelLoadError(
        f"The architecture {shown} is not supported. Batchscope runs {', '.join([*NATIVE, *TRANSFORMERS])}.",
        "unsupported",
    )


def refuse_unsupported_features(architecture: str, values: Mapping[str, Any]) -> None:
    """Of a native family. Raises :class:`ModelLoadError`."""
    if values["hidden_act"] not in ("silu", "swish"):
        raise ModelLoadError(
            f"{architecture} with the activation {values['hidden_act']!r} is not supported; only silu is.",
            "unsupported",
        )
    refuse_quantised(values)


def refuse_quantised(values: Mapping[str, Any]) -> None:
    quantisation = values.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "an unnamed method") if isinstance(quantisation, Mapping) else "?"
        raise ModelLoadError(
            f"This checkpoint is quantised ({method}), which is not supported; take the float16 or bfloat16 one.",
            "unsupported",
        )


# Numbers of a config.json --------------------------------------------------------------------------------------------


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
    if size % 2:
        raise damaged(f"the heads have {size} dimensions; rotary positions need an even number")
    return size


def longest_context(named: int, rotary: Mapping[str, Any]) -> int:
    """Tokens that the rotary positions are meant for: YaRN stretches what is ``named`` without it."""
    if rotary.get("rope_type") != "yarn":
        return named
    original, factor = yarn_stretch(rotary, named)
    return max(named, int(original * factor))


def rotary_section(config: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """One flat dict with ``rope_type`` and ``rope_theta``, whichever form the configuration has them in.

    Raises :class:`ModelLoadError`, ``unsupported`` for a scaling that the native decoder does not know (named).
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ModelLoadError(f"config.json: rope_scaling is {scaling!r}; it must be an object.", "damaged")
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
            f"This model's rotary positions are scaled by {rope_type!r}, which Batchscope does not know; it knows "
            f"{', '.join(ROPE_TYPES)}.",
            "unsupported",
        )
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = config.get("rope_theta") or default_theta
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelLoadError(
            f"This model rotates only a part of each head (partial_rotary_factor {partial}), which its family does not "
            "define; Batchscope does not guess.",
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


def count(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise damaged(f"{name} is {value!r}; it must be a whole number above 0")
    return value


def positive_number(parameters: Mapping[str, Any], name: str) -> float:
    """A number of ``config.json``. Raises :class:`ModelLoadError`, ``damaged``, with its name where it is none."""
    value = parameters.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise damaged(f"{name} is {value!r}; it must be a number above 0")
    return value


def damaged(what: str) -> ModelLoadError:
    return ModelLoadError(f"config.json: {what}.", "damaged")
