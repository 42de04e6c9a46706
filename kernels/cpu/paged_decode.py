"""Attention of decodes in float32: keys and values are read where they lie, block by block, and nothing is gathered.

One pass over the keys of a context, a softmax, one pass over its values, all heads of a token together, since they are
neighbours in the storage (layout in :mod:`kernels.cpu.attention`). The bytes that must move are those of the contexts,
once. Requests are shared out among threads by the lengths of their contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
# Sums may be reordered, so that they use vectors; NaN and infinity keep their meaning, for they end a request.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "nsz", "contract", "arcp"},
}


def _specialised(kv_heads: int, group: int, head_dim: int) -> Callable[..., None]:
    """The kernel for one shape of heads: with lengths that are constants its loops become vector instructions."""
    heads, kv_size = kv_heads * group, kv_heads * head_dim

    def attend_rows(qkv, storage, tables, spans, begin, end, block_size, scale, scores, out):  # type: ignore[no-untyped-def]
        """Rows ``begin`` … ``end`` - 1 of ``spans``. ``scores`` is scratch, [longest context, heads]."""
        for index in range(begin, end):
            row, request, first, last = spans[index]
            query, result = qkv[row], out[row]
            for token in range(first, last):
                start = (token % block_size) * 2 * kv_size
                keys = storage[tables[request, token // block_size], start : start + kv_size]
                for head in range(heads):
                    score = np.float32(0.0)
                    for d in range(head_dim):
                        score += query[head * head_dim + d] * keys[(head // group) * head_dim + d]
                    scores[token - first, head] = score * scale
            count = last - first
            for head in range(heads):
                largest = scores[0, head]
                for i in range(1, count):
                    largest = max(largest, scores[i, head])
                total = np.float32(0.0)
                for i in range(count):
                    weight = math.exp(scores[i, head] - largest)
                    scores[i, head] = weight
                    total += weight
                for i in range(count):
                    scores[i, head] /= total
            for d in range(heads * head_dim):
                result[d] = 0.0
            for token in range(first, last):
                start = (token % block_size) * 2 * kv_size + kv_size
                values = storage[tables[request, token // block_size], start : start + kv_size]
                for head in range(heads):
                    weight = scores[token - first, head]
                    for d in range(head_dim):
                        result[head * head_dim + d] += weight * values[(head // group) * head_dim + d]

    return attend_rows


@cache
def _compiled(kv_heads: int, group: int, head_dim: int) -> Callable[..., None]:
    """Compiled for this CPU at its first call, and kept on disk where there is a place to write to."""
    kernel = _specialised(kv_heads, group, head_dim)
    try:
        compiled: Callable[..., None] = numba.njit(cache=True, **_OPTIONS)(kernel)
    except (RuntimeError, OSError):
        compiled = numba.njit(**_OPTIONS)(kernel)
    return compiled


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
    head_dim = storage.shape[1] // (2 * block_size * kv_heads)
    heads = out.shape[1] // head_dim
    scores = np.empty((len(plan.shares), plan.longest, heads), dtype=np.float32)
    inputs, result = (qkv.contiguous().numpy(), storage.numpy(), tables, plan.spans), out.numpy()
    run = _compiled(kv_heads, heads // kv_heads, head_dim)

    def compute(thread: int) -> None:
        begin, end = plan.shares[thread]
        run(*inputs, begin, end, block_size, np.float32(scale), scores[thread], result)

    others = range(1, len(plan.shares))
    pool = _threads(len(others)) if others else None
    running = [pool.submit(compute, thread) for thread in others] if pool is not None else []
    compute(0)
    for future in running:
        future.result()
