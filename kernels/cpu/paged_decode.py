"""Attention of decodes in float32: keys and values are read where they lie, block by block, and nothing is gathered.

One pass over the keys of a context, a softmax, one pass over its values, all heads of a token together, since they are
neighbours in the storage (layout in :mod:`kernels.cpu.attention`). The bytes that must move are those of the contexts,
once. Requests are shared out among threads by the lengths of their contexts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch

WORTH_A_THREAD = 256
"""Tokens of context; for fewer, handing over costs more than it saves."""
_SIGNATURE = (
    "void(float32[:,::1], float32[:,::1], int32[:,::1], int64[:,::1], int64, int64, int64, int64, int64, float32,"
    " float32[:,::1], float32[:,::1])"
)
# Sums may be reordered, so that they use vectors; NaN and infinity keep their meaning, for they end a request.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "nsz", "contract", "arcp"},
}


def _attend_rows(  # type: ignore[no-untyped-def]
    qkv, storage, tables, spans, begin, end, block_size, kv_heads, group, scale, scores, out
):
    """Rows ``begin`` … ``end`` - 1 of ``spans`` (int64 [n, 4]: row of qkv and out, request, first visible token, length
    of the context). ``scores`` is scratch, [heads, longest context]."""
    heads = kv_heads * group
    head_dim = out.shape[1] // heads
    kv_size = kv_heads * head_dim
    for index in range(begin, end):
        row, request, first, last = spans[index]
        for token in range(first, last):
            block = tables[request, token // block_size]
            base = (token % block_size) * 2 * kv_size
            for head in range(heads):
                query, key = head * head_dim, base + (head // group) * head_dim
                score = np.float32(0.0)
                for d in range(head_dim):
                    score += qkv[row, query + d] * storage[block, key + d]
                scores[head, token - first] = score * scale
        count = last - first
        for head in range(heads):
            largest = scores[head, 0]
            for i in range(1, count):
                largest = max(largest, scores[head, i])
            total = np.float32(0.0)
            for i in range(count):
                weight = math.exp(scores[head, i] - largest)
                scores[head, i] = weight
                total += weight
            for i in range(count):
                scores[head, i] /= total
            for d in range(head_dim):
                out[row, head * head_dim + d] = 0.0
        for token in range(first, last):
            block = tables[request, token // block_size]
            base = (token % block_size) * 2 * kv_size + kv_size
            for head in range(heads):
                result, value = head * head_dim, base + (head // group) * head_dim
                weight = scores[head, token - first]
                for d in range(head_dim):
                    out[row, result + d] += weight * storage[block, value + d]


@cache
def _compiled() -> Any:
    """Compiled for this CPU, once: kept on disk where there is a place to write to."""
    try:
        return numba.njit(_SIGNATURE, cache=True, **_OPTIONS)(_attend_rows)
    except (RuntimeError, OSError):
        return numba.njit(_SIGNATURE, **_OPTIONS)(_attend_rows)


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="attention")


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The decodes of a step that see the same window."""

    spans: np.ndarray
    """int64 [n, 4]: row among the step's tokens, row of the block tables, first visible token, length of context."""
    shares: list[tuple[int, int]]
    """Rows of ``spans`` for each thread, about as many tokens of context each."""
    longest: int


def plan_decodes(
    row_starts: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int], window: int | None
) -> DecodePlan | None:
    """None where nobody decodes."""
    spans = [
        (row_starts[request], request, 0 if window is None else max(0, seq_len - window), seq_len)
        for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        if query_len == 1
    ]
    if not spans:
        return None
    array = np.array(spans, dtype=np.int64)
    totals = np.cumsum(array[:, 3] - array[:, 2])
    threads = min(torch.get_num_threads(), len(spans), 1 + int(totals[-1]) // WORTH_A_THREAD)
    edges = np.searchsorted(totals, totals[-1] * np.arange(1, threads) / threads).tolist()
    edges = [0, *edges, len(spans)]
    shares = [(begin, end) for begin, end in pairwise(edges) if begin < end]
    return DecodePlan(array, shares, int((array[:, 3] - array[:, 2]).max()))


def attend_decodes(
    qkv: torch.Tensor,
    storage: torch.Tensor,
    tables: np.ndarray,
    plan: DecodePlan,
    block_size: int,
    kv_heads: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Write the rows of ``plan`` to ``out``, float32 [T, heads · head_dim]; ``tables`` is int32 [S, widest]."""
    kv_size = storage.shape[1] // (2 * block_size)
    heads = out.shape[1] * kv_heads // kv_size
    scores = np.empty((len(plan.shares), heads, plan.longest), dtype=np.float32)
    inputs, result, run = (qkv.contiguous().numpy(), storage.numpy(), tables, plan.spans), out.numpy(), _compiled()

    def compute(thread: int) -> None:
        begin, end = plan.shares[thread]
        group = heads // kv_heads
        run(*inputs, begin, end, block_size, kv_heads, group, np.float32(scale), scores[thread], result)

    others = range(1, len(plan.shares))
    pool = _threads(len(others)) if others else None
    running = [pool.submit(compute, thread) for thread in others] if pool is not None else []
    compute(0)
    for future in running:
        future.result()
