"""A matrix laid out for oneDNN once, when a model is loaded, instead of in every product.

torch's own ``linear`` reads a row-major matrix and leaves packing to MKL, which on many CPUs reaches less than half
of what oneDNN's kernels do on a packed one (2 cores with AVX2, 8 to 32 rows: 14 to 34 against 34 to 77 GFLOP/s). The
operators used here are those that torch's compiler emits for frozen models; where a build of torch lacks them or oneDNN
does not take the type, the plain product answers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

EXPECTED_ROWS = 32
"""Rows that the layout is chosen for; others work as well."""


class PackedLinear:
    """``x · matrixᵀ + bias`` for x [T, in]; the matrix is [out, in]."""

    __slots__ = ("_bias", "_matrix", "_packed")

    def __init__(self, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _takes(matrix.dtype)
        self._matrix = torch.ops.mkldnn._reorder_linear_weight(matrix, EXPECTED_ROWS) if self._packed else matrix

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._matrix, self._bias, "none", [], "")
            return product
        return F.linear(x, self._matrix, self._bias)


def _takes(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
