"""What a discipline is: a planner. It sees the queues and the memory, reserves and yields, and fills in a plan.

To add one, write one file in ``disciplines/``: its name is the discipline's name (``-`` for ``_``), and its class, a
:class:`Discipline`, is called ``Planner``. The scheduler lays a fresh :class:`PlanningDesk` before it at every step,
validates the plan and executes it; a discipline never touches a queue, a block or a counter itself.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from engine.config import SchedulerConfig
from engine.events import AnyEvent, BatchStarted
from engine.memory.kv_cache import Joining, KVCacheManager
from engine.request import Request, RequestStatus
from engine.scheduling.orders import QueueOrder


class Discipline(ABC):
    preempts = False
    """Whether it takes blocks from running requests; only then may requests be swapped."""
    speculates = True
    """Whether drafts may use what its plan leaves of the budget."""
    whole_prompts = False
    """Whether a prompt is never split over steps, whatever the configuration says."""
    ends_together = False
    """Whether a row stays in the batch when its answer is complete, until :meth:`leaving` lets it go."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config

    @abstractmethod
    def plan(self, desk: PlanningDesk) -> None:
        """Fill ``desk.plan``: request → tokens to compute, in the order of execution, and ``desk.padding``.

        Every request in it must be running and hold blocks for those tokens; their sum stays within the budget, which
        only a single prompt that may not be split exceeds.
        """

    @property
    def batch(self) -> BatchStarted | None:
        """The batch that runs as a whole, where the discipline forms such."""
        return None

    @property
    def withholds_answers(self) -> bool:
        """Whether what a request gets is kept back until its row leaves the batch."""
        return False

    def leaving(
        self, running: Sequence[Request], ended: list[Request], totals: StepTotals, events: list[AnyEvent]
    ) -> list[Request]:
        """Those of the running requests that leave after a step, in which the answers of ``ended`` were completed;
        what there is to tell about it goes to ``events``."""
        return ended


class StepTotals(Protocol):
    """What has been computed since the engine started (:class:`engine.scheduling.counters.Counters`)."""

    steps: int
    computed_tokens: int
    padding_tokens: int


def make_discipline(config: SchedulerConfig) -> Discipline:
    module = importlib.import_module(f"engine.scheduling.disciplines.{config.discipline.replace('-', '_')}")
    planner: Discipline = module.Planner(config)
    return planner


class SchedulerTools(Protocol):
    """What the scheduler does on a discipline's word."""

    events: list[AnyEvent]

    def admit(self, request: Request, joining: Joining, num_tokens: int) -> bool: ...

    def preempt(self, victim: Request, beneficiary: Request, rule: str) -> None: ...

    def drop_swapped(self, request: Request, reason: str) -> None: ...

    def defer(self, request: Request, reason: str, needed: int, available: int) -> None: ...


class WaitingView(Protocol):
    """Those who wait, swapped ones before the others unless somebody outranks them."""

    def __len__(self) -> int: ...

    def head(self) -> Request | None: ...

    def holders(self) -> list[Request]:
        """Swapped requests that still refer to blocks on the device, in the order in which they come back."""


class MemoryView:
    """Reading only: how much room there is and who would need how much of it."""

    def __init__(self, memory: KVCacheManager) -> None:
        self._memory = memory
        self.look_up = memory.look_up
        self.blocks_to_join = memory.blocks_to_join
        self.blocks_freed_by = memory.blocks_freed_by
        self.blocks_for = memory.blocks_for
        self.block_size = memory.block_size

    @property
    def num_available(self) -> int:
        """Blocks nobody refers to."""
        return self._memory.pool.num_available

    def blocks_to_grow(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request lacks for its next ``num_tokens`` tokens, or for all that it may still get."""
        end = min(len(request.token_ids) + num_tokens, request.footprint)
        return max(self.blocks_for(end) - len(request.block_ids), 0)


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
        chunk_size: int | None,
        watermark_blocks: int,
        totals: StepTotals,
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
        self.largest_chunk = min(token_budget, chunk_size or token_budget) if chunked_prefill else token_budget
        """Most tokens of one prompt in this step, where prompts come in chunks."""
        self.watermark_blocks = watermark_blocks
        """Blocks that admission leaves free for the running requests to grow into."""
        self.plan: dict[Request, int] = {}
        self.padding: dict[Request, int] = {}
        """Request → padding computed behind its tokens, or alone."""
        self.totals = totals
        """What had been computed before this step."""
        self.deferred: Request | None = None
        """The head of the queue, once it has been found to wait in this step."""
        self._tools = tools
        self._reserve = memory.reserve

    @property
    def budget_left(self) -> int:
        return self.token_budget - sum(self.plan.values()) - sum(self.padding.values())

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Blocks for the next ``num_tokens`` of a running request; False where the pool is exhausted."""
        return self._reserve(request, num_tokens)

    def prefill_chunk(self, num_tokens: int, budget: int | None = None) -> int:
        """How many of ``num_tokens`` tokens a prefill may compute in this step, within what is left of the budget; 0:
        none. Without chunks it is all or nothing, and one that does not fit goes as the only prefill of its step."""
        left = self.budget_left if budget is None else budget
        if self.chunked_prefill:
            return max(min(num_tokens, left, self.largest_chunk), 0)
        if num_tokens <= left:
            return num_tokens
        alone = left > 0 and not any(count > 1 for count in self.plan.values())
        return num_tokens if alone else 0

    def plan_decodes(self) -> list[Request]:
        """Plan a token for each running request that needs one and has a block for it; return the others."""
        others, plan, running = [], self.plan, RequestStatus.RUNNING
        for request in list(self.running):
            if request.status is not running:
                continue
            computed = request.num_computed_tokens
            if len(request.token_ids) - computed == 1 and computed < request.capacity:
                plan[request] = 1
            else:
                others.append(request)
        return others

    def last_in_rank(self) -> Request:
        """The running request that yields first (:meth:`QueueOrder.yield_rank`)."""
        return max(self.running, key=self.order.yield_rank)

    def outranked_by(self, arrival: Request) -> list[Request]:
        """Running requests whose place ``arrival`` may take, the first to yield first."""
        if not self.order.by_priority:
            return []
        lower = [request for request in self.running if self.order.outranks(arrival, request)]
        lower.sort(key=self.order.yield_rank, reverse=True)
        return lower

    def preempt(self, victim: Request, beneficiary: Request, rule: str) -> None:
        """Take a running request's blocks and put it back in the queue; its part of this plan and budget is free."""
        self.plan.pop(victim, None)
        self.padding.pop(victim, None)
        self._tools.preempt(victim, beneficiary, rule)

    def admit(self, head: Request, joining: Joining, num_tokens: int) -> bool:
        """Let the head of the queue run with blocks for its first ``num_tokens`` tokens, ``joining`` included. False
        where the memory refused after all: nothing has changed then."""
        return self._tools.admit(head, joining, num_tokens)

    def drop_swapped(self, request: Request, reason: str) -> None:
        """Let a swapped request give up its blocks on host and device: it waits to be computed again."""
        self._tools.drop_swapped(request, reason)

    def defer(self, head: Request, reason: str, needed: int, available: int) -> None:
        """Say why the head of the queue waits on."""
        self.deferred = head
        self._tools.defer(head, reason, needed, available)

    def defer_for_budget(self, head: Request, remaining: int) -> None:
        """The head, with ``remaining`` tokens to compute, waits for room in a step."""
        self.defer(head, "budget", 1 if self.chunked_prefill else remaining, max(self.budget_left, 0))

    def tell(self, event: AnyEvent) -> None:
        """Leave an event of the discipline's own in the step's record."""
        self._tools.events.append(event)

    # Parts of a plan that several disciplines have in common --------------------------------------------------------

    def admit_reserving(self, head: Request) -> bool:
        """Admit the head with blocks for all that it may ever need, and plan its prefill; or say what it waits for."""
        memory = self.memory
        if len(self.running) >= self.max_running:
            self.defer(head, self.full_reason, 1, 0)
            return False
        joining = memory.look_up(head)
        needed = memory.blocks_to_join(head, joining, head.footprint)
        if needed > memory.num_available:
            self.defer(head, "blocks", needed, memory.num_available)
            return False
        remaining = len(head.token_ids) - joining.num_computed
        chunk = self.prefill_chunk(remaining)
        if chunk == 0:
            self.defer_for_budget(head, remaining)
            return False
        if not self.admit(head, joining, head.footprint):
            self.defer(head, "blocks", needed, memory.num_available)
            return False
        self.plan[head] = chunk
        return True
