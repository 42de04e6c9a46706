"""Reads workload files of every known format (:mod:`engine.trace_formats`, :mod:`engine.trace_kinds`).

Nothing is read that is not needed: rows come one after the other, so the first thousand of a file of forty million cost
a thousand rows, and whoever has something else to do meanwhile reads a few at a time. Light: no torch.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from engine.load_shapes import ShapeError
from engine.trace_formats import Rejected, TraceClock
from engine.trace_kinds import HEAD_BYTES, recognise
from engine.workload_files import MAX_REQUESTS, RowCounts, Workload, WorkloadError, WorkloadRequest

__all__ = ["TraceReader", "load_workload"]


class TraceReader:
    """A workload file, read a slice at a time::

        with TraceReader(path) as reader:
            while reader.read(1_000):
                ...
            workload = reader.workload()

    ``seed`` gives the synthetic prompts. ``time_scale``: how many times as fast as recorded the requests come.
    ``limit``: rows that are read, the first of the file. Raises :class:`WorkloadError` with the file and the fault, and
    :class:`ShapeError` where ``time_scale`` or ``limit`` is impossible.
    """

    def __init__(self, path: str | Path, *, seed: int = 0, time_scale: float = 1.0, limit: int | None = None) -> None:
        if not (math.isfinite(time_scale) and time_scale > 0):
            raise ShapeError(f"time_scale is {time_scale}; it must be above 0 (2: twice as fast as recorded)")
        if limit is not None and limit < 1:
            raise ShapeError(f"limit is {limit}; at least 1 row must be read")
        self.path = Path(path)
        self._seed = seed
        self._clock = TraceClock(time_scale)
        self._requests: list[WorkloadRequest] = []
        self._rejections: Counter[str] = Counter()
        self.rows_read = 0
        try:
            self._file = self.path.open("rb")
            self._size = self.path.stat().st_size
            head = self._file.read(HEAD_BYTES)
            self._file.seek(0)
            self.format = recognise(self.path, head)
        except OSError as error:
            raise self._unreadable(error) from error
        except WorkloadError:
            self.close()
            raise
        # No file has more rows than islice can count.
        self._rows = islice(self.format.rows(self._file), None if limit is None else min(limit, sys.maxsize))

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def share(self) -> float:
        """How much of the file has been read, 0 to 1; with a limit it ends earlier."""
        return 1.0 if self._file.closed else self._file.tell() / max(1, self._size)

    def read(self, rows: int) -> bool:
        """Take up to so many rows more; whether there may be others after them."""
        try:
            taken = self._take(rows)
        except OSError as error:
            raise self._unreadable(error) from error
        if taken == rows:
            return True
        self.close()
        return False

    def _take(self, rows: int) -> int:
        taken = 0
        for row in islice(self._rows, rows):
            taken += 1
            self.rows_read += 1
            self._take_row(row)
        return taken

    def _take_row(self, row: Any) -> None:
        index = len(self._requests)
        if index == MAX_REQUESTS:
            raise WorkloadError(
                f"{self.path} has more than {MAX_REQUESTS:,} requests; read fewer of its rows (--limit N: the first N)"
            )
        try:
            self._requests.append(self.format.take(row, index, self._seed, self._clock))
        except Rejected as reason:
            self._rejections[str(reason)] += 1

    def _unreadable(self, error: OSError) -> WorkloadError:
        return WorkloadError(f"{self.path} cannot be read: {error.strerror or error}")

    @property
    def counts(self) -> RowCounts:
        return RowCounts(self.format.name, self.rows_read, dict(self._rejections))

    def workload(self) -> Workload:
        """What was read so far; the first request comes at 0 where the file has instants. Raises
        :class:`WorkloadError` where no row was of use."""
        if not self.rows_read:
            raise WorkloadError(f"{self.path} has no requests: it holds no row of {self.format.name}")
        if not self._requests:
            raise WorkloadError(f"{self.path} has no usable request: {self.counts.sentence()}")
        requests, earliest = self._requests, self._clock.earliest
        if earliest < 0:
            requests = [dataclasses.replace(r, arrival_s=r.arrival_s - earliest) for r in requests]
        return Workload(self.path.stem, tuple(requests), rows=self.counts)


def load_workload(path: str | Path, *, seed: int = 0, time_scale: float = 1.0, limit: int | None = None) -> Workload:
    """Read a workload file of any known format, see :class:`TraceReader`."""
    with TraceReader(path, seed=seed, time_scale=time_scale, limit=limit) as reader:
        while reader.read(100_000):
            pass
        return reader.workload()
