"""From a checkpoint's ``config.json`` to the :class:`~kernels.spec.DecoderSpec` of the one native decoder.

The families differ in a handful of rules (biases, q/k norm, windows, layers without rotary) and in what a missing key
means; both are Transformers 5's. Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.models.config_values import (
    count,
    damaged,
    head_dim,
    natural,
    num_kv_heads,
    num_layers,
    optional_list,
    positive_number,
    shown,
)
from engine.models.errors import ModelLoadError
from engine.models.families import COMMON_DEFAULTS, NATIVE, Family, refuse_unsupported_features, runner_of
from engine.models.rope import rotary_parameters
from kernels.spec import DecoderSpec

SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(NATIVE)


def spec_from_config(config: Mapping[str, Any], dtype: torch.dtype) -> DecoderSpec:
    """The decoder that a ``config.json`` describes, to be computed in ``dtype``.

    Raises :class:`ModelLoadError`: ``unsupported`` names the architecture or the feature, ``damaged`` the missing or
    impossible number.
    """
    architecture, runner = runner_of(config)
    if runner != "native":
        raise ModelLoadError(f"The architecture {architecture} has no native decoder.", "unsupported")
    family = NATIVE[architecture]
    values = {**COMMON_DEFAULTS, **family.defaults, **config}
    refuse_unsupported_features(architecture, values)
    hidden_size, depth = count(values, "hidden_size"), num_layers(values)
    num_heads, kv_heads = count(values, "num_attention_heads"), num_kv_heads(values)
    head_size = head_dim(values, hidden_size, num_heads)
    rotary = rotary_parameters(values, head_size, values["rope_theta_default"])
    rope_layers = _rope_layers(family, values, depth)
    attention_bias = bool(values.get("attention_bias")) if family.qkv_bias is None else family.qkv_bias
    return DecoderSpec(
        architecture=architecture,
        vocab_size=count(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count(values, "intermediate_size"),
        num_layers=depth,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_size,
        rms_norm_eps=float(positive_number(values, "rms_norm_eps")),
        max_position=rotary.max_position,
        dtype=dtype,
        inv_freq=rotary.inv_freq,
        rope_attention_scaling=rotary.attention_scaling,
        rope_layers=() if all(rope_layers) else rope_layers,
        sliding_window=_windows(family, values, rope_layers),
        attention_bias=attention_bias,
        attention_out_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=family.mlp_bias and bool(values.get("mlp_bias")),
        qk_norm=family.qk_norm,
        tie_embeddings=bool(values["tie_word_embeddings"]),
    )


def expected_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the decoder needs, named as Transformers names them."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = (rows, columns)
        if bias:
            tensors[f"{name}.bias"] = (rows,)

    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        tensors[f"{layer}.input_layernorm.weight"] = (hidden,)
        linear(f"{layer}.self_attn.q_proj", query, hidden, spec.attention_bias)
        linear(f"{layer}.self_attn.k_proj", key_value, hidden, spec.attention_bias)
        linear(f"{layer}.self_attn.v_proj", key_value, hidden, spec.attention_bias)
        if spec.qk_norm:
            tensors[f"{layer}.self_attn.q_norm.weight"] = (spec.head_dim,)
            tensors[f"{layer}.self_attn.k_norm.weight"] = (spec.head_dim,)
        linear(f"{layer}.self_attn.o_proj", hidden, query, spec.attention_out_bias)
        tensors[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, spec.mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, spec.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, spec.mlp_bias)
    tensors["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        tensors["lm_head.weight"] = (spec.vocab_size, hidden)
    return tensors


def _rope_layers(family: Family, values: Mapping[str, Any], depth: int) -> tuple[bool, ...]:
    if family.model_type != "smollm3":
        return (True,) * depth
    given = optional_list(values, "no_rope_layers")
    if given is None:
        interval = count({"no_rope_layer_interval": 4, **values}, "no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(depth))
    if len(given) < depth:
        raise damaged(f"no_rope_layers has {len(given)} entries for {depth} layers")
    return tuple(bool(uses) for uses in given[:depth])


def _windows(family: Family, values: Mapping[str, Any], rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The sliding window of each layer; empty where no layer has one."""
    if family.model_type == "llama":
        return ()
    size = values["sliding_window"]
    if family.model_type != "mistral" and not values.get("use_sliding_window", False):
        size = None
    sliding = _sliding_layers(family, values, rope_layers)
    if len(sliding) != len(rope_layers):
        raise damaged(f"layer_types has {len(sliding)} entries for {len(rope_layers)} layers")
    if size is None:
        if values.get("layer_types") is not None and any(sliding):
            raise damaged("layer_types asks for sliding_attention, but there is no sliding_window in use")
        return ()
    if not any(sliding):
        return ()
    window = count(values, "sliding_window")
    return tuple(window if slides else None for slides in sliding)


def _sliding_layers(family: Family, values: Mapping[str, Any], rope_layers: tuple[bool, ...]) -> list[bool]:
    layer_types = optional_list(values, "layer_types")
    if layer_types is not None:
        for name in layer_types:
            if name not in ("full_attention", "sliding_attention", "attention"):
                raise ModelLoadError(
                    f"This model has layers of the type {shown(name)}, which is not supported.", "unsupported"
                )
        return [name == "sliding_attention" for name in layer_types]
    if family.model_type == "mistral":
        return [True] * len(rope_layers)
    if family.model_type == "smollm3":
        return [not uses_rope for uses_rope in rope_layers]
    first = natural(values, "max_window_layers")
    return [layer >= first for layer in range(len(rope_layers))]
