"""What a model takes in memory, from the shapes of its tensors alone. Light: no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

WORKING_BYTES = 192 * 2**20
"""Activations and the libraries' own."""
FLOAT32_BYTES = 4
COMPUTED_BYTES = {"int8": 2, "bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number of activations, keys and values, by the type of the weights: beside int8 it is bfloat16."""


def weight_bytes(shapes: Iterable[Sequence[int]], dtype: str, computed_bytes: int) -> int:
    """Of the tensors as a backend keeps them, matrices in ``dtype`` and the rest in the type of the activations: int8
    comes with a float32 scale per row of a matrix."""
    is_int8 = dtype == "int8"
    kept_bytes = 1 if is_int8 else computed_bytes
    total = 0
    for shape in shapes:
        is_matrix = len(shape) == 2
        total += math.prod(shape) * (kept_bytes if is_matrix else computed_bytes)
        total += shape[0] * FLOAT32_BYTES if is_matrix and is_int8 else 0
    return total


def working_bytes(hidden_size: int, intermediate_size: int) -> int:
    """Beside weights and blocks: one layer's gate and up in float32, joined and in parts, while they are packed."""
    return WORKING_BYTES + 2 * 2 * intermediate_size * hidden_size * FLOAT32_BYTES
