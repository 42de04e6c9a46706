"""Counts since the engine started: mutable here, frozen as :class:`~engine.events.RunTotals` in every record."""

from __future__ import annotations

from dataclasses import dataclass

from engine.events import RunTotals


@dataclass(slots=True)
class Counters:
    """The fields of :class:`RunTotals`, which defines them, in its order."""

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
    computed_tokens: int = 0
    padding_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def snapshot(self) -> RunTotals:
        return RunTotals(*[getattr(self, name) for name in _FIELDS])


_FIELDS = RunTotals.__struct_fields__
