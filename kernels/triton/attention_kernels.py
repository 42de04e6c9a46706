"""Attention of one ragged step over the paged cache: prefill chunks and decodes.

One program owns one *tile*: some consecutive new tokens of one request under one key/value head. The query heads that
share this head (the group) are packed into the tile's rows, so that a decode with a group of 4 multiplies 4 rows::

    group 3, 16 rows:   row   0   1   2 | 3   4   5 | ... |12  13  14 | 15
                        query 0   0   0 | 1   1   1 | ... | 4   4   4 |  masked: 16 is no multiple of 3
                        head  0   1   2 | 0   1   2 | ... | 0   1   2 |

Requests with several new tokens and those with one differ in what suits them, so each kind has its launch, which skips
the other's requests; a step that has one kind only has one launch.

*Several tokens.* A request of n tokens fills ceil(n / queries) tiles. The grid has ``T // queries + S`` of them, an
upper bound that needs only the sizes of the batch: tile t belongs to the last request r with
``query_start[r] // queries + r <= t``, and what lies behind the request's own tiles ends at once.

*One token.* The context is split over the grid's third axis, so that a few long ones fill a GPU. The bounds follow from
the length on the device; programs that are left without keys end at once, and only the others' partial results are
combined, by a second kernel. Where one program has all keys it writes the result itself::

    seq_len 500, 4 splits:   keys  0 ... 127 | 128 ... 255 | 256 ... 383 | 384 ... 499
    seq_len 100, 4 splits:         0 ...  63 |  64 ...  99 |    ends     |    ends
    seq_len  50, 4 splits:         0 ...  49 |    ends     |    ends     |    ends

Softmax is the online form with base 2 (log2 e folded into the scale), kept in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_tiles import EVEN_KEYS, SPLIT_KEYS
from kernels.triton.fp8 import decode_fp8

# The interpreter keeps bfloat16 as raw 16-bit integers, which must not be multiplied as such.
_WIDEN_OPERANDS = tl.constexpr(triton.knobs.runtime.interpret)
_SPLIT_KEYS = tl.constexpr(SPLIT_KEYS)
_EVEN_KEYS = tl.constexpr(EVEN_KEYS)


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
def _first_split(begin_key: tl.tensor) -> tl.tensor:
    """Where the splits of a context begin whose first visible key is ``begin_key``."""
    return begin_key // _SPLIT_KEYS * _SPLIT_KEYS


@triton.jit
def _split_length(keys: tl.tensor, splits: tl.tensor, filling: tl.tensor) -> tl.tensor:
    """Keys of one split of ``keys``, as :class:`kernels.triton.attention_tiles.Splits` says."""
    shared_by = tl.minimum(splits, tl.maximum(filling, keys // _EVEN_KEYS))
    return tl.maximum(tl.cdiv(keys, shared_by * _SPLIT_KEYS), 1) * _SPLIT_KEYS


@triton.jit
def _attend_tile(
    q: tl.tensor,
    positions: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    first_key: tl.tensor,
    begin_key: tl.tensor,
    end_key: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    accumulator: tl.tensor,
    row_sum: tl.tensor,
    row_max: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    FP8_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The tile of keys at ``first_key``, a multiple of KEYS, added to the online softmax. Without MASKED every row sees
    every key of it."""
    in_tile = tl.arange(0, KEYS)
    dims = tl.arange(0, DIM_PADDED)
    keys = first_key + in_tile
    live = (keys >= begin_key) & (keys < end_key)
    # Both are powers of two and tiles begin at multiples of KEYS, so either a tile holds whole blocks or a block tiles.
    if BLOCK_SIZE >= KEYS:
        block = tl.load(table_ptr + first_key // BLOCK_SIZE) + in_tile * 0
        in_block = first_key % BLOCK_SIZE + in_tile
    else:
        blocks = table_ptr + first_key // BLOCK_SIZE + in_tile // BLOCK_SIZE
        block = tl.load(blocks, mask=live, other=0) if MASKED else tl.load(blocks)
        in_block = in_tile % BLOCK_SIZE
    # The block id is widened before it is multiplied: offsets pass 2^31 in a large pool.
    start = block.to(tl.int64) * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM)
    offsets = start[:, None] + (in_block[:, None] * HEAD_DIM + dims[None, :])
    if MASKED:
        # Slots outside the range may hold anything: a NaN there times a weight of 0 is a NaN.
        loadable = live[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(key_ptr + offsets, mask=loadable, other=0)
        v = tl.load(value_ptr + offsets, mask=loadable, other=0)
    elif HEAD_DIM < DIM_PADDED:
        loadable = (dims < HEAD_DIM)[None, :]
        k = tl.load(key_ptr + offsets, mask=loadable, other=0)
        v = tl.load(value_ptr + offsets, mask=loadable, other=0)
    else:
        k = tl.load(key_ptr + offsets)
        v = tl.load(value_ptr + offsets)

    if FP8_BIAS > 0:
        k = decode_fp8(k, FP8_BIAS, q.dtype)
        v = decode_fp8(v, FP8_BIAS, q.dtype)
    scores = _dot(q, tl.trans(k)) * scale
    if HAS_SOFTCAP:
        # tanh(x) = 2 / (1 + e^(-2x)) - 1, where an overflow of the power gives the right limit; `scale` holds the 2,
        # and both factors log2 e. Near 0 the error is that of rounding a score as large as the cap.
        scores = softcap * (2.0 / (1.0 + tl.exp2(-scores)) - 1.0)
    if MASKED:
        distance = positions[:, None] - keys[None, :]
        seen = live[None, :] & (distance >= 0) & (distance < window)
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # A row that has seen no key yet: -inf - -inf would be NaN, and any finite reference gives weights of 0.
    reference = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(row_max - reference)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    accumulator = accumulator * decay[:, None] + _dot(weights.to(v.dtype), v)
    return accumulator, row_sum, new_max


@triton.jit(
    do_not_specialize=["num_requests", "window", "filling"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "tables_ptr", "table_stride_ptr"],
)
def paged_attention_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    table_stride_ptr: tl.tensor,
    num_requests: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    filling: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    FP8_BIAS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tile if ONE_TOKEN else _find_request(query_start_ptr, tile, num_requests, QUERIES)
    first_row = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - first_row
    # Asked for before the branch, behind which it would begin to travel only when the others have arrived.
    seq_len = tl.load(seq_lens_ptr + request)
    first_query = tile * 0 if ONE_TOKEN else (tile - first_row // QUERIES - request) * QUERIES
    is_mine = query_len == 1 if ONE_TOKEN else query_len > 1
    if (first_query >= query_len) | (is_mine == 0):
        return

    # A row's position in its request is known from the ends: the new tokens are the context's last.
    before = seq_len - query_len
    rows = tl.arange(0, ROWS)
    queries = first_query + rows // GROUP
    row_valid = (rows < QUERIES * GROUP) & (queries < query_len)
    head = kv_head * GROUP + rows % GROUP
    # Every key that a row of this tile sees lies in [begin_key, end_key).
    end_key = before + tl.minimum(first_query + QUERIES, query_len)
    begin_key = tl.maximum(before + first_query - (window - 1), 0)
    begin_tile = begin_key // KEYS * KEYS
    splits = tl.num_programs(2)
    split = tl.program_id(2)
    is_split = False
    if ONE_TOKEN:
        begin = _first_split(begin_key)
        length = _split_length(end_key - begin, splits, filling)
        is_split = end_key - begin > length
        begin += split * length
        end_key = tl.minimum(end_key, begin + length)
        # The first one stays even without a context: a padding row's result is 0.
        if (begin >= end_key) & (split > 0):
            return
        begin_tile = tl.maximum(begin, begin_tile)

    dims = tl.arange(0, DIM_PADDED)
    offsets = ((first_row + queries).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dims[None, :]
    mask = row_valid[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
    positions = before + queries
    table = tables_ptr + request.to(tl.int64) * tl.load(table_stride_ptr)
    keys_of_head = key_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values_of_head = value_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)

    accumulator = tl.zeros([ROWS, DIM_PADDED], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    # fmt: off
    if ONE_TOKEN:
        for first_key in tl.range(begin_tile, end_key, KEYS):
            accumulator, row_sum, row_max = _attend_tile(
                q, positions, keys_of_head, values_of_head, table, first_key, begin_key, end_key,
                scale, softcap, window, accumulator, row_sum, row_max,
                NUM_KV_HEADS, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, KEYS, FP8_BIAS, HAS_SOFTCAP, True,
            )
    else:
        # The keys that all rows see, in whole tiles, pay for no mask; the tiles before them (a window's beginning) and
        # behind them (the diagonal) do, in one loop.
        tiles_before = tl.cdiv(tl.maximum(end_key - window - begin_tile, 0), KEYS)
        begin_inner = begin_tile + tiles_before * KEYS
        end_inner = begin_inner + tl.maximum(before + first_query + 1 - begin_inner, 0) // KEYS * KEYS
        for first_key in tl.range(begin_inner, end_inner, KEYS):
            accumulator, row_sum, row_max = _attend_tile(
                q, positions, keys_of_head, values_of_head, table, first_key, begin_key, end_key,
                scale, softcap, window, accumulator, row_sum, row_max,
                NUM_KV_HEADS, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, KEYS, FP8_BIAS, HAS_SOFTCAP, False,
            )
        for edge in tl.range(0, tiles_before + tl.cdiv(tl.maximum(end_key - end_inner, 0), KEYS)):
            behind = end_inner + (edge - tiles_before) * KEYS
            first_key = tl.where(edge < tiles_before, begin_tile + edge * KEYS, behind)
            accumulator, row_sum, row_max = _attend_tile(
                q, positions, keys_of_head, values_of_head, table, first_key, begin_key, end_key,
                scale, softcap, window, accumulator, row_sum, row_max,
                NUM_KV_HEADS, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, KEYS, FP8_BIAS, HAS_SOFTCAP, True,
            )
    # fmt: on

    # Rows that saw no key: padding rows of a captured graph, and what the tile has more rows than heads.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    result = accumulator / row_sum[:, None]
    if is_split:
        place = (request.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * splits + split
        tl.store(partial_ptr + place[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
        tl.store(partial_lse_ptr + place, row_max + tl.log2(row_sum), mask=row_valid)
    else:
        tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["window", "splits", "filling"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr"],
)
def combine_splits_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    window: tl.tensor,
    splits: tl.tensor,
    filling: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> None:
    """One head of one decode: the splits' results, weighted by their shares of the softmax's sum."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - row
    end_key = tl.load(seq_lens_ptr + request)
    begin = _first_split(tl.maximum(end_key - window, 0))
    # What splits without keys have left in memory is not read; one alone has written the result.
    used = tl.cdiv(end_key - begin, _split_length(end_key - begin, splits, filling))
    if (query_len != 1) | (used <= 1):
        return
    split = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, DIM_PADDED)
    place = (request.to(tl.int64) * NUM_HEADS + head) * splits + split
    lse = tl.load(partial_lse_ptr + place, mask=split < used, other=float("-inf"))
    mask = (split < used)[:, None] & (dims < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    largest = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, axis=0)
    result = tl.sum(partial * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
