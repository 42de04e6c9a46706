"""The last steps of a run in preallocated columns: what the batch held, how long each step took. Qt-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.events import Keyframe, RowKind, StepRecord

CAPACITY = 4096
_COLUMNS = ("step", "decode", "prefill", "recompute", "budget", "running", "waiting")


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step, for a tooltip. Tokens computed by kind, the budget, requests after it, seconds it took."""

    step: int
    decode: int
    prefill: int
    recompute: int
    budget: int
    running: int
    waiting: int
    seconds: float

    @property
    def tokens(self) -> int:
        return self.decode + self.prefill + self.recompute


class StepHistory:
    """A ring of the last :data:`CAPACITY` steps. A step whose record was replaced by a keyframe has no row."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._ints = {name: np.zeros(capacity, dtype=np.int64) for name in _COLUMNS}
        self._seconds = np.zeros(capacity, dtype=np.float64)
        self._written = 0

    def __len__(self) -> int:
        return min(self._written, self._capacity)

    @property
    def last_step(self) -> int:
        return int(self._ints["step"][(self._written - 1) % self._capacity]) if self._written else 0

    def restore(self, keyframe: Keyframe) -> None:
        if keyframe.step < self.last_step:
            self._written = 0

    def apply(self, record: StepRecord) -> None:
        by_kind = [0, 0, 0]
        for kind, tokens in zip(record.kinds, record.num_tokens, strict=True):
            by_kind[kind] += tokens
        at = self._written % self._capacity
        values = (
            record.step,
            by_kind[RowKind.DECODE],
            by_kind[RowKind.PREFILL],
            by_kind[RowKind.RECOMPUTE],
            record.token_budget,
            record.num_running,
            record.num_waiting,
        )
        for name, value in zip(_COLUMNS, values, strict=True):
            self._ints[name][at] = value
        self._seconds[at] = record.timings.total
        self._written += 1

    def last(self, name: str, count: int) -> np.ndarray:
        """The newest ``count`` values of a column, oldest first: int array [min(count, len(self))]."""
        count = min(count, len(self))
        return self._ints[name].take(np.arange(self._written - count, self._written), mode="wrap")

    def row(self, age: int) -> StepRow | None:
        """The step ``age`` steps before the newest."""
        if not 0 <= age < len(self):
            return None
        at = (self._written - 1 - age) % self._capacity
        return StepRow(*(int(self._ints[name][at]) for name in _COLUMNS), seconds=float(self._seconds[at]))
