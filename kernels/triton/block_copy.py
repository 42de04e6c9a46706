"""Copies of whole KV blocks, all layers and keys and values in one launch: within the pool, or between the pool and
page-locked host memory, which a GPU reads and writes itself.

A block is copied as words of 64 bits, whatever its numbers are: two of them are the 16 bytes that a thread loads at
once, and one compiled kernel serves every type. Only a block that is no whole number of words is copied byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Words of a program: four loads of 16 bytes for each thread."""
NUM_WARPS = 4


def word_type(block_bytes: int) -> torch.dtype:
    """What a block of so many bytes in each plane is copied as."""
    return torch.uint8 if block_bytes % torch.int64.itemsize else torch.int64


def copy_constants(block_words: int) -> dict[str, int]:
    """The kernel's compile-time values; a block has ``block_words`` words in each plane."""
    return {"WORDS": block_words, "BLOCK": min(BLOCK, triton.next_power_of_2(block_words))}


@triton.jit(do_not_specialize=["source_blocks", "destination_blocks"], do_not_specialize_on_alignment=["pairs_ptr"])
def copy_blocks_kernel(
    source_ptr: tl.tensor,
    destination_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    source_blocks: tl.tensor,
    destination_blocks: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    pair = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    source = plane * source_blocks + tl.load(pairs_ptr + 2 * pair)
    destination = plane * destination_blocks + tl.load(pairs_ptr + 2 * pair + 1)
    offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < WORDS
    values = tl.load(source_ptr + source * WORDS + offsets, mask=mask)
    tl.store(destination_ptr + destination * WORDS + offsets, values, mask=mask)


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
    word = word_type(source.shape[2] * source.itemsize)
    source, destination = source.view(word), destination.view(word)
    planes, source_blocks, words = source.shape
    constants = copy_constants(words)
    # From page-locked memory the table travels in the order of the stream, and nobody waits for what is on it.
    pinned = device.type == "cuda"
    table = torch.tensor(pairs, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=pinned)
    grid = (len(pairs), planes, triton.cdiv(words, constants["BLOCK"]))
    copy_blocks_kernel[grid](
        source, destination, table, source_blocks, destination.shape[1], **constants, num_warps=NUM_WARPS
    )
