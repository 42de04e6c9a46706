"""The last steps of a run in columns: what the batch held, how long each step took and on what. Qt-free.

Memory is bounded: :data:`CAPACITY` rows of 160 bytes, and a quarter of room more: 6.6 MB when full, taken as needed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from engine.columns import Columns
from engine.events import Keyframe, RowKind, StepRecord

CAPACITY = 32_768
LAYERS = ("decode", "prefill", "recompute", "accepted", "rejected", "padding")
"""What a step's tokens were computed for. Drafted tokens are counted by what became of them, not as decodes."""
PARTS = ("schedule", "prepare", "forward", "sample", "detokenise")
"""Of a step's time, in seconds."""
_COUNTS = ("step", *LAYERS, "budget", "running", "waiting", "swapped", "free_blocks", "cached_blocks")
_SECONDS = ("time", "seconds", *PARTS)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step, for a tooltip. Tokens computed by layer, the budget, requests after it, seconds it took."""

    step: int
    decode: int
    prefill: int
    recompute: int
    accepted: int
    rejected: int
    padding: int
    budget: int
    running: int
    waiting: int
    """Swapped ones included."""
    swapped: int
    free_blocks: int
    cached_blocks: int
    time: float
    """When it began, engine clock."""
    seconds: float
    schedule: float
    prepare: float
    forward: float
    sample: float
    detokenise: float

    @property
    def tokens(self) -> int:
        return sum(getattr(self, layer) for layer in LAYERS)


class StepHistory:
    """The last :data:`CAPACITY` steps. A step whose record was replaced by a keyframe has no row.

    Every reading takes ``last_step``: the history as it was right after that step; None: up to the newest.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._rows = Columns(capacity, **dict.fromkeys(_COUNTS, np.int64), **dict.fromkeys(_SECONDS, np.float64))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def last_step(self) -> int:
        return int(self._rows["step"][-1]) if len(self._rows) else 0

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def restore(self, keyframe: Keyframe) -> None:
        if keyframe.step < self.last_step:
            self._rows.clear()

    def apply(self, record: StepRecord) -> None:
        timings = record.timings
        counts = (
            record.step,
            *layer_tokens(record),
            record.token_budget,
            record.num_running,
            record.num_waiting,
            record.num_swapped,
            record.free_blocks,
            record.cached_blocks,
        )
        seconds = (record.time, timings.total, *(getattr(timings, part) for part in PARTS))
        self._rows.append(1, **dict(zip(_COUNTS + _SECONDS, counts + seconds, strict=True)))

    def count(self, last_step: int | None = None) -> int:
        """How many of the rows are of steps up to ``last_step``."""
        if last_step is None:
            return len(self._rows)
        return bisect_right(self._rows["step"], last_step)

    def number(self, last_step: int | None = None) -> int:
        """How many steps have had a row by then, those included that are not kept any more."""
        return self._rows.dropped + self.count(last_step)

    def last(self, name: str, count: int, last_step: int | None = None) -> np.ndarray:
        """The newest ``count`` values of a column, oldest first: int64 or, of seconds, float64 [min(count, rows)].

        A view: right until the next step.
        """
        end = self.count(last_step)
        return self._rows[name][max(0, end - count) : end]

    def row(self, age: int, last_step: int | None = None) -> StepRow | None:
        """The step ``age`` steps before the newest."""
        return self._row(self.count(last_step) - 1 - age) if age >= 0 else None

    def at(self, time: float) -> StepRow | None:
        """The step that ran at a moment, engine clock."""
        row = self._row(bisect_right(self._rows["time"], time) - 1)
        return row if row is not None and time <= row.time + row.seconds else None

    def _row(self, place: int) -> StepRow | None:
        if place < 0:
            return None
        counts = (int(self._rows[name][place]) for name in _COUNTS)
        return StepRow(*counts, *(float(self._rows[name][place]) for name in _SECONDS))


def layer_tokens(record: StepRecord) -> list[int]:
    """The step's tokens by layer, in the order of :data:`LAYERS`."""
    by_kind = np.bincount(record.kinds, weights=record.num_tokens, minlength=len(RowKind)).astype(np.int64).tolist()
    drafts, accepted = sum(record.drafts), sum(record.accepted_drafts())
    decode = by_kind[RowKind.DECODE] - drafts
    padding = by_kind[RowKind.PADDING] + sum(record.padding)
    return [decode, by_kind[RowKind.PREFILL], by_kind[RowKind.RECOMPUTE], accepted, drafts - accepted, padding]
