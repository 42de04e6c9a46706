"""A decoder's weights as the CPU backend keeps them: fewer and larger matrices than the checkpoint has.

::

    q_proj, k_proj, v_proj   ->  qkv      [(heads + 2 · kv heads) · head_dim, hidden]   one product a layer
    gate_proj, up_proj       ->  gate_up  [2 · intermediate, hidden]                    one product a layer
    input / post norm        ->  folded into the columns of qkv and gate_up: x · w · A = x · (w · A)

The rows of q and k are reordered so that a rotary pair (i, i + r/2) becomes the neighbours (2i, 2i + 1), which makes
the rotation a multiplication of complex numbers. Both sides of the dot product are reordered alike, so attention
scores do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.cpu.linear import PackedLinear
from kernels.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, packed. ``I`` is the intermediate size."""

    qkv: PackedLinear
    qk_norm: torch.Tensor | None
    """float32 [heads + kv heads, head_dim]"""
    out: PackedLinear
    """[hidden, heads · head_dim]"""
    gate_up: PackedLinear
    down: PackedLinear
    """[hidden, I]"""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor
    """[vocab, hidden]"""
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    """float32 [hidden]"""
    head: PackedLinear
    """[vocab, hidden]; packed, a tied head is a second copy of the embedding."""


def rotary_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """int64 [head_dim]: which dimension goes where so that rotary pairs are neighbours; those behind stay in place."""
    paired = torch.arange(rotary_dim).view(2, rotary_dim // 2).t().reshape(-1)
    return torch.cat((paired, torch.arange(rotary_dim, head_dim)))


def pack_decoder(spec: DecoderSpec, weights: Mapping[str, torch.Tensor]) -> DecoderWeights:
    embedding = _own(weights["model.embed_tokens.weight"], spec.dtype)
    # First, while there is room for it twice: the matrix it is packed from is the largest of all.
    head = PackedLinear(embedding if spec.tie_embeddings else _own(weights["lm_head.weight"], spec.dtype))
    return DecoderWeights(
        embedding=embedding,
        layers=[_pack_layer(spec, weights, layer) for layer in range(spec.num_layers)],
        final_norm=_own(weights["model.norm.weight"], torch.float32),
        head=head,
    )


def _pack_layer(spec: DecoderSpec, weights: Mapping[str, torch.Tensor], layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    order = rotary_order(spec.head_dim, spec.rotary_dim)

    def get(name: str) -> torch.Tensor:
        return weights[prefix + name].to(torch.float32)

    def reordered(name: str) -> torch.Tensor:
        """Rows of q or k (a matrix or a bias), each head's in the order of ``rotary_order``."""
        tensor = get(name)
        return tensor.unflatten(0, (-1, spec.head_dim))[:, order].flatten(0, 1)

    def bias(names: tuple[str, ...], present: bool, reorder: tuple[str, ...] = ()) -> torch.Tensor | None:
        if not present:
            return None
        parts = [reordered(n + ".bias") if n in reorder else get(n + ".bias") for n in names]
        return torch.cat(parts).to(spec.dtype)

    q, k, v = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
    qkv = torch.cat((reordered(q + ".weight"), reordered(k + ".weight"), get(v + ".weight")))
    gate_up = torch.cat((get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")))
    qk_norm = None
    if spec.qk_norm:
        q_norm, k_norm = get("self_attn.q_norm.weight")[order], get("self_attn.k_norm.weight")[order]
        qk_norm = torch.cat((q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1)))
    return LayerWeights(
        qkv=PackedLinear(
            qkv.mul_(get("input_layernorm.weight")).to(spec.dtype), bias((q, k, v), spec.attention_bias, (q, k))
        ),
        qk_norm=qk_norm,
        out=PackedLinear(
            _own(weights[prefix + "self_attn.o_proj.weight"], spec.dtype),
            bias(("self_attn.o_proj",), spec.attention_out_bias),
        ),
        gate_up=PackedLinear(
            gate_up.mul_(get("post_attention_layernorm.weight")).to(spec.dtype),
            bias(("mlp.gate_proj", "mlp.up_proj"), spec.mlp_bias),
        ),
        down=PackedLinear(
            _own(weights[prefix + "mlp.down_proj.weight"], spec.dtype), bias(("mlp.down_proj",), spec.mlp_bias)
        ),
    )


def _own(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy in memory of our own: the checkpoint's may be a mapped file that goes away."""
    return tensor.to(dtype=dtype, copy=True).contiguous()
