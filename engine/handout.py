"""When clients got what the records of a run tell: tokens of a step in flight, and answers that end with them, come
with the landing in the next record. Light.

::

    record        k, in flight             k+1, in flight                    k+2
    rows          tokens of k under way    tokens of k+1 under way
    landed_at                              tokens and ends of k are there    those of k+1

An answer whose last token was a stop token is ended by the landing, and the record in which that happens tells of it:
its own row gave nothing then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.events import BatchEnded, BatchStarted, Ended, Finished, Keyframe, StepRecord
from engine.request import FinishReason

_NOTHING_COMES = frozenset({FinishReason.ABORT, FinishReason.ERROR})


@dataclass(frozen=True, slots=True)
class Handout:
    """What clients got at one moment."""

    step: int
    """The step whose record tells of it."""
    time: float
    """Engine clock."""
    request_ids: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    """Output tokens, for each of ``request_ids``."""
    ends: Sequence[Ended | Finished] = ()
    """Behind those tokens."""


class Handouts:
    """Folds the records of a run."""

    def __init__(self) -> None:
        self._under_way: Handout | None = None

    def under_way(self, request_id: int) -> bool:
        """Whether a token of the request has yet to arrive."""
        return self._under_way is not None and request_id in self._under_way.request_ids

    def restore(self, keyframe: Keyframe) -> None:
        """Begin here. Of what is under way only first tokens are known."""
        first = [r.request_id for r in keyframe.requests if r.output_tokens and r.first_token_time is None]
        self._under_way = Handout(keyframe.step, keyframe.time, first, [1] * len(first)) if first else None

    def apply(self, record: StepRecord) -> Iterator[Handout]:
        """What clients got in this record's step, in order. Of tokens under way with a request that was aborted or
        failed, and of those whose step brought none, nothing comes."""
        ends = [event for event in record.events if isinstance(event, Ended | Finished)]
        waiting, self._under_way = self._under_way, None
        if waiting is not None:
            lost = {event.request_id for event in ends if event.reason in _NOTHING_COMES}
            yield _landed(waiting, record, lost)
        if record.in_flight or record.landed_at:
            own, got = ended_by_rows(record), _got(record)
            late = [e for e in ends if e.request_id in (own if isinstance(e, Finished) else got)]
            yield Handout(record.step, _landing(record), ends=[event for event in ends if event not in late])
            ends = late
        given = Handout(record.step, record.end, record.request_ids, record.new_tokens, ends)
        if record.in_flight:
            self._under_way = given
        else:
            yield given


def _landing(record: StepRecord) -> float:
    return record.landed_at or record.end


def _landed(waiting: Handout, record: StepRecord, lost: set[int]) -> Handout:
    pairs = zip(waiting.request_ids, waiting.new_tokens, strict=True)
    got = [(request_id, new) for request_id, new in pairs if new and request_id not in lost]
    if not record.landed_at:
        got = []
    return Handout(waiting.step, _landing(record), [i for i, _ in got], [new for _, new in got], waiting.ends)


def _got(record: StepRecord) -> set[int]:
    """Whom the rows of this step gave tokens."""
    return {request_id for request_id, new in zip(record.request_ids, record.new_tokens, strict=True) if new}


def ended_by_rows(record: StepRecord) -> frozenset[int]:
    """Requests whose answers the rows of this step ended, and those that a batch lets go because of it; the landing
    in the step, or an abort, ended all others."""
    ended, together = set[int](), False
    for event in record.events:
        if isinstance(event, BatchStarted):  # what ended before has no row here
            ended, together = set(), False
        elif isinstance(event, BatchEnded):
            together = True
        elif isinstance(event, Ended | Finished) and event.reason not in _NOTHING_COMES:
            ended.add(event.request_id)
    own = ended & _got(record)
    return frozenset(ended if own and together else own)
