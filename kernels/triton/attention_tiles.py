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
PROGRAMS_PER_MULTIPROCESSOR = 2
"""Decode programs that keep a multiprocessor's memory pipeline full: each has two or three tiles of keys on the way."""


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
    """Of a GPU; a CPU, which interprets, counts as a small one."""
    if device.type == "cpu":
        return Processor("sm_80", 1)
    properties = torch.cuda.get_device_properties(device)
    family: Family = "amd" if torch.version.hip else "sm_90" if properties.major in (9, 10) else "sm_80"
    return Processor(family, properties.multi_processor_count)


def decode_splits(requests: int, num_kv_heads: int, multiprocessors: int) -> int:
    """Over how many programs the context of a decode under one key/value head is split, 1 to :data:`MAX_SPLITS`: so
    many that every multiprocessor has work, and 1 where the batch sees to that."""
    wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    return min(MAX_SPLITS, max(1, -(-wanted // (requests * num_kv_heads))))


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
