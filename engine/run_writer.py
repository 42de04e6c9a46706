"""Writes a run file (:mod:`engine.recording`) while the run goes on."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

from engine.block_takers import BlockTakers
from engine.events import Keyframe, StepRecord
from engine.run_file import (
    FORMAT_VERSION,
    MAGIC,
    PREFIX,
    FrameKind,
    RecordingError,
    RunHeader,
    SegmentStart,
    Text,
    copy_range,
    discard,
    pack_frame,
    temporary_beside,
    write_all,
)

DEFAULT_LIMIT_BYTES = 256 * 2**20
MIN_LIMIT_BYTES = 2**20
SEGMENT_CHANGES = 32_768
"""Rows, and events as so many, after which a segment ends: they are folded in about 20 ms."""
ROWS_AN_EVENT = 4
"""An event is folded in the time of four rows."""
SEGMENT_STEPS = 512
"""Steps after which it ends in any case."""
FLUSH_BYTES = 256 * 1024
FLUSH_SECONDS = 0.5
COPY_BYTES = 2 * 2**20
"""Copied at each flush while old segments are dropped: so much more than is written that it catches up."""
SHORTEN_FROM = 11 / 12
"""Share of the limit from which old segments are dropped."""

_encoder = msgspec.msgpack.Encoder()


class RunWriter:
    """Writes a run as it goes on. What was added is on its way to the disk within half a second, as long as steps come;
    call :meth:`flush` where they stop for a while.

    Every method may raise :class:`RecordingError`, once: the file then keeps what it has, and whatever comes after is
    ignored.
    """

    def __init__(
        self,
        path: str | Path,
        header: RunHeader,
        *,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        keyframe: Keyframe | None = None,
    ) -> None:
        """``keyframe``: the state before the first step that is added; without one the file begins with the state
        after it. The file takes the place of one that is there. While old segments are dropped, half of ``limit_bytes``
        more is taken for a moment; a single segment is kept whatever its size."""
        if limit_bytes < MIN_LIMIT_BYTES:
            raise RecordingError(
                f"the limit of a run file is {limit_bytes:,} bytes; it must be at least {MIN_LIMIT_BYTES:,}"
            )
        try:
            self.path = Path(path).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a NUL in it, links in a circle
            raise RecordingError(f"{str(path)!r} cannot be written: {error}") from error
        self.limit_bytes = limit_bytes
        self._texts = header.texts
        self._beginning = PREFIX.pack(MAGIC, FORMAT_VERSION) + pack_frame(
            FrameKind.HEADER, 0, 0.0, _encoder.encode(header)
        )
        self._takers = BlockTakers(0)
        self._buffer = bytearray()
        self._size = 0
        """Bytes in the file."""
        self._segments: list[int] = []
        """Where each begins."""
        self._keyframe_bytes = self._segment_changes = self._segment_steps = 0
        self._last_step = -1
        self._last_time = 0.0
        self._flushed_at = time.monotonic()
        self._file: BinaryIO | None = None
        self._successor: BinaryIO | None = None
        """Becomes the run file once it has all of it from ``_kept_from`` on; up to ``_copied`` it has."""
        self._kept_from = self._copied = 0
        with self._reporting():
            if self.path.exists() and not self.path.is_file():
                raise OSError(None, "this is not a file")
            self._take_over(self._begin_file())
        if keyframe is not None:
            self._takers = BlockTakers.of(keyframe)
            self._last_step, self._last_time = keyframe.step, keyframe.time
            self._begin_segment(keyframe)
            self.flush()

    def add(self, record: StepRecord, keyframe: Callable[[], Keyframe]) -> None:
        """Add a step, right after it; ``keyframe`` gives the state after it where that is wanted."""
        if self._file is None:
            return
        if record.step <= self._last_step:
            self._fail(f"step {record.step:,} came after step {self._last_step:,}: this is another run")
        self._last_step, self._last_time = record.step, record.end
        if not self._segments:
            state = keyframe()
            self._takers = BlockTakers.of(state)
            self._begin_segment(state)
        else:
            self._takers.follow(record)
        self._append(FrameKind.RECORD, _encoder.encode(record))
        self._segment_steps += 1
        self._segment_changes += ROWS_AN_EVENT * len(record.events) + len(record.request_ids)
        if self._segment_is_long():
            self._begin_segment(keyframe())
        if len(self._buffer) >= FLUSH_BYTES or time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def text(self, request_id: int, role: str, text: str) -> None:
        """Add a prompt, or a piece of an answer, of which the last step told; nothing where texts are not kept."""
        if self._file is not None and self._texts and text:
            self._append(FrameKind.TEXT, _encoder.encode(Text(request_id, role, text)))

    def flush(self) -> None:
        """Hand everything to the system: a reader sees it from here on, and it survives the end of this process."""
        if self._file is None:
            return
        self._flushed_at = time.monotonic()
        if not self._buffer:
            return
        with self._reporting():
            if self._size + len(self._buffer) > self.limit_bytes:
                self._shorten(at_once=True)
            write_all(self._file, self._buffer)
            self._size += len(self._buffer)
            self._buffer.clear()
            if self._successor is not None or self._size > self.limit_bytes * SHORTEN_FROM:
                self._shorten(at_once=False)

    def close(self) -> None:
        if self._file is None:
            return
        self._append(FrameKind.END, b"")
        self.flush()
        self._end()

    def _end(self) -> None:
        for file in (self._file, self._successor):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        if self._successor is not None:
            discard(self._successor)
        self._file = self._successor = None

    def _append(self, kind: FrameKind, payload: bytes) -> None:
        self._buffer += pack_frame(kind, self._last_step, self._last_time, payload)

    def _begin_segment(self, keyframe: Keyframe) -> None:
        self._segments.append(self._size + len(self._buffer))
        self._append(FrameKind.KEYFRAME, _encoder.encode(SegmentStart(keyframe, self._takers.beside(keyframe))))
        self._keyframe_bytes = self._size + len(self._buffer) - self._segments[-1]
        self._segment_changes = self._segment_steps = 0

    def _segment_is_long(self) -> bool:
        if self._segment_changes >= SEGMENT_CHANGES or self._segment_steps >= SEGMENT_STEPS:
            return True
        steps_bytes = self._size + len(self._buffer) - self._segments[-1] - self._keyframe_bytes
        return steps_bytes > max(self.limit_bytes // 8, self._keyframe_bytes)

    def _begin_file(self) -> BinaryIO:
        """A file beside the run file with the header in it."""
        file = temporary_beside(self.path)
        try:
            write_all(file, self._beginning)
        except OSError:
            discard(file)
            raise
        return file

    def _shorten(self, *, at_once: bool) -> None:
        """Copy the newest segments, half of the limit at most, to another file: all of them, or some at each call, so
        that no step waits for it. Once that has caught up it takes the place of the run file."""
        assert self._file is not None
        if self._successor is None:
            written = bisect_right(self._segments, self._size)
            first = min(bisect_left(self._segments, self._size - self.limit_bytes // 2), written - 1)
            if first <= 0:
                return
            self._kept_from = self._copied = self._segments[first]
            self._successor = self._begin_file()
        end = self._size if at_once else min(self._size, self._copied + COPY_BYTES)
        copy_range(self._file, self._successor, self._copied, end)
        self._file.seek(self._size)
        self._copied = end
        if end == self._size:
            shift = self._kept_from - len(self._beginning)
            successor, self._successor = self._successor, None
            self._take_over(successor)
            self._segments = [offset - shift for offset in self._segments if offset >= self._kept_from]

    def _take_over(self, file: BinaryIO) -> None:
        """The file becomes the run file; whoever has the old one open keeps that."""
        try:
            Path(file.name).replace(self.path)
        except OSError:
            discard(file)
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._size = file, file.tell()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fail(error.strerror or str(error))

    def _fail(self, reason: str) -> NoReturn:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # half a frame may have been written
        self._end()
        raise RecordingError(f"{self.path} cannot be written: {reason}")
