"""The ``vllm`` discipline: continuous batching with memory on demand (vLLM: SOSP '23; scheduling as in V1).

One step, within the token budget::

    1  decodes           running requests with one token to compute, in order of admission
    2  prefill chunks    running requests with more to compute, in order of the queue; under ``priority`` a waiting
                         request of strictly higher priority goes before them
    3  admissions        the waiting, head first

Blocks are taken as they are needed. When none is left, the request of the lowest priority and the latest arrival yields
(the one that asked, if that is it): its blocks and its part of this step's plan go, and it waits again and recomputes.

The head of the queue joins when a slot is free, the budget leaves a token (without chunked prefill: all it needs), and
the pool could hold everything it has to compute, though only the first chunk's blocks are taken now: a request that
would have to yield before its first token is not let in. Nobody passes the head: it starts as soon as the running have
finished enough, and those behind it wait with it.
"""

from __future__ import annotations

from engine.request import Request, RequestStatus
from engine.scheduling.discipline import PlanningDesk

RULE_GROWTH = "lowest priority, latest arrival"
RULE_ARRIVAL = "lowest priority, latest arrival; a higher priority came"


class VllmDiscipline:
    name = "vllm"

    def plan(self, desk: PlanningDesk) -> None:
        prefills = self._plan_decodes(desk)
        if prefills:
            self._plan_prefills(desk, prefills)
        self._admit_waiting(desk)

    def _plan_decodes(self, desk: PlanningDesk) -> list[Request]:
        """Plan one token for each that needs one; return those that need more."""
        plan, prefills, running = desk.plan, [], RequestStatus.RUNNING
        for request in list(desk.running):
            if request.status is not running:
                continue  # it has just yielded to one before it
            computed = request.num_computed_tokens
            if len(request.token_ids) - computed > 1:
                prefills.append(request)
            elif computed < request.capacity or self._grow(desk, request, 1):
                plan[request] = 1
        return prefills

    def _plan_prefills(self, desk: PlanningDesk, prefills: list[Request]) -> None:
        prefills.sort(key=desk.order.key)
        for request in prefills:
            self._admit_waiting(desk, before=request)
            if request.status is not RequestStatus.RUNNING:
                continue  # it has yielded
            chunk = min(len(request.token_ids) - request.num_computed_tokens, desk.budget_left)
            if chunk > 0 and self._grow(desk, request, chunk):
                desk.plan[request] = chunk

    def _grow(self, desk: PlanningDesk, request: Request, num_tokens: int) -> bool:
        """Reserve, and let others yield until it works. False where the request itself had to."""
        while not desk.reserve(request, num_tokens):
            victim = desk.last_in_rank()
            desk.preempt(victim, request, RULE_GROWTH)
            if victim is request:
                return False
        return True

    def _admit_waiting(self, desk: PlanningDesk, before: Request | None = None) -> None:
        """Admit from the head on while that works; with ``before`` only those that outrank it."""
        while (head := desk.waiting.head()) is not None:
            if head is desk.deferred or (before is not None and not desk.order.outranks(head, before)):
                return
            if not self._admit(desk, head):
                return

    def _admit(self, desk: PlanningDesk, head: Request) -> bool:
        """Admit the head, over lower priorities if that is what it takes, or say what it waits for."""
        lower, yielding = desk.outranked_by(head), list[Request]()
        if len(desk.running) >= desk.max_running:
            if not lower:
                desk.defer(head, desk.full_reason, 1, 0)
                return False
            yielding.append(lower.pop(0))
        memory = desk.memory
        hits = memory.find_prefix(head)
        remaining = len(head.token_ids) - len(hits) * memory.block_size
        budget = desk.budget_left + sum(desk.plan.get(victim, 0) for victim in yielding)
        chunk = self._first_chunk(desk, head, remaining, budget)
        if chunk == 0:
            desk.defer(head, "budget", 1 if desk.chunked_prefill else remaining, budget)
            return False
        needed, available = memory.blocks_to_admit(head, hits), memory.num_available
        if not self._find_room(desk, needed, hits, yielding, lower):
            self._defer_for_blocks(desk, head, needed, available)
            return False
        for victim in yielding:
            desk.preempt(victim, head, RULE_ARRIVAL)
        if not desk.admit(head, hits, chunk):
            self._defer_for_blocks(desk, head, needed, available)
            return False
        desk.plan[head] = chunk
        return True

    @staticmethod
    def _find_room(
        desk: PlanningDesk, needed: int, hits: list[int], yielding: list[Request], lower: list[Request]
    ) -> bool:
        """Move as many of ``lower`` to ``yielding`` as it takes to make ``needed`` blocks available; False if all of
        them would not do."""
        memory = desk.memory
        most = memory.num_available + sum(len(request.block_ids) for request in (*yielding, *lower))
        while needed <= most:
            # The margin is for the running to grow into: without them there is none.
            margin = desk.watermark_blocks if len(desk.running) > len(yielding) else 0
            freed = memory.blocks_freed_by(yielding, hits) if yielding else 0
            if needed + margin <= memory.num_available + freed:
                return True
            if not lower:
                return False
            yielding.append(lower.pop(0))
        return False

    @staticmethod
    def _first_chunk(desk: PlanningDesk, head: Request, remaining: int, budget: int) -> int:
        """Tokens to compute at once; 0: the budget does not allow it."""
        if desk.chunked_prefill or remaining <= budget:
            return min(remaining, budget)
        # What grew beyond a whole step before it was preempted can only come back in chunks.
        return budget if budget == desk.token_budget else 0

    @staticmethod
    def _defer_for_blocks(desk: PlanningDesk, head: Request, needed: int, available: int) -> None:
        if needed <= available:
            desk.defer(head, "watermark", needed + desk.watermark_blocks, available)
        else:
            desk.defer(head, "blocks", needed, available)
