"""Everything that ships, family by family."""

from __future__ import annotations

from kernels.triton.configurations import attention, elementwise, int8, sampling
from kernels.triton.configurations.base import Configuration, Traffic

__all__ = ["Configuration", "Traffic", "shipped_configurations"]


def shipped_configurations() -> list[Configuration]:
    """Everything that ``kernels`` compiles and checks, in the order in which it is shown."""
    return [
        *attention.configurations(),
        *elementwise.configurations(),
        *int8.configurations(),
        *sampling.configurations(),
    ]
