"""The one seam between the sections and the device: where memory is, how to wait, how to time, how to capture.

On a GPU times are CUDA events around what is measured. A rehearsal has a processor and Triton's interpreter instead:
nothing is captured, a replay is a call, and the clock is the host's.

Two ways to time a replay::

    queued   sleep ─▶ event ─▶ replay ─▶ replay ─▶ … ─▶ event     the card alone: all of it is queued before it begins
    idle     wait ─▶ event ─▶ replay ─▶ event ─▶ wait             with the way from the host to the card
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from kernels.aot import TARGETS
from kernels.triton.graphs import CudaCapture

_SLEEP_CYCLES = 20_000_000
"""About 10 ms at a GPU's clock: longer than the host takes to queue what is to be timed."""


@dataclass(frozen=True)
class Card:
    device: torch.device
    rehearsal: bool
    l2_bytes: int
    target: str
    """Of those in :data:`kernels.aot.TARGETS`."""

    @staticmethod
    def find(*, rehearsal: bool) -> Card | str:
        """The GPU that torch has, or why it has none. Arithmetic in float32 is float32 from here on."""
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        if rehearsal:
            return Card(torch.device("cpu"), True, l2_bytes=2**8, target="sm_90")
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} finds no GPU"
        properties = torch.cuda.get_device_properties(0)
        if torch.version.hip:
            target = properties.gcnArchName.partition(":")[0]
        else:
            target = _nearest_target(10 * properties.major + properties.minor)
        return Card(torch.device("cuda", 0), False, properties.L2_cache_size, target)

    def is_sound(self) -> bool:
        """Whether the context still works: after an illegal access nothing does, in this process."""
        try:
            self.wait()
        except Exception:
            return False
        return True

    def wait(self) -> None:
        if not self.rehearsal:
            torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """Of the device's memory; a rehearsal has little on purpose."""
        return 2**27 if self.rehearsal else int(torch.cuda.mem_get_info(self.device)[0])

    def release(self) -> None:
        """Give back what a section no longer holds."""
        gc.collect()
        if not self.rehearsal and self.is_sound():
            torch.cuda.empty_cache()

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    # Timing -------------------------------------------------------------------------------------------------------

    def captured(self, launch: Callable[[], object]) -> Callable[[], None]:
        """A graph of what ``launch`` launches, as a function that replays it. It runs once beforehand, so that kernels
        are compiled and libraries are set up; a rehearsal runs it once and replays by calling it."""
        if self.rehearsal:
            launch()
            return lambda: (launch(), None)[1]
        no_output = torch.empty(0)
        return _capture(self.device).record(lambda: (launch(), no_output)[1], None).replay

    def queued_seconds(self, replay: Callable[[], object], count: int, *, rounds: int = 5) -> float:
        """Of one replay: the median over ``rounds`` of ``count`` replays behind each other, divided by ``count``."""
        if self.rehearsal:
            return self._on_the_host(replay)
        times = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_SLEEP_CYCLES)
            begin.record()
            for _ in range(count):
                replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / count)
        return statistics.median(times)

    def idle_seconds(
        self, replay: Callable[[], object], count: int, *, before: Callable[[int], object] | None = None
    ) -> float:
        """Of one replay that finds the card idle: the median of ``count``. ``before`` runs ahead of each, not timed."""
        if self.rehearsal:
            if before is not None:
                before(0)
            return self._on_the_host(replay)
        times = []
        for index in range(count):
            if before is not None:
                before(index)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def wall_seconds(self, work: Callable[[], object]) -> float:
        """Of ``work`` on the host's clock, the card idle before and after it."""
        self.wait()
        begin = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin

    @staticmethod
    def _on_the_host(replay: Callable[[], object]) -> float:
        begin = time.perf_counter()
        replay()
        return max(time.perf_counter() - begin, 1e-9)


@cache
def _capture(device: torch.device) -> CudaCapture:
    return CudaCapture(device)


def _nearest_target(capability: int) -> str:
    """The shipped one that a GPU of this compute capability (86: 8.6) takes the kernels of."""
    shipped = [name for name, target in TARGETS.items() if target.backend == "cuda" and target.arch <= capability]
    return max(shipped, key=lambda name: TARGETS[name].arch)
