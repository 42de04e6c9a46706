"""A decoder's weights on the device: q, k and v in one matrix, gate and up in another, all in the model's type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, packed. ``I`` is the intermediate size."""

    input_norm: torch.Tensor
    """[hidden]"""
    qkv: torch.Tensor
    """[(heads + 2 · kv heads) · head_dim, hidden]"""
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    """[head_dim]"""
    k_norm: torch.Tensor | None
    out: torch.Tensor
    """[hidden, heads · head_dim]"""
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    """[hidden]"""
    gate_up: torch.Tensor
    """[2 · I, hidden]"""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    """[hidden, I]"""
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor
    """[vocab, hidden]"""
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    """[hidden]"""
    head: torch.Tensor
    """[vocab, hidden]; the embedding itself where they are tied."""
    inv_freq: torch.Tensor
    """float32 [rotary_dim / 2]"""


def pack_decoder(spec: DecoderSpec, weights: Mapping[str, torch.Tensor], device: torch.device) -> DecoderWeights:
    """Copy the checkpoint's tensors to the device, converted and joined; nothing of them stays referenced."""

    def get(name: str) -> torch.Tensor:
        return weights[name].to(device=device, dtype=spec.dtype, copy=True).contiguous()

    embedding = get("model.embed_tokens.weight")
    return DecoderWeights(
        embedding=embedding,
        layers=[_pack_layer(spec, weights, layer, device) for layer in range(spec.num_layers)],
        final_norm=get("model.norm.weight"),
        head=embedding if spec.tie_embeddings else get("lm_head.weight"),
        inv_freq=spec.inv_freq.to(device=device, dtype=torch.float32),
    )


def _pack_layer(
    spec: DecoderSpec, weights: Mapping[str, torch.Tensor], layer: int, device: torch.device
) -> LayerWeights:
    prefix = f"model.layers.{layer}."

    def joined(*names: str, present: bool = True) -> torch.Tensor | None:
        if not present:
            return None
        parts = [weights[prefix + name].to(device=device, dtype=spec.dtype) for name in names]
        return torch.cat(parts)  # copies, also where there is only one part

    def needed(*names: str) -> torch.Tensor:
        tensor = joined(*names)
        assert tensor is not None
        return tensor

    q, k, v, gate, up = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"
    return LayerWeights(
        input_norm=needed("input_layernorm.weight"),
        qkv=needed(f"{q}.weight", f"{k}.weight", f"{v}.weight"),
        qkv_bias=joined(f"{q}.bias", f"{k}.bias", f"{v}.bias", present=spec.attention_bias),
        q_norm=joined("self_attn.q_norm.weight", present=spec.qk_norm),
        k_norm=joined("self_attn.k_norm.weight", present=spec.qk_norm),
        out=needed("self_attn.o_proj.weight"),
        out_bias=joined("self_attn.o_proj.bias", present=spec.attention_out_bias),
        post_norm=needed("post_attention_layernorm.weight"),
        gate_up=needed(f"{gate}.weight", f"{up}.weight"),
        gate_up_bias=joined(f"{gate}.bias", f"{up}.bias", present=spec.mlp_bias),
        down=needed("mlp.down_proj.weight"),
        down_bias=joined("mlp.down_proj.bias", present=spec.mlp_bias),
    )
