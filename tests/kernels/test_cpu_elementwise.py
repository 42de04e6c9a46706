"""Loops with explicit vectors against numpy in float64."""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest

from kernels.cpu import elementwise, vectors
from kernels.cpu.vectors import LANES

COUNTS = (1, LANES - 1, LANES, LANES + 1, 5 * LANES + 3)
GUARD = np.float32(-77.0)


@numba.njit
def exp_sum(array, at, count, minus):
    return elementwise.exp_sum(array, at, count, minus)


@numba.njit
def silu_product(array, gate_at, up_at, count, out):
    elementwise.silu_product(array, gate_at, up_at, count, out)


@numba.njit
def largest(array, at, count):
    return elementwise.largest(array, at, count)


@numba.njit
def largest_magnitude(array, at, count):
    return elementwise.largest_magnitude(array, at, count)


@numba.njit
def prefetch(array, at, count):
    vectors.prefetch(array, at, count)


def ulps(actual: np.ndarray, exact: np.ndarray) -> float:
    return float(np.max(np.abs(actual.astype(np.float64) - exact) / np.spacing(exact.astype(np.float32))))


def exps(x: np.ndarray) -> np.ndarray:
    values = np.concatenate([x, np.zeros(LANES, np.float32)])
    exp_sum(values, 0, len(x), np.float32(0.0))
    return values[: len(x)]


def test_exp_is_near_to_2_units_in_the_last_place() -> None:
    x = np.linspace(-87.0, 88.0, 200_003, dtype=np.float32)
    x = np.concatenate([x, np.random.default_rng(1).uniform(-1, 1, 50_000).astype(np.float32)])
    assert ulps(exps(x), np.exp(x.astype(np.float64))) <= 2.0


def test_exp_has_limits_and_passes_nan_on() -> None:
    x = np.array([-math.inf, -1e30, -88.0, 0.0, -0.0, 89.0, 1e30, math.inf, math.nan], np.float32)
    assert exps(x)[3:5].tolist() == [1.0, 1.0]
    ends = np.exp(np.array([-87.0] * 3 + [88.0] * 3))
    assert ulps(exps(x)[[0, 1, 2, 5, 6, 7]], ends) <= 2.0
    assert np.isnan(exps(x)[8])


@pytest.mark.parametrize("count", COUNTS)
def test_exp_sum_is_of_its_numbers_alone(count: int) -> None:
    array = np.full(3 + count + LANES, GUARD)
    array[3 + count : 3 + count + 1] = math.nan
    x = np.random.default_rng(count).normal(size=count).astype(np.float32) * 9
    array[3 : 3 + count] = x
    total = exp_sum(array, 3, count, x.max())
    exact = np.exp((x - x.max()).astype(np.float64))
    assert abs(total / exact.sum() - 1) < 1e-6
    assert np.allclose(array[3 : 3 + count], exact, rtol=1e-6, atol=0.0)
    whole = -(-count // LANES) * LANES
    assert (array[:3] == GUARD).all() and (array[3 + count : 3 + whole] == 0).all()
    assert (array[3 + whole :][1:] == GUARD).all()


@pytest.mark.parametrize("place", [0, LANES - 1, LANES, 2 * LANES + 1])
def test_a_sum_with_nan_is_nan(place: int) -> None:
    x = np.zeros(3 * LANES + 2, np.float32)
    x[place] = math.nan
    assert math.isnan(exp_sum(x, 0, 2 * LANES + 2, largest(x, 0, 2 * LANES + 2)))


@pytest.mark.parametrize("count", COUNTS)
def test_silu_product(count: int) -> None:
    array = np.random.default_rng(count).normal(size=2 * count + LANES).astype(np.float32) * 20
    out = np.full(count + LANES, GUARD)
    silu_product(array, 0, count, count, out)
    gate, up = array[:count].astype(np.float64), array[count : 2 * count].astype(np.float64)
    assert np.allclose(out[:count], gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-30)
    assert (out[-(-count // LANES) * LANES :] == GUARD).all()


def test_silu_at_its_ends() -> None:
    gates = np.array([-200.0, -80.0, 0.0, 80.0, 3e38, math.nan, 2.0, math.inf], np.float32)
    ups = np.array([5.0, 5.0, 5.0, 5.0, 1.0, 1.0, math.nan, 1.0], np.float32)
    array = np.concatenate([gates, ups, np.zeros(LANES, np.float32)])
    out = np.zeros(8 + LANES, np.float32)
    silu_product(array, 0, 8, 8, out)
    assert np.abs(out[:3]).max() < 1e-30 and out[3] == 400.0 and out[4] == np.float32(3e38)
    assert not np.isfinite(out[5:8]).any()


@pytest.mark.parametrize("count", [0, *COUNTS])
def test_largest_is_of_its_numbers_alone(count: int) -> None:
    array = np.full(1 + count + LANES, 1e9, np.float32)
    x = np.random.default_rng(count).normal(size=count).astype(np.float32) - 50
    array[1 : 1 + count] = x
    assert largest(array, 1, count) == max(x, default=-math.inf)
    assert largest_magnitude(array, 1, count) == max(np.abs(x), default=0.0)


def test_prefetch_does_no_harm_at_the_end_of_an_array() -> None:
    array = np.zeros(100, np.float32)
    for at, count in ((96, 4), (99, 1), (100, 64), (0, 0)):
        prefetch(array, at, count)
    prefetch(array, 10, 1 << 20)  # some 4 MB behind it
    assert not array.any()
