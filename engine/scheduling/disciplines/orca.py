"""``orca``: iteration-level scheduling, with memory reserved for all that was asked.

Taken from Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI '22, Algorithm
1: at every iteration requests join in order of arrival while the batch has a place and the memory has room for
``max_tokens`` more of them; a request keeps that room until it ends, so nothing is ever taken back. Prompts are
computed whole, beside the decodes of others. Left out: pipelining over workers, and the paper's contiguous memory:
blocks are paged here as everywhere, so what its reservation costs shows alone, without fragmentation.

A step's token budget, which the paper has not, limits how many prompts join at once; one that does not fit into what is
left of it goes as the only prefill of its step.
"""

from __future__ import annotations

from engine.scheduling.discipline import Discipline, PlanningDesk


class Planner(Discipline):
    whole_prompts = True

    def plan(self, desk: PlanningDesk) -> None:
        desk.plan_decodes()
        while (head := desk.waiting.head()) is not None and desk.admit_reserving(head):
            pass
