"""The matrices of a decoder: in the model's type, multiplied by torch, or int8 with a scale per output channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.triton.int8_matmul import int8_matmul

LARGEST = 127
_NUMBERS_AT_ONCE = 2**24
"""Numbers of a checkpoint's tensor that are quantised together: 64 MiB in float32, whatever the tensor's size."""


@dataclass(frozen=True, slots=True)
class Matrix:
    weight: torch.Tensor
    """[outputs, inputs]: what is multiplied or, with a scale, int8."""
    scale: torch.Tensor | None = None
    """float32 [outputs]: the matrix is ``scale[:, None] · weight``."""


def linear(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` [T, inputs] times the matrix's transpose, plus ``bias`` [outputs]: [T, outputs] of ``x``'s type."""
    if matrix.scale is None:
        return F.linear(x, matrix.weight, bias)
    return int8_matmul(x, matrix.weight, matrix.scale, bias)


def packed(
    parts: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> Matrix:
    """``parts``, [outputs, inputs] each, one under another on ``device``: copies in ``dtype`` or, for a
    ``weight_dtype`` of torch.int8, quantised."""
    if weight_dtype != torch.int8:
        return Matrix(torch.cat([part.to(device=device, dtype=dtype) for part in parts]))
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    weight = torch.empty((outputs, inputs), dtype=torch.int8, device=device)
    scale = torch.empty(outputs, dtype=torch.float32, device=device)
    begin = 0
    for part in parts:
        for rows in part.split(max(1, _NUMBERS_AT_ONCE // inputs)):
            end = begin + rows.shape[0]
            quantise(rows.to(device), weight[begin:end], scale[begin:end])
            begin = end
    return Matrix(weight, scale)


def quantise(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Write ``rows`` [outputs, inputs] as ``weight``, int8 in -127 … 127, and ``scale``, float32 [outputs]: each row's
    own, max |w| / 127, so that no number is further than half a scale from what it was.

    A row with a number that is not finite gets a scale that is not, and zeros: whatever is multiplied with it is NaN,
    as it must not pass for a model's answer.
    """
    values = rows.float()
    scale.copy_(values.abs().amax(dim=1) / LARGEST)
    finite = torch.isfinite(scale)
    # Where all is zero, or too small for a float32 to hold its 127th part, there is nothing to divide by.
    divisor = torch.where(finite & (scale > 0), scale, 1.0)
    quotients = (values / divisor[:, None]).round_().clamp_(-LARGEST, LARGEST)
    weight.copy_(torch.where(finite[:, None], quotients, 0.0))
