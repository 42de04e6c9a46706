"""``static``: the classic server. A batch is formed and runs until its last answer is complete; then comes the next.

Taken from what ``generate()`` of Transformers does with a padded batch, behind a queue that forms one from whoever
waits, as the literature on serving describes its baseline (Orca, OSDI '22, section 2; Faster Transformer's
request-level scheduling). Prompts are padded to the longest, finished rows go on until the last one ends, and both are
really computed::

    tokens of one batch, B rows            useful        padding
    |<------ max p ------>|<-- max o - 1 -->|
    [ prompt ▓▓▓▓▓▓▓▓▓▓▓▓▓ answer ▓▓▓▓▓▓▓▓▓▓ ]
    [ prompt ▓▓▓▓▓ ░░░░░░░ answer ▓▓ ░░░░░░░ ]       useful share = Σ(p + o - 1) / (B · (max p + max o - 1))
    [ prompt ▓▓▓▓▓▓▓▓▓ ░░░ answer ▓▓▓▓▓▓ ░░░ ]

Memory is reserved for prompt + ``max_tokens``, both padded to the longest of the batch; a batch that does not fit is
cut to what fits. Prefill and decode are apart. Answers are handed out when the batch ends, or each as it is made
(``static_delivery``). It does not look into the prefix cache.

Left out: waiting for a batch to fill up (whoever waits when the last batch ends goes). Padding is on the right, where
causal attention needs no mask for it; the work is the same. The padded prefill is spread over steps of the token
budget, so that a step stays short enough to be watched and cancelled. A request that is aborted leaves at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import SchedulerConfig
from engine.events import AnyEvent, BatchEnded, BatchStarted
from engine.memory.kv_cache import Joining
from engine.request import Request, RequestStatus
from engine.scheduling.discipline import Discipline, PlanningDesk, StepTotals


@dataclass(slots=True)
class _Batch:
    started: BatchStarted
    lengths: dict[Request, int]
    """Tokens of each row when it joined."""
    padded: int
    """The most of them."""
    width: int
    """Tokens that every row has blocks for, once they are reserved."""
    steps: int
    computed_tokens: int
    padding_tokens: int
    """What had been computed before it began."""
    reserved: bool = False
    prefilling: bool = True


class Planner(Discipline):
    speculates = False
    ends_together = True

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._batch: _Batch | None = None
        self._count = 0

    @property
    def batch(self) -> BatchStarted | None:
        return None if self._batch is None else self._batch.started

    @property
    def withholds_answers(self) -> bool:
        return self.config.static_delivery == "batch"

    def plan(self, desk: PlanningDesk) -> None:
        if not desk.running:
            self._batch = self._form(desk)
        elif (head := desk.waiting.head()) is not None:
            desk.defer(head, "batch", 1, 0)
        batch = self._batch
        if batch is None:
            return
        if not batch.reserved:
            batch.reserved = all(desk.reserve(request, batch.width) for request in desk.running)
            if not batch.reserved:
                return
        if batch.prefilling:
            batch.prefilling = self._plan_prefill(desk, batch)
        if not batch.prefilling:
            for request in desk.running:
                if request.status is RequestStatus.ENDED:
                    desk.padding[request] = 1
                else:
                    desk.plan[request] = 1

    def _form(self, desk: PlanningDesk) -> _Batch | None:
        """Admit from the head while the whole batch, padded, fits into the pool."""
        memory, lengths = desk.memory, dict[Request, int]()
        longest = most_left = 0
        available = memory.num_available
        while (head := desk.waiting.head()) is not None:
            if len(lengths) >= desk.max_running:
                desk.defer(head, desk.full_reason, 1, 0)
                break
            length = len(head.token_ids)
            widest = max(longest, length) + max(most_left, head.footprint - length)
            needed = (len(lengths) + 1) * memory.blocks_for(widest)
            if needed > available or not desk.admit(head, Joining(), head.footprint):
                desk.defer(head, "blocks", needed, available)
                break
            lengths[head] = length
            longest, most_left = max(longest, length), max(most_left, head.footprint - length)
        if not lengths:
            return None
        self._count += 1
        totals = desk.totals
        started = BatchStarted(self._count, [request.request_id for request in lengths], longest)
        desk.tell(started)
        return _Batch(
            started=started,
            lengths=lengths,
            padded=longest,
            width=longest + most_left,
            steps=totals.steps,
            computed_tokens=totals.computed_tokens,
            padding_tokens=totals.padding_tokens,
        )

    def _plan_prefill(self, desk: PlanningDesk, batch: _Batch) -> bool:
        """Plan prompts and their padding within the budget; False where all are computed."""
        left = desk.token_budget
        for request in desk.running:
            length = batch.lengths[request]
            computed = min(request.num_computed_tokens, length)
            own = min(length - computed, left)
            padding = min(batch.padded - length - request.padded, left - own) if computed + own == length else 0
            if own > 0:
                desk.plan[request] = own
            if padding > 0:
                desk.padding[request] = padding
            left -= own + max(padding, 0)
        return left < desk.token_budget

    def leaving(
        self, running: Sequence[Request], ended: list[Request], totals: StepTotals, events: list[AnyEvent]
    ) -> list[Request]:
        batch = self._batch
        if batch is None or not running or any(request.status is not RequestStatus.ENDED for request in running):
            return []
        if batch.prefilling and any(batch.lengths[request] + request.padded < batch.padded for request in running):
            return []  # all ended with their first token, and a padded prompt is still to be computed to its end
        rows = [(batch.lengths[request], len(request.token_ids) - batch.lengths[request]) for request in running]
        size, longest, most = len(rows), max(p for p, _ in rows), max(o for _, o in rows)
        useful = totals.computed_tokens - batch.computed_tokens
        padding = totals.padding_tokens - batch.padding_tokens
        events.append(
            BatchEnded(
                batch.started.batch,
                size,
                totals.steps - batch.steps,
                useful,
                padding,
                eta=sum(p + o for p, o in rows) / (size * max(p + o for p, o in rows)),
                predicted_useful=sum(p + o - 1 for p, o in rows) / (size * (longest + most - 1)),
                measured_useful=useful / (useful + padding),
            )
        )
        self._batch = None
        return list(running)
