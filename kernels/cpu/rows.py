"""What happens to one row (one token) between the products of a layer."""

from __future__ import annotations

import math

import numpy as np
from numba.core import types
from numba.extending import overload

from kernels.cpu.compiled import inner
from kernels.cpu.elementwise import silu_product
from kernels.cpu.products import REORDER, put_row
from kernels.cpu.vectors import bits_of

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


def as_stored(value, storage):
    """A float32 in the type of the KV storage: itself, or the bits of the nearest bfloat16."""
    raise NotImplementedError


@overload(as_stored)
def _as_stored(value, storage):
    if storage.dtype == types.float32:
        return lambda value, storage: value

    def nearest(value, storage):
        bits = bits_of(value)
        rounded = bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))
        kept = np.int32(0x7FC00000) if value != value else rounded
        return np.uint16((kept >> np.int32(16)) & np.int32(0xFFFF))

    return nearest


@inner(fastmath=REORDER)
def add_row(stream, at, y, y_at, size, parameters, bias):
    """stream += y + bias"""
    if bias >= 0:
        for i in range(size):
            stream[at + i] += y[y_at + i] + parameters[bias + i]
    else:
        for i in range(size):
            stream[at + i] += y[y_at + i]


@inner(fastmath=REORDER)
def norm_row(values, at, size, parameters, weight, eps, out, out_at):
    """RMSNorm (Zhang, Sennrich 2019): out = x / sqrt(mean(x²) + eps) · weight."""
    squares = _ZERO
    for i in range(size):
        squares += values[at + i] * values[at + i]
    scale = np.float32(_ONE / math.sqrt(squares / np.float32(size) + eps))
    for i in range(size):
        out[out_at + i] = values[at + i] * scale * parameters[weight + i]


@inner(fastmath=REORDER)
def rotate_row(values, at, half, cos, sin, angle):
    """Rotary positions of one head, in place: pairs (i, i + half)."""
    for i in range(half):
        first, second = values[at + i], values[at + half + i]
        values[at + i] = first * cos[angle + i] - second * sin[angle + i]
        values[at + half + i] = second * cos[angle + i] + first * sin[angle + i]


@inner(fastmath=REORDER)
def activate_row(work, scratch, row, rows, y, at, size, inputs, parameters, bias):
    """SiLU(gate) · up of one row [gate | up], as the next product's input."""
    if bias >= 0:
        for i in range(2 * size):
            y[at + i] += parameters[bias + i]
    silu_product(y, at, at + size, size, scratch.row)
    put_row(work, scratch, row, rows, scratch.row, size, inputs)
