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
from kernels.triton.activation import silu_mul
from kernels.triton.block_copy import copy_blocks
from kernels.triton.kv_write import kv_write
from kernels.triton.norms import rms_norm
from kernels.triton.paged_attention import paged_attention
from kernels.triton.reference import (
    copy_blocks_reference,
    paged_attention_reference,
    rms_norm_reference,
    rotary_reference,
    silu_mul_reference,
)

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


def attention_error(
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    group: int = 3,
    num_kv_heads: int = 2,
    query_lens: list[int],
    seq_lens: list[int],
    block_size: int = 16,
    window: int | None = None,
    device: str = "cpu",
) -> float:
    """Paged attention over a cache in which every slot outside the requests' contexts is NaN."""
    random = torch.Generator().manual_seed(head_dim * 1000 + group)
    batch, num_blocks = make_batch(query_lens, seq_lens, block_size, random, device=device)
    tables = batch.block_tables.cpu()
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    keys, values = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
    for request, length in enumerate(seq_lens):
        query_len = query_lens[request]
        # With a window the engine may have given the blocks behind it away: their content is nobody's.
        first = 0 if window is None else max(0, length - query_len - window + 1)
        live = torch.arange(first, length)
        blocks, offsets = tables[request, live // block_size].long(), live % block_size
        keys[blocks, :, offsets] = torch.randn(len(live), num_kv_heads, head_dim, generator=random).to(dtype)
        values[blocks, :, offsets] = torch.randn(len(live), num_kv_heads, head_dim, generator=random).to(dtype)
    q = torch.randn(sum(query_lens), num_kv_heads * group, head_dim, generator=random).to(dtype)
    scale = head_dim**-0.5
    expected = paged_attention_reference(q, keys, values, query_lens, seq_lens, tables, scale=scale, window=window)
    out = torch.full_like(q, math.nan).to(device)
    paged_attention(q.to(device), keys.to(device), values.to(device), batch, scale=scale, window=window, out=out)
    return largest_error(out, expected)


def kv_write_error(
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    num_tokens: int = 3,
    block_size: int = 16,
    qk_norm: bool = False,
    device: str = "cpu",
) -> float:
    """Queries, keys and values after :func:`kv_write`; slots that no token was given must stay as they were."""
    random = torch.Generator().manual_seed(head_dim * 131 + num_heads)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=random).to(dtype)
    angles = torch.rand(num_tokens, max(rotary_dim, 2) // 2, generator=random) * 6.3
    cos, sin = angles.cos(), angles.sin()
    num_blocks = 2 + -(-num_tokens // block_size)
    slots = torch.randperm((num_blocks - 1) * block_size, generator=random)[:num_tokens] + block_size
    norms = [(torch.rand(head_dim, generator=random) + 0.5).to(dtype) if qk_norm else None for _ in range(2)]
    caches = [torch.full((num_blocks, num_kv_heads, block_size, head_dim), 7.0, dtype=dtype) for _ in range(2)]

    heads = qkv.view(num_tokens, -1, head_dim)
    parts = [heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:].float()]
    for i, weight in enumerate(norms):
        parts[i] = parts[i].float() if weight is None else rms_norm_reference(parts[i], weight, EPS)
        parts[i] = rotary_reference(parts[i], cos, sin) if rotary_dim else parts[i]
    expected = [cache.float() for cache in caches]
    for cache, part in zip(expected, parts[1:], strict=True):
        cache[slots // block_size, :, slots % block_size] = part

    on_device = [cache.to(device) for cache in caches]
    out = torch.full((num_tokens, num_heads, head_dim), math.nan, dtype=dtype, device=device)
    kv_write(
        qkv.to(device),
        on_device[0],
        on_device[1],
        slots.to(device),
        cos.to(device),
        sin.to(device),
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
    """Copies must be exact: any difference at all is an infinite error."""
    random = torch.Generator().manual_seed(elements)
    kv = torch.randn(planes, num_blocks, elements, generator=random).to(dtype)
    expected = copy_blocks_reference(kv, pairs)
    result = kv.clone().to(device)
    copy_blocks(result, pairs)
    return 0.0 if torch.equal(result.cpu(), expected) else math.inf
