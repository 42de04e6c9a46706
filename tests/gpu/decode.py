"""Attention of decode steps: one new token for each of many requests, over paged keys and values in bfloat16.

``share of the copy bandwidth``: bytes of the keys and values that one layer reads, over the time of one call, over the
measured copy bandwidth. The calls follow each other in a graph, and each reads a region of the pool of its own; there
are so many that what one leaves in the L2 has gone before it comes round again::

    pool of blocks   │ region 0 │ region 1 │ region 2 │ …           blocks of a request are scattered over its region
    graph              call 0     call 1     call 2                 regions · bytes ≥ 4 · L2

``over the floor``: the time of a graph with one call, replayed by an idle card, over (launch of an empty graph + bytes
/ copy bandwidth), the launch measured in the same way. Where little is read, nobody can be faster than a launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.spec import StepBatch
from kernels.triton.paged_attention import paged_attention
from kernels.triton.reference import paged_attention_reference
from tests.gpu.card import Card
from tests.gpu.figures import Report, Target
from tests.gpu.models import LLAMA_1B, LLAMA_8B, TINY, Shape

BLOCK_SIZE = 16
BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (512, 2048, 8192, 32_768)
LARGE = 256 * 2**20
"""Bytes of a layer from which on the bandwidth is the bound."""
REHEARSED_LARGE = 5_000
SHARE = Target(85.0)
OVER_FLOOR = Target(1.5, at_most=True)
MOST_REGIONS = 256
POOL_SHARE = 0.7
"""Of the free memory."""
_FILL = 2**28
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Pool:
    """Keys and values of one layer."""

    keys: torch.Tensor
    """bfloat16 [blocks, kv_heads, BLOCK_SIZE, head_dim]; as ``values``."""
    values: torch.Tensor
    order: torch.Tensor
    """int32 [blocks - 1]: the blocks 1 … in a random order, on the device."""

    @staticmethod
    def filled(card: Card, shape: Shape, blocks: int) -> Pool:
        """Random numbers in so many blocks, and the null block."""
        blocks += 1
        random = card.generator(7)
        planes = []
        for _ in range(2):
            plane = torch.empty(
                (blocks, shape.kv_heads, BLOCK_SIZE, shape.head_dim), dtype=torch.bfloat16, device=card.device
            )
            for piece in plane.view(-1).split(_FILL):
                piece.normal_(generator=random)
            plane[0] = float("nan")  # nobody's: whatever reads the null block shows
            planes.append(plane)
        order = torch.randperm(blocks - 1, generator=random, device=card.device).int() + 1
        return Pool(planes[0], planes[1], order)


def kv_bytes(shape: Shape, batch: int, context: int) -> int:
    """Of one layer."""
    return 2 * batch * context * shape.kv_heads * shape.head_dim * torch.bfloat16.itemsize


def num_blocks(batch: int, context: int) -> int:
    return batch * -(-context // BLOCK_SIZE)


def decode_batch(tables: torch.Tensor, context: int) -> StepBatch:
    """One new token for each row of ``tables``, int32 [S, blocks], at the end of a context of so many tokens."""
    count, device = tables.shape[0], tables.device
    last = torch.full((count,), context - 1, dtype=torch.int64, device=device)
    slots = tables[:, (context - 1) // BLOCK_SIZE].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    return StepBatch(
        token_ids=torch.zeros(count, dtype=torch.int64, device=device),
        positions=last,
        slot_mapping=slots,
        query_start=torch.arange(count + 1, dtype=torch.int32, device=device),
        seq_lens=torch.full((count,), context, dtype=torch.int32, device=device),
        block_tables=tables,
        logits_rows=torch.arange(count, device=device),
        query_lens_list=[1] * count,
        seq_lens_list=[context] * count,
        table_stride=torch.full((1,), tables.stride(0), dtype=torch.int32, device=device),
    )


@torch.inference_mode()
def run(card: Card, report: Report, facts: dict[str, Any]) -> None:
    shapes, batches, contexts = (LLAMA_1B, LLAMA_8B), BATCHES, CONTEXTS
    if card.rehearsal:
        shapes, batches, contexts = (TINY,), (1, 3), (5, 17)
    for shape in shapes:
        block_bytes = kv_bytes(shape, 1, BLOCK_SIZE)
        largest = max(num_blocks(batch, context) for batch in batches for context in contexts)
        wanted = max(largest, -(-8 * card.l2_bytes // block_bytes))
        pool = Pool.filled(card, shape, min(int(card.free_bytes() * POOL_SHARE) // block_bytes, wanted))
        for batch in batches:
            for context in contexts:
                if num_blocks(batch, context) > pool.order.shape[0]:
                    report.fact(f"{shape.name} batch {batch} context {context}", "does not fit into the memory")
                    continue
                _measure(card, report, facts, shape, pool, batch, context)
        _check(card, report, shape, pool, contexts[1])
        del pool
        card.release()


def _regions(card: Card, shape: Shape, pool: Pool, batch: int, context: int) -> list[StepBatch]:
    needed = num_blocks(batch, context)
    wanted = max(2, -(-4 * card.l2_bytes // kv_bytes(shape, batch, context)))
    count = max(1, min(wanted, MOST_REGIONS, pool.order.shape[0] // needed))
    tables = pool.order[: count * needed].view(count, batch, -1)
    return [decode_batch(tables[index], context) for index in range(count)]


def _measure(
    card: Card, report: Report, facts: dict[str, Any], shape: Shape, pool: Pool, batch: int, context: int
) -> None:
    num_bytes = kv_bytes(shape, batch, context)
    regions = _regions(card, shape, pool, batch, context)
    q = torch.randn(batch, shape.heads, shape.head_dim, device=card.device, generator=card.generator(3)).bfloat16()
    out = torch.empty_like(q)
    scale = shape.head_dim**-0.5

    def call(region: StepBatch) -> None:
        paged_attention(q, pool.keys, pool.values, region, scale=scale, out=out)

    all_regions = card.captured(lambda: [call(region) for region in regions])
    replays = max(1, min(20, int(2e-3 * facts["bandwidth"] / (num_bytes * len(regions)))))
    seconds = card.queued_seconds(all_regions, replays, rounds=3) / len(regions)
    share = 100 * num_bytes / facts["bandwidth"] / seconds
    name = f"{shape.name} batch {batch} context {context}, {num_bytes / 2**20:.4g} MiB a layer"
    detail = {"bytes": num_bytes, "seconds": seconds, "regions": len(regions)}
    if num_bytes >= (REHEARSED_LARGE if card.rehearsal else LARGE):
        report.rate(f"{name}: share of copy bandwidth", share, "%", SHARE, **detail)
        return
    idle = _idle_seconds(card, regions, call)
    floor = facts["launch"] + num_bytes / facts["bandwidth"]
    detail |= {"share": share, "idle_seconds": idle, "floor_seconds": floor}
    report.rate(f"{name}: over the floor", idle / floor, "×", OVER_FLOOR, **detail)


def _idle_seconds(card: Card, regions: list[StepBatch], call: Callable[[StepBatch], None]) -> float:
    """One call in a graph whose table is replaced by another region's before each replay."""
    tables = regions[0].block_tables.clone()
    replay = card.captured(lambda: call(dataclasses.replace(regions[0], block_tables=tables)))
    return card.idle_seconds(replay, 60, before=lambda index: tables.copy_(regions[index % len(regions)].block_tables))


def _check(card: Card, report: Report, shape: Shape, pool: Pool, context: int) -> None:
    """That what was timed is right: a small step on the same pool against the reference."""
    tables = pool.order[: 2 * -(-context // BLOCK_SIZE)].view(2, -1)
    q = torch.randn(2, shape.heads, shape.head_dim, device=card.device, generator=card.generator(4)).bfloat16()
    batch = decode_batch(tables, context)
    out = paged_attention(q, pool.keys, pool.values, batch, scale=shape.head_dim**-0.5)
    used = tables.flatten().long()
    small = torch.arange(used.shape[0], dtype=torch.int32).view(2, -1)
    expected = paged_attention_reference(
        q.cpu(),
        pool.keys[used].cpu(),
        pool.values[used].cpu(),
        batch.query_lens_list,
        batch.seq_lens_list,
        small,
        scale=shape.head_dim**-0.5,
    )
    error = float((out.float().cpu() - expected).abs().max())
    report.check(f"{shape.name} attention on this pool", error <= TOLERANCE, f"error {error:.1e}", listed=False)
