"""A decoder straight from the definitions, in float64, and the specs and batches with which the CPU backend is compared
to it."""

from __future__ import annotations

import dataclasses
import math

import torch

from engine.models.architecture import expected_tensors
from kernels.cpu.backend import CpuBackend
from kernels.spec import DecoderSpec, StepBatch

Weights = dict[str, torch.Tensor]
Row = tuple[list[int], int, int, list[int]]
"""All token ids, the position of the first new one, how many are new, the block table."""

BASE = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=61,
    hidden_size=48,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position=512,
    dtype=torch.float32,
    inv_freq=1.0 / 100.0 ** (torch.arange(0, 16, 2).float() / 16),
)
SPECS = {
    "plain": BASE,
    "partial-rotary": dataclasses.replace(BASE, inv_freq=1.0 / 100.0 ** (torch.arange(0, 8, 2).float() / 8)),
    "partial-rotary-qk-norm": dataclasses.replace(
        BASE, inv_freq=1.0 / 100.0 ** (torch.arange(0, 12, 2).float() / 12), qk_norm=True
    ),
    "all-biases": dataclasses.replace(BASE, attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "mixed-windows": dataclasses.replace(BASE, sliding_window=(None, 5, 9), rope_layers=(True, False, True)),
    "rope-scaling-factor": dataclasses.replace(BASE, rope_attention_scaling=1.2, tie_embeddings=True),
    "group-5-head-80": dataclasses.replace(
        BASE, num_heads=5, num_kv_heads=1, head_dim=80, inv_freq=1.0 / 100.0 ** (torch.arange(0, 80, 2).float() / 80)
    ),
}

TYPES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, torch.int8),
}
"""What a user may ask for, as the types of a spec."""


def typed(spec: DecoderSpec, name: str) -> DecoderSpec:
    dtype, weight_dtype = TYPES[name]
    return dataclasses.replace(spec, dtype=dtype, weight_dtype=weight_dtype)


def random_weights(spec: DecoderSpec) -> Weights:
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in expected_tensors(spec).items():
        tensor = torch.randn(shape, generator=generator)
        weights[name] = tensor * 0.2 + 1.0 if "norm" in name else tensor * (0.5 if "bias" in name else 0.2)
    return weights


def _as_kept(spec: DecoderSpec, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a checkpoint after rounding to the type in which its weights are kept; only matrices are rounded."""
    kind = spec.weight_dtype or spec.dtype
    if tensor.dim() != 2:
        return tensor.double()
    if kind == torch.int8:
        scale = tensor.abs().amax(dim=1, keepdim=True).double() / 127
        return (tensor.double() / scale).round() * scale
    return tensor.to(kind).double()


def reference_logits(spec: DecoderSpec, weights: Weights, token_ids: list[int]) -> torch.Tensor:
    """float64 [T, vocab], straight from the definitions: no cache, no pages, one head at a time. Weights, keys and
    values are rounded to the types that the spec keeps them in, and nothing else is."""
    w = {name: _as_kept(spec, tensor) for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][token_ids]
    for layer in range(spec.num_layers):
        p = f"model.layers.{layer}."
        x = x + _attention(spec, w, p, layer, _norm(x, w[p + "input_layernorm.weight"], spec.rms_norm_eps))
        h = _norm(x, w[p + "post_attention_layernorm.weight"], spec.rms_norm_eps)
        gate, up = _linear(w, p + "mlp.gate_proj", h), _linear(w, p + "mlp.up_proj", h)
        x = x + _linear(w, p + "mlp.down_proj", gate * gate.sigmoid() * up)
    head = w["model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"]
    return _norm(x, w["model.norm.weight"], spec.rms_norm_eps) @ head.t()


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ w[name + ".weight"].t()
    return y + w[name + ".bias"] if name + ".bias" in w else y


def _rotated(spec: DecoderSpec, head: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + r/2) turned by position · inv_freq[i]; [T, head_dim]."""
    half = spec.rotary_dim // 2
    angles = torch.arange(head.shape[0]).double()[:, None] * spec.inv_freq.double()
    cos, sin = angles.cos() * spec.rope_attention_scaling, angles.sin() * spec.rope_attention_scaling
    a, b, rest = head[:, :half], head[:, half : 2 * half], head[:, 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _attention(spec: DecoderSpec, w: Weights, p: str, layer: int, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (_linear(w, p + f"self_attn.{n}_proj", x).split(spec.head_dim, dim=-1) for n in "qkv")
    position = torch.arange(x.shape[0])
    hidden = position[None] > position[:, None]
    window = spec.layer_window(layer)
    if window is not None:
        hidden |= position[None] <= position[:, None] - window
    outputs = []
    for head in range(spec.num_heads):
        kv = head // (spec.num_heads // spec.num_kv_heads)
        query, key = q[head], k[kv]
        if spec.qk_norm:
            query = _norm(query, w[p + "self_attn.q_norm.weight"], spec.rms_norm_eps)
            key = _norm(key, w[p + "self_attn.k_norm.weight"], spec.rms_norm_eps)
        if spec.layer_uses_rope(layer):
            query, key = _rotated(spec, query), _rotated(spec, key)
        kind = spec.kv_dtype or spec.dtype
        key, value = key.to(kind).double(), v[kv].to(kind).double()
        scores = (query @ key.t() / math.sqrt(spec.head_dim)).masked_fill(hidden, -math.inf)
        outputs.append(scores.softmax(-1) @ value)
    return _linear(w, p + "self_attn.o_proj", torch.cat(outputs, dim=-1))


def make_batch(rows: list[Row], block_size: int) -> StepBatch:
    """The logits of every new token are wanted."""
    tokens, positions, slots = [], [], []
    for ids, start, count, table in rows:
        for position in range(start, start + count):
            tokens.append(ids[position])
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
    counts = [count for _, _, count, _ in rows]
    seq_lens = [start + count for _, start, count, _ in rows]
    widest = max(len(table) for *_, table in rows)
    return StepBatch(
        token_ids=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (widest - len(table)) for *_, table in rows], dtype=torch.int32),
        logits_rows=torch.arange(len(tokens)),
        query_lens_list=counts,
        seq_lens_list=seq_lens,
    )


def loaded(spec: DecoderSpec, weights: Weights, num_blocks: int, block_size: int, threads: int = 1) -> CpuBackend:
    """A backend whose storage holds NaN wherever nothing is written: whatever it must not read shows."""
    backend, before = CpuBackend(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        backend.load(spec, weights)
    finally:
        torch.set_num_threads(before)
    backend.allocate_kv(num_blocks, block_size)
    backend._kv().fill_(math.nan)
    return backend
