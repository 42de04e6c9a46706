"""Paged attention against its float32 reference; what it must not read or must write is NaN beforehand."""

from __future__ import annotations

import dataclasses
import math
import mmap

import pytest
import torch

from kernels.spec import StepBatch
from kernels.triton.attention_kernels import combine_splits_kernel, paged_attention_kernel
from kernels.triton.attention_tiles import (
    MAX_SPLITS,
    PROGRAMS_PER_MULTIPROCESSOR,
    ROUNDS,
    SPLIT_KEYS,
    TILES,
    Family,
    Splits,
    attention_constants,
    attention_tile,
    combine_constants,
    decode_splits,
)
from kernels.triton.paged_attention import NO_WINDOW, paged_attention
from kernels.triton.reference import paged_attention_reference
from kernels.triton.verification.attention import attention_error
from kernels.triton.verification.base import largest_error, make_batch, tolerance

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
    tile = attention_tile(one_token=False, dtype=FP32, kv_dtype=FP32, head_dim=64, group=5, family="sm_80")
    constants = attention_constants(
        tile,
        one_token=False,
        head_dim=64,
        num_heads=5,
        num_kv_heads=1,
        block_size=16,
        kv_dtype=FP32,
        has_softcap=False,
    )
    assert tile.rows % 5 != 0
    out = torch.full_like(q, math.nan)
    integers = [torch.tensor(each, dtype=torch.int32) for each in ([0, 20], [20], [[1, 2]], [2])]
    nothing = torch.empty(0)
    paged_attention_kernel[(1, 1)](
        out, nothing, nothing, q, keys, values, *integers, 1, 0.1, 0.0, NO_WINDOW, 1, **constants
    )
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
        attention_tile(one_token=True, dtype=BF16, kv_dtype=BF16, head_dim=512, group=1, family="amd")


@pytest.mark.parametrize(
    ("requests", "num_kv_heads", "multiprocessors", "splits"),
    [
        (1, 8, 132, Splits(32, 32)),  # one request on an H200: 264 programs fill it, 8 without splits
        (4, 8, 132, Splits(32, 9)),
        (32, 8, 132, Splits(9, 2)),
        (33, 8, 132, Splits(8, 1)),
        (128, 8, 132, Splits(3, 1)),
        (265, 8, 132, Splits(1, 1)),
        (1, 3, 16, Splits(32, 11)),
        (1, 1, 0, Splits(1, 1)),
    ],
)
def test_splits_fill_the_device(requests: int, num_kv_heads: int, multiprocessors: int, splits: Splits) -> None:
    assert decode_splits(requests, num_kv_heads, multiprocessors) == splits


@pytest.mark.parametrize(
    ("requests", "keys", "used"),
    [
        (1, 512, 8),  # 64 keys each
        (1, 32_768, 32),
        (32, 512, 2),
        (32, 2048, 4),  # full with two: no fewer keys than 512 each
        (128, 512, 1),
        (128, 1023, 1),
        (128, 1024, 2),
        (128, 32_768, 3),
    ],
)
def test_short_contexts_are_split_no_further_than_fills_the_device(requests: int, keys: int, used: int) -> None:
    assert decode_splits(requests, 8, 132).used(keys) == used


@pytest.mark.parametrize("requests", [1, 2, 8, 32, 33, 67, 128, 256])
def test_the_last_wave_of_long_contexts_is_a_small_part_of_the_launch(requests: int) -> None:
    """Programs of equal length, so many at a time as reside: what the last wave lacks of those that keep the memory
    pipelines full is idle for the time of one program. Few requests have few programs, however they are split: theirs
    end well with the two or five a multiprocessor that the tiles for 128 and 64 dimensions let reside on sm_90."""
    heads, multiprocessors = 8, 132
    filling = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    programs = heads * requests * decode_splits(requests, heads, multiprocessors).used(32_768)
    for residing in range(PROGRAMS_PER_MULTIPROCESSOR, 9) if requests >= 8 else (2, 5):
        last = programs % (residing * multiprocessors)
        idle = max(0, filling - last) if last else 0
        assert idle / programs <= 1 / ROUNDS


def test_a_split_is_whole_tiles() -> None:
    assert all(SPLIT_KEYS % tile.keys == 0 for table in TILES.values() for (one, *_), tile in table.items() if one)


@pytest.mark.parametrize(("splits", "group", "head_dim"), [(2, 1, 64), (3, 5, 80), (8, 2, 64), (MAX_SPLITS, 1, 64)])
def test_splits(splits: int, group: int, head_dim: int) -> None:
    """Lengths on both sides of a split's edge, most of them too short for all of the splits."""
    lengths = [1, 64, 65, 129, 300]
    error = attention_error(
        head_dim=head_dim, group=group, num_kv_heads=1, query_lens=[1] * 5, seq_lens=lengths, splits=splits
    )
    assert error <= tolerance(FP32)


def test_a_full_device_leaves_short_contexts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside long ones, which are combined, they are written by their first program, and nobody else."""
    from kernels.triton import paged_attention as module

    splits = Splits(3, 1)
    lengths = [1, 600, 1023, 1024, 1700]
    assert [splits.used(length) for length in lengths] == [1, 1, 1, 2, 3]
    monkeypatch.setattr(module, "decode_splits", lambda *sizes: splits)
    shapes = {"num_kv_heads": 1, "query_lens": [1] * 5, "seq_lens": lengths}
    assert attention_error(**shapes, splits=None) <= tolerance(FP32)
    assert attention_error(**shapes, splits=None, window=1050) <= tolerance(FP32)


@pytest.mark.parametrize(("window", "block_size"), [(1, 16), (64, 16), (65, 64), (100, 16), (250, 64)])
def test_a_window_bounds_the_splits(window: int, block_size: int) -> None:
    error = attention_error(
        num_kv_heads=1, query_lens=[1] * 2, seq_lens=[300, 256], window=window, block_size=block_size, splits=4
    )
    assert error <= tolerance(FP32)


@pytest.mark.parametrize("splits", [1, 3])
def test_decodes_beside_prompts(splits: int) -> None:
    """Each of the two launches writes its own requests' rows."""
    lengths = {"query_lens": [1, 40, 1, 2, 1], "seq_lens": [200, 45, 1, 2, 70]}
    assert attention_error(**lengths, num_kv_heads=1, splits=splits) <= tolerance(FP32)
    assert attention_error(**lengths, num_kv_heads=1, splits=splits, window=33) <= tolerance(FP32)


def test_the_two_launches_write_disjoint_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch alone leaves the other's rows as they were."""
    from kernels.triton import paged_attention as module

    random = torch.Generator().manual_seed(0)
    batch, blocks = make_batch([1, 9, 1], [80, 9, 3], 16, random)
    cache, q = torch.randn(blocks, 1, 16, 64), torch.randn(11, 2, 64)
    launch = module._launch
    for kept, rows in ((True, [0, 10]), (False, list(range(1, 10)))):

        def only(operands: object, *, one_token: bool, splits: object = None, kept: bool = kept) -> None:
            if one_token is kept:
                launch(operands, one_token=one_token, **({} if splits is None else {"splits": splits}))  # type: ignore[arg-type]

        monkeypatch.setattr(module, "_launch", only)
        out = torch.full_like(q, math.nan)
        paged_attention(q, cache, cache, batch, scale=0.125, splits=2, out=out)
        written = torch.isfinite(out).all(dim=(1, 2))
        assert written.nonzero().flatten().tolist() == rows
        assert bool(out[~written].isnan().all())


@pytest.mark.parametrize("splits", [1, 4])
def test_padding_rows_read_nothing_and_give_0(splits: int) -> None:
    """Rows with which a captured graph is filled up: no context, and block tables that lead nowhere."""
    random = torch.Generator().manual_seed(0)
    batch, blocks = make_batch([1, 1, 1], [70, 1, 1], 16, random)
    cache = torch.full((blocks, 1, 16, 64), math.nan)
    cache[batch.block_tables[0, :5].long()] = torch.randn(5, 1, 16, 64)
    batch.seq_lens[1:] = 0
    batch.block_tables[1:] = 2**31 - 1
    q = torch.randn(3, 3, 64)
    q[1:] = math.nan
    for window in (None, 8):
        out = paged_attention(q, cache, cache, batch, scale=0.125, window=window, splits=splits)
        assert bool((out[1:] == 0).all())
        assert bool(torch.isfinite(out[0]).all())


def test_splits_without_keys_are_not_read() -> None:
    """What the second kernel combines is what the first one wrote: the other partial results may hold anything."""
    torch.manual_seed(0)
    partial, lse = torch.full((1, 2, 8, 64), math.nan), torch.full((1, 2, 8), math.nan)
    partial[:, :, :3], lse[:, :, :3] = torch.randn(1, 2, 3, 64), torch.randn(1, 2, 3)
    ends = [torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [150])]
    out = torch.full((1, 2, 64), math.nan)
    constants = combine_constants(num_heads=2, head_dim=64)
    combine_splits_kernel[(1, 2)](out, partial, lse, *ends, NO_WINDOW, 8, 8, **constants)
    shares = torch.softmax(lse[0, :, :3] * math.log(2), dim=-1)
    assert largest_error(out[0], (partial[0, :, :3] * shares[:, :, None]).sum(1)) <= tolerance(FP32)


def test_the_stride_of_the_tables_is_read_on_the_device() -> None:
    """Tables of another width at the same address, as a captured graph finds them."""
    random = torch.Generator().manual_seed(0)
    batch, blocks = make_batch([1, 1], [30, 40], 16, random)
    cache, q = torch.randn(blocks, 1, 16, 64), torch.randn(2, 2, 64)
    expected = paged_attention_reference(q, cache, cache, [1, 1], [30, 40], batch.block_tables, scale=0.125)
    memory, stride = torch.full((40,), 2**31 - 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for width in (4, 7, 13):
        memory.view(-1)[: 2 * width].view(2, width)[:, :4] = batch.block_tables[:, :4]
        stride.fill_(width)
        step = dataclasses.replace(batch, block_tables=memory.view(2, 20), table_stride=stride)
        assert largest_error(paged_attention(q, cache, cache, step, scale=0.125), expected) <= tolerance(FP32)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_soft_cap(softcap: float) -> None:
    """Random scores of this size are around 1, so that the smaller caps bend them. A rounding of tanh by one unit in
    the last place is softcap · 2^-23 of a score, and the same share of a weight."""
    allowed = tolerance(FP32) + softcap * 2.0**-23
    shapes = {"num_kv_heads": 1, "softcap": softcap, "head_dim": 80}
    assert attention_error(query_lens=[1, 9], seq_lens=[40, 14], window=11, **shapes) <= allowed
    assert attention_error(query_lens=[1], seq_lens=[130], splits=2, **shapes) <= allowed


def test_a_soft_cap_does_not_overflow() -> None:
    """Scores of ±10,000 are the cap itself: the keys of one sign share the weight."""
    keys, values = torch.ones(2, 1, 16, 64), torch.randn(2, 1, 16, 64)
    keys[1, 0, 1::2] = -1.0
    q = torch.full((1, 2, 64), 1e4)
    tables = torch.tensor([[1]], dtype=torch.int32)
    out = paged_attention(q, keys, values, _decode_batch(tables, 16), scale=1 / 64, softcap=30.0)
    assert largest_error(out, values[1, 0, ::2].mean(0).expand(1, 2, 64)) <= tolerance(FP32)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_keys_and_values_of_8_bits(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    shapes = {"dtype": dtype, "kv_dtype": kv_dtype, "head_dim": 80, "num_kv_heads": 1}
    assert attention_error(query_lens=[1, 19], seq_lens=[70, 25], **shapes) <= tolerance(dtype)
    assert attention_error(query_lens=[1, 1], seq_lens=[70, 130], splits=2, **shapes) <= tolerance(dtype)


@pytest.mark.parametrize("family", ["sm_90", "amd"])
def test_tiles_of_other_gpus(family: Family) -> None:
    for dtype in (FP32, BF16):
        shapes = {"dtype": dtype, "family": family, "group": 3, "num_kv_heads": 1}
        assert attention_error(query_lens=[1, 70], seq_lens=[70, 90], window=40, **shapes) <= tolerance(dtype)


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
