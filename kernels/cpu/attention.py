"""Attention over a paged context with torch operators: a plan once a step, run once a layer.

Storage of one layer; a slot is one token, a block ``block_size`` neighbouring slots::

    slot       0                  1                  2
          [ k heads | v heads ][ k heads | v heads ][ ...        2 · kv_heads · head_dim values each

so a step writes its keys and values with one indexed copy, and a context is gathered block by block in one operation.

Rows of a step are split in two. *Decodes* (one new token) in float32 are computed in place (:mod:`kernels.cpu.
paged_decode`); in other types they are grouped by length and computed together, padded to the longest of their group.
*Chunks* (several new tokens) are computed one by one. Query heads that share a key head are
neighbours (head h reads kv head h // group), so a group of them is handled as if it were several queries of one head.

Masked places hold zeros or the request's own values, never another request's: a block that is begun and not filled is
cleared first. A weight of zero times a stray NaN would be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cpu.paged_decode import DecodePlan, attend_decodes, plan_decodes
from kernels.spec import DecoderSpec, StepBatch

MAX_GROUP_PADDING = 256
"""Padded tokens a group of decodes may waste; another group costs about as much as gathering these."""
MAX_GROUP_BYTES = 1 << 20
"""Gathered keys and values of one group, for each thread, so that they are still in its cache when they are used:
groups of 4 contexts of 272 tokens took a third less time than groups of 16."""
MAX_MASK_ELEMENTS = 1 << 22
"""A larger mask is made anew in every layer instead of being kept for the step."""
MAX_PIECE_ELEMENTS = 1 << 21
"""Queries × keys of a chunk computed at once."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """n requests with one new token each, their contexts padded to ``length`` slots."""

    rows: torch.Tensor
    """int64 [n]: their rows among the step's tokens."""
    blocks: torch.Tensor
    """int64 [n · blocks per request]"""
    length: int
    mask: torch.Tensor | None
    """[n, 1, 1, length], 0 or minus infinity; None: every slot is visible to every request."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a chunk's queries, with the keys they may see."""

    start: int
    """First row among the chunk's rows."""
    end: int
    first_position: int
    keys: int
    """Keys visible to the last of them, counted from the chunk's first gathered slot."""
    mask: torch.Tensor | None
    """[queries, keys]; None with ``build_mask``: too large to keep; None without: plainly causal, or nothing masked."""
    build_mask: bool
    causal: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several new tokens of one request."""

    row_start: int
    row_end: int
    blocks: torch.Tensor | None
    """int64: blocks of the context; None: the chunk is the whole context and nothing needs gathering."""
    first_key: int
    """Position of the first gathered slot."""
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    window: int | None
    in_place: DecodePlan | None
    """The decodes in float32."""
    decodes: list[DecodeGroup]
    """Those in other types."""
    chunks: list[Chunk]


class AttentionPlanner:
    """Plans one step: who is computed with whom, and the masks. One plan per different window of the layers."""

    def __init__(self, batch: StepBatch, block_size: int, spec: DecoderSpec) -> None:
        self.block_size = block_size
        self._dtype = spec.dtype
        token_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        self._max_group_tokens = MAX_GROUP_BYTES * torch.get_num_threads() // token_bytes
        self.tables = batch.block_tables.numpy()
        self._query_lens = batch.query_lens_list or np.diff(batch.query_start.numpy()).tolist()
        self._seq_lens = batch.seq_lens_list or batch.seq_lens.tolist()
        self._row_starts = batch.query_start.tolist()
        self._longest = max(self._seq_lens, default=0)
        self._plans: dict[int | None, WindowPlan] = {}

    def blocks_to_clear(self) -> list[int]:
        """Blocks that get their first token in this step and not their last: nothing of an owner before may stay."""
        size = self.block_size
        return [
            int(self.tables[request, seq_len // size])
            for request, (query_len, seq_len) in enumerate(zip(self._query_lens, self._seq_lens, strict=True))
            if 0 < seq_len % size <= query_len
        ]

    def plan(self, window: int | None) -> WindowPlan:
        if window is not None and window >= self._longest:
            window = None
        found = self._plans.get(window)
        if found is None:
            in_place, groups = None, list[DecodeGroup]()
            if self._dtype == torch.float32:
                in_place = plan_decodes(self._row_starts, self._query_lens, self._seq_lens, window)
            else:
                groups = self._plan_decodes(window)
            found = self._plans[window] = WindowPlan(window, in_place, groups, self._plan_chunks(window))
        return found

    def _first_key(self, first_position: int, window: int | None) -> int:
        """Position of the first slot to gather: the block edge at or before the first visible key."""
        if window is None:
            return 0
        return max(0, first_position - window + 1) // self.block_size * self.block_size

    def _plan_decodes(self, window: int | None) -> list[DecodeGroup]:
        spans = []
        for request, (query_len, seq_len) in enumerate(zip(self._query_lens, self._seq_lens, strict=True)):
            if query_len == 1:
                first = self._first_key(seq_len - 1, window)
                spans.append((seq_len - first, first, request))
        spans.sort(reverse=True)
        groups: list[DecodeGroup] = []
        members: list[tuple[int, int, int]] = []
        padding = 0
        for span in spans:
            waste = members[0][0] - span[0] if members else 0
            too_long = members and (len(members) + 1) * members[0][0] > self._max_group_tokens
            if members and (padding + waste > MAX_GROUP_PADDING or too_long):
                groups.append(self._decode_group(members, window))
                members, padding, waste = [], 0, 0
            members.append(span)
            padding += waste
        if members:
            groups.append(self._decode_group(members, window))
        return groups

    def _decode_group(self, members: list[tuple[int, int, int]], window: int | None) -> DecodeGroup:
        length = members[0][0]
        per_request = -(-length // self.block_size)
        blocks = np.zeros((len(members), per_request), dtype=np.int64)
        for i, (span, first, request) in enumerate(members):
            begin = first // self.block_size
            count = -(-span // self.block_size)
            blocks[i, :count] = self.tables[request, begin : begin + count]
        spans = np.array([span for span, _, _ in members])
        visible = np.arange(length) < spans[:, None]
        if window is not None:
            visible &= np.arange(length) >= (spans - window)[:, None]
        mask = None if visible.all() else self._mask(visible).view(len(members), 1, 1, length)
        rows = torch.tensor([self._row_starts[request] for _, _, request in members])
        return DecodeGroup(rows, torch.from_numpy(blocks.reshape(-1)), length, mask)

    def _plan_chunks(self, window: int | None) -> list[Chunk]:
        chunks = []
        for request, (query_len, seq_len) in enumerate(zip(self._query_lens, self._seq_lens, strict=True)):
            if query_len == 1:
                continue
            start = seq_len - query_len
            first_key = self._first_key(start, window)
            blocks = None
            if start > 0:
                table = self.tables[request, first_key // self.block_size : -(-seq_len // self.block_size)]
                blocks = torch.from_numpy(table.astype(np.int64))
            row = self._row_starts[request]
            pieces = self._pieces(query_len, start, first_key, window)
            chunks.append(Chunk(row, row + query_len, blocks, first_key, pieces))
        return chunks

    def _pieces(self, query_len: int, start: int, first_key: int, window: int | None) -> list[Piece]:
        context = start + query_len - first_key
        step = max(16, MAX_PIECE_ELEMENTS // context)
        keep = query_len * context <= MAX_MASK_ELEMENTS
        pieces = []
        for begin in range(0, query_len, step):
            end = min(begin + step, query_len)
            position = start + begin
            keys = start + end - first_key
            causal = window is None and position == first_key
            mask = None
            if keep and not causal:
                mask = causal_mask(position, end - begin, first_key, keys, window, self._dtype)
            pieces.append(Piece(begin, end, position, keys, mask, not keep and not causal, causal))
        return pieces

    def _mask(self, visible: np.ndarray) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=self._dtype)
        return mask.masked_fill_(torch.from_numpy(~visible), -torch.inf)


def causal_mask(
    position: int, queries: int, first_key: int, keys: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """[queries, keys], 0 where query i (at ``position`` + i) sees key j (at ``first_key`` + j), else minus infinity."""
    q = torch.arange(position, position + queries)[:, None]
    k = torch.arange(first_key, first_key + keys)
    hidden = k > q
    if window is not None:
        hidden |= k <= q - window
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(hidden, -torch.inf)


def attend(
    qkv: torch.Tensor, storage: torch.Tensor, planner: AttentionPlanner, window: int | None, spec: DecoderSpec
) -> torch.Tensor:
    """Attention of all rows over their contexts, whose keys and values are in ``storage`` already.

    ``qkv`` is [T, (heads + 2 · kv_heads) · head_dim] after rotary, ``storage`` [blocks, block_size · 2 · kv_heads ·
    head_dim]. Returns [T, heads · head_dim]. Scores and softmax are accumulated in float32 by the operator.
    """
    kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
    group = spec.num_heads // kv_heads
    q_size = spec.num_heads * head_dim
    out = qkv.new_empty(qkv.shape[0], q_size)
    plan = planner.plan(window)
    if plan.in_place is not None:
        scale, size = spec.attention_scale, planner.block_size
        attend_decodes(qkv, storage, planner.tables, plan.in_place, size, kv_heads, scale, out)
    for decode in plan.decodes:
        n = decode.rows.shape[0]
        query = qkv[:, :q_size].index_select(0, decode.rows).view(n, kv_heads, group, head_dim)
        context = storage.index_select(0, decode.blocks).view(n, -1, 2, kv_heads, head_dim)[:, : decode.length]
        keys, values = context[:, :, 0].transpose(1, 2), context[:, :, 1].transpose(1, 2)
        result = F.scaled_dot_product_attention(query, keys, values, attn_mask=decode.mask, scale=spec.attention_scale)
        out.index_copy_(0, decode.rows, result.reshape(n, q_size))
    for chunk in plan.chunks:
        rows = qkv[chunk.row_start : chunk.row_end]
        query = rows[:, :q_size].view(1, -1, spec.num_heads, head_dim).transpose(1, 2)
        if chunk.blocks is None:
            context = rows[:, q_size:].view(-1, 2, kv_heads, head_dim)
        else:
            context = storage.index_select(0, chunk.blocks).view(-1, 2, kv_heads, head_dim)
        context = context.transpose(0, 2).unsqueeze(1)  # [kv_heads, 1, 2, tokens, head_dim]
        _attend_chunk(query, context, chunk, plan.window, out[chunk.row_start : chunk.row_end], spec)
    return out


def _attend_chunk(
    query: torch.Tensor, context: torch.Tensor, chunk: Chunk, window: int | None, out: torch.Tensor, spec: DecoderSpec
) -> None:
    keys, values = context[:, :, 0].transpose(0, 1), context[:, :, 1].transpose(0, 1)  # [1, kv_heads, tokens, head_dim]
    for piece in chunk.pieces:
        count = piece.end - piece.start
        mask = piece.mask
        if piece.build_mask:
            mask = causal_mask(piece.first_position, count, chunk.first_key, piece.keys, window, query.dtype)
        result = F.scaled_dot_product_attention(
            query[:, :, piece.start : piece.end],
            keys[:, :, : piece.keys],
            values[:, :, : piece.keys],
            attn_mask=mask,
            is_causal=piece.causal,
            scale=spec.attention_scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
        out[piece.start : piece.end].view(count, spec.num_heads, spec.head_dim).copy_(result[0].transpose(0, 1))
