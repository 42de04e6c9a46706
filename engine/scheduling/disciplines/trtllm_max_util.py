"""``trtllm-max-util``: as many requests as fit now; the newest is paused when they no longer do.

Taken from TensorRT-LLM's capacity scheduler policy MAX_UTILIZATION, as its documentation describes it: every iteration
packs as many requests as the KV cache has blocks for at that moment, at the risk of having to pause some later; the one
that started last is paused first, its blocks are given back, and it is restarted when there is room. Context and
generation are in one batch; contexts are chunked where that is switched on. Left out: inflight micro-batches of
pipeline parallelism, LoRA and encoder limits.

It differs from ``vllm`` in who yields (the last to *start*, not the last to arrive) and in that admission never leaves
a margin to the running requests. The rest, a paused request's coming back included, is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Request
from engine.scheduling.discipline import PlanningDesk
from engine.scheduling.disciplines import vllm


class Planner(vllm.Planner):
    rule = "started last"

    def victim(self, desk: PlanningDesk) -> Request:
        lowest = max(request.priority for request in desk.running) if desk.order.by_priority else None
        return next(request for request in reversed(desk.running) if lowest is None or request.priority == lowest)

    def margin_blocks(self, desk: PlanningDesk, head: Request, staying: Sequence[Request]) -> int:
        return 0
