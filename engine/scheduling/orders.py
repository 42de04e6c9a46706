"""The waiting queue: who is its head, under the orders ``fcfs`` and ``priority``.

Keys are static, so the queue is a heap: joining costs O(log n), the head O(1), and a step costs the same whether ten
wait or a hundred thousand.

    fcfs                      (arrival, id)
    priority                  (priority, arrival, id)
    priority with ageing A    (arrival + priority · A, id)

The last makes one level of priority worth A seconds of waiting: since the key is fixed at arrival, a request is
overtaken only by those that arrive within A seconds per level after it, so nothing starves.

A preempted request comes back with its own old key, ahead of all that arrived later.
"""

from __future__ import annotations

import heapq
from typing import Any

from engine.config import SchedulerConfig
from engine.request import Request, RequestStatus

_WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class QueueOrder:
    def __init__(self, config: SchedulerConfig) -> None:
        self.by_priority = config.order == "priority"
        self._ageing = config.ageing

    def key(self, request: Request) -> tuple[Any, ...]:
        """Position in the queue: smaller joins first."""
        if not self.by_priority:
            return (request.arrival_time, request.request_id)
        if self._ageing is None:
            return (request.priority, request.arrival_time, request.request_id)
        return (request.arrival_time + request.priority * self._ageing, request.request_id)

    def outranks(self, arrival: Request, running: Request) -> bool:
        """Whether ``arrival`` may take the place of ``running``: never among equals, and ageing does not count."""
        return self.by_priority and arrival.priority < running.priority


def yield_rank(request: Request) -> tuple[int, float, int]:
    """Who yields when memory is gone: the largest, which is the lowest priority and among those the latest arrival."""
    return (request.priority, request.arrival_time, request.request_id)


class WaitingQueue:
    """A heap in which a request that left stays as a dead entry until it comes up, or until the dead outnumber the
    living. An entry lives while its request waits in the epoch in which it was queued."""

    def __init__(self, order: QueueOrder) -> None:
        self.order = order
        self._heap: list[_Entry] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self.order.key(request), request.epoch, request))
        self._size += 1

    def head(self) -> Request | None:
        heap = self._heap
        while heap:
            if _lives(heap[0]):
                return heap[0][2]
            heapq.heappop(heap)
        return None

    def forget_one(self) -> None:
        """Account for a request whose status has just changed from waiting: O(1) amortised, wherever it stood."""
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [entry for entry in self._heap if _lives(entry)]
            heapq.heapify(self._heap)

    def in_order(self) -> list[Request]:
        """All that wait, head first: O(n log n), for keyframes and tests."""
        return [entry[2] for entry in sorted(entry for entry in self._heap if _lives(entry))]


_Entry = tuple[tuple[Any, ...], int, Request]
"""(key, epoch, request); keys end with the id, so requests are never compared."""


def _lives(entry: _Entry) -> bool:
    _, epoch, request = entry
    return request.epoch == epoch and request.status in _WAITING
