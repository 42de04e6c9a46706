"""Paged attention against its float32 reference; what it must not read or must write is NaN beforehand."""

from __future__ import annotations

import math
import mmap

import pytest
import torch

from kernels.spec import StepBatch
from kernels.triton.paged_attention import (
    NO_WINDOW,
    attention_constants,
    attention_tile,
    paged_attention,
    paged_attention_kernel,
)
from kernels.triton.reference import paged_attention_reference
from kernels.triton.verification.attention import attention_error
from kernels.triton.verification.base import largest_error, tolerance

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("group", "head_dim"), [(1, 64), (1, 96), (3, 80), (3, 128), (5, 96), (5, 64), (7, 128), (7, 80)]
)
def test_a_mixed_step(group: int, head_dim: int) -> None:
    """A decode, a whole prompt and a later chunk together, on both sides of a block's edge."""
    error = attention_error(
        head_dim=head_dim, group=group, query_lens=[1, 17, 6], seq_lens=[33, 17, 32], num_kv_heads=1
    )
    assert error <= tolerance(FP32)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("group", [1, 3, 5, 7])
def test_decodes(group: int, head_dim: int) -> None:
    error = attention_error(head_dim=head_dim, group=group, query_lens=[1] * 4, seq_lens=[1, 16, 17, 49])
    assert error <= tolerance(FP32)


@pytest.mark.parametrize("group", [2, 4, 6, 8, 16, 32])
def test_other_groups(group: int) -> None:
    """A group larger than a tile's rows makes the tile grow."""
    shapes = {"num_kv_heads": 1, "head_dim": 64, "group": group}
    assert attention_error(query_lens=[3, 1], seq_lens=[19, 5], **shapes) <= tolerance(FP32)
    assert attention_error(query_lens=[1, 1], seq_lens=[19, 5], **shapes) <= tolerance(FP32)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_prompts_at_block_edges(length: int) -> None:
    assert attention_error(query_lens=[length, 1], seq_lens=[length, length]) <= tolerance(FP32)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_half_precision(dtype: torch.dtype, head_dim: int) -> None:
    shapes = {"dtype": dtype, "head_dim": head_dim, "group": 5}
    assert attention_error(query_lens=[1, 17, 9], seq_lens=[70, 17, 25], **shapes) <= tolerance(dtype)
    assert attention_error(query_lens=[1, 1], seq_lens=[70, 16], **shapes) <= tolerance(dtype)


@pytest.mark.parametrize(("length", "window"), [(7, 8), (8, 8), (9, 8), (17, 8), (40, 8), (40, 1), (40, 33)])
def test_window(length: int, window: int) -> None:
    """As a prompt, as a chunk and as a decode; the slots behind the window hold NaN."""
    chunk = min(6, length)
    error = attention_error(
        query_lens=[length, chunk, 1], seq_lens=[length, length, length], window=window, num_kv_heads=1
    )
    assert error <= tolerance(FP32)
    assert attention_error(query_lens=[1, 1], seq_lens=[length, 1], window=window) <= tolerance(FP32)


def test_rows_that_see_none_of_a_tiles_keys() -> None:
    """32 queries against 16 keys at a time: the last queries' windows begin behind the first keys."""
    error = attention_error(head_dim=128, group=1, num_kv_heads=1, query_lens=[40], seq_lens=[40], window=3)
    assert error <= tolerance(FP32)


def test_a_tile_writes_its_own_rows_only() -> None:
    """32 rows are 6 queries of a group of 5 and two rows too many, which are the next tile's."""
    torch.manual_seed(0)
    q, keys, values = torch.randn(20, 5, 64), torch.randn(3, 1, 16, 64), torch.randn(3, 1, 16, 64)
    tile = attention_tile(one_token=False, dtype=FP32, head_dim=64, group=5)
    constants = attention_constants(tile, one_token=False, head_dim=64, num_heads=5, num_kv_heads=1, block_size=16)
    assert tile.rows % 5 != 0
    out = torch.full_like(q, math.nan)
    ends = torch.tensor([0, 20]), torch.tensor([20]), torch.tensor([[1, 2]])
    arguments = [end.to(torch.int32) for end in ends]
    paged_attention_kernel[(1, 1)](out, q, keys, values, *arguments, 1, 2, 0.1, NO_WINDOW, **constants)
    queries = tile.rows // 5
    assert bool(torch.isfinite(out[:queries]).all())
    assert bool(out[queries:].isnan().all())


@pytest.mark.parametrize("block_size", [1, 2, 32, 256])
def test_block_sizes(block_size: int) -> None:
    assert attention_error(query_lens=[1, 5], seq_lens=[37, 33], block_size=block_size) <= tolerance(FP32)


def test_many_requests_of_every_length() -> None:
    """Tiles of 32 rows hold 10 queries of a group of 3: every remainder, and the search through the requests."""
    lengths = [*range(1, 12), 20, 21]
    error = attention_error(query_lens=lengths, seq_lens=[n + 3 for n in lengths], num_kv_heads=1)
    assert error <= tolerance(FP32)


def test_scores_far_from_zero() -> None:
    """Scores of ±1000 neither overflow nor lose the differences between them."""
    torch.manual_seed(0)
    keys, values = torch.randn(3, 1, 16, 64) * 40, torch.randn(3, 1, 16, 64)
    q = torch.randn(1, 3, 64) * 25
    tables = torch.tensor([[2, 1]], dtype=torch.int32)
    out = paged_attention(q, keys, values, _decode_batch(tables, 20), scale=0.125)
    expected = paged_attention_reference(q, keys, values, [1], [20], tables, scale=0.125)
    assert largest_error(out, expected) < 1e-3
    assert expected.abs().max() > 0.5


def test_offsets_beyond_two_to_the_31() -> None:
    """The last blocks of a pool of more than 2^31 elements, of which only the blocks in use exist in memory."""
    block_size, head_dim, kv_heads = 16, 64, 1
    block = kv_heads * block_size * head_dim
    high = 2**31 // block + 5
    memory = mmap.mmap(-1, (high + 4) * block * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def blocks(first: int, count: int) -> torch.Tensor:
        flat = torch.frombuffer(memory, dtype=FP16, count=count * block, offset=first * block * 2)
        return flat.view(count, kv_heads, block_size, head_dim)

    torch.manual_seed(0)
    # The values' cache starts one block after the keys': keys in blocks 1 and high, values behind them.
    for first in (1, high):
        blocks(first, 2).copy_(torch.randn(2, kv_heads, block_size, head_dim))
    tables = torch.tensor([[high, 1]], dtype=torch.int32)
    q = torch.randn(1, 3, head_dim).to(FP16)
    out = paged_attention(q, blocks(0, 1), blocks(1, 1), _decode_batch(tables, 27), scale=0.125)

    near = torch.tensor([[0, 1]], dtype=torch.int32)
    keys = torch.cat((blocks(high, 1), blocks(1, 1)))
    values = torch.cat((blocks(high + 1, 1), blocks(2, 1)))
    expected = paged_attention_reference(q, keys, values, [1], [27], near, scale=0.125)
    assert largest_error(out, expected) <= tolerance(FP16)


def test_a_head_dimension_without_a_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim is 512"):
        attention_tile(one_token=True, dtype=BF16, head_dim=512, group=1)


def _decode_batch(tables: torch.Tensor, seq_len: int) -> StepBatch:
    position = torch.tensor([seq_len - 1])
    return StepBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=position,
        slot_mapping=position,
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_tables=tables,
        logits_rows=torch.tensor([0]),
    )
