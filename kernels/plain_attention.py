"""Paged attention in plain torch, for what the fused kernels do not know: soft caps, values narrower than keys, any
head size, any device.

Storage of one layer, keys and values apart: [blocks, kv_heads, block_size, head_dim]. Every request is computed alone,
over its own context, so that no answer depends on who shares the step::

    table ─▶ keys, values [kv_heads, context, head_dim] ─▶ scores of some queries ─▶ softmax ─▶ weighted values

All of it is float32, whatever the storage is kept in.
"""

from __future__ import annotations

import torch

from kernels.spec import StepBatch

SCORES = 1 << 24
"""Most scores that are in memory at once."""


def write_kv(
    keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Put ``k`` and ``v`` [T, kv_heads, head_dim] into the slots, int64 [T], of the storage of a layer."""
    block_size = keys.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    keys[blocks, :, offsets] = k.to(keys.dtype)
    values[blocks, :, offsets] = v.to(values.dtype)


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: StepBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend each new token to its request's context up to itself, within the window.

    ``q`` [T, heads, head_dim] after rotary; the new keys and values are in the storage already. A query at position p
    sees the keys at positions > p - window; scores are softcap · tanh(score / softcap) where there is a cap. Returns
    [T, heads, head_dim of the values].
    """
    out = q.new_empty((q.shape[0], q.shape[1], values.shape[3]))
    row = 0
    for request, (count, context) in enumerate(zip(batch.query_lens_list, batch.seq_lens_list, strict=True)):
        begin = context - count
        first = 0 if window is None else max(0, begin - window + 1) // keys.shape[2]
        table = batch.block_tables[request, first : -(-context // keys.shape[2])]
        start = first * keys.shape[2]
        k, v = (_gathered(storage, table, context - start) for storage in (keys, values))
        together = max(1, SCORES // (q.shape[1] * (context - start)))
        for query in range(0, count, together):
            rows = slice(row + query, row + min(query + together, count))
            _attend(q[rows], k, v, begin + query - start, scale, window, softcap, out[rows])
        row += count
    return out


def _gathered(storage: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` keys or values of the blocks ``table``: float32 [kv_heads, length, head_dim]."""
    return storage.index_select(0, table).transpose(0, 1).flatten(1, 2)[:, :length].float()


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    """Queries [t, heads, head_dim], the first at ``position`` among the keys [kv_heads, context, head_dim]."""
    count, heads, _ = q.shape
    kv_heads = k.shape[0]
    end = position + count
    first = 0 if window is None else max(0, position - window + 1)
    k, v = k[:, first:end], v[:, first:end]
    rows = q.view(count, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3).flatten(1, 2).float()
    scores = torch.bmm(rows * scale, k.transpose(1, 2)).view(kv_heads, -1, count, end - first)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if count > 1:
        at = torch.arange(position, end, device=q.device)[:, None]
        key = torch.arange(first, end, device=q.device)
        hidden = key > at if window is None else (key > at) | (key <= at - window)
        scores.masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1).flatten(1, 2)
    attended = torch.bmm(weights, v).view(kv_heads, -1, count, v.shape[2])
    out.copy_(attended.permute(2, 0, 1, 3).reshape(count, heads, -1))
