"""Matrices packed for vectors, and their products with the rows of a step.

A matrix [outputs, inputs] is cut into panels of PANEL neighbouring outputs, each laid out in the order in which it is
read, so that a product reads a matrix as one stream::

    panel 0                                                         panel 1
    [ k 0: out 0 … out P-1 ][ k 1: out 0 … out P-1 ] … [ k K ]      [ k 0: out P … out 2P-1 ] …    float32, bfloat16
    [ k 0,1 of out 0 | k 0,1 of out 1 | … ][ k 2,3 … ] …                                           int8, pairs in k

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
from kernels.cpu.vectors import LANES, TILE_ROWS, TILE_VECTORS, panel_tile, prefetch

PANEL = LANES * TILE_VECTORS
"""Outputs of a packed matrix come in multiples of it."""
INPUTS_MULTIPLE = 2
"""Inputs of a packed matrix come in multiples of it, the longest step."""
TILES_IN_BLOCK = 16
"""Tiles of rows that go through all of a matrix before the next ones do, so that they stay in the core's cache."""
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
    panels, tiles = outputs // PANEL, num_tiles(rows)
    blocks = (tiles + TILES_IN_BLOCK - 1) // TILES_IN_BLOCK
    groups = min(panels, max(1, threads * UNITS_PER_THREAD // blocks))
    while True:
        unit = claim(counters, phase)
        if unit >= groups * blocks:
            return
        block, group = unit // groups, unit % groups
        first_tile, end_tile = block * tiles // blocks, (block + 1) * tiles // blocks
        for panel in range(group * panels // groups, (group + 1) * panels // groups):
            begin = panel * PANEL
            share = PANEL * inputs // (end_tile - first_tile)
            following = at + (begin + PANEL) * inputs
            for index in range(first_tile, end_tile):
                row, end_row = index * rows // tiles, (index + 1) * rows // tiles
                if end_tile - first_tile > 1:  # a single tile reads once, in order: the core sees that by itself
                    prefetch(weights.packed, following + (index - first_tile) * share, share)
                panel_tile(
                    end_row - row, work.x, row * inputs, weights.packed, at + begin * inputs, LANES * step,
                    PANEL * step, inputs // step, y, row * outputs + begin, outputs, work.x_scales, row,
                    weights.scales, matrix[PER_OUTPUT] + begin,
                )  # fmt: skip


@inner()
def num_tiles(rows):
    return (rows + TILE_ROWS - 1) // TILE_ROWS


@inner()
def row_levels(inputs):
    """Levels of an int16 row to each side of zero, such that no sum over ``inputs`` of them with int8 overflows."""
    return min(_MOST_ROW_LEVELS, 0x7FFFFFFF // (127 * inputs))


def _words(values, count, inputs, levels, words, scales, row):
    """``count`` float32 ``values``, filled up with zeros to ``inputs``, as the 4-byte words of an input row:
    themselves, or pairs of int16 in ``words``."""
    raise NotImplementedError


@overload(_words, jit_options={"fastmath": REORDER, "error_model": "numpy"})
def _words_as(values, count, inputs, levels, words, scales, row):
    if words.dtype == types.float32:

        def copy(values, count, inputs, levels, words, scales, row):
            for k in range(count):
                words[k] = values[k]
            for k in range(count, inputs):
                words[k] = np.float32(0.0)
            return words

        return copy

    def quantise(values, count, inputs, levels, words, scales, row):
        magnitude, not_finite = largest_magnitude(values, 0, count), np.float32(0.0)
        for k in range(count):
            not_finite += values[k] * np.float32(0.0)
        # That is 0, or NaN where a value was not finite, which has to end the request and not to become a number.
        scales[row] = magnitude / levels + not_finite
        inverse = levels / magnitude if magnitude > _NOTHING else np.float32(0.0)
        for k in range(count):
            words[k] = np.int32(np.rint(values[k] * inverse))
        for k in range(count, inputs):
            words[k] = 0
        return words.view(np.int32)

    return quantise


@inner(fastmath=REORDER)
def put_row(work, scratch, row, rows, values, count, inputs):
    """Make ``values`` the input row ``row`` of the ``rows`` of the next product: interleaved with the others of its
    tile."""
    levels = np.float32(row_levels(inputs))
    words = _words(values, count, inputs, levels, scratch.words, work.x_scales, row)
    tiles = num_tiles(rows)
    index = ((row + 1) * tiles - 1) // rows
    first, end = index * rows // tiles, (index + 1) * rows // tiles
    x, together = work.x_words, end - first
    in_a_word = scratch.words.shape[0] // words.shape[0]
    at = first * inputs // in_a_word + row - first
    for word in range(inputs // in_a_word):
        x[at + word * together] = words[word]


def padded_inputs(inputs: int) -> int:
    return -(-inputs // INPUTS_MULTIPLE) * INPUTS_MULTIPLE


def padded_outputs(outputs: int) -> int:
    return -(-outputs // PANEL) * PANEL


@inner()
def place_of(output, k, inputs, step):
    """Where the number of an output and an input lies in a packed matrix."""
    return output // PANEL * PANEL * inputs + k // step * PANEL * step + output % PANEL * step + k % step


def _pack(matrix, packed, at, inputs, step, first_output, scales, per_output):
    raise NotImplementedError


@overload(_pack, jit_options={"fastmath": REORDER - {"arcp"}, "error_model": "numpy"})
def _pack_as(matrix, packed, at, inputs, step, first_output, scales, per_output):
    if packed.dtype == types.int8:

        def quantise(matrix, packed, at, inputs, step, first_output, scales, per_output):
            outputs, size = matrix.shape
            levels = np.zeros(inputs, dtype=np.int8)
            for output in range(outputs):
                row, not_finite, whole = matrix[output], np.float32(0.0), size // LANES * LANES
                largest = largest_magnitude(row, 0, whole)  # it reads whole vectors, and a tensor may end a file
                for k in range(whole, size):
                    largest = max(largest, abs(row[k]))
                for k in range(size):
                    not_finite += row[k] * np.float32(0.0)
                scales[per_output + first_output + output] = largest / LEVELS + not_finite
                inverse = LEVELS / largest if largest > _NOTHING else np.float32(0.0)
                # Apart from storing, which no vector does: each neighbour has its own place.
                for k in range(size):
                    levels[k] = np.int32(np.rint(row[k] * inverse))
                place = at + place_of(first_output + output, 0, inputs, step)
                for k in range(0, inputs, 2):
                    packed[place], packed[place + 1] = levels[k], levels[k + 1]
                    place += PANEL * step

        return quantise

    def copy(matrix, packed, at, inputs, step, first_output, scales, per_output):
        for output in range(matrix.shape[0]):
            place = at + place_of(first_output + output, 0, inputs, step)
            for k in range(matrix.shape[1]):
                packed[place + k * PANEL] = matrix[output, k]

    return copy


@kept
def pack(matrix, packed, at, inputs, step, first_output, scales, per_output):
    """Lay out ``matrix`` [outputs, real inputs] as the outputs from ``first_output`` on of the packed matrix at ``at``.
    It is float32 for float32 and int8, the bits of bfloat16 as uint16 for those; padding is left as it is. int8 fills
    in the outputs' scales, from place ``per_output`` on."""
    _pack(matrix, packed, at, inputs, step, first_output, scales, per_output)
