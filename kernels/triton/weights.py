"""A decoder's weights on the device: q, k and v in one matrix, gate and up in another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.spec import DecoderSpec
from kernels.triton.kv_write import rotary_table
from kernels.triton.matrix import Matrix, packed


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, packed. ``I`` is the intermediate size; norms and biases are in the model's type."""

    input_norm: torch.Tensor
    """[hidden]"""
    qkv: Matrix
    """[(heads + 2 · kv heads) · head_dim, hidden]"""
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    """[head_dim]"""
    k_norm: torch.Tensor | None
    out: Matrix
    """[hidden, heads · head_dim]"""
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    """[hidden]"""
    gate_up: Matrix
    """[2 · I, hidden]"""
    gate_up_bias: torch.Tensor | None
    down: Matrix
    """[hidden, I]"""
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Matrix
    """[vocab, hidden]"""
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    """[hidden]"""
    head: Matrix
    """[vocab, hidden]; the embedding itself where they are tied."""
    rotary: torch.Tensor
    """float32 [max_position, rotary_dim]: :func:`kernels.triton.kv_write.rotary_table`."""


def pack_decoder(spec: DecoderSpec, weights: Mapping[str, torch.Tensor], device: torch.device) -> DecoderWeights:
    """Copy the checkpoint's tensors to the device, converted and joined; nothing of them stays referenced. Matrices are
    quantised on the device, one after another, where the spec says int8. ValueError for another type of weights."""
    if spec.weight_dtype not in (None, spec.dtype, torch.int8):
        raise ValueError(f"the Triton backend keeps weights in {spec.dtype} or int8, not in {spec.weight_dtype}")

    def get(name: str) -> torch.Tensor:
        return weights[name].to(device=device, dtype=spec.dtype, copy=True).contiguous()

    def matrix(name: str) -> Matrix:
        return packed([weights[name]], device, spec.dtype, spec.weight_dtype)

    embedding = matrix("model.embed_tokens.weight")
    return DecoderWeights(
        embedding=embedding,
        layers=[_pack_layer(spec, weights, layer, device) for layer in range(spec.num_layers)],
        final_norm=get("model.norm.weight"),
        head=embedding if spec.tie_embeddings else matrix("lm_head.weight"),
        rotary=rotary_table(spec.inv_freq, spec.max_position, spec.rope_attention_scaling, device),
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

    def needed(name: str) -> torch.Tensor:
        tensor = joined(name)
        assert tensor is not None
        return tensor

    def matrix(*names: str) -> Matrix:
        parts = [weights[f"{prefix}{name}.weight"] for name in names]
        return packed(parts, device, spec.dtype, spec.weight_dtype)

    q, k, v, gate, up = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"
    return LayerWeights(
        input_norm=needed("input_layernorm.weight"),
        qkv=matrix(q, k, v),
        qkv_bias=joined(f"{q}.bias", f"{k}.bias", f"{v}.bias", present=spec.attention_bias),
        q_norm=joined("self_attn.q_norm.weight", present=spec.qk_norm),
        k_norm=joined("self_attn.k_norm.weight", present=spec.qk_norm),
        out=matrix("self_attn.o_proj"),
        out_bias=joined("self_attn.o_proj.bias", present=spec.attention_out_bias),
        post_norm=needed("post_attention_layernorm.weight"),
        gate_up=matrix(gate, up),
        gate_up_bias=joined(f"{gate}.bias", f"{up}.bias", present=spec.mlp_bias),
        down=matrix("mlp.down_proj"),
        down_bias=joined("mlp.down_proj.bias", present=spec.mlp_bias),
    )
