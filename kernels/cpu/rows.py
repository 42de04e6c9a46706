"""What happens to one row (one token) between the products of a layer."""

from __future__ import annotations

import math

import numba
import numpy as np
from numba.core import types
from numba.extending import overload

from kernels.cpu.products import put_row
from kernels.cpu.vectors import bits_of, float_of

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ONE, _HALF, _ZERO = np.float32(1.0), np.float32(0.5), np.float32(0.0)
_LARGEST_EXPONENT = np.float32(88.0)
# Sums may be reordered, so that they use vectors; NaN and infinity keep their meaning, for they end a request.
REORDER = {"reassoc", "nsz", "contract", "arcp"}


@numba.njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def exp32(x):  # type: ignore[no-untyped-def]
    """e^x in float32, to 2 units in the last place, between e^-88 and e^88: what is beyond gets these. The polynomial is
    that of Cephes' ``expf``; unlike the library's function it becomes vectors in a loop. NaN stays NaN."""
    x = min(max(x, -_LARGEST_EXPONENT), _LARGEST_EXPONENT) if x == x else x
    power = np.floor(x * _LOG2_E + _HALF)
    rest = x - power * _LN2_HIGH - power * _LN2_LOW
    series = ((((_P0 * rest + _P1) * rest + _P2) * rest + _P3) * rest + _P4) * rest + _P5
    return (series * rest * rest + rest + _ONE) * float_of(np.int32((np.int32(power) + np.int32(127)) << np.int32(23)))


def as_stored(value, storage):  # type: ignore[no-untyped-def]
    """A float32 in the type of the KV storage: itself, or the bits of the nearest bfloat16."""
    raise NotImplementedError


@overload(as_stored, inline="always")  # type: ignore[untyped-decorator]
def _as_stored(value, storage):  # type: ignore[no-untyped-def]
    if storage.dtype == types.float32:
        return lambda value, storage: value

    def nearest(value, storage):  # type: ignore[no-untyped-def]
        bits = bits_of(value)
        rounded = bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))
        if value != value:
            rounded = np.int32(0x7FC00000)
        return np.uint16((rounded >> np.int32(16)) & np.int32(0xFFFF))

    return nearest


@numba.njit(nogil=True, error_model="numpy", fastmath=REORDER)  # type: ignore[untyped-decorator]
def add_row(stream, at, y, y_at, size, parameters, bias):  # type: ignore[no-untyped-def]
    """stream += y + bias"""
    if bias >= 0:
        for i in range(size):
            stream[at + i] += y[y_at + i] + parameters[bias + i]
    else:
        for i in range(size):
            stream[at + i] += y[y_at + i]


@numba.njit(nogil=True, error_model="numpy", fastmath=REORDER)  # type: ignore[untyped-decorator]
def norm_row(values, at, size, parameters, weight, eps, out, out_at):  # type: ignore[no-untyped-def]
    """RMSNorm (Zhang, Sennrich 2019): out = x / sqrt(mean(x²) + eps) · weight."""
    squares = _ZERO
    for i in range(size):
        squares += values[at + i] * values[at + i]
    scale = np.float32(_ONE / math.sqrt(squares / np.float32(size) + eps))
    for i in range(size):
        out[out_at + i] = values[at + i] * scale * parameters[weight + i]


@numba.njit(nogil=True, error_model="numpy", fastmath=REORDER)  # type: ignore[untyped-decorator]
def rotate_row(values, at, half, cos, sin, angle):  # type: ignore[no-untyped-def]
    """Rotary positions of one head, in place: pairs (i, i + half)."""
    for i in range(half):
        first, second = values[at + i], values[at + half + i]
        values[at + i] = first * cos[angle + i] - second * sin[angle + i]
        values[at + half + i] = second * cos[angle + i] + first * sin[angle + i]


@numba.njit(nogil=True, error_model="numpy", fastmath=REORDER)  # type: ignore[untyped-decorator]
def activate_row(work, row, y, at, size, inputs, parameters, bias, scratch):  # type: ignore[no-untyped-def]
    """SiLU(gate) · up of one row [gate | up], as the next product's input."""
    if bias >= 0:
        for i in range(2 * size):
            y[at + i] += parameters[bias + i]
    for i in range(size):
        gate = y[at + i]
        scratch[i] = gate / (_ONE + exp32(-gate)) * y[at + size + i]
    put_row(work, row, scratch, size, inputs)
