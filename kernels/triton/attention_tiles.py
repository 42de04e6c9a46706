"""How paged attention cuts its work: a static table of tiles, and the number of splits of a decode.

Nothing here looks at lengths, so that a captured graph serves a context of any length, and nothing is tuned at a start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import triton

from kernels.triton.fp8 import fp8_bias

Family = Literal["sm_80", "sm_90", "amd"]
"""GPUs that share tiles: NVIDIA's with at least 99 KiB of shared memory a program (compute capability 8 and 12), those
with 227 KiB and asynchronous matrix units (9 and 10), and AMD's with 64 KiB."""

MAX_SPLITS = 32
SPLIT_KEYS = 64
"""Splits begin at multiples of this many keys, a multiple of every decode tile's: with fewer keys a program would save
less than its partial result costs, which it writes and another one reads."""
EVEN_KEYS = 512
"""Least keys of a split where there are programs enough without it. With 4 heads a group its partial result, 4 bytes a
number, written and read, is then 1/64 of its keys and values of 2 bytes."""
PROGRAMS_PER_MULTIPROCESSOR = 2
"""Decode programs that keep a multiprocessor's memory pipeline full: each has a tile of keys and values, 16 to 32 KiB,
on the way, and the H200's share of a multiprocessor, 36 GB/s, times a microsecond of latency is 36 KB. Every shipped
tile of 16-bit keys lets as many or more reside (compiled: registers allow 2 on sm_90 at 128 dimensions, shared memory 2
on sm_89). Reasoned, not measured."""
ROUNDS = 8
"""How many times the programs that fill a GPU a long context's batch is cut into. The last programs of a launch run
beside idle ones, for at most the time of one program: with so many this is at most an eighth of the launch, wherever
its waves end. More would cost the short contexts of the same batch, whose programs without keys have to come and go.
Reasoned, not measured."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """How one program is cut: ``rows`` of packed query heads against ``keys`` at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Processor:
    """What the cut depends on of a device."""

    family: Family
    multiprocessors: int


TileTable = dict[tuple[bool, int, int], AttentionTile]
"""(one new token per request, bytes per element, padded head dim) -> tile. 1 byte: keys and values in 8 bits, queries
in 16."""

# float32 is multiplied without tensor cores (exactly), which costs registers: its tiles are small everywhere.
_FLOAT32: TileTable = {
    (True, 4, 64): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=2),
    (True, 4, 128): AttentionTile(rows=16, keys=16, num_warps=4, num_stages=2),
    (True, 4, 256): AttentionTile(rows=16, keys=16, num_warps=4, num_stages=1),
    (False, 4, 64): AttentionTile(rows=32, keys=32, num_warps=8, num_stages=2),
    (False, 4, 128): AttentionTile(rows=32, keys=16, num_warps=4, num_stages=2),
    (False, 4, 256): AttentionTile(rows=16, keys=16, num_warps=8, num_stages=1),
}

# Keys lie where a block id says that is loaded too: NVIDIA's pipeline needs stages for both. With 5, one tile of keys
# and values is on the way while another is multiplied; with 3, the next tile is asked for only after the products.
TILES: dict[Family, TileTable] = {
    "sm_80": _FLOAT32
    | {
        (True, 1, 64): AttentionTile(rows=16, keys=64, num_warps=4, num_stages=5),
        (True, 1, 128): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=5),
        (True, 1, 256): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=3),
        (True, 2, 64): AttentionTile(rows=16, keys=64, num_warps=4, num_stages=5),
        (True, 2, 128): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=5),
        (True, 2, 256): AttentionTile(rows=16, keys=16, num_warps=4, num_stages=5),
        (False, 1, 64): AttentionTile(rows=64, keys=64, num_warps=4, num_stages=5),
        (False, 1, 128): AttentionTile(rows=64, keys=32, num_warps=8, num_stages=5),
        (False, 1, 256): AttentionTile(rows=64, keys=32, num_warps=8, num_stages=3),
        (False, 2, 64): AttentionTile(rows=64, keys=64, num_warps=4, num_stages=5),
        (False, 2, 128): AttentionTile(rows=64, keys=32, num_warps=4, num_stages=5),
        (False, 2, 256): AttentionTile(rows=64, keys=32, num_warps=8, num_stages=3),
    },
    "sm_90": _FLOAT32
    | {
        (True, 1, 64): AttentionTile(rows=16, keys=64, num_warps=4, num_stages=5),
        (True, 1, 128): AttentionTile(rows=16, keys=64, num_warps=8, num_stages=5),
        (True, 1, 256): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=5),
        (True, 2, 64): AttentionTile(rows=16, keys=64, num_warps=4, num_stages=5),
        (True, 2, 128): AttentionTile(rows=16, keys=64, num_warps=8, num_stages=5),
        (True, 2, 256): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=5),
        (False, 1, 64): AttentionTile(rows=128, keys=64, num_warps=8, num_stages=5),
        (False, 1, 128): AttentionTile(rows=128, keys=64, num_warps=8, num_stages=3),
        (False, 1, 256): AttentionTile(rows=128, keys=32, num_warps=8, num_stages=3),
        (False, 2, 64): AttentionTile(rows=128, keys=64, num_warps=8, num_stages=5),
        (False, 2, 128): AttentionTile(rows=128, keys=64, num_warps=8, num_stages=5),
        (False, 2, 256): AttentionTile(rows=128, keys=32, num_warps=8, num_stages=3),
        (False, 4, 256): AttentionTile(rows=16, keys=16, num_warps=4, num_stages=1),
    },
    "amd": _FLOAT32
    | {
        (True, 1, 64): AttentionTile(rows=16, keys=64, num_warps=4, num_stages=2),
        (True, 1, 128): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=2),
        (True, 1, 256): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=2),
        (True, 2, 64): AttentionTile(rows=16, keys=64, num_warps=4, num_stages=2),
        (True, 2, 128): AttentionTile(rows=16, keys=32, num_warps=4, num_stages=2),
        (True, 2, 256): AttentionTile(rows=16, keys=16, num_warps=4, num_stages=2),
        (False, 1, 64): AttentionTile(rows=64, keys=32, num_warps=4, num_stages=2),
        (False, 1, 128): AttentionTile(rows=64, keys=32, num_warps=8, num_stages=2),
        (False, 1, 256): AttentionTile(rows=64, keys=32, num_warps=8, num_stages=2),
        (False, 2, 64): AttentionTile(rows=64, keys=32, num_warps=4, num_stages=2),
        (False, 2, 128): AttentionTile(rows=64, keys=32, num_warps=8, num_stages=2),
        (False, 2, 256): AttentionTile(rows=64, keys=16, num_warps=8, num_stages=2),
    },
}


@cache
def processor(device: torch.device) -> Processor:
    """Of a GPU; a CPU, which interprets, has no multiprocessors to fill."""
    if device.type == "cpu":
        return Processor("sm_80", 0)
    properties = torch.cuda.get_device_properties(device)
    family: Family = "amd" if torch.version.hip else "sm_90" if properties.major in (9, 10) else "sm_80"
    return Processor(family, properties.multi_processor_count)


@dataclass(frozen=True, slots=True)
class Splits:
    """Over how many programs the context of a decode under one key/value head is split."""

    most: int
    """The programs there are, 1 to :data:`MAX_SPLITS`; a short context leaves some without keys."""
    filling: int
    """With so many of each context the batch fills the GPU; further ones have at least :data:`EVEN_KEYS` keys."""

    def used(self, keys: int) -> int:
        """Programs that share ``keys`` visible keys, from the first multiple of :data:`SPLIT_KEYS` before them on; as
        the kernels compute it on the device."""
        shared_by = min(self.most, max(self.filling, keys // EVEN_KEYS))
        length = max(1, -(-keys // (shared_by * SPLIT_KEYS))) * SPLIT_KEYS
        return -(-keys // length)


def decode_splits(requests: int, num_kv_heads: int, multiprocessors: int) -> Splits:
    """How to split the contexts of so many decodes, of any length.

    ::

        132 multiprocessors, 8 heads      512 keys     2,048      32,768
        1 request                        8 × 64      32 × 64    32 × 1,024
        32 requests                      2 × 256      4 × 512    9 × 3,648
        128 requests                     1 × 512      3 × 704    3 × 10,944

    Short contexts are split until the GPU is full, and a batch that fills it leaves them whole. Long ones are split
    further: so that the last wave of programs is a small part of the launch, and so that one long context among short
    ones is not read by a single program while the rest of the GPU is idle. What that costs where no context is long is
    bounded: ROUNDS times the programs that fill the GPU, which see that they have no keys and end, and the second
    kernel's, which see that there is nothing to combine.
    """
    programs = requests * num_kv_heads
    filling = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    most, needed = (min(MAX_SPLITS, max(1, -(-wanted // programs))) for wanted in (ROUNDS * filling, filling))
    return Splits(most, needed)


def padded_head_dim(head_dim: int) -> int:
    """The next power of two that a matrix unit takes; the dimensions behind ``head_dim`` are masked."""
    return max(64, triton.next_power_of_2(head_dim))


def has_tile(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether paged attention computes such heads."""
    return (True, dtype.itemsize, padded_head_dim(head_dim)) in TILES["sm_80"]


def attention_tile(
    *, one_token: bool, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, group: int, family: Family
) -> AttentionTile:
    """The shipped tile for queries of ``dtype`` on a cache of ``kv_dtype``; ``rows`` grows where a group has more heads
    than the tile has rows.

    Raises ValueError for a head dimension that no tile was made for.
    """
    size = kv_dtype.itemsize if dtype.itemsize == 2 else dtype.itemsize
    key = (one_token, size, padded_head_dim(head_dim))
    if key not in TILES[family]:
        raise ValueError(f"head_dim is {head_dim} with {dtype}; paged attention has tiles up to 256")
    tile = TILES[family][key]
    rows = max(tile.rows, triton.next_power_of_2(group))
    return AttentionTile(rows, tile.keys, tile.num_warps, tile.num_stages)


def attention_constants(
    tile: AttentionTile,
    *,
    one_token: bool,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    kv_dtype: torch.dtype,
    has_softcap: bool,
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
        "FP8_BIAS": fp8_bias(kv_dtype),
        "ONE_TOKEN": one_token,
        "HAS_SOFTCAP": has_softcap,
    }


def combine_constants(*, num_heads: int, head_dim: int) -> dict[str, int]:
    """Compile-time values of the kernel that combines splits."""
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "DIM_PADDED": padded_head_dim(head_dim),
        "MAX_SPLITS": MAX_SPLITS,
    }
