"""What a device tells of its memory: the seam that a test replaces by one that has only as much as it says."""

from __future__ import annotations

import gc
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    def release(self) -> None:
        """Give back what nobody uses any more."""

    def free_bytes(self) -> int:
        """Not taken by any program; what torch keeps for later is taken."""

    def total_bytes(self) -> int: ...

    def watch(self) -> None:
        """Begin to watch for a peak."""

    def peak_bytes(self) -> int:
        """The most that torch took since then, beyond what it had."""


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watched_from = 0

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def watch(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._watched_from = torch.cuda.memory_reserved(self._device)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._device)) - self._watched_from
