"""Counts since the engine started: mutable here, frozen as :class:`~engine.events.RunTotals` in every record."""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.events import RunTotals


@dataclass(slots=True)
class Counters:
    """The fields of :class:`RunTotals`, which defines them."""

    steps: int = 0
    arrived: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    rejected: int = 0

    def snapshot(self) -> RunTotals:
        return RunTotals(**{field.name: getattr(self, field.name) for field in fields(self)})
