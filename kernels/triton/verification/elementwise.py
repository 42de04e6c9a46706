"""The kernels around attention against their references."""

from __future__ import annotations

import math

import torch

from kernels.triton.activation import silu_mul
from kernels.triton.block_copy import copy_blocks
from kernels.triton.kv_write import kv_write, rotary_table
from kernels.triton.norms import rms_norm
from kernels.triton.reference import (
    copy_blocks_reference,
    rms_norm_reference,
    rotary_reference,
    silu_mul_reference,
)
from kernels.triton.verification.base import EPS, largest_error

MAX_POSITION = 1000
"""Rows of the rotary table."""


def kv_write_error(
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    num_tokens: int = 3,
    block_size: int = 16,
    qk_norm: bool = False,
    device: str = "cpu",
) -> float:
    """Queries, keys and values after :func:`kv_write`; slots that no token was given must stay as they were.

    ``kv_dtype``: of the cache, None for ``dtype``; of 8 bits, each row has a value that is too large for it.
    """
    random = torch.Generator().manual_seed(head_dim * 131 + num_heads)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=random).to(dtype)
    largest = math.inf if kv_dtype is None else torch.finfo(kv_dtype).max
    if kv_dtype is not None:
        qkv[:, -1] = -2 * largest
    inv_freq = torch.rand(max(rotary_dim, 2) // 2, generator=random)
    positions = torch.randint(0, MAX_POSITION, (num_tokens,), generator=random)
    positions[0] = MAX_POSITION - 1
    angles = positions[:, None].float() * inv_freq
    num_blocks = 2 + -(-num_tokens // block_size)
    slots = torch.randperm((num_blocks - 1) * block_size, generator=random)[:num_tokens] + block_size
    norms = [(torch.rand(head_dim, generator=random) + 0.5).to(dtype) if qk_norm else None for _ in range(2)]
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    caches = [torch.full(shape, 7.0).to(kv_dtype or dtype) for _ in range(2)]

    heads = qkv.view(num_tokens, -1, head_dim)
    parts = [heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:].float()]
    for i, weight in enumerate(norms):
        parts[i] = parts[i].float() if weight is None else rms_norm_reference(parts[i], weight, EPS)
        parts[i] = rotary_reference(parts[i], angles.cos(), angles.sin()) if rotary_dim else parts[i]
    expected = [cache.float() for cache in caches]
    for cache, part in zip(expected, parts[1:], strict=True):
        cache[slots // block_size, :, slots % block_size] = part.clamp(-largest, largest)

    on_device = [cache.to(device) for cache in caches]
    out = torch.full((num_tokens, num_heads, head_dim), math.nan, dtype=dtype, device=device)
    kv_write(
        qkv.to(device),
        on_device[0],
        on_device[1],
        slots.to(device),
        positions.to(device),
        rotary_table(inv_freq, MAX_POSITION, 1.0, torch.device(device)),
        num_heads=num_heads,
        use_rope=rotary_dim > 0,
        q_norm=None if norms[0] is None else norms[0].to(device),
        k_norm=None if norms[1] is None else norms[1].to(device),
        eps=EPS,
        out=out,
    )
    pairs = [(out, parts[0]), (on_device[0], expected[0]), (on_device[1], expected[1])]
    return max(largest_error(result, wanted) for result, wanted in pairs)


def norm_error(
    *,
    dtype: torch.dtype = torch.float32,
    rows: int = 3,
    columns: int = 577,
    residual: bool = True,
    device: str = "cpu",
) -> float:
    """The norm and, with a residual, the sum beside it."""
    random = torch.Generator().manual_seed(columns)
    x, other = (
        torch.randn(rows, columns, generator=random).to(dtype),
        torch.randn(rows, columns, generator=random).to(dtype),
    )
    weight = (torch.rand(columns, generator=random) + 0.5).to(dtype)
    total = (x.float() + other.float()).to(dtype) if residual else x
    poisoned = [torch.full_like(x, math.nan).to(device) for _ in range(2)]
    out, summed = rms_norm(
        x.to(device),
        other.to(device) if residual else None,
        weight.to(device),
        EPS,
        out=poisoned[0],
        total=poisoned[1] if residual else None,
    )
    expected = rms_norm_reference(total, weight, EPS)
    return max(largest_error(out, expected), largest_error(summed, total.float()))


def activation_error(
    *, dtype: torch.dtype = torch.float32, rows: int = 3, width: int = 1537, device: str = "cpu"
) -> float:
    """Gates from -40 to 40, where the sigmoid is 0 and 1 to the last bit."""
    random = torch.Generator().manual_seed(width)
    gate_up = torch.randn(rows, 2 * width, generator=random)
    gate_up[:, 0], gate_up[:, 1] = -40.0, 40.0
    gate_up[:, width : width + 2] = 0.5
    gate_up = gate_up.to(dtype)
    out = torch.full((rows, width), math.nan, dtype=dtype, device=device)
    return largest_error(silu_mul(gate_up.to(device), out=out), silu_mul_reference(gate_up))


def copy_error(
    *,
    dtype: torch.dtype = torch.float32,
    planes: int = 4,
    num_blocks: int = 9,
    elements: int = 2 * 16 * 80,
    pairs: list[tuple[int, int]],
    device: str = "cpu",
) -> float:
    """Copies must be exact, whatever the bytes stand for: any difference at all is an infinite error."""
    random = torch.Generator().manual_seed(elements)
    noise = torch.randint(0, 256, (planes, num_blocks, elements * dtype.itemsize), dtype=torch.uint8, generator=random)
    expected = copy_blocks_reference(noise, pairs)
    result = noise.clone().to(device)
    copy_blocks(result.view(dtype), pairs)
    return 0.0 if torch.equal(result.cpu(), expected) else math.inf
