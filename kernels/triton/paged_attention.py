"""Attention of one ragged step over the paged cache: prefill chunks and decodes in one launch.

One program owns one *tile*: some consecutive new tokens of one request under one key/value head. The query heads that
share this head (the group) are packed into the tile's rows, so that a decode with a group of 4 multiplies 4 rows::

    group 3, 16 rows:   row   0   1   2 | 3   4   5 | ... |12  13  14 | 15
                        query 0   0   0 | 1   1   1 | ... | 4   4   4 |  masked: 16 is no multiple of 3
                        head  0   1   2 | 0   1   2 | ... | 0   1   2 |

A request of n tokens fills ceil(n / queries) tiles. The grid has ``T // queries + S`` of them, an upper bound that
needs only the sizes of the batch: tile t belongs to the last request r with ``query_start[r] // queries + r <= t``, and
what lies behind the request's own tiles ends at once.

Softmax is the online form with base 2 (log2 e folded into the scale), kept in float32. A program walks a range of keys
with :func:`_attend`, whose partial results (sum, maximum, weighted values) are all that a split over several programs
would have to combine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.spec import StepBatch

NO_WINDOW = 2**31 - 1
"""Window of a layer that sees every key."""

# The interpreter keeps bfloat16 as raw 16-bit integers, which must not be multiplied as such.
_WIDEN_OPERANDS = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """How one program is cut: ``rows`` of packed query heads against ``keys`` at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# (one new token per request, bytes per element, padded head dim) -> tile. Static, so that no start waits for a tuner.
# float32 is multiplied without tensor cores (exactly), which costs registers: its tiles are small.
TILES: dict[tuple[bool, int, int], AttentionTile] = {
    (True, 2, 64): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=3),
    (True, 2, 128): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=3),
    (True, 2, 256): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=2),
    (True, 4, 64): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=2),
    (True, 4, 128): AttentionTile(rows=16, keys=16, num_warps=4, num_stages=2),
    (True, 4, 256): AttentionTile(rows=16, keys=16, num_warps=4, num_stages=1),
    (False, 2, 64): AttentionTile(rows=64, keys=32, num_warps=4, num_stages=3),
    (False, 2, 128): AttentionTile(rows=64, keys=32, num_warps=4, num_stages=2),
    (False, 2, 256): AttentionTile(rows=64, keys=32, num_warps=8, num_stages=1),
    (False, 4, 64): AttentionTile(rows=32, keys=32, num_warps=8, num_stages=2),
    (False, 4, 128): AttentionTile(rows=32, keys=16, num_warps=8, num_stages=2),
    (False, 4, 256): AttentionTile(rows=16, keys=16, num_warps=4, num_stages=1),
}


def padded_head_dim(head_dim: int) -> int:
    """The next power of two that a matrix unit takes; the dimensions behind ``head_dim`` are masked."""
    return max(64, triton.next_power_of_2(head_dim))


def attention_tile(*, one_token: bool, dtype: torch.dtype, head_dim: int, group: int) -> AttentionTile:
    """The shipped tile for a step; ``rows`` grows where a group has more heads than the tile has rows.

    Raises ValueError for a head dimension that no tile was made for.
    """
    key = (one_token, dtype.itemsize, padded_head_dim(head_dim))
    if key not in TILES:
        raise ValueError(f"head_dim is {head_dim} with {dtype}; paged attention has tiles up to 256")
    tile = TILES[key]
    rows = max(tile.rows, triton.next_power_of_2(group))
    return AttentionTile(rows, tile.keys, tile.num_warps, tile.num_stages)


def attention_constants(
    tile: AttentionTile, *, one_token: bool, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int
) -> dict[str, int | bool]:
    """The kernel's compile-time values; a model uses two sets of them, with and without ``one_token``."""
    group = num_heads // num_kv_heads
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM_PADDED": padded_head_dim(head_dim),
        "BLOCK_SIZE": block_size,
        "ROWS": tile.rows,
        "QUERIES": tile.rows // group,
        "KEYS": tile.keys,
        "ONE_TOKEN": one_token,
    }


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    if _WIDEN_OPERANDS:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _find_request(
    query_start_ptr: tl.tensor, tile: tl.tensor, num_requests: tl.tensor, QUERIES: tl.constexpr
) -> tl.tensor:
    """The last request whose first tile is at or before ``tile``, by bisection."""
    low = tile * 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_ptr + middle) // QUERIES + middle
        low = tl.where(first_tile <= tile, middle, low)
        high = tl.where(first_tile <= tile, high, middle)
    return low


@triton.jit
def _attend(
    q: tl.tensor,
    positions: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    kv_head: tl.tensor,
    begin_key: tl.tensor,
    end_key: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Rows against the keys [begin_key, end_key): weighted values [ROWS, DIM_PADDED], sum and maximum of each row."""
    dims = tl.arange(0, DIM_PADDED)
    accumulator = tl.zeros([ROWS, DIM_PADDED], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for first_key in tl.range(begin_key, end_key, KEYS):
        keys = first_key + tl.arange(0, KEYS)
        # Slots behind the end were never written and may hold anything: a NaN there times a weight of 0 is a NaN.
        loadable = (keys < end_key)[:, None] & (dims < HEAD_DIM)[None, :]
        # The block id is widened before it is multiplied: offsets pass 2^31 in a large pool.
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end_key, other=0).to(tl.int64)
        slot = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        offsets = slot[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(key_ptr + offsets, mask=loadable, other=0.0)
        v = tl.load(value_ptr + offsets, mask=loadable, other=0.0)

        scores = _dot(q, tl.trans(k)) * scale_log2
        distance = positions[:, None] - keys[None, :]
        scores = tl.where((distance >= 0) & (distance < window), scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen no key yet: -inf - -inf would be NaN, and any finite reference gives weights of 0.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(row_max - reference)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        accumulator = accumulator * decay[:, None] + _dot(weights.to(v.dtype), v)
        row_max = new_max
    return accumulator, row_sum, row_max


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "window"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "tables_ptr"],
)
def paged_attention_kernel(
    out_ptr: tl.tensor,
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    num_requests: tl.tensor,
    table_stride: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tile if ONE_TOKEN else _find_request(query_start_ptr, tile, num_requests, QUERIES)
    first_row = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - first_row
    first_query = tile * 0 if ONE_TOKEN else (tile - first_row // QUERIES - request) * QUERIES
    if first_query >= query_len:
        return

    # A row's position in its request is known from the ends: the new tokens are the context's last.
    before = tl.load(seq_lens_ptr + request) - query_len
    rows = tl.arange(0, ROWS)
    queries = first_query + rows // GROUP
    row_valid = (rows < QUERIES * GROUP) & (queries < query_len)
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, DIM_PADDED)
    offsets = ((first_row + queries).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dims[None, :]
    mask = row_valid[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0)

    end_key = before + tl.minimum(first_query + QUERIES, query_len)
    begin_key = tl.maximum(before + first_query - (window - 1), 0)
    accumulator, row_sum, _ = _attend(
        q,
        before + queries,
        key_ptr,
        value_ptr,
        tables_ptr + request.to(tl.int64) * table_stride,
        kv_head,
        begin_key,
        end_key,
        scale_log2,
        window,
        NUM_KV_HEADS,
        HEAD_DIM,
        DIM_PADDED,
        BLOCK_SIZE,
        ROWS,
        KEYS,
    )
    out = accumulator / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: StepBatch,
    *,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each new token to its request's context up to itself, within the window.

    ``q`` [T, heads, head_dim] after rotary; caches [blocks, kv_heads, block_size, head_dim], contiguous, the new keys
    and values already written. A query at position p sees the keys at positions > p - window. Returns [T, heads,
    head_dim] (``out`` where given). Any length, table or batch size runs the same compiled kernel.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    if out is None:
        out = torch.empty_like(q)
    # Every request has at least one new token, so as many tokens as requests means one each.
    one_token = num_tokens == batch.num_requests
    tile = attention_tile(one_token=one_token, dtype=q.dtype, head_dim=head_dim, group=num_heads // num_kv_heads)
    constants = attention_constants(
        tile,
        one_token=one_token,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
    )
    tiles = batch.num_requests if one_token else num_tokens // constants["QUERIES"] + batch.num_requests
    paged_attention_kernel[(tiles, num_kv_heads)](
        out,
        q,
        key_cache,
        value_cache,
        batch.query_start,
        batch.seq_lens,
        batch.block_tables,
        batch.num_requests,
        batch.block_tables.stride(0),
        scale * math.log2(math.e),
        NO_WINDOW if window is None else window,
        **constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
