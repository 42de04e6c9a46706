"""The ledger of a run, preemptions and rejections, as a fold of its own. Qt-free.

What an entry cost in the end is known later than the entry. Looked at from a step before, neither entries nor costs
that came after it are there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from engine.events import Finished, Keyframe, Preempted, Recovered, Rejected, StepRecord, SwapDropped

ENTRIES_KEPT = 5_000
"""The oldest go first; totals go on counting them."""

Outcome = Literal["open", "recovered", "again", "ended", "unseen"]
"""What became of a preempted request: not known yet; again where it was; preempted anew before that, where the time is
counted; ended before that; not known, since records are missing."""


@dataclass(slots=True)
class LedgerEntry:
    """A preemption or a rejection, with what followed from it."""

    step: int
    time: float
    """When its step ended, engine clock."""
    event: Preempted | Rejected
    outcome: Outcome = "open"
    outcome_step: int = 0
    recovered: Recovered | None = None
    dropped: str = ""
    """Why what had been swapped was given up after all."""
    dropped_step: int = 0

    def as_of(self, last_step: int | None) -> LedgerEntry:
        """The entry as it was known after a step; None: as it is known."""
        if last_step is None or max(self.outcome_step, self.dropped_step) <= last_step:
            return self
        entry = replace(self)
        if self.outcome_step > last_step:
            entry.outcome, entry.recovered = "open", None
        if self.dropped_step > last_step:
            entry.dropped = ""
        return entry

    def close(self, outcome: Outcome, step: int) -> None:
        self.outcome, self.outcome_step = outcome, step


class LedgerHistory:
    """The newest :data:`ENTRIES_KEPT` entries, oldest first, and the seconds lost to preemptions."""

    def __init__(self) -> None:
        self._entries: deque[LedgerEntry] = deque(maxlen=ENTRIES_KEPT)
        self._open: dict[int, LedgerEntry] = {}
        """The last preemption of each request that has not recovered from it."""
        self._lost: deque[tuple[int, float]] = deque(maxlen=ENTRIES_KEPT)
        """(step, seconds lost up to and with it)."""
        self._step = 0

    def restore(self, keyframe: Keyframe) -> None:
        if keyframe.step < self._step:
            self._entries.clear()
            self._lost.clear()
        for entry in self._open.values():
            entry.close("unseen", keyframe.step)
        self._open.clear()
        self._step = keyframe.step

    def apply(self, record: StepRecord) -> None:
        self._step = record.step
        for event in record.events:
            if isinstance(event, Preempted | Rejected):
                self._add(event, record)
            elif isinstance(event, Recovered):
                self._recover(event, record.step)
            elif isinstance(event, SwapDropped):
                entry = self._open.get(event.request_id)
                if entry is not None:
                    entry.dropped, entry.dropped_step = event.reason, record.step
            elif isinstance(event, Finished):
                entry = self._open.pop(event.request_id, None)
                if entry is not None:
                    entry.close("ended", record.step)

    def _add(self, event: Preempted | Rejected, record: StepRecord) -> None:
        entry = LedgerEntry(record.step, record.end, event)
        self._entries.append(entry)
        if isinstance(event, Preempted):
            before = self._open.get(event.request_id)
            if before is not None:
                before.close("again", record.step)
            self._open[event.request_id] = entry

    def _recover(self, event: Recovered, step: int) -> None:
        entry = self._open.pop(event.request_id, None)
        if entry is not None:
            entry.close("recovered", step)
            entry.recovered = event
        lost = self._lost[-1][1] if self._lost else 0.0
        self._lost.append((step, lost + event.seconds))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def until(self, last_step: int | None) -> list[LedgerEntry]:
        """The entries up to a step, oldest first; None: all that are kept."""
        if last_step is None:
            return list(self._entries)
        return [entry for entry in self._entries if entry.step <= last_step]

    def any_until(self, last_step: int | None) -> bool:
        return bool(self._entries) and (last_step is None or self._entries[0].step <= last_step)

    def seconds_lost(self, last_step: int | None) -> float | None:
        """Seconds from preemptions until the requests were again where they had been, added up over all that were by
        then; None: not known any more for a step so long ago."""
        if not self._lost:
            return 0.0
        if last_step is None:
            return self._lost[-1][1]
        at = bisect_right(self._lost, last_step, key=lambda lost: lost[0])
        if at == 0:
            return None if len(self._lost) == self._lost.maxlen else 0.0
        return self._lost[at - 1][1]

    def latest_preemptions(self, request_ids: Iterable[int], last_step: int | None) -> dict[int, Preempted]:
        """The last preemption of each of the requests, where one is kept."""
        wanted = set(request_ids)
        found: dict[int, Preempted] = {}
        for entry in reversed(self._entries):
            if len(found) == len(wanted):
                break
            event = entry.event
            known = last_step is None or entry.step <= last_step
            if known and isinstance(event, Preempted) and event.request_id in wanted:
                found.setdefault(event.request_id, event)
        return found
