"""Products with weights of 8 bits: ``y = x · (scale · q)ᵀ + bias`` for ``x`` [M, K], ``q`` int8 [N, K].

A decode reads every weight once and multiplies it with a handful of rows, so its time is that of the reading. Weights
are widened to the activations' type in registers, never in memory; activations are not quantised. A program owns a tile
of outputs, and as a small matrix has too few of those to keep a GPU's memory busy, its K is cut over several programs,
whose float32 partial sums a second kernel adds in the order of the cuts::

                 K ─▶                                          tile (n, m) of the outputs
    q  [N, K]   │ cut 0 │ cut 1 │ cut 2 │                 cut 0 + cut 1 + cut 2, times scale [N], plus bias [N]
    x  [M, K]   │ cut 0 │ cut 1 │ cut 2 │  ─▶ partials [cuts, M, N] ─▶ y [M, N]

With one cut the tile is written at once, and there is no second launch. The order of every sum depends on the shapes
alone: the same inputs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PROGRAMS = 512
"""Programs that a launch should have, by cutting K: enough for two on each of 256 multiprocessors. A constant and no
property of the GPU at hand, so that sums have one order everywhere."""
REDUCE_BLOCK = 512
REDUCE_WARPS = 4

# The interpreter keeps bfloat16 as raw 16-bit integers, which must not be multiplied as such.
_WIDEN_OPERANDS = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """How one program is cut: ``outputs`` of N by ``rows`` of M, ``depth`` of K at a time."""

    rows: int
    outputs: int
    depth: int
    num_warps: int
    num_stages: int


# (most rows of x, bytes per element of x) -> tile. Static, so that no start waits for a tuner, and small enough for the
# shared memory of every GPU. The weights are the left operand: a matrix unit takes that one from registers, where they
# are widened, and its other side may be as narrow as a decode is. For a decode two warps are enough to read, and few
# enough that Hopper's compiler leaves its warp-group products, which take twice the instructions a weight, alone.
# float32 is multiplied without tensor cores (exactly).
ANY_ROWS = 2**31 - 1
TILES: dict[tuple[int, int], MatmulTile] = {
    (16, 2): MatmulTile(rows=16, outputs=64, depth=128, num_warps=2, num_stages=4),
    (64, 2): MatmulTile(rows=64, outputs=128, depth=64, num_warps=8, num_stages=3),
    (ANY_ROWS, 2): MatmulTile(rows=128, outputs=128, depth=64, num_warps=8, num_stages=3),
    (16, 4): MatmulTile(rows=16, outputs=32, depth=64, num_warps=4, num_stages=3),
    (ANY_ROWS, 4): MatmulTile(rows=64, outputs=64, depth=32, num_warps=8, num_stages=2),
}
ALIGNMENT = 16
ODD_TILE = MatmulTile(rows=32, outputs=32, depth=32, num_warps=4, num_stages=2)
"""Of a K that is no multiple of ``ALIGNMENT``: rows then begin anywhere and are read number by number, which takes many
registers. No model of use has such widths."""


def matmul_tile(rows: int, inputs: int, dtype: torch.dtype) -> MatmulTile:
    """The shipped tile for ``x`` [rows, inputs] of this type."""
    if inputs % ALIGNMENT:
        return ODD_TILE
    return next(tile for (most, size), tile in TILES.items() if rows <= most and size == dtype.itemsize)


def matmul_constants(tile: MatmulTile, inputs: int) -> dict[str, int]:
    """The kernel's compile-time values; ``inputs`` is K. A model has two or three different K, and any N and M."""
    return {"K": inputs, "ROWS": tile.rows, "OUTPUTS": tile.outputs, "DEPTH": tile.depth}


@dataclass(frozen=True, slots=True)
class MatmulGrid:
    tiles: int
    cuts: int
    """Programs over K."""
    steps_per_cut: int
    """Steps of the tile's ``depth``; the last cut may have fewer."""


def matmul_grid(tile: MatmulTile, rows: int, outputs: int, inputs: int) -> MatmulGrid:
    """Cuts K until there are ``PROGRAMS`` programs, with two limits: a cut keeps four steps, without which it hardly
    fills its pipeline, and the partial sums stay, written and read, below half of the weights' bytes."""
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    steps = triton.cdiv(inputs, tile.depth)
    cuts = max(1, min(triton.cdiv(PROGRAMS, tiles), steps // 4, inputs // (16 * tile.rows)))
    steps_per_cut = triton.cdiv(steps, cuts)
    return MatmulGrid(tiles, triton.cdiv(steps, steps_per_cut), steps_per_cut)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_cuts", "steps_per_cut"])
def int8_matmul_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    x_ptr: tl.tensor,
    q_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_cuts: tl.tensor,
    steps_per_cut: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Programs that share outputs are neighbours: the weights of a tile come from memory once."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    tile = tl.program_id(0)
    cut = tl.program_id(1)
    rows = (tile % row_tiles) * ROWS + tl.arange(0, ROWS)
    outputs = (tile // row_tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    depth = tl.arange(0, DEPTH)

    # Behind the last output the last one is read again and never stored; rows that are not there are not read, as a
    # decode of one request would else read it sixteen times.
    row_there = (rows < num_rows)[None, :]
    x_rows = rows.to(tl.int64) * K
    q_rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64) * K
    accumulator = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    first = cut * steps_per_cut * DEPTH
    end = tl.minimum(first + steps_per_cut * DEPTH, K)
    for begin in tl.range(first, end, DEPTH):
        k = begin + depth
        if K % DEPTH == 0:
            q = tl.load(q_ptr + q_rows[:, None] + k[None, :])
            x = tl.load(x_ptr + x_rows[None, :] + k[:, None], mask=row_there, other=0.0)
        else:
            q = tl.load(q_ptr + q_rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0)
            x = tl.load(x_ptr + x_rows[None, :] + k[:, None], mask=row_there & (k < K)[:, None], other=0.0)
        if _WIDEN_OPERANDS:
            x = x.to(tl.float32)
        accumulator = tl.dot(q.to(x.dtype), x, accumulator, input_precision="ieee")

    mask = (outputs < num_outputs)[:, None] & row_there
    if num_cuts > 1:
        row_of_partial = cut.to(tl.int64) * num_rows + rows
        offsets = row_of_partial[None, :] * num_outputs + outputs[:, None]
        tl.store(partial_ptr + offsets, accumulator, mask=mask)
    else:
        result = accumulator * tl.load(scale_ptr + outputs, mask=outputs < num_outputs, other=0.0)[:, None]
        if bias_ptr is not None:
            result += tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
        offsets = rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
        tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_cuts"])
def sum_cuts_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_cuts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = outputs < num_outputs
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for cut in tl.range(0, num_cuts):
        partial = (row + cut * num_rows) * num_outputs + outputs
        total += tl.load(partial_ptr + partial, mask=mask, other=0.0)
    total *= tl.load(scale_ptr + outputs, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_outputs + outputs, total.to(out_ptr.dtype.element_ty), mask=mask)


def int8_matmul(
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x`` [M, K] times the transpose of ``scale · q``, plus ``bias`` [N]; accumulated in float32.

    ``q`` is int8 [N, K], ``scale`` float32 [N], all contiguous. Returns [M, N] of ``x``'s type (``out`` where given).
    Any M within a row of ``TILES`` runs the same compiled kernel; nothing of a launch depends on what the tensors hold.
    """
    (rows, inputs), outputs = x.shape, q.shape[0]
    if out is None:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tile = matmul_tile(rows, inputs, x.dtype)
    grid = matmul_grid(tile, rows, outputs, inputs)
    partials = torch.empty((grid.cuts if grid.cuts > 1 else 0, rows, outputs), dtype=torch.float32, device=x.device)
    int8_matmul_kernel[(grid.tiles, grid.cuts)](
        out,
        partials,
        x,
        q,
        scale,
        bias,
        rows,
        outputs,
        grid.cuts,
        grid.steps_per_cut,
        **matmul_constants(tile, inputs),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if grid.cuts > 1:
        sum_cuts_kernel[(rows, triton.cdiv(outputs, REDUCE_BLOCK))](
            out, partials, scale, bias, rows, outputs, grid.cuts, BLOCK=REDUCE_BLOCK, num_warps=REDUCE_WARPS
        )
    return out
