"""What a discipline is: a planner. It sees the queues and the memory, reserves and yields, and fills in a plan.

To add one, write a file beside ``vllm.py`` with a class that has ``plan(desk)``, and name it in ``DISCIPLINES``. The
scheduler lays a fresh :class:`PlanningDesk` before it at every step, validates the plan and executes it; a discipline
never touches a queue, a block or a counter itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.memory.kv_cache import KVCacheManager
from engine.request import Request
from engine.scheduling.orders import QueueOrder, yield_rank


class Discipline(Protocol):
    name: str

    def plan(self, desk: PlanningDesk) -> None:
        """Fill ``desk.plan``: request → tokens to compute, in the order of execution.

        Every request in it must be running and hold blocks for those tokens; their sum stays within the budget.
        """


class SchedulerTools(Protocol):
    """What the scheduler does on a discipline's word."""

    def admit(self, request: Request, hits: Sequence[int], num_new_tokens: int) -> bool: ...

    def preempt(self, victim: Request, beneficiary: Request, rule: str) -> None: ...

    def defer(self, request: Request, reason: str, needed: int, available: int) -> None: ...


class WaitingView(Protocol):
    def __len__(self) -> int: ...

    def head(self) -> Request | None: ...


class MemoryView:
    """Reading only: how much room there is and who would need how much of it."""

    def __init__(self, memory: KVCacheManager) -> None:
        self._memory = memory
        self.find_prefix = memory.find_prefix
        self.blocks_to_admit = memory.blocks_to_admit
        self.blocks_freed_by = memory.blocks_freed_by
        self.block_size = memory.block_size

    @property
    def num_available(self) -> int:
        """Blocks nobody refers to."""
        return self._memory.pool.num_available


class PlanningDesk:
    """One step's planning: views of the queues and the memory, and the tools to reserve and to yield."""

    def __init__(
        self,
        *,
        running: Sequence[Request],
        waiting: WaitingView,
        memory: KVCacheManager,
        tools: SchedulerTools,
        order: QueueOrder,
        token_budget: int,
        max_num_seqs: int,
        chunked_prefill: bool,
        watermark_blocks: int,
    ) -> None:
        self.running = running
        """Those that run, in order of admission; it changes as the desk's tools are used."""
        self.waiting = waiting
        self.memory = MemoryView(memory)
        self.order = order
        self.token_budget = token_budget
        self.max_running = min(max_num_seqs, token_budget)
        """A running request needs a token of every step's budget, or it would hold memory and stand still."""
        self.full_reason = "slots" if max_num_seqs <= token_budget else "budget"
        """What binds where that many run."""
        self.chunked_prefill = chunked_prefill
        self.watermark_blocks = watermark_blocks
        """Blocks that admission leaves free for the running requests to grow into."""
        self.plan: dict[Request, int] = {}
        self.deferred: Request | None = None
        """The head of the queue, once it has been found to wait in this step."""
        self._tools = tools
        self._reserve = memory.reserve

    @property
    def budget_left(self) -> int:
        return self.token_budget - sum(self.plan.values())

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Blocks for the next ``num_tokens`` of a running request; False where the pool is exhausted."""
        return self._reserve(request, num_tokens)

    def last_in_rank(self) -> Request:
        """The running request that yields first: lowest priority, latest arrival."""
        return max(self.running, key=yield_rank)

    def outranked_by(self, arrival: Request) -> list[Request]:
        """Running requests whose place ``arrival`` may take, the first to yield first."""
        if not self.order.by_priority:
            return []
        lower = [request for request in self.running if self.order.outranks(arrival, request)]
        lower.sort(key=yield_rank, reverse=True)
        return lower

    def preempt(self, victim: Request, beneficiary: Request, rule: str) -> None:
        """Take a running request's blocks and put it back in the queue; its part of this plan and budget is free."""
        self.plan.pop(victim, None)
        self._tools.preempt(victim, beneficiary, rule)

    def admit(self, head: Request, hits: Sequence[int], num_tokens: int) -> bool:
        """Let the head of the queue run, on ``hits`` of the prefix cache and blocks for ``num_tokens`` behind them.
        False where the memory refused after all: nothing has changed then."""
        return self._tools.admit(head, hits, num_tokens)

    def defer(self, head: Request, reason: str, needed: int, available: int) -> None:
        """Say why the head of the queue waits on."""
        self.deferred = head
        self._tools.defer(head, reason, needed, available)
