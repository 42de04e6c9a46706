"""Paged attention against its reference."""

from __future__ import annotations

import math

import torch

from kernels.triton.paged_attention import paged_attention
from kernels.triton.reference import paged_attention_reference
from kernels.triton.verification.base import largest_error, make_batch


def attention_error(
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    group: int = 3,
    num_kv_heads: int = 2,
    query_lens: list[int],
    seq_lens: list[int],
    block_size: int = 16,
    window: int | None = None,
    device: str = "cpu",
) -> float:
    """Paged attention over a cache in which every slot outside the requests' contexts is NaN."""
    random = torch.Generator().manual_seed(head_dim * 1000 + group)
    batch, num_blocks = make_batch(query_lens, seq_lens, block_size, random, device=device)
    tables = batch.block_tables.cpu()
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    keys, values = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
    for request, length in enumerate(seq_lens):
        query_len = query_lens[request]
        # With a window the engine may have given the blocks behind it away: their content is nobody's.
        first = 0 if window is None else max(0, length - query_len - window + 1)
        live = torch.arange(first, length)
        blocks, offsets = tables[request, live // block_size].long(), live % block_size
        keys[blocks, :, offsets] = torch.randn(len(live), num_kv_heads, head_dim, generator=random).to(dtype)
        values[blocks, :, offsets] = torch.randn(len(live), num_kv_heads, head_dim, generator=random).to(dtype)
    q = torch.randn(sum(query_lens), num_kv_heads * group, head_dim, generator=random).to(dtype)
    scale = head_dim**-0.5
    expected = paged_attention_reference(q, keys, values, query_lens, seq_lens, tables, scale=scale, window=window)
    out = torch.full_like(q, math.nan).to(device)
    paged_attention(q.to(device), keys.to(device), values.to(device), batch, scale=scale, window=window, out=out)
    return largest_error(out, expected)
