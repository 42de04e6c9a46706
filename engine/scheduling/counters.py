"""Counts since the engine started: mutable here, frozen as :class:`~engine.events.RunTotals` in every record."""

from __future__ import annotations

from dataclasses import dataclass

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
        return RunTotals(
            steps=self.steps,
            arrived=self.arrived,
            finished=self.finished,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            rejected=self.rejected,
        )
