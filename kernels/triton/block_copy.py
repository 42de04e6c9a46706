"""Copies of whole KV blocks, all layers and keys and values in one launch: within the pool, or between the pool and
page-locked host memory, which a GPU reads and writes itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 2048
NUM_WARPS = 4


def copy_constants(block_elements: int) -> dict[str, int]:
    """The kernel's compile-time values; a block has ``block_elements`` elements in each plane."""
    return {"ELEMENTS": block_elements, "BLOCK": min(BLOCK, triton.next_power_of_2(block_elements))}


@triton.jit(do_not_specialize=["source_blocks", "destination_blocks"], do_not_specialize_on_alignment=["pairs_ptr"])
def copy_blocks_kernel(
    source_ptr: tl.tensor,
    destination_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    source_blocks: tl.tensor,
    destination_blocks: tl.tensor,
    ELEMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    pair = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    source = plane * source_blocks + tl.load(pairs_ptr + 2 * pair)
    destination = plane * destination_blocks + tl.load(pairs_ptr + 2 * pair + 1)
    offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < ELEMENTS
    values = tl.load(source_ptr + source * ELEMENTS + offsets, mask=mask)
    tl.store(destination_ptr + destination * ELEMENTS + offsets, values, mask=mask)


def independent_waves(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut the pairs, in order, into runs whose copies may happen at once with the result of one after another."""
    waves: list[list[tuple[int, int]]] = []
    sources: set[int] = set()
    destinations: set[int] = set()
    for source, destination in pairs:
        if not waves or source in destinations or destination in destinations or destination in sources:
            waves.append([])
            sources, destinations = set(), set()
        waves[-1].append((source, destination))
        sources.add(source)
        destinations.add(destination)
    return waves


def copy_blocks(kv: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (source, destination), in order, in ``kv`` [planes, blocks, elements], contiguous."""
    for wave in independent_waves(pairs):
        move_blocks(kv, kv, wave, kv.device)


def move_blocks(
    source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]], device: torch.device
) -> None:
    """Copy blocks of ``source`` to blocks of ``destination``, all at once: no copy may depend on another. Both are
    [planes, blocks, elements], contiguous, of one type and in memory that ``device`` reaches."""
    planes, source_blocks, elements = source.shape
    constants = copy_constants(elements)
    # From page-locked memory the table travels in the order of the stream, and nobody waits for what is on it.
    pinned = device.type == "cuda"
    table = torch.tensor(pairs, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=pinned)
    grid = (len(pairs), planes, triton.cdiv(elements, constants["BLOCK"]))
    copy_blocks_kernel[grid](
        source, destination, table, source_blocks, destination.shape[1], **constants, num_warps=NUM_WARPS
    )
