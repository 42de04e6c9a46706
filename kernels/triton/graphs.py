"""Decode steps that are recorded once and replayed: one launch in place of several hundred.

A step of which every request has one token differs from the next only in the contents of its inputs, which are always
at the same addresses (:mod:`kernels.triton.step_inputs`). It is recorded for some numbers of requests and replayed with
the smallest that holds the step::

    requests     5  ─▶  size 8   | r0 r1 r2 r3 r4 -- -- -- |     --: padding: no context, writes to the null block
    recorded     64, 48, 32, 16, 8, 4, 2, 1                      the largest first, all in one pool of memory

All recordings share the memory of what they compute on the way: the largest takes it, the others fit in. So a replay's
result holds until the next replay, of whatever size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

SMALL_SIZES = (1, 2, 4, 8)
SIZE_STEP = 16


class Recording(Protocol):
    """A recorded step; its memory is free once nobody refers to it."""

    @property
    def output(self) -> torch.Tensor:
        """Where each replay puts its result."""

    def replay(self) -> None: ...


class Capture(Protocol):
    """Makes recordings."""

    def record(self, run: Callable[[], torch.Tensor], beside: Recording | None) -> Recording:
        """``run``, which launches kernels alone, run once and then recorded. ``beside``: an earlier recording to share
        memory with."""


@dataclass(frozen=True, slots=True)
class CudaRecording:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def replay(self) -> None:
        """On the current stream."""
        self.graph.replay()


class CudaCapture:
    """CUDA graphs, or HIP's."""

    def __init__(self, device: torch.device) -> None:
        # One stream for all: what the products' library sets aside for a stream is then shared too.
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Callable[[], torch.Tensor], beside: Recording | None) -> CudaRecording:
        """Raises whatever ``run`` or the driver does; the current stream is as before then."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        pool = beside.graph.pool() if isinstance(beside, CudaRecording) else None
        # Not torch.cuda.graph, which leaves its stream current after a failure and empties the allocator each time.
        with torch.cuda.stream(self._stream):
            # Kernels are compiled and loaded, and libraries take what they need, at the first run of each size: none
            # of that can be recorded.
            run()
            self._stream.synchronize()
            # The first recording of a process makes the random generator's tensors, which everybody's recordings write
            # to, also those that are made outside inference mode. Other threads may allocate meanwhile.
            with _kept_if_it_fails(graph), torch.inference_mode(False):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = run()
            finally:
                with _kept_if_it_fails(graph):
                    graph.capture_end()
        current.wait_stream(self._stream)
        return CudaRecording(graph, output)


_broken: list[torch.cuda.CUDAGraph] = []


@contextmanager
def _kept_if_it_fails(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """The allocator goes on asking a graph whose recording could not begin or end what it records: so it stays."""
    try:
        yield
    except Exception:
        _broken.append(graph)
        raise


def graph_sizes(max_requests: int) -> list[int]:
    """Numbers of requests that are recorded, ascending: 1, 2, 4, 8, then by 16, and ``max_requests`` itself."""
    sizes = {*SMALL_SIZES, *range(SIZE_STEP, max_requests + 1, SIZE_STEP), max_requests}
    return sorted(size for size in sizes if 0 < size <= max_requests)


class DecodeGraphs:
    """One recording for each of ``sizes``."""

    def __init__(
        self, capture: Capture, sizes: Sequence[int], run_of: Callable[[int], Callable[[], torch.Tensor]]
    ) -> None:
        """``run_of(n)`` gives the step of n requests, its inputs in place. Raises what recording raises."""
        self._sizes = sorted(sizes)
        self._recordings: dict[int, Recording] = {}
        first: Recording | None = None
        for size in reversed(self._sizes):
            recording = capture.record(run_of(size), first)
            self._recordings[size] = recording
            first = first or recording

    def size_for(self, num_requests: int) -> int | None:
        """The smallest recorded size that holds so many requests; None: none does."""
        place = bisect_left(self._sizes, num_requests)
        return self._sizes[place] if place < len(self._sizes) else None

    def replay(self, size: int) -> torch.Tensor:
        """What the recorded step of ``size`` requests gives, until the next replay."""
        recording = self._recordings[size]
        recording.replay()
        return recording.output
