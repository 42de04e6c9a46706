"""Each kernel against its reference on random inputs with poisoned memory: one number, the largest error.

Whatever a kernel has no business reading (cache slots that were never written, the null block) and whatever it must
write (its output) holds NaN beforehand, so that a stray read or a missed write shows as an infinite error. The inputs
have the kernel's own type; the reference takes the same rounded inputs to float32.

Run with TRITON_INTERPRET=1 on a CPU; the same functions check a GPU with ``device="cuda"``.
"""

from __future__ import annotations

import math

import torch

from kernels.spec import StepBatch

EPS = 1e-5


def tolerance(dtype: torch.dtype) -> float:
    """Largest error (:func:`largest_error`) that rounding explains: two or three units in the last place.

    The interpreter cuts bfloat16 off where a GPU rounds to the nearest, which doubles its share.
    """
    return {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]


def largest_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to an expected value above 1; infinite where a result is not finite."""
    error = (result.float().cpu() - expected).abs() / expected.abs().clamp(min=1.0)
    return float(error.max()) if bool(torch.isfinite(error).all()) else math.inf


def make_batch(
    query_lens: list[int], seq_lens: list[int], block_size: int, random: torch.Generator, *, device: str = "cpu"
) -> tuple[StepBatch, int]:
    """A step of these lengths with shuffled block tables, and the number of blocks that its pool needs."""
    needed = [-(-length // block_size) for length in seq_lens]
    num_blocks = 1 + sum(needed) + 3
    free = (torch.randperm(num_blocks - 1, generator=random) + 1).tolist()
    tables = torch.zeros((len(seq_lens), max(needed) + 1), dtype=torch.int32)
    slots, positions = [], []
    for request, count in enumerate(needed):
        blocks = [free.pop() for _ in range(count)]
        tables[request, :count] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(seq_lens[request] - query_lens[request], seq_lens[request]):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    total = sum(query_lens)
    query_start = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    batch = StepBatch(
        token_ids=torch.zeros(total, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        query_start=query_start.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        logits_rows=(query_start[1:].long() - 1).to(device),
        query_lens_list=list(query_lens),
        seq_lens_list=list(seq_lens),
    )
    return batch, num_blocks
