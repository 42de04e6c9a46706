"""When the scheduler's knobs were changed while it ran, and to what: a fold over step records. Qt-free."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, fields, replace

from app.knob_words import NAMES, value_text
from app.translation import tr
from engine.config import SPECULATION_OFF, SchedulerConfig
from engine.events import Keyframe, Reconfigured, StepRecord

CHANGES_KEPT = 256


def differing(before: SchedulerConfig, after: SchedulerConfig) -> list[str]:
    """The knobs that are not alike, in the order of :data:`NAMES`."""
    return [f.name for f in fields(SchedulerConfig) if getattr(before, f.name) != getattr(after, f.name)]


@dataclass(frozen=True, slots=True)
class KnobChange:
    """A change, from the step with which it was in force on. A discipline that waits for the batch to drain is not yet
    in ``after``; it is another change when it takes over."""

    step: int
    time: float
    before: SchedulerConfig
    after: SchedulerConfig

    @property
    def label(self) -> str:
        """``budget 64 → 128``; of several the first, and how many more."""
        knobs = differing(self.before, self.after)
        knob = knobs[0]
        old, new = (value_text(knob, getattr(config, knob)) for config in (self.before, self.after))
        more = tr(" and {knobs} more", knobs=len(knobs) - 1) if len(knobs) > 1 else ""
        return f"{NAMES.get(knob, knob)} {old} → {new}{more}"


class KnobChanges:
    """The knobs in force, and the last :data:`CHANGES_KEPT` times they changed."""

    def __init__(self) -> None:
        self._changes: deque[KnobChange] = deque(maxlen=CHANGES_KEPT)
        self.in_force: SchedulerConfig | None = None
        """None: not known yet."""
        self.speculation = SPECULATION_OFF
        """Who drafts where anybody does: what was loaded with the model."""
        self._step = 0

    def restore(self, keyframe: Keyframe) -> None:
        if keyframe.step < self._step:
            self._changes.clear()
            self.in_force, self.speculation = None, SPECULATION_OFF
        self._step = keyframe.step
        if keyframe.scheduler is not None:
            self._set(keyframe.step, keyframe.time, as_it_runs(keyframe.scheduler, keyframe.discipline))

    def apply(self, record: StepRecord) -> None:
        self._step = record.step
        for event in record.events:
            if isinstance(event, Reconfigured):
                base = event.scheduler or self.in_force or SchedulerConfig()
                base = replace(
                    base,
                    order=event.order,
                    preemption=event.preemption,
                    max_num_seqs=event.max_num_seqs or base.max_num_seqs,
                )
                self._set(record.step, record.time, as_it_runs(base, event.discipline))

    def _set(self, step: int, time: float, config: SchedulerConfig) -> None:
        if self.in_force is not None and config != self.in_force:
            self._changes.append(KnobChange(step, time, self.in_force, config))
        self.in_force = config
        if config.speculative != SPECULATION_OFF:
            self.speculation = config.speculative

    def between(self, begin: float, end: float) -> list[KnobChange]:
        """Those after ``begin`` and up to ``end``, engine clock; oldest first."""
        changes = list(self._changes)
        first, last = (bisect_right(changes, time, key=lambda change: change.time) for time in (begin, end))
        return changes[first:last]


def as_it_runs(wanted: SchedulerConfig, discipline: str) -> SchedulerConfig:
    """``wanted`` with the discipline that runs; the wanted one may wait for the batch to drain."""
    if discipline in ("", wanted.discipline):
        return wanted
    return replace(wanted, discipline=discipline)
