"""The last steps of a run in preallocated columns: what the batch held, how long each step took. Qt-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.events import Keyframe, RowKind, StepRecord

CAPACITY = 4096
LAYERS = ("decode", "prefill", "recompute", "accepted", "rejected", "padding")
"""What a step's tokens were computed for. Drafted tokens are counted by what became of them, not as decodes."""
_COLUMNS = ("step", *LAYERS, "budget", "running", "waiting")


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
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(getattr(self, layer) for layer in LAYERS)


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
        at = self._written % self._capacity
        values = (
            record.step,
            *layer_tokens(record),
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


def layer_tokens(record: StepRecord) -> list[int]:
    """The step's tokens by layer, in the order of :data:`LAYERS`."""
    by_kind = [0] * len(RowKind)
    for kind, tokens in zip(record.kinds, record.num_tokens, strict=True):
        by_kind[kind] += tokens
    drafts = accepted = 0
    for drafted, new in zip(record.drafts, record.new_tokens, strict=False):  # no drafts: an empty column
        drafts += drafted
        accepted += min(drafted, max(0, new - 1))  # the last new token is the model's own
    decode = by_kind[RowKind.DECODE] - drafts
    padding = by_kind[RowKind.PADDING] + sum(record.padding)
    return [decode, by_kind[RowKind.PREFILL], by_kind[RowKind.RECOMPUTE], accepted, drafts - accepted, padding]
