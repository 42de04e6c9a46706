"""What ships: a kernel with the types and constants of one launch, how to measure it, and what it must at least do.

Each one says how to compile a kernel without a GPU and how to measure it against its reference, with the very constants
that a launch would pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one launch of a stated workload must at least move and compute."""

    workload: str
    """For people: rows, contexts, widths."""
    bytes: int
    """Read from and written to the device's memory, each value once."""
    operations: int
    """Multiplications and additions of matrix products, in the type that the configuration's name begins with; 0 for a
    kernel that has none."""


@dataclass(frozen=True)
class Configuration:
    """One kernel as one model would launch it."""

    kernel: str
    config: str
    """What distinguishes it, for people: type, shapes, tile."""
    function: Any
    """The kernel itself, as ``triton.jit`` made it."""
    types: dict[str, str]
    """Triton's type of each run-time argument, e.g. ``*bf16`` or ``i32``."""
    constants: dict[str, Any]
    num_warps: int
    num_stages: int | None
    """None: the launch names none."""
    error: Callable[[], float]
    """Largest error against the reference at an odd shape; needs the interpreter."""
    tolerance: float
    traffic: Traffic
    targets: frozenset[str] | None = None
    """The targets (:data:`kernels.aot.TARGETS`) that it ships on; None: all."""
