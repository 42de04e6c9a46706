"""Reads a run file (:mod:`engine.recording`), also while it is written."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np

from engine.events import Keyframe, StepRecord
from engine.run_file import (
    FrameKind,
    FrameScan,
    Head,
    RecordingError,
    RunHeader,
    SegmentStart,
    Text,
    copy_range,
    discard,
    pack_frame,
    payload_of,
    read_header,
    temporary_beside,
    write_all,
)
from engine.run_state import RunState

_READ_BYTES = 2**20
_COLUMNS = ("num_tokens", "num_computed", "kinds", "new_tokens")
"""Of a step: a value for each of its ``request_ids``."""
_T = TypeVar("_T")

_segment_decoder = msgspec.msgpack.Decoder(SegmentStart)
_record_decoder = msgspec.msgpack.Decoder(StepRecord)
_text_decoder = msgspec.msgpack.Decoder(Text)


class _Index:
    """Where everything lies in one file, as far as it has been gone through."""

    def __init__(self, file: BinaryIO, position: int) -> None:
        self.file = file
        self.header_end = position
        self.steps, self.offsets, self.ends = array("q"), array("q"), array("d")
        """Of each step: its number, where its frame begins, when it ended."""
        self.segment_steps, self.segment_offsets, self.segment_ends = array("q"), array("q"), array("d")
        """Of each segment the same of its keyframe."""
        self.segment_first = array("q")
        """How many steps lie before it."""
        self.text_steps, self.text_offsets = array("q"), array("q")
        self.whole = position
        """Behind the last frame of the run."""
        self.ended = False
        self._scan = FrameScan(file, position)
        self._gap = False
        """Whether steps are left out until the next keyframe."""

    def extend(self) -> bool:
        """Go through what has been written since; whether that was anything."""
        size = os.fstat(self.file.fileno()).st_size
        begun = self._scan.position
        while (found := self._scan.next(size)) is not None:
            self._gap |= self._scan.jumped
            self._take(*found)
        return self._scan.position > begun

    def _take(self, offset: int, head: Head) -> None:
        if head.kind == FrameKind.END:
            self.ended = True
            return
        self.whole = self._scan.position
        if head.kind == FrameKind.KEYFRAME:
            self._gap = False
            self.segment_steps.append(head.step)
            self.segment_offsets.append(offset)
            self.segment_ends.append(head.time)
            self.segment_first.append(len(self.steps))
        elif head.kind == FrameKind.RECORD and self.segment_steps and not self._gap:
            self.steps.append(head.step)
            self.offsets.append(offset)
            self.ends.append(head.time)
        elif head.kind == FrameKind.TEXT:
            self.text_steps.append(head.step)
            self.text_offsets.append(offset)

    def segment_range(self, segment: int) -> tuple[int, int]:
        """Its steps, as places in the columns."""
        following = self.segment_first[segment + 1 :][:1]
        return self.segment_first[segment], following[0] if following else len(self.steps)

    def read(self, begin: int, end: int) -> bytes:
        self.file.seek(begin)
        parts = []
        while begin < end:
            part = self.file.read(end - begin)
            if not part:
                break
            parts.append(part)
            begin += len(part)
        return b"".join(parts)

    def payloads(self, offsets: array[int], first: int, last: int) -> Iterator[bytes | None]:
        """Of the frames ``first`` … ``last - 1`` among ``offsets``; None for a damaged one."""
        place, whole = first, self.whole
        while place < last:
            begin = offsets[place]
            stop = bisect_left(offsets, begin + _READ_BYTES, place + 1, last)
            data = self.read(begin, offsets[stop] if stop < len(offsets) else whole)
            for offset in offsets[place:stop]:
                yield payload_of(data, offset - begin)
            place = stop

    def records(self, first: int, last: int) -> Iterator[StepRecord | None]:
        """The steps at the places ``first`` … ``last - 1``; None for a damaged one."""
        for payload in self.payloads(self.offsets, first, last):
            yield None if payload is None else _record(payload)

    def keyframe(self, segment: int) -> SegmentStart | None:
        """The state in which a segment begins; None where it is damaged."""
        payload = next(self.payloads(self.segment_offsets, segment, segment + 1))
        return None if payload is None else _decoded(_segment_decoder, payload)


class _Unpacked:
    """A segment as far as it has been decoded, since the next jump is often near."""

    def __init__(self, index: _Index, segment: int) -> None:
        self._index = index
        self.segment = segment
        self.start = index.keyframe(segment)
        self.records: list[StepRecord] = []

    def of(self, index: _Index, segment: int) -> bool:
        return self._index is index and self.segment == segment

    def up_to(self, place: int) -> list[StepRecord]:
        """Its records up to the one at ``place`` in the index, or up to the last before a damaged one."""
        first, _ = self._index.segment_range(self.segment)
        for record in self._index.records(first + len(self.records), place + 1):
            if record is None:
                break
            self.records.append(record)
        return self.records[: place + 1 - first]


class RunReader:
    """A run file, open for one thread. Steps are numbered as the engine numbers them; a file may begin anywhere.

    Raises :class:`RecordingError`, here and everywhere, where the file cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header, self._index = self._open()
        self._unpacked: _Unpacked | None = None
        self._index.extend()

    def _open(self) -> tuple[RunHeader, _Index]:
        try:
            file = self.path.open("rb", buffering=0)
            try:
                header, position = read_header(file)
            except (OSError, RecordingError):
                file.close()
                raise
        except OSError as error:
            raise RecordingError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except RecordingError as error:
            raise RecordingError(f"{self.path} {error}") from error
        return header, _Index(file, position)

    def refresh(self) -> bool:
        """Take in what has been written since: whether there is anything new, or old steps have gone. Iterators that
        are under way end with it."""
        try:
            now, ours = self.path.stat(), os.fstat(self._index.file.fileno())
        except OSError:  # it was removed: what we have open stays readable
            return self._index.extend()
        if (now.st_dev, now.st_ino) == (ours.st_dev, ours.st_ino):
            return self._index.extend()
        header, index = self._open()
        index.extend()
        self._index.file.close()
        self.header, self._index = header, index
        return True

    def close(self) -> None:
        self._index.file.close()

    # What there is ------------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        return len(self._index.steps)

    @property
    def first_step(self) -> int:
        """The oldest step that is kept; without a step, the one after which the recording begins."""
        index = self._index
        return index.steps[0] if index.steps else index.segment_steps[0] if index.segment_steps else 0

    @property
    def last_step(self) -> int:
        index = self._index
        return index.steps[-1] if index.steps else index.segment_steps[-1] if index.segment_steps else 0

    @property
    def truncated(self) -> bool:
        """Whether the recording was not ended: it goes on, or it broke off."""
        return not self._index.ended

    def step_at(self, time: float) -> int:
        """The last step that had ended at ``time`` (engine clock); the first one where none had."""
        place = bisect_right(self._index.ends, time) - 1
        return self._index.steps[place] if place >= 0 else self.first_step

    def end_of(self, step: int) -> float:
        """When a step ended, engine clock."""
        index = self._index
        place = bisect_left(index.steps, step)
        if place < len(index.steps) and index.steps[place] == step:
            return index.ends[place]
        return index.segment_ends[self._segment_beginning_at(step)]

    def _segment_beginning_at(self, step: int) -> int:
        segment = bisect_right(self._index.segment_steps, step) - 1
        if segment < 0 or self._index.segment_steps[segment] != step:
            raise self._missing(step)
        return segment

    def _missing(self, step: int) -> RecordingError:
        if self.first_step <= step <= self.last_step:
            return RecordingError(f"{self.path}: step {step:,} is damaged; choose one before or well after it")
        return RecordingError(
            f"{self.path} has no step {step:,}; it has the steps {self.first_step:,} to {self.last_step:,}"
        )

    # Steps --------------------------------------------------------------------------------------------------------

    def records(self, first: int, last: int) -> Iterator[StepRecord]:
        """The steps ``first`` … ``last``, damaged ones left out; what is written meanwhile is not among them."""
        index = self._index
        place, stop = bisect_left(index.steps, first), bisect_right(index.steps, last)
        while place < stop:
            segment = bisect_right(index.segment_first, place) - 1
            _, end = index.segment_range(segment)
            for record in index.records(place, min(end, stop)):
                if record is None:
                    break
                yield record
            place = end

    def replay(self, after: int | None = None) -> Iterator[Keyframe | StepRecord]:
        """All steps (those after ``after``) as a fold takes them: the state, then the steps that follow it; the state
        once more behind damaged steps."""
        index = self._index
        begin, step = 0, None
        if after is not None:
            yield self.state_at(after).keyframe()
            begin, step = max(bisect_right(index.segment_steps, after) - 1, 0), after
        for segment in range(begin, len(index.segment_steps)):
            if step is None or index.segment_steps[segment] > step:
                start = index.keyframe(segment)
                if start is None:
                    continue
                step = start.keyframe.step
                yield start.keyframe
            for record in index.records(*index.segment_range(segment)):
                if record is None:
                    break
                if record.step > step:
                    step = record.step
                    yield record

    def state_at(self, step: int) -> RunState:
        """The state right after ``step``, a new object each time. Of requests that have left and of preemptions it
        knows only what happened since the keyframe before it."""
        index = self._index
        place = bisect_left(index.steps, step)
        if place < len(index.steps) and index.steps[place] == step:
            unpacked = self._segment(bisect_right(index.segment_first, place) - 1)
            records = unpacked.up_to(place)
            if unpacked.start is not None and records and records[-1].step == step:
                return _folded(unpacked.start, records)
        start = self._segment(self._segment_beginning_at(step)).start
        if start is None:
            raise self._missing(step)
        return _folded(start, [])

    def _segment(self, segment: int) -> _Unpacked:
        if self._unpacked is None or not self._unpacked.of(self._index, segment):
            self._unpacked = _Unpacked(self._index, segment)
        return self._unpacked

    def texts(self, first: int | None = None, last: int | None = None) -> Iterator[tuple[int, Text]]:
        """Prompts and pieces of answers with the step after which they came, of the steps ``first`` … ``last``."""
        index = self._index
        begin = 0 if first is None else bisect_left(index.text_steps, first)
        end = len(index.text_steps) if last is None else bisect_right(index.text_steps, last)
        steps = index.text_steps[begin:end]
        for step, payload in zip(steps, index.payloads(index.text_offsets, begin, end), strict=True):
            if payload is not None:
                yield step, _decoded(_text_decoder, payload)

    def copy(self, path: str | Path, first_step: int | None = None) -> None:
        """Write the run as far as it is read to another file, from the segment of ``first_step`` on."""
        index, target = self._index, Path(path).resolve()
        if target == self.path.resolve():
            raise RecordingError(f"{target} is the run file itself; give the copy another name")
        segment = 0
        if first_step is not None:
            # A segment holds the steps after the one that it is named for.
            segment = max(bisect_left(index.segment_steps, first_step) - 1, 0)
        begin = index.segment_offsets[segment] if index.segment_offsets else index.whole
        try:
            temporary = temporary_beside(target)
            try:
                copy_range(index.file, temporary, 0, index.header_end)
                copy_range(index.file, temporary, begin, index.whole)
                write_all(temporary, pack_frame(FrameKind.END, self.last_step, 0.0, b""))
                Path(temporary.name).replace(target)
                temporary.close()
            except OSError:
                discard(temporary)
                raise
        except OSError as error:
            raise RecordingError(f"{target} cannot be written: {error.strerror or error}") from error


def _decoded(decoder: msgspec.msgpack.Decoder[_T], payload: bytes) -> _T:
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise RecordingError(f"the run file holds what this program does not understand: {error}") from error


def _record(payload: bytes) -> StepRecord:
    record = _decoded(_record_decoder, payload)
    rows = len(record.request_ids)
    for name in _COLUMNS:
        if len(column := getattr(record, name)) != rows:
            raise RecordingError(
                f"the run file holds what this program does not understand: step {record.step:,} has {rows:,} requests "
                f"and {len(column):,} values of {name}"
            )
    return record


def _folded(start: SegmentStart, records: list[StepRecord]) -> RunState:
    state = RunState()
    state.restore(start.keyframe)
    blocks = np.frombuffer(start.owners.blocks, dtype="<i4")
    state.block_owner[blocks] = np.frombuffer(start.owners.requests, dtype="<i8")
    for record in records:
        if record.step > state.step:
            state.apply(record)
        else:  # the first of a recording that began with the state after it
            state.last_record = record
    return state
