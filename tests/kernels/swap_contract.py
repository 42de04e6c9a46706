"""What every backend's swapping holds to, whatever its storage is like."""

from __future__ import annotations

import pytest

from kernels.backend import Backend

IMPOSSIBLE_PAIRS = [(0, 1), (1, 0), (12, 1), (1, 9), (-1, 1), (1, -2)]
"""(block, host block), of 12 and 9 with the ones that are never used."""


def assert_refused(backend: Backend, pair: tuple[int, int]) -> None:
    """A pair that does not exist and a place that is named twice are refused, beside pairs that are right."""
    with pytest.raises(ValueError, match="blocks 1 to"):
        backend.swap_out([(2, 3), pair])
    with pytest.raises(ValueError, match="blocks 1 to"):
        backend.swap_in([(3, 2), (pair[1], pair[0])])
    for move in (backend.swap_out, backend.swap_in):
        with pytest.raises(ValueError, match="same place"):
            move([(2, 3), (4, 3)])
