"""Paged attention against its reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernels.triton.attention_tiles import Family
from kernels.triton.paged_attention import paged_attention
from kernels.triton.reference import paged_attention_reference
from kernels.triton.verification.base import largest_error, make_batch


@contextmanager
def _poisoned_scratch() -> Iterator[None]:
    """Floating-point memory that :func:`torch.empty` gives out holds NaN, as PyTorch promises where only deterministic
    algorithms are allowed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def attention_error(
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    head_dim: int = 64,
    group: int = 3,
    num_kv_heads: int = 2,
    query_lens: list[int],
    seq_lens: list[int],
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    family: Family | None = None,
    device: str = "cpu",
) -> float:
    """Paged attention over a cache in which every slot outside the requests' contexts is NaN, as is the memory that the
    splits of a decode leave their results in. ``kv_dtype``: of the cache; None: ``dtype``."""
    random = torch.Generator().manual_seed(head_dim * 1000 + group)
    batch, num_blocks = make_batch(query_lens, seq_lens, block_size, random, device=device)
    tables = batch.block_tables.cpu()
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    caches = []
    for _ in range(2):
        cache = torch.full(shape, math.nan)
        for request, (query_len, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
            # With a window the engine may have given the blocks behind it away: their content is nobody's.
            first = 0 if window is None else max(0, length - query_len - window + 1)
            live = torch.arange(first, length)
            blocks, offsets = tables[request, live // block_size].long(), live % block_size
            cache[blocks, :, offsets] = torch.randn(len(live), num_kv_heads, head_dim, generator=random)
        caches.append(cache.to(kv_dtype or dtype))
    q = torch.randn(sum(query_lens), num_kv_heads * group, head_dim, generator=random).to(dtype)
    scale = head_dim**-0.5
    expected = paged_attention_reference(
        q, caches[0], caches[1], query_lens, seq_lens, tables, scale=scale, window=window, softcap=softcap
    )
    out = torch.full_like(q, math.nan).to(device)
    with _poisoned_scratch():
        paged_attention(
            q.to(device),
            caches[0].to(device),
            caches[1].to(device),
            batch,
            scale=scale,
            window=window,
            softcap=softcap,
            splits=splits,
            family=family,
            out=out,
        )
    return largest_error(out, expected)
