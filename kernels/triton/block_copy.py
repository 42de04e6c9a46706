"""Copies of whole KV blocks, all layers and keys and values in one launch."""

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


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["pairs_ptr"])
def copy_blocks_kernel(
    kv_ptr: tl.tensor, pairs_ptr: tl.tensor, num_blocks: tl.tensor, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    pair = tl.program_id(0)
    plane = kv_ptr + tl.program_id(1).to(tl.int64) * num_blocks * ELEMENTS
    source = tl.load(pairs_ptr + 2 * pair)
    destination = tl.load(pairs_ptr + 2 * pair + 1)
    offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < ELEMENTS
    values = tl.load(plane + source * ELEMENTS + offsets, mask=mask)
    tl.store(plane + destination * ELEMENTS + offsets, values, mask=mask)


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
    planes, num_blocks, elements = kv.shape
    constants = copy_constants(elements)
    for wave in independent_waves(pairs):
        table = torch.tensor(wave, dtype=torch.int64, device=kv.device)
        grid = (len(wave), planes, triton.cdiv(elements, constants["BLOCK"]))
        copy_blocks_kernel[grid](kv, table, num_blocks, **constants, num_warps=NUM_WARPS)
