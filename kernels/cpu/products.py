"""Matrices packed for vectors, and their products with the rows of a step.

A matrix [outputs, inputs] is cut into vectors of neighbouring outputs, each laid out in the order in which
:func:`kernels.cpu.vectors.tile` reads it; PANEL outputs are computed together::

    vector 0                                     vector 1
    [ k 0: out 0 … out L-1 ][ k 1: … ] … [ k K ] [ k 0: out L … out 2L-1 ] …         float32, bfloat16
    [ k 0,1 out 0 | k 0,1 out 1 | … ][ k 2,3 … ]                                     int8, pairs in k

Outputs and inputs are filled up with zeros to whole panels and steps. An int8 matrix has a scale per output
(largest magnitude / 127), and the rows that it is multiplied with are int16 with a scale for each row:
y = x_scale · w_scale · Σ x w. Rows use as many levels as keep the sum exact in int32; the instructions take 16 bits as
fast as 8, and with 8 the rounding of rows would cost ten times the accuracy that the rounding of weights costs.
"""

from __future__ import annotations

import numpy as np
from numba.core import types
from numba.extending import overload

from kernels.cpu.compiled import inner, kept
from kernels.cpu.elementwise import largest_magnitude
from kernels.cpu.team import claim
from kernels.cpu.vectors import LANES, TILE_ROWS, TILE_VECTORS, panel_tile

PANEL = LANES * TILE_VECTORS
"""Outputs of a packed matrix come in multiples of it."""
INPUTS_MULTIPLE = 2
"""Inputs of a packed matrix come in multiples of it, the longest step."""
ROW_BLOCK = 96
"""Rows that go through all of a matrix before the next ones do, so that they stay in the core's cache."""
UNITS_PER_THREAD = 12
"""Units of a phase for each thread: few enough to cost nothing, enough to even out who waits for whom."""
_NOTHING = np.float32(1e-30)
"""A row with no larger magnitude counts as zeros: its inverse could be infinite."""
LEVELS = np.float32(127.0)
"""Of an int8 weight, to each side of zero."""
_MOST_ROW_LEVELS = 8191

# Sums may be reordered, so that they use vectors; NaN and infinity keep their meaning, for they end a request.
REORDER = {"reassoc", "nsz", "contract", "arcp"}

AT, INPUTS, OUTPUTS, PER_OUTPUT, BIAS = range(5)
"""Columns of a table of matrices: place in the packed numbers, padded sizes, place in scales and offsets, and of the
bias among the parameters (-1: none)."""


@inner()
def multiply(counters, phase, threads, weights, matrix, rows, work, y):
    """y[rows, outputs] = x[rows, inputs] · matrixᵀ: this thread's share of a phase.

    ``matrix`` is a row of the table of matrices, ``work.x`` and ``work.x_scales`` the rows, ``y`` flat float32.
    """
    inputs, outputs, at = matrix[INPUTS], matrix[OUTPUTS], matrix[AT]
    step = weights.depth
    panels = outputs // PANEL
    row_blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
    groups = min(panels, max(1, threads * UNITS_PER_THREAD // row_blocks))
    while True:
        unit = claim(counters, phase)
        if unit >= groups * row_blocks:
            return
        block, group = unit // groups, unit % groups
        first_row, end_row = block * rows // row_blocks, (block + 1) * rows // row_blocks
        tiles = (end_row - first_row + TILE_ROWS - 1) // TILE_ROWS
        for panel in range(group * panels // groups, (group + 1) * panels // groups):
            begin = panel * PANEL
            row = first_row
            for index in range(tiles):
                count = (end_row - row) // (tiles - index)
                panel_tile(
                    count, work.x, row * inputs, inputs, step, weights.packed, at + begin * inputs, inputs * LANES,
                    LANES * step, inputs // step, y, row * outputs + begin, outputs, work.x_scales, row,
                    weights.scales, matrix[PER_OUTPUT] + begin,
                )  # fmt: skip
                row += count


@inner()
def row_levels(inputs):
    """Levels of an int16 row to each side of zero, such that no sum over ``inputs`` of them with int8 overflows."""
    return min(_MOST_ROW_LEVELS, 0x7FFFFFFF // (127 * inputs))


def _put(x, at, values, count, inputs, scales, row):
    """Store ``count`` float32 ``values`` as row ``row`` of ``x``, filled up to ``inputs``, in the type of ``x``."""
    raise NotImplementedError


@overload(_put, jit_options={"fastmath": REORDER, "error_model": "numpy"})
def _put_as(x, at, values, count, inputs, scales, row):
    if x.dtype == types.float32:

        def copy(x, at, values, count, inputs, scales, row):
            for k in range(count):
                x[at + k] = values[k]
            for k in range(count, inputs):
                x[at + k] = np.float32(0.0)

        return copy

    def quantise(x, at, values, count, inputs, scales, row):
        magnitude, not_finite = largest_magnitude(values, 0, count), np.float32(0.0)
        for k in range(count):
            not_finite += values[k] * np.float32(0.0)
        # That is 0, or NaN where a value was not finite, which has to end the request and not to become a number.
        levels = np.float32(row_levels(inputs))
        scales[row] = magnitude / levels + not_finite
        inverse = levels / magnitude if magnitude > _NOTHING else np.float32(0.0)
        for k in range(count):
            x[at + k] = np.int32(np.rint(values[k] * inverse))
        for k in range(count, inputs):
            x[at + k] = 0

    return quantise


@inner(fastmath=REORDER)
def put_row(work, row, values, count, inputs):
    """Make ``values`` the input row ``row`` of the next product."""
    _put(work.x, row * inputs, values, count, inputs, work.x_scales, row)


def padded_inputs(inputs: int) -> int:
    return -(-inputs // INPUTS_MULTIPLE) * INPUTS_MULTIPLE


def padded_outputs(outputs: int) -> int:
    return -(-outputs // PANEL) * PANEL


@inner()
def place_of(output, k, inputs, step):
    """Where the number of an output and an input lies in a packed matrix."""
    return output // LANES * LANES * inputs + k // step * LANES * step + output % LANES * step + k % step


def _pack(matrix, packed, at, inputs, step, first_output, scales, per_output):
    raise NotImplementedError


@overload(_pack)
def _pack_as(matrix, packed, at, inputs, step, first_output, scales, per_output):
    if packed.dtype == types.int8:

        def quantise(matrix, packed, at, inputs, step, first_output, scales, per_output):
            outputs, size = matrix.shape
            for output in range(outputs):
                largest, not_finite = np.float32(0.0), np.float32(0.0)
                for k in range(size):
                    largest = max(largest, abs(matrix[output, k]))
                    not_finite += matrix[output, k] * np.float32(0.0)
                scales[per_output + first_output + output] = largest / LEVELS + not_finite
                inverse = LEVELS / largest if largest > _NOTHING else np.float32(0.0)
                place = at + place_of(first_output + output, 0, inputs, step)
                for k in range(0, size, step):
                    for i in range(min(step, size - k)):
                        packed[place + i] = np.int32(np.rint(matrix[output, k + i] * inverse))
                    place += LANES * step

        return quantise

    def copy(matrix, packed, at, inputs, step, first_output, scales, per_output):
        for output in range(matrix.shape[0]):
            place = at + place_of(first_output + output, 0, inputs, step)
            for k in range(matrix.shape[1]):
                packed[place + k * LANES] = matrix[output, k]

    return copy


@kept
def pack(matrix, packed, at, inputs, step, first_output, scales, per_output):
    """Lay out ``matrix`` [outputs, real inputs] as the outputs from ``first_output`` on of the packed matrix at ``at``.
    It is float32 for float32 and int8, the bits of bfloat16 as uint16 for those; padding is left as it is. int8 fills
    in the outputs' scales, from place ``per_output`` on."""
    _pack(matrix, packed, at, inputs, step, first_output, scales, per_output)
