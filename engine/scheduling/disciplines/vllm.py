"""``vllm``: continuous batching with memory on demand, block by block.

Taken from vLLM: paging and preemption from Kwon et al., "Efficient Memory Management for Large Language Model Serving
with PagedAttention", SOSP '23; one token budget for decodes and prefill chunks together, preemption by recomputing and
a watermark of 0 from V1's scheduler; swapping to host memory, swapped requests before new ones, from V0. Left out:
scheduling of encoder inputs, of adapters and of remote KV transfers.

One step, within the token budget::

    1  decodes           running requests with one token to compute, in order of admission
    2  prefill chunks    running requests with more to compute, in order of the queue; under ``priority`` a waiting
                         request of strictly higher priority goes before them
    3  admissions        the waiting, head first

Blocks are taken as they are needed. When none is left, the latest arrival yields, under ``priority`` among those of the
lowest priority (the one that asked, if that is it): its blocks and its part of this step's plan go, and it waits again.

The head of the queue joins when a slot is free, the budget leaves a token (without chunked prefill: all it needs), and
the pool could hold everything it has to compute, though only the first chunk's blocks are taken now: a request that
would have to yield before its first token is not let in. Nobody passes the head: it starts as soon as the running have
finished enough, and those behind it wait with it.

Where a chunk size keeps one prompt from taking a whole step, several share it; those behind the first are let in only
where the pool holds the rest of all their prompts.

Ours: a request that has been preempted comes back only once it and the running ones could all grow for as many steps as
its coming back takes of the token budget (one, where it was swapped). Otherwise it could yield again at the next block,
and a tight pool would compute the same tokens over and over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from engine.memory.kv_cache import Joining
from engine.request import Request, RequestStatus
from engine.scheduling.discipline import Discipline, PlanningDesk

RULE_GROWTH = "lowest priority, latest arrival"
"""Priority counts under the order ``priority`` only."""
RULE_ARRIVAL = "lowest priority, latest arrival; a higher priority came"


class Planner(Discipline):
    preempts = True
    rule = RULE_GROWTH
    """Who yields when memory is gone."""

    def plan(self, desk: PlanningDesk) -> None:
        prefills = self._plan_decodes(desk)
        if prefills:
            self._plan_prefills(desk, prefills)
        self._admit_waiting(desk)

    def victim(self, desk: PlanningDesk) -> Request:
        """The running request that yields when memory is gone."""
        return desk.last_in_rank()

    def margin_blocks(self, desk: PlanningDesk, head: Request, staying: Sequence[Request]) -> int:
        """Blocks that the admission of ``head`` leaves to those who stay: the watermark and, where a chunk size has
        prompts share a step, what those that do not rank below it have yet to take for theirs."""
        if desk.largest_chunk == desk.token_budget:
            return desk.watermark_blocks
        first = [request for request in staying if not desk.order.outranks(head, request)]
        return desk.watermark_blocks + sum(desk.memory.blocks_to_grow(request, 0) for request in first)

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
            chunk = desk.prefill_chunk(len(request.token_ids) - request.num_computed_tokens)
            if chunk > 0 and self._grow(desk, request, chunk):
                desk.plan[request] = chunk

    def _grow(self, desk: PlanningDesk, request: Request, num_tokens: int) -> bool:
        """Reserve, and let others yield until it works. False where the request itself had to."""
        while not desk.reserve(request, num_tokens):
            victim = self.victim(desk)
            desk.preempt(victim, request, self.rule)
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
        while len(desk.running) - len(yielding) >= desk.max_running:
            if not lower:
                desk.defer(head, desk.full_reason, 1, 0)
                return False
            yielding.append(lower.pop(0))
        memory = desk.memory
        joining = memory.look_up(head)
        remaining = len(head.token_ids) - joining.num_computed
        chunk = desk.prefill_chunk(remaining, desk.budget_left + sum(desk.plan.get(victim, 0) for victim in yielding))
        if chunk == 0:
            desk.defer_for_budget(head, remaining)
            return False
        needed = memory.blocks_to_join(head, joining)
        if not self._find_room(desk, head, joining, needed, yielding, lower):
            return self._drop_a_holder(desk, head, joining, needed)
        for victim in yielding:
            desk.preempt(victim, head, RULE_ARRIVAL)
        for victim in yielding:
            if memory.blocks_to_join(head, joining) <= memory.num_available:
                break
            if any(victim.block_ids):  # swapped, and its shared blocks were counted on: none of the sharers runs on
                desk.drop_swapped(victim, "a higher priority needs the blocks it shares")
        if not desk.admit(head, joining, joining.num_computed + chunk):
            desk.defer(head, "blocks", needed, memory.num_available)
            return False
        desk.plan[head] = chunk
        return True

    @staticmethod
    def _drop_a_holder(desk: PlanningDesk, head: Request, joining: Joining, needed: int) -> bool:
        """What swapped requests share stays on the device. Where nobody runs it can only hold up those who wait, and
        it must not hold up a head of higher priority that would have room without it: the last of them gives
        everything up, and the head is looked at once more. Whether there was one."""
        holders = desk.waiting.holders()
        reason = "nobody runs, and the blocks it shares are needed"
        if desk.running:
            holders = [holder for holder in holders if desk.order.outranks(head, holder)]
            freed = desk.memory.blocks_freed_by(holders, joining.blocks)
            if needed > desk.memory.num_available + freed:
                return False
            reason = "a higher priority needs the blocks it shares"
        if not holders:
            return False
        desk.drop_swapped(holders[-1], reason)
        desk.deferred = None
        return True

    def _find_room(
        self,
        desk: PlanningDesk,
        head: Request,
        joining: Joining,
        needed: int,
        yielding: list[Request],
        lower: list[Request],
    ) -> bool:
        """Add as many of ``lower`` to ``yielding`` as it takes to make ``needed`` blocks available. Where all of them
        would not do, say what is missing: False."""
        memory, available = desk.memory, desk.memory.num_available
        if needed > available + sum(len(request.block_ids) for request in (*yielding, *lower)):
            desk.defer(head, "blocks", needed, available)  # which it may do for long: no more is counted than that
            return False

        def look(count: int) -> tuple[bool, str, int]:
            """Whether there is room if ``count`` of ``lower`` yield too; reason and size of the margin."""
            gone = dict.fromkeys([*yielding, *lower[:count]])
            room = available + (memory.blocks_freed_by(gone, joining.blocks) if gone else 0)
            if needed > room:
                return False, "blocks", 0
            staying = [request for request in desk.running if request not in gone] if gone else desk.running
            # The margin is for the running to grow into: without them there is none.
            reason, margin = self._margin(desk, head, joining, staying) if staying else ("blocks", 0)
            return needed + margin <= room, reason, margin

        works, reason, margin = look(0)
        if not works and lower:
            works, reason, margin = look(len(lower))
            if works:
                # The more yield the more is free and the fewer are to grow: the fewest are found by halving.
                count = bisect_left(range(len(lower)), True, lo=1, key=lambda count: look(count)[0])
                yielding += lower[:count]
        if not works and needed > available:
            desk.defer(head, "blocks", needed, available)
        elif not works:
            desk.defer(head, reason, needed + margin, available)
        return works

    def _margin(
        self, desk: PlanningDesk, head: Request, joining: Joining, staying: Sequence[Request]
    ) -> tuple[str, int]:
        """(reason, blocks) that must be free beside what ``head`` needs."""
        margin = self.margin_blocks(desk, head, staying)
        if not head.num_preemptions:
            return "watermark", margin
        memory, length = desk.memory, len(head.token_ids)
        steps = -(-(length - joining.num_computed) // desk.largest_chunk)
        growth = sum(memory.blocks_to_grow(request, steps) for request in staying)
        own = memory.blocks_for(min(length + steps, head.footprint)) - memory.blocks_for(length)
        return "resume", max(margin, growth + max(own, 0))
