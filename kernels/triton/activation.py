"""SiLU(gate) · up of the fused gate/up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
NUM_WARPS = 4


def activation_constants(columns: int) -> dict[str, int]:
    """The kernel's compile-time values; ``columns`` is the width of the result."""
    return {"COLUMNS": columns, "BLOCK": min(BLOCK, triton.next_power_of_2(columns))}


@triton.jit
def silu_mul_kernel(out_ptr: tl.tensor, gate_up_ptr: tl.tensor, COLUMNS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < COLUMNS
    gate = tl.load(gate_up_ptr + row * (2 * COLUMNS) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * COLUMNS) + COLUMNS + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * COLUMNS + columns, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[T, 2 · width] with the gate in the first half → [T, width]; computed in float32, contiguous."""
    rows, double = gate_up.shape
    if out is None:
        out = gate_up.new_empty((rows, double // 2))
    constants = activation_constants(double // 2)
    grid = (rows, triton.cdiv(double // 2, constants["BLOCK"]))
    silu_mul_kernel[grid](out, gate_up, **constants, num_warps=NUM_WARPS)
    return out
