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
    """A heap in which a request that left by another door (an abort) stays as a dead entry until it comes up, or until
    dead entries outnumber the living."""

    def __init__(self, order: QueueOrder) -> None:
        self.order = order
        self._heap: list[tuple[tuple[Any, ...], Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self.order.key(request), request))
        self._size += 1

    def head(self) -> Request | None:
        heap = self._heap
        while heap:
            request = heap[0][1]
            if request.status in _WAITING:
                return request
            heapq.heappop(heap)
        return None

    def pop(self) -> Request:
        """Take the head out; :class:`IndexError` where nobody waits."""
        head = self.head()
        if head is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heap)
        self._size -= 1
        return head

    def discard(self, request: Request) -> None:
        """Account for a waiting request whose status has just become finished."""
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [entry for entry in self._heap if entry[1].status in _WAITING]
            heapq.heapify(self._heap)

    def in_order(self) -> list[Request]:
        """All that wait, head first: O(n log n), for keyframes and tests."""
        return [request for _, request in sorted(e for e in self._heap if e[1].status in _WAITING)]
