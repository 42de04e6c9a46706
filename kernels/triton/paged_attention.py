"""Attention of one step: which kernels of :mod:`kernels.triton.attention_kernels` are launched, and with what."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.spec import StepBatch
from kernels.triton.attention_kernels import combine_splits_kernel, paged_attention_kernel
from kernels.triton.attention_tiles import (
    Family,
    Splits,
    attention_constants,
    attention_tile,
    combine_constants,
    decode_splits,
    processor,
)
from kernels.triton.fp8 import fp8_bias

NO_WINDOW = 2**31 - 1
"""Window of a layer that sees every key."""
_WHOLE = Splits(1, 1)
COMBINE_WARPS = 4
"""Warps of the kernel that combines splits."""


@dataclass(frozen=True, slots=True)
class _Operands:
    """What the launches of one step share."""

    out: torch.Tensor
    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: StepBatch
    table_stride: torch.Tensor
    scale: float
    window: int
    softcap: float | None
    family: Family


def _launch(operands: _Operands, *, one_token: bool, splits: Splits = _WHOLE) -> None:
    """Attention of the requests with one new token, or of those with several."""
    q, batch = operands.q, operands.batch
    num_tokens, num_heads, head_dim = q.shape
    key_cache, value_cache = operands.key_cache, operands.value_cache
    _, num_kv_heads, block_size, _ = key_cache.shape
    requests = batch.num_requests
    tile = attention_tile(
        one_token=one_token,
        dtype=q.dtype,
        kv_dtype=key_cache.dtype,
        head_dim=head_dim,
        group=num_heads // num_kv_heads,
        family=operands.family,
    )
    softcap = operands.softcap
    constants = attention_constants(
        tile,
        one_token=one_token,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        kv_dtype=key_cache.dtype,
        has_softcap=softcap is not None,
    )
    tiles = requests if one_token else num_tokens // constants["QUERIES"] + requests
    # Of each decode, head and split: attention over the split's keys alone, and log2 of the sum of their 2^score.
    scratch = (requests, num_heads, splits.most) if splits.most > 1 else (0,)
    partial = torch.empty((*scratch, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(scratch, dtype=torch.float32, device=q.device)
    log2_e = math.log2(math.e)
    paged_attention_kernel[(tiles, num_kv_heads, splits.most)](
        operands.out,
        partial,
        partial_lse,
        q,
        key_cache.view(torch.uint8) if fp8_bias(key_cache.dtype) else key_cache,
        value_cache.view(torch.uint8) if fp8_bias(value_cache.dtype) else value_cache,
        batch.query_start,
        batch.seq_lens,
        batch.block_tables,
        operands.table_stride,
        requests,
        (operands.scale if softcap is None else 2.0 * operands.scale / softcap) * log2_e,
        0.0 if softcap is None else softcap * log2_e,
        operands.window,
        splits.filling,
        **constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits.most > 1:
        combine_splits_kernel[(requests, num_heads)](
            operands.out,
            partial,
            partial_lse,
            batch.query_start,
            batch.seq_lens,
            operands.window,
            splits.most,
            splits.filling,
            **combine_constants(num_heads=num_heads, head_dim=head_dim),
            num_warps=COMBINE_WARPS,
        )


def _table_stride(batch: StepBatch) -> torch.Tensor:
    if batch.table_stride is not None:
        return batch.table_stride
    tables = batch.block_tables
    return torch.full((1,), tables.stride(0), dtype=torch.int32, device=tables.device)


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: StepBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    family: Family | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each new token to its request's context up to itself, within the window.

    ``q`` [T, heads, head_dim] after rotary; caches [blocks, kv_heads, block_size, head_dim], contiguous, the new keys
    and values already written, of q's type or an 8-bit float, which is taken as it is, without scales. A query at
    position p sees the keys at positions > p - window; scores become softcap · tanh(score / softcap). ``splits``: of
    the decodes' contexts, 1 to MAX_SPLITS; None: as the device and the batch's size suggest. ``family``: whose tiles
    are used; None: the device's. Returns [T, heads, head_dim] (``out`` where given); 0 for a request without a context
    (``seq_lens`` 0 and one token: a padding row).
    Any length, table or batch size runs the same compiled kernels, and only sizes of the batch decide about launches.
    """
    device = processor(q.device)
    operands = _Operands(
        out=torch.empty_like(q) if out is None else out,
        q=q,
        key_cache=key_cache,
        value_cache=value_cache,
        batch=batch,
        table_stride=_table_stride(batch),
        scale=scale,
        window=NO_WINDOW if window is None else window,
        softcap=softcap,
        family=device.family if family is None else family,
    )
    requests = batch.num_requests
    # Every request has at least one new token.
    has_several = batch.num_tokens > requests
    decodes = batch.query_lens_list.count(1) if has_several and batch.query_lens_list else requests
    if decodes:
        if splits is None:
            cut = decode_splits(decodes, key_cache.shape[1], device.multiprocessors)
        else:
            cut = Splits(splits, splits)
        _launch(operands, one_token=True, splits=cut)
    if has_several:
        _launch(operands, one_token=False)
    return operands.out
