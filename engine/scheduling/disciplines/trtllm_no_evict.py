"""``trtllm-no-evict``: a request starts only if it and all running ones can be brought to their ends.

Taken from TensorRT-LLM's capacity scheduler policy GUARANTEED_NO_EVICT, as its documentation describes it: a request
that has started is never paused, so admission counts, for every running request and for the candidate, the blocks that
prompt + ``max_tokens`` still need beyond those they hold. Blocks are handed out as they are needed; what is only
promised may meanwhile keep cached prefixes. Context and generation are in one batch; contexts are chunked where that is
switched on. Left out: inflight micro-batches of pipeline parallelism, LoRA and encoder limits.
"""

from __future__ import annotations

from engine.request import Request
from engine.scheduling.discipline import Discipline, PlanningDesk


class Planner(Discipline):
    def plan(self, desk: PlanningDesk) -> None:
        prefills = []
        for request in desk.plan_decodes():
            if len(request.token_ids) - request.num_computed_tokens > 1:
                prefills.append(request)
            elif desk.reserve(request, 1):
                desk.plan[request] = 1
        prefills.sort(key=desk.order.key)
        for request in prefills:
            chunk = desk.prefill_chunk(len(request.token_ids) - request.num_computed_tokens)
            if chunk > 0 and desk.reserve(request, chunk):
                desk.plan[request] = chunk
        while (head := desk.waiting.head()) is not None and self._admit(desk, head):
            pass

    def _admit(self, desk: PlanningDesk, head: Request) -> bool:
        if len(desk.running) >= desk.max_running:
            desk.defer(head, desk.full_reason, 1, 0)
            return False
        memory = desk.memory
        joining = memory.look_up(head)
        remaining = len(head.token_ids) - joining.num_computed
        chunk = desk.prefill_chunk(remaining)
        if chunk == 0:
            desk.defer_for_budget(head, remaining)
            return False
        needed = memory.blocks_to_join(head, joining, head.footprint)
        available = memory.num_available
        if needed <= available:
            available -= sum(memory.blocks_to_grow(request, request.footprint) for request in desk.running)
        if needed > available:
            reason = "blocks" if needed > memory.num_available else "promised"
            desk.defer(head, reason, needed, max(available, 0))
            return False
        if not desk.admit(head, joining, joining.num_computed + chunk):
            desk.defer(head, "blocks", needed, memory.num_available)
            return False
        desk.plan[head] = chunk
        return True
