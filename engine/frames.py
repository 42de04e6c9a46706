"""Step records on their way to a window that may be slower than the engine."""

from __future__ import annotations

from collections.abc import Callable

from engine.events import Keyframe, StepRecord
from engine.messages import MAX_FRAME_RECORDS, Frame


class FrameStream:
    """At most one frame of a run is unacknowledged. What piles up meanwhile goes into the next; past
    ``MAX_FRAME_RECORDS`` it is dropped, and the next frame carries the state instead. ``keyframe`` gives the state
    after the last record added.
    """

    def __init__(self, keyframe: Callable[[], Keyframe]) -> None:
        self._keyframe = keyframe
        self._records: list[StepRecord] = []
        self._state_wanted = False
        """Whether the next frame begins with the state, records left out."""
        self._sent = 0
        self._acknowledged = 0

    def begin(self, keyframe: Callable[[], Keyframe]) -> None:
        """Another run from here on, whose state the next frame brings, at once whatever is unacknowledged; of the run
        before nothing more is told."""
        self._keyframe = keyframe
        self._records.clear()
        self._state_wanted = True
        self._acknowledged = self._sent

    def add(self, record: StepRecord) -> None:
        if self._state_wanted:
            return
        self._records.append(record)
        if len(self._records) > MAX_FRAME_RECORDS:
            self._records.clear()
            self._state_wanted = True

    def acknowledge(self, number: int) -> None:
        self._acknowledged = max(self._acknowledged, min(number, self._sent))

    def next_frame(self) -> Frame | None:
        """The next frame, where one may be sent and there is something to say."""
        if self._acknowledged < self._sent or not (self._records or self._state_wanted):
            return None
        self._sent += 1
        records, self._records = self._records, []
        keyframe = self._keyframe() if self._state_wanted else None
        self._state_wanted = False
        return Frame(self._sent, records, keyframe)
