"""What each kernel must compute, in plain float32 torch: loops, no tricks, nothing shared with the kernels.

The ``kernels`` command and the tests measure against these.
"""

from __future__ import annotations

import torch


def paged_attention_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """``q`` [T, heads, head_dim], caches [blocks, kv_heads, block_size, head_dim] → float32 [T, heads, head_dim]."""
    num_heads, head_dim = q.shape[1:]
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    outputs = []
    row = 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        positions = torch.arange(seq_len)
        blocks, offsets = block_tables[request, positions // block_size].long(), positions % block_size
        keys = key_cache[blocks, :, offsets].float()  # [seq_len, kv_heads, head_dim]
        values = value_cache[blocks, :, offsets].float()
        for position in range(seq_len - query_len, seq_len):
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            query = q[row].float().reshape(num_kv_heads, group, head_dim)
            scores = torch.einsum("kgd,skd->kgs", query, keys[seen]) * scale
            out = torch.einsum("kgs,skd->kgd", torch.softmax(scores, dim=-1), values[seen])
            outputs.append(out.reshape(num_heads, head_dim))
            row += 1
    return torch.stack(outputs)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, float32."""
    x = x.float()
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight.float()


def rotary_reference(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``heads`` [T, H, head_dim], ``cos`` and ``sin`` [T, rotary_dim / 2]: pairs (i, i + rotary_dim / 2), float32."""
    heads = heads.float()
    half = cos.shape[1]
    out = heads.clone()
    for i in range(half):
        a, b = heads[:, :, i], heads[:, :, i + half]
        out[:, :, i] = a * cos[:, i, None] - b * sin[:, i, None]
        out[:, :, i + half] = b * cos[:, i, None] + a * sin[:, i, None]
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 · width] → float32 [T, width]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def copy_blocks_reference(kv: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """The copy of ``kv`` [planes, blocks, elements] in which the pairs have been copied one after another."""
    kv = kv.clone()
    for source, destination in pairs:
        kv[:, destination] = kv[:, source]
    return kv
