"""Rotary with the KV write, norms, activation and block copies against their float32 references."""

from __future__ import annotations

import math
import mmap

import pytest
import torch

from kernels.triton.block_copy import (
    copy_blocks,
    copy_blocks_kernel,
    copy_constants,
    independent_waves,
    move_blocks,
    word_type,
)
from kernels.triton.configurations.elementwise import FP8_TOLERANCE
from kernels.triton.kv_write import kv_write, rotary_table
from kernels.triton.reference import copy_blocks_reference
from kernels.triton.verification.base import tolerance
from kernels.triton.verification.elementwise import activation_error, copy_error, kv_write_error, norm_error

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def _still(rotary_dim: int) -> torch.Tensor:
    """A table of angles of 0, for three positions: keys are written as they are."""
    return rotary_table(torch.zeros(rotary_dim // 2), 3, 1.0, torch.device("cpu"))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 5, 7])
def test_kv_write(group: int, head_dim: int) -> None:
    error = kv_write_error(head_dim=head_dim, num_heads=2 * group, num_kv_heads=2)
    assert error <= tolerance(FP32)


@pytest.mark.parametrize("rotary_dim", [0, 16, 32, 40, 80])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_kv_write_with_partial_rotary(rotary_dim: int, qk_norm: bool) -> None:
    error = kv_write_error(head_dim=80, rotary_dim=rotary_dim, num_heads=10, num_kv_heads=10, qk_norm=qk_norm)
    assert error <= tolerance(FP32)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_kv_write_in_half_precision(dtype: torch.dtype) -> None:
    assert kv_write_error(dtype=dtype, num_heads=3, num_kv_heads=1, qk_norm=True) <= tolerance(dtype)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_kv_write_into_eight_bits(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    error = kv_write_error(
        dtype=dtype, kv_dtype=kv_dtype, head_dim=80, rotary_dim=32, num_heads=10, num_kv_heads=2, qk_norm=True
    )
    assert error <= tolerance(dtype) + FP8_TOLERANCE


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_a_bad_number_stays_one_in_eight_bits(kv_dtype: torch.dtype) -> None:
    """What overflows is a number still; NaN must not pass for one."""
    keys, values = (torch.zeros(2, 1, 4, 8, dtype=kv_dtype) for _ in range(2))
    qkv = torch.zeros(1, 3 * 8)
    qkv[0, 8:11] = torch.tensor([math.nan, math.inf, -1e9])
    qkv[0, 16:19] = torch.tensor([math.nan, -math.inf, 1e9])
    kv_write(qkv, keys, values, torch.tensor([5]), torch.tensor([0]), _still(8), num_heads=1, use_rope=False)
    largest = torch.finfo(kv_dtype).max
    assert torch.equal(keys[1, 0, 1].float().nan_to_num(7.0)[:4], torch.tensor([7.0, largest, -largest, 0.0]))
    assert torch.equal(values[1, 0, 1].float().nan_to_num(7.0)[:4], torch.tensor([7.0, -largest, largest, 0.0]))


def test_padding_shares_the_null_block_and_may_lie_behind_the_last_position() -> None:
    qkv = torch.randn(3, 3 * 16, generator=torch.Generator().manual_seed(1))
    keys, values = (torch.full((2, 1, 4, 16), 7.0) for _ in range(2))
    q = kv_write(qkv, keys, values, torch.tensor([6, 0, 0]), torch.tensor([2, 10**6, 99]), _still(16), num_heads=1)
    assert torch.equal(q[:, 0], qkv[:, :16])
    assert torch.equal(keys[1, 0, 2], qkv[0, 16:32]) and torch.equal(values[1, 0, 2], qkv[0, 32:])
    assert torch.equal(keys[0, 0, 0], qkv[1, 16:32]) or torch.equal(keys[0, 0, 0], qkv[2, 16:32])
    untouched = torch.cat((keys[:, 0].flatten(0, 1)[1:6], keys[:, 0].flatten(0, 1)[7:]))
    assert bool((untouched == 7.0).all())


def test_the_rotary_table_is_the_cosine_and_sine_of_each_position() -> None:
    inv_freq = torch.tensor([1.0, 0.25, 0.01])
    table = rotary_table(inv_freq, 300, 1.5, torch.device("cpu"))
    angles = torch.arange(300).double()[:, None] * inv_freq.double()
    expected = 1.5 * torch.cat((angles.cos(), angles.sin()), dim=1)
    assert table.dtype == FP32 and table.shape == (300, 6)
    assert torch.allclose(table.double(), expected, atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 2, 256])
def test_kv_write_with_other_block_sizes(block_size: int) -> None:
    assert kv_write_error(block_size=block_size, num_heads=3, num_kv_heads=1) <= tolerance(FP32)


def test_kv_write_beyond_two_to_the_31() -> None:
    block_size, head_dim = 16, 64
    block = block_size * head_dim
    high = 2**31 // block + 7
    memory = mmap.mmap(-1, (high + 2) * block * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def blocks(first: int) -> torch.Tensor:
        flat = torch.frombuffer(memory, dtype=FP16, count=block, offset=first * block * 2)
        return flat.view(1, 1, block_size, head_dim)

    qkv = torch.randn(1, 3 * head_dim).to(FP16)
    slot = torch.tensor([high * block_size + 3])
    # The values' cache starts one block after the keys'.
    kv_write(qkv, blocks(0), blocks(1), slot, torch.tensor([0]), _still(head_dim), num_heads=1)
    for first, part in ((high, 1), (high + 1, 2)):
        expected = torch.zeros(1, 1, block_size, head_dim, dtype=FP16)
        expected[0, 0, 3] = qkv[0, part * head_dim : (part + 1) * head_dim]
        assert torch.equal(blocks(first), expected)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("columns", [1, 64, 577])
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(dtype: torch.dtype, columns: int, residual: bool) -> None:
    assert norm_error(dtype=dtype, columns=columns, residual=residual) <= tolerance(dtype)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("width", [2, 1024, 1537])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    assert activation_error(dtype=dtype, width=width) <= tolerance(dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float8_e4m3fn])
@pytest.mark.parametrize("elements", [2 * 16 * 80, 4096, 8 * 1031, 1031, 17])
def test_copies_are_exact(elements: int, dtype: torch.dtype) -> None:
    assert copy_error(elements=elements, pairs=[(1, 2), (3, 4), (1, 5)], dtype=dtype) == 0.0


def test_blocks_of_every_type_are_copied_as_the_same_words() -> None:
    assert [word_type(size) for size in (16 * 80 * 2, 16 * 80, 24, 20, 17)] == [torch.int64] * 3 + [torch.uint8] * 2


def test_blocks_move_between_storages_of_different_sizes() -> None:
    pool, host = torch.randn(3, 7, 40).to(torch.float8_e4m3fn), torch.zeros(3, 4, 40).to(torch.float8_e4m3fn)
    move_blocks(pool, host, [(6, 1), (2, 3)], pool.device)
    as_bytes, moved = pool.view(torch.uint8), host.view(torch.uint8)
    assert torch.equal(moved[:, [1, 3]], as_bytes[:, [6, 2]]) and torch.count_nonzero(moved[:, [0, 2]]) == 0


@pytest.mark.parametrize(
    "pairs",
    [
        [(1, 2), (2, 3)],  # a copy of a copy
        [(1, 2), (3, 1)],  # a source that is written again
        [(1, 2), (3, 2)],  # a destination written twice
        [(1, 2), (2, 1)],
        [(1, 1), (1, 2)],
        [],
    ],
)
def test_dependent_copies_happen_in_order(pairs: list[tuple[int, int]]) -> None:
    assert copy_error(pairs=pairs) == 0.0


def test_independent_copies_share_a_launch() -> None:
    assert independent_waves([(1, 2), (1, 3), (4, 5)]) == [[(1, 2), (1, 3), (4, 5)]]
    for second in ((2, 3), (3, 1), (3, 2)):
        assert independent_waves([(1, 2), second]) == [[(1, 2)], [second]]


def test_copies_leave_the_other_blocks_alone() -> None:
    kv = torch.randn(2, 6, 33)
    before = kv.clone()
    copy_blocks(kv, [(1, 4)])
    assert torch.equal(kv, copy_blocks_reference(before, [(1, 4)]))
    assert not torch.equal(kv, before)


def test_copies_beyond_two_to_the_31() -> None:
    """Two planes whose second one begins behind 2^31 words."""
    words, num_blocks = 1024, 2**21 + 3
    memory = mmap.mmap(-1, 2 * (num_blocks + 4) * words, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def block(plane: int, index: int) -> torch.Tensor:
        offset = (plane * num_blocks + index) * words
        return torch.frombuffer(memory, dtype=torch.uint8, count=words, offset=offset)

    block(0, 1).fill_(1)
    block(1, 1).fill_(2)
    pairs = torch.tensor([[1, num_blocks - 1]])
    start = block(0, 0)
    copy_blocks_kernel[(1, 2, 1)](start, start, pairs, num_blocks, num_blocks, **copy_constants(words))
    assert bool((block(0, num_blocks - 1) == 1).all())
    assert bool((block(1, num_blocks - 1) == 2).all())
