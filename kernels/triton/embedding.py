"""The embedding's rows for one step, in one launch, wherever the ids of its tokens are.

Of a token that the step before sampled the host knows no id yet; it knows which entry of that step's ids it is::

    token_source   [ -1   -1    2   -1    0 ]
    token_ids      [ 17    4    ·   99    · ]        previous  [ 31   8   52 ]
    row of table     17    4   52   99   31
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.matrix import Matrix

BLOCK = 2048
NUM_WARPS = 4


def embedding_constants(columns: int) -> dict[str, int]:
    """The kernel's compile-time values; a row has ``columns`` numbers."""
    return {"COLUMNS": columns, "BLOCK": min(BLOCK, triton.next_power_of_2(columns))}


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["token_ids_ptr", "source_ptr", "previous_ptr"]
)
def embedding_kernel(
    out_ptr: tl.tensor,
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    source_ptr: tl.tensor,
    previous_ptr: tl.tensor,
    num_rows: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids_ptr + token)
    if source_ptr is not None:
        source = tl.load(source_ptr + token)
        row = tl.where(source >= 0, tl.load(previous_ptr + source, mask=source >= 0, other=0), row)
    there = (row >= 0) & (row < num_rows)
    row = tl.where(there, row, 0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < COLUMNS
    values = tl.load(table_ptr + row * COLUMNS + columns, mask=mask & there, other=0)
    if scale_ptr is not None:
        values = values.to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(out_ptr + token * COLUMNS + columns, values.to(out_ptr.dtype.element_ty), mask=mask)


def embedding(
    token_ids: torch.Tensor,
    table: Matrix,
    dtype: torch.dtype,
    *,
    token_source: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of ``table`` [vocab, hidden] as ``dtype`` [T, hidden] (``out`` where given).

    ``token_ids`` int64 [T]; where ``token_source``, int32 [T], is not negative the id is that entry of ``previous``,
    int64, instead. An id that is no row of the table (-1 of a request whose logits were no numbers) gives zeros.
    """
    num_rows, columns = table.weight.shape
    if out is None:
        out = torch.empty((token_ids.shape[0], columns), dtype=dtype, device=token_ids.device)
    if previous is None:
        token_source = None
    constants = embedding_constants(columns)
    grid = (token_ids.shape[0], triton.cdiv(columns, constants["BLOCK"]))
    embedding_kernel[grid](
        out,
        table.weight,
        table.scale,
        token_ids,
        token_source,
        previous,
        num_rows,
        **constants,
        num_warps=NUM_WARPS,
    )
    return out
