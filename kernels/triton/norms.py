"""RMSNorm of a row, fused with the addition that precedes it.

The residual stream arrives as two addends; the kernel stores their sum and its norm in one pass over the row. The sum
is rounded to the activations' type before it is normalised, as a model that adds first and normalises then does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def norm_constants(columns: int) -> dict[str, int]:
    """The kernel's compile-time values: one block holds a whole row."""
    return {"COLUMNS": columns, "BLOCK": triton.next_power_of_2(columns)}


def norm_warps(columns: int) -> int:
    """Warps of a program: about 16 values a thread, 4 to 16 warps."""
    return min(16, max(4, triton.next_power_of_2(columns) // 512))


@triton.jit
def rms_norm_kernel(
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * COLUMNS
    columns = tl.arange(0, BLOCK)
    mask = columns < COLUMNS
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
    # Asked for before the sum over the row, behind whose barrier it would begin to travel only then.
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(sum_ptr + start + columns, rounded, mask=mask)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / COLUMNS + eps)
    tl.store(out_ptr + start + columns, (x * inverse * weight).to(dtype), mask=mask)


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(weight · s / sqrt(mean(s²) + eps), s)`` with ``s = x + residual``, all [T, hidden], contiguous.

    Without a residual ``s`` is ``x`` itself. ``out`` and ``total`` may be given to be written into.
    """
    rows, columns = x.shape
    if out is None:
        out = torch.empty_like(x)
    if residual is None:
        total = None
    elif total is None:
        total = torch.empty_like(x)
    rms_norm_kernel[(rows,)](
        out, total, x, residual, weight, eps, **norm_constants(columns), num_warps=norm_warps(columns)
    )
    return out, x if total is None else total
