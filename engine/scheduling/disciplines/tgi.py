"""``tgi``: waiting requests join in groups, and their prefill pauses the decodes.

Taken from the router of Text Generation Inference (its batching task and queue, in the mode without chunking):

- The waiting join a running batch once they number at least ``waiting_served_ratio`` times the running ones, or once
  ``max_waiting_tokens`` decode steps have passed since the last joining; an empty batch takes them at once.
- Those who join are taken from the head while their prompts fit into one prefill (``max_batch_prefill_tokens``: here
  the step's token budget; one longer prompt goes alone) and while prompt + ``max_tokens`` of all running and joining
  requests fit into ``max_batch_total_tokens`` (here the pool, in blocks). The first that does not fit ends the group.
- The joining prefill is a step of its own, whole prompts only; then all decode together. So at least one decode lies
  between two joinings of a running batch, however many wait.

Memory is reserved, so nothing is ever taken back. Left out: that a group which the limits cut below the ratio goes back
to the queue; the padding of models without flash attention, the router's estimate of the budget by a warm-up,
speculation by Medusa heads.
"""

from __future__ import annotations

import math

from engine.config import SchedulerConfig
from engine.request import Request
from engine.scheduling.discipline import Discipline, PlanningDesk


class Planner(Discipline):
    whole_prompts = True

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._decodes_since_joining = 0
        self._paused = False
        """Whether running requests were kept from decoding by the last step: now it is their turn."""

    def plan(self, desk: PlanningDesk) -> None:
        head, running = desk.waiting.head(), len(desk.running)
        if head is not None and not (self._paused and running) and self._may_join(desk, head):
            while (head := desk.waiting.head()) is not None and desk.admit_reserving(head):
                pass
        self._paused = bool(desk.plan) and running > 0
        if desk.plan:
            self._decodes_since_joining = 0
        else:
            desk.plan_decodes()
            self._decodes_since_joining += 1

    def _may_join(self, desk: PlanningDesk, head: Request) -> bool:
        needed = math.floor(self.config.waiting_served_ratio * len(desk.running))
        if len(desk.waiting) >= needed or self._decodes_since_joining >= self.config.max_waiting_tokens:
            return True
        desk.defer(head, "joining", needed, len(desk.waiting))
        return False
