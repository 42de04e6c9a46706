"""Swaps beside the step in flight, on a stream of their own.

A step waits for the swaps that were planned with it; a swap waits for the step before only where that one touches its
blocks. The backend knows which these are from the tables and slots that it uploaded last::

    compute   ── step t ─────────────────────────┐  ┌─ copies ─ step t + 1 ──
    side          └ swaps planned with step t + 1 ──┘
                  ↑
                  begin when step t began, or when it ends if it writes a block that leaves
                  or has a block in a table, still, that is filled

What came before step t is over either way: its end is marked when step t is uploaded. All swaps are in order among
themselves, so a block may leave and its place be filled in one plan, and a host block be read and then written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from kernels.spec import HostStep

Event: TypeAlias = Any
Pairs: TypeAlias = Sequence[tuple[int, int]]


class Stream(Protocol):
    """What is used of :class:`torch.cuda.Stream`."""

    def record_event(self) -> Event:
        """Behind all that was given to the stream so far."""

    def wait_event(self, event: Event) -> None:
        """What is given to the stream from here on comes after the event."""

    def synchronize(self) -> None:
        """Wait on the host."""


class Streams(Protocol):
    @property
    def side(self) -> Stream:
        """Where swaps run."""

    @property
    def compute(self) -> Stream:
        """Where steps are computed."""

    def beside(self) -> AbstractContextManager[object]:
        """What is launched within goes to the side stream."""


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.side = torch.cuda.Stream(device)

    @property
    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.side)


class SwapLane:
    """Launches swaps so that they run as early as they may. ``streams`` None: a device that does one thing after the
    other."""

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._before: Event | None = None
        """Behind all that came before the step in flight; None: it is not known what is in flight."""
        self._step: HostStep | None = None
        self._copied: list[int] = []
        """Blocks that were copied from or to since the step."""
        self._swapped: Event | None = None
        """Behind the swaps that no step has waited for."""

    def begin_step(self, step: HostStep) -> None:
        """``step`` is next on the compute stream."""
        if self._streams is not None:
            self._before = self._streams.compute.record_event()
            self._step = step
            self._copied.clear()

    def begin_unknown(self) -> None:
        """What is next on the compute stream may touch any block."""
        self._before = None

    def note_copies(self, pairs: Pairs) -> None:
        """Blocks are copied on the compute stream."""
        if self._streams is not None:
            self._copied += [block for pair in pairs for block in pair]

    def out(self, pairs: Pairs, block_size: int, launch: Callable[[], None]) -> None:
        """``launch`` the copies of ``pairs`` (block, host block); a block has ``block_size`` slots."""
        self._launch([block for block, _ in pairs], block_size, launch, written=False)

    def back(self, pairs: Pairs, block_size: int, launch: Callable[[], None]) -> None:
        """``launch`` the copies of ``pairs`` (host block, block)."""
        self._launch([block for _, block in pairs], block_size, launch, written=True)

    def join(self) -> None:
        """What comes on the compute stream from here on, comes after all swaps."""
        if self._streams is not None and self._swapped is not None:
            self._streams.compute.wait_event(self._swapped)
            self._swapped = None

    def finish(self) -> None:
        """Wait until nothing is under way on either stream: memory may go then."""
        if self._streams is not None:
            self._streams.side.synchronize()
            self._streams.compute.synchronize()
            # Memory that comes next is filled with zeros on the compute stream, behind what is marked here.
            self._before, self._step, self._swapped = None, None, None
            self._copied.clear()

    def _launch(self, blocks: list[int], block_size: int, launch: Callable[[], None], *, written: bool) -> None:
        if self._streams is None:
            launch()
            return
        before = self._before
        if before is None or self._in_flight(blocks, block_size, written=written):
            before = self._streams.compute.record_event()
        self._streams.side.wait_event(before)
        with self._streams.beside():
            launch()
        self._swapped = self._streams.side.record_event()

    def _in_flight(self, blocks: list[int], block_size: int, *, written: bool) -> bool:
        """Whether the step in flight, or a copy behind it, keeps ``blocks`` from being read, or from being written."""
        if not set(self._copied).isdisjoint(blocks):
            return True
        if self._step is None:
            return False
        touched = [self._step.slot_mapping // block_size]
        if written:
            touched.append(self._step.block_tables.ravel())
        return any(bool(np.isin(blocks, part).any()) for part in touched)
