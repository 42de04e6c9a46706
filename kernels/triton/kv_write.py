"""From the fused q/k/v projection to rotated queries and a written cache, in one pass.

A program takes one token and a few heads. The first programs of a token turn its queries, the others its keys, which
they put into the cache beside the values::

    qkv row   | q0 q1 q2 q3 | q4 q5 | k0 k1 | v0 v1 |        6 query heads, 2 key/value heads, 4 heads a program
    program         0           1          2

Rotary turns the pairs (i, i + rotary_dim / 2) of a head: both halves are loaded once, each as its own tile, so nothing
is exchanged between threads. Dimensions behind ``rotary_dim`` pass through. The optional RMSNorm of each q and k head
(Qwen3) comes first and is folded into the same registers. Cosines and sines come from a table of all positions, so that
a step computes none::

    rotary table, row p   | cos(p · f0) … cos(p · fn) | sin(p · f0) … sin(p · fn) |      rotary_dim numbers

A cache of 8 bits takes keys and values without a scale (:mod:`kernels.triton.fp8`): those beyond ±448 (±240 on
gfx942) are written as that, and NaN as NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.fp8 import encode_fp8, fp8_bias

HEADS_PER_PROGRAM = 8
NUM_WARPS = 4


def rotary_table(inv_freq: torch.Tensor, max_position: int, scaling: float, device: torch.device) -> torch.Tensor:
    """float32 [max_position, rotary_dim] on ``device``: of each position the cosines, then the sines, times
    ``scaling``. ``inv_freq``: float32 [rotary_dim / 2]."""
    angles = torch.outer(torch.arange(max_position, device=device).float(), inv_freq.to(device, torch.float32))
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(scaling)


def kv_write_constants(
    *, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, block_size: int, kv_dtype: torch.dtype
) -> dict[str, int]:
    """The kernel's compile-time values; ``kv_dtype`` is that of the cache."""
    rest = head_dim - rotary_dim
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "DIM_PADDED": triton.next_power_of_2(head_dim),
        "ROTARY_DIM": rotary_dim,
        "HALF_PADDED": triton.next_power_of_2(max(1, rotary_dim // 2)),
        "REST_PADDED": triton.next_power_of_2(max(1, rest)),
        "BLOCK_SIZE": block_size,
        "HEADS": min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads)),
        "FP8_BIAS": fp8_bias(kv_dtype),
    }


@triton.jit
def _rounded(x: tl.tensor, dtype: tl.constexpr, FP8_BIAS: tl.constexpr) -> tl.tensor:
    """``x`` as memory of ``dtype`` holds it; where there is a bias these are bytes."""
    return x.to(dtype) if FP8_BIAS == 0 else encode_fp8(x.to(tl.float32), FP8_BIAS)


@triton.jit
def _norm_and_rotate(
    source: tl.tensor,
    destination: tl.tensor,
    valid: tl.tensor,
    rotary_row: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    FP8_BIAS: tl.constexpr,
) -> None:
    """Heads at the pointers ``source`` [HEADS] to ``destination`` [HEADS]; ``rotary_row`` is that of this token's
    position."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    dtype: tl.constexpr = destination.dtype.element_ty
    half = tl.arange(0, HALF_PADDED)
    rest = ROTARY_DIM + tl.arange(0, REST_PADDED)
    half_mask = valid[:, None] & (half < HALF)[None, :]
    rest_mask = valid[:, None] & (rest < HEAD_DIM)[None, :]
    squares = tl.zeros([source.shape[0]], dtype=tl.float32)
    if ROTARY_DIM > 0:
        first = tl.load(source[:, None] + half[None, :], mask=half_mask, other=0.0).to(tl.float32)
        second = tl.load(source[:, None] + HALF + half[None, :], mask=half_mask, other=0.0).to(tl.float32)
        squares += tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if ROTARY_DIM < HEAD_DIM:
        others = tl.load(source[:, None] + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
        squares += tl.sum(others * others, axis=1)
    inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]

    if ROTARY_DIM > 0:
        if norm_ptr is not None:
            first *= inverse * tl.load(norm_ptr + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
            second *= inverse * tl.load(norm_ptr + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
        cos = tl.load(rotary_row + half, mask=half < HALF, other=0.0)[None, :]
        sin = tl.load(rotary_row + HALF + half, mask=half < HALF, other=0.0)[None, :]
        turned = _rounded(first * cos - second * sin, dtype, FP8_BIAS)
        tl.store(destination[:, None] + half[None, :], turned, mask=half_mask)
        turned = _rounded(second * cos + first * sin, dtype, FP8_BIAS)
        tl.store(destination[:, None] + HALF + half[None, :], turned, mask=half_mask)
    if ROTARY_DIM < HEAD_DIM:
        if norm_ptr is not None:
            others *= inverse * tl.load(norm_ptr + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        tl.store(destination[:, None] + rest[None, :], _rounded(others, dtype, FP8_BIAS), mask=rest_mask)


@triton.jit(
    do_not_specialize=["last_position"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def kv_write_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    rotary_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    last_position: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    FP8_BIAS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    row = qkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    # Padding, whose result nobody reads, may lie behind the longest context.
    position = tl.minimum(tl.load(positions_ptr + token), last_position) if ROTARY_DIM > 0 else token * 0
    rotary_row = rotary_ptr + position * ROTARY_DIM
    if part < Q_PARTS:
        head = part * HEADS + tl.arange(0, HEADS)
        source = row + head * HEAD_DIM
        destination = q_ptr + (token * NUM_HEADS + head) * HEAD_DIM
        valid = head < NUM_HEADS
        _norm_and_rotate(
            source,
            destination,
            valid,
            rotary_row,
            q_norm_ptr,
            eps,
            HEAD_DIM,
            ROTARY_DIM,
            HALF_PADDED,
            REST_PADDED,
            0,
        )
    else:
        head = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)
        valid = head < NUM_KV_HEADS
        slot = tl.load(slots_ptr + token)
        offset = (((slot // BLOCK_SIZE) * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
        source = row + (NUM_HEADS + head) * HEAD_DIM
        _norm_and_rotate(
            source,
            key_ptr + offset,
            valid,
            rotary_row,
            k_norm_ptr,
            eps,
            HEAD_DIM,
            ROTARY_DIM,
            HALF_PADDED,
            REST_PADDED,
            FP8_BIAS,
        )
        dims = tl.arange(0, DIM_PADDED)
        mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(source[:, None] + NUM_KV_HEADS * HEAD_DIM + dims[None, :], mask=mask)
        stored = _rounded(values, value_ptr.dtype.element_ty, FP8_BIAS)
        tl.store(value_ptr + offset[:, None] + dims[None, :], stored, mask=mask)


def kv_write(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    rotary: torch.Tensor,
    *,
    num_heads: int,
    use_rope: bool = True,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate (and norm) queries and keys, write keys and values to their slots, return the queries.

    ``qkv`` [T, (heads + 2 kv_heads) · head_dim], contiguous; caches [blocks, kv_heads, block_size, head_dim], of the
    type of ``qkv`` or of 8 bits; ``slot_mapping`` and ``positions`` int64 [T]; ``rotary`` as :func:`rotary_table` makes
    it: a position behind its end is taken for its last. Returns [T, heads, head_dim] (``out`` where given).

    Several rows may have slot 0, in the null block: what it holds then is one row's or another's.
    """
    num_tokens = qkv.shape[0]
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    if out is None:
        out = qkv.new_empty((num_tokens, num_heads, head_dim))
    constants = kv_write_constants(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary.shape[1] if use_rope else 0,
        block_size=block_size,
        kv_dtype=key_cache.dtype,
    )
    if constants["FP8_BIAS"]:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    parts = triton.cdiv(num_heads, constants["HEADS"]) + triton.cdiv(num_kv_heads, constants["HEADS"])
    kv_write_kernel[(num_tokens, parts)](
        out,
        key_cache,
        value_cache,
        qkv,
        slot_mapping,
        positions,
        rotary,
        q_norm,
        k_norm,
        rotary.shape[0] - 1,
        eps,
        **constants,
        num_warps=NUM_WARPS,
    )
    return out
