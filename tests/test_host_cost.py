"""``python -m tests.host_cost``: it runs, whatever becomes of the engine that it looks into."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests import host_cost


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_takes_longer_than_its_part(temperature: float) -> None:
    whole, laid_out = host_cost.measure(3, 20, 4, temperature)
    assert len(whole) == len(laid_out) == 4
    assert all(0 < part < step for part, step in zip(laid_out, whole, strict=True))
