"""Attention over a paged context: keys and values are read where they lie, block by block, and nothing is gathered.

Storage of one layer, for each block one run of memory; a key's numbers lie apart, so that a vector holds neighbouring
keys and no sum runs across its lanes; a value's lie together::

    block b   [ kv head 0: dim 0 of its keys | dim 1 … ][ kv head 1 … ]   keys: [kv_heads, head_dim, keys']
              [ kv head 0: value 0 | value 1 | … ][ kv head 1 … ]         values: [kv_heads, keys, head_dim']

keys' and head_dim' are filled up to whole vectors. The queries of a kv head, of one or several neighbouring tokens, are
the rows of a tile::

    scores = rows · keys ─▶ softmax over all that a row sees ─▶ out = weights · values

Every row is computed alone and over the whole context in ascending order, whether it is a decode or part of a chunk.
Masked keys have the weight 0, and what they meet are zeros or the request's own values, never another request's: a
block that is begun and not filled is cleared behind its last token. A weight of zero times a stray NaN would be NaN.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import inner
from kernels.cpu.elementwise import exp_sum, largest
from kernels.cpu.rows import as_stored
from kernels.cpu.team import claim
from kernels.cpu.vectors import LANES, TILE_ROWS, prefetch, tile

_scores_1, _scores_2 = (tile(vectors, add=False, interleaved=True) for vectors in (1, 2))
_values_1, _values_2 = (tile(vectors, add=True) for vectors in (1, 2))
_values_4 = tile(4, add=True, most_rows=3)
AHEAD = 3
"""Blocks between the one that is computed and the one that is asked for from memory: contexts lie in pieces too short
for the core to see where it will read next."""
_ZERO = np.float32(0.0)


def padded_lanes(size: int) -> int:
    return -(-size // LANES) * LANES


def block_values(kv_heads: int, head_dim: int, block_size: int) -> int:
    """Numbers of a block in one layer, those that fill up vectors included."""
    return kv_heads * (head_dim * padded_lanes(block_size) + block_size * padded_lanes(head_dim))


def rows_together(group: int) -> int:
    """Rows of a task: the queries of so many tokens that a tile is full, at least those of one token."""
    return max(1, TILE_ROWS // group) * group


@inner()
def write_row(shape, storage, layer_at, slot, y, keys_at, values_at):
    """One token's keys and values [kv_heads · head_dim each], from places of ``y``, into its slot of a layer."""
    block, offset = slot // shape.block_size, slot % shape.block_size
    size, keys, dims = shape.head_dim, shape.block_keys, shape.value_dims
    at = layer_at + block * shape.block_values
    for head in range(shape.kv_heads):
        for d in range(size):
            storage[at + d * keys + offset] = as_stored(y[keys_at + head * size + d], storage)
        at += size * keys
    for head in range(shape.kv_heads):
        for d in range(size):
            storage[at + offset * dims + d] = as_stored(y[values_at + head * size + d], storage)
        at += shape.block_size * dims


@inner()
def clear_behind(shape, storage, layer_at, block, offset):
    """Zero the slots of a block from ``offset`` on."""
    size, keys, dims = shape.head_dim, shape.block_keys, shape.value_dims
    at = layer_at + block * shape.block_values
    for _ in range(shape.kv_heads):
        for d in range(size):
            for slot in range(offset, shape.block_size):
                storage[at + d * keys + slot] = 0
        at += size * keys
    for _ in range(shape.kv_heads):
        for i in range(offset * dims, shape.block_size * dims):
            storage[at + i] = 0
        at += shape.block_size * dims


@inner()
def _softmax(scores, at, first, last, end):
    """Weights, not yet divided by their sum, which is returned: e^(score - largest) of the keys ``first`` to ``last``
    - 1, 0 for the others before ``end``; places are counted from ``at``."""
    total = exp_sum(scores, at + first, last - first, largest(scores, at + first, last - first))
    for i in range(first):
        scores[at + i] = _ZERO
    for i in range(last, end):
        scores[at + i] = _ZERO
    return total


@inner()
def _add_values(rows, weights, at, stride, storage, values_at, count, dims, out, out_at):
    """out[rows, dims] += weights[rows, count] · values[count, dims]"""
    vectors = dims // LANES
    done = 0
    if rows <= 3:
        while vectors - done >= 4:
            d = done * LANES
            _values_4(rows, weights, at, stride, 1, storage, values_at + d, LANES, dims, count, out, out_at + d, dims)
            done += 4
    while vectors - done >= 2:
        d = done * LANES
        _values_2(rows, weights, at, stride, 1, storage, values_at + d, LANES, dims, count, out, out_at + d, dims)
        done += 2
    if done < vectors:
        d = done * LANES
        _values_1(rows, weights, at, stride, 1, storage, values_at + d, LANES, dims, count, out, out_at + d, dims)


@inner()
def _add_scores(rows, queries, at, size, storage, keys_at, keys, out, out_at, stride):
    """out[rows, keys] = queries[size, rows] · keys[size, keys]"""
    done = 0
    while keys - done >= 2 * LANES:
        _scores_2(rows, queries, at, size, 1, storage, keys_at + done, LANES, keys, size, out, out_at + done, stride)
        done += 2 * LANES
    if done < keys:
        _scores_1(rows, queries, at, size, 1, storage, keys_at + done, LANES, keys, size, out, out_at + done, stride)


@inner()
def _attend_task(shape, storage, layer_at, table, window, position, tokens, head, y, y_at, y_row, out, out_at, scratch):
    """The queries of kv head ``head`` of ``tokens`` neighbouring tokens from ``position`` on, at ``y_at`` in ``y``."""
    size, group, dims, length = shape.head_dim, shape.group, shape.value_dims, shape.block_size
    keys, rows = shape.block_keys, tokens * shape.group
    queries, scores, sums = scratch.queries, scratch.scores, scratch.sums
    for row in range(rows):
        source = y_at + row // group * y_row + (head * group + row % group) * size
        first_row = row // TILE_ROWS * TILE_ROWS
        together = min(TILE_ROWS, rows - first_row)
        place = first_row * size + row - first_row
        for d in range(size):
            queries[place + d * together] = y[source + d] * shape.scale
    first = 0 if window == 0 else max(0, position - window + 1)
    begin, end = first // length, (position + tokens + length - 1) // length
    stride = (end - begin) * keys + LANES  # behind a row may be written up to a whole vector
    for index in range(begin, end):
        keys_at = layer_at + table[index] * shape.block_values + head * size * keys
        if index + AHEAD < end:
            prefetch(storage, layer_at + table[index + AHEAD] * shape.block_values + head * size * keys, size * keys)
        for row in range(0, rows, TILE_ROWS):
            together = min(TILE_ROWS, rows - row)
            place = row * stride + (index - begin) * length
            _add_scores(together, queries, row * size, size, storage, keys_at, keys, scores, place, stride)
    behind_keys = shape.kv_heads * size * keys + head * length * dims
    for index in range(begin, min(begin + AHEAD, end)):
        prefetch(storage, layer_at + table[index] * shape.block_values + behind_keys, length * dims)
    span = (end - begin) * length
    for row in range(rows):
        at = position + row // group
        seen_from = 0 if window == 0 else max(0, at - window + 1)
        zero = begin * length
        sums[row] = _softmax(scores, row * stride, seen_from - zero, at + 1 - zero, span)
    values = scratch.values
    values[: rows * dims] = _ZERO
    for index in range(begin, end):
        values_at = layer_at + table[index] * shape.block_values + behind_keys
        if index + AHEAD < end:
            prefetch(storage, layer_at + table[index + AHEAD] * shape.block_values + behind_keys, length * dims)
        for row in range(0, rows, TILE_ROWS):
            together = min(TILE_ROWS, rows - row)
            place = row * stride + (index - begin) * length
            _add_values(together, scores, place, stride, storage, values_at, length, dims, values, row * dims)
    for row in range(rows):
        target = out_at + row // group * shape.query_size + (head * group + row % group) * size
        inverse = np.float32(1.0) / sums[row]
        for d in range(size):
            out[target + d] = values[row * dims + d] * inverse


@inner()
def attend(counters, phase, shape, batch, storage, layer_at, window, y, y_row, out, scratch):
    """Attention of all rows of a step over their contexts, whose keys and values are in ``storage`` already: this
    thread's share. ``out`` is flat float32 [T, heads · head_dim]; ``window`` 0: all keys."""
    together = shape.tokens_together
    tasks = batch.task_start[-1] * shape.kv_heads
    request = 0
    while True:
        task = claim(counters, phase)
        if task >= tasks:
            return
        piece, head = task // shape.kv_heads, task % shape.kv_heads
        while batch.task_start[request + 1] <= piece:
            request += 1
        first, last = batch.query_start[request], batch.query_start[request + 1]
        row = first + (piece - batch.task_start[request]) * together
        tokens = min(together, last - row)
        position = batch.seq_lens[request] - (last - row)
        _attend_task(
            shape, storage, layer_at, batch.block_tables[request], window, position, tokens, head, y, row * y_row,
            y_row, out, row * shape.query_size, scratch,
        )  # fmt: skip
