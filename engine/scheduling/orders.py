"""The waiting queue: who is its head, under the orders ``fcfs``, ``priority`` and ``fair``.

Keys of the first two are static, so the queue is a heap: joining costs O(log n), the head O(1), and a step costs the
same whether ten wait or a hundred thousand.

    fcfs                      (arrival, id)
    priority                  (priority, arrival, id)
    priority with ageing A    (arrival + priority · A, id)

The last makes one level of priority worth A seconds of waiting: since the key is fixed at arrival, a request is
overtaken only by those that arrive within A seconds per level after it, so nothing starves.

``fair`` serves the user first who has got least (the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models", OSDI '24), and a user's requests in order of arrival. A counter rises by 1 for each prompt token when
a request is first admitted and by 2 for each output token, divided by the user's weight; work that is done again after
a preemption costs its user nothing. A user who comes back after a pause is lifted to the least counter among those who
wait, or to that of the user who left the queue last: idle time earns no credit. One whose running request is preempted
was not idle, and stays where it was.

A preempted request comes back with its own old key, ahead of all that arrived later.
"""

from __future__ import annotations

import heapq
from typing import Any, Protocol

from engine.config import SchedulerConfig
from engine.request import WAITING_STATES, Request, RequestStatus

INPUT_COST = 1.0
"""Service per prompt token."""
OUTPUT_COST = 2.0
"""Service per output token."""
MAX_IDLE_USERS = 10_000
"""Counters kept of users who have nothing in the queue; of more, the least served are forgotten: they have least to
lose, being lifted when they return."""


class QueueOrder:
    def __init__(self, config: SchedulerConfig) -> None:
        self.name = config.order
        self.by_priority = config.order == "priority"
        self._ageing = config.ageing

    def key(self, request: Request) -> tuple[Any, ...]:
        """Position in the queue: smaller joins first. Under ``fair``: among the requests of one user."""
        if not self.by_priority:
            return (request.arrival_time, request.request_id)
        if self._ageing is None:
            return (request.priority, request.arrival_time, request.request_id)
        return (request.arrival_time + request.priority * self._ageing, request.request_id)

    def outranks(self, arrival: Request, running: Request) -> bool:
        """Whether ``arrival`` may take the place of ``running``: never among equals. Ageing makes nobody yield, but who
        has come before ``arrival`` by age keeps its place: it would only join again and yield again."""
        if not self.by_priority or arrival.priority >= running.priority:
            return False
        return self._ageing is None or self.key(arrival) < self.key(running)

    def yield_rank(self, request: Request) -> tuple[float, float, int]:
        """Who yields when memory is gone: the largest, which is the latest arrival, under ``priority`` among those of
        the lowest priority."""
        return (request.priority if self.by_priority else 0, request.arrival_time, request.request_id)


class WaitingQueue(Protocol):
    def __len__(self) -> int: ...

    def push(self, request: Request) -> None: ...

    def head(self) -> Request | None: ...

    def forget(self, request: Request) -> None:
        """Account for a request whose status has just changed from waiting."""

    def in_order(self) -> list[Request]:
        """All that wait, head first: O(n log n), for keyframes and tests."""

    def charge(self, request: Request, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Service that a request has got."""


def make_queue(order: QueueOrder, config: SchedulerConfig) -> WaitingQueue:
    return FairQueue(order, config.user_weights) if order.name == "fair" else HeapQueue(order)


class HeapQueue:
    """A heap in which a request that left stays as a dead entry until it comes up, or until the dead outnumber the
    living. An entry lives while its request waits in the epoch in which it was queued."""

    def __init__(self, order: QueueOrder) -> None:
        self._key = order.key
        self._heap: list[_Entry] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self._key(request), request.epoch, request))
        self._size += 1

    def head(self) -> Request | None:
        heap = self._heap
        while heap:
            if _lives(heap[0]):
                return heap[0][2]
            heapq.heappop(heap)
        return None

    def forget(self, request: Request) -> None:
        """O(1) amortised, wherever it stood."""
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [entry for entry in self._heap if _lives(entry)]
            heapq.heapify(self._heap)

    def in_order(self) -> list[Request]:
        return [entry[2] for entry in sorted(entry for entry in self._heap if _lives(entry))]

    def charge(self, request: Request, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Service counts only under ``fair``."""


class FairQueue:
    """A heap of requests per user who waits, and a heap of these users by what they have got.

    Counters only rise, so an entry in the heap of users that is out of date is too small: it is put right when it
    comes up.
    """

    def __init__(self, order: QueueOrder, weights: dict[str, float]) -> None:
        self._order = order
        self._weights = weights
        self._queues: dict[str, HeapQueue] = {}
        """Of the users who wait."""
        self._users: list[tuple[float, str]] = []
        self._listed: set[str] = set()
        """Users with an entry in that heap: one each, which may outlast their waiting."""
        self._served: dict[str, float] = {}
        self._last_left = ""
        """The user who left the queue last."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        user = request.user
        queue = self._queues.get(user)
        if queue is None:
            if request.status is RequestStatus.WAITING:
                self._lift(user)
            else:  # preempted: its user was not idle
                self._served.setdefault(user, 0.0)
            queue = self._queues[user] = HeapQueue(self._order)
            if user not in self._listed:
                self._listed.add(user)
                heapq.heappush(self._users, (self._served[user], user))
        queue.push(request)
        self._size += 1

    def head(self) -> Request | None:
        user = self._first_user()
        return None if user is None else self._queues[user].head()

    def forget(self, request: Request) -> None:
        self._size -= 1
        queue = self._queues[request.user]
        queue.forget(request)
        if not len(queue):
            del self._queues[request.user]
            self._last_left = request.user
            self._forget_idle_users()

    def in_order(self) -> list[Request]:
        users = sorted(self._queues, key=lambda user: (self._served[user], user))
        return [request for user in users for request in self._queues[user].in_order()]

    def charge(self, request: Request, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        cost = INPUT_COST * input_tokens + OUTPUT_COST * output_tokens
        user = request.user
        self._served[user] = self._served.get(user, 0.0) + cost / self._weights.get(user, 1.0)

    def weigh(self, weights: dict[str, float]) -> None:
        """Other weights from now on; what users have got stays as it was counted."""
        self._weights = weights

    def served(self, user: str) -> float:
        """What a user has got, weighted: tokens of prompts once, tokens of answers twice."""
        return self._served.get(user, 0.0)

    def _lift(self, user: str) -> None:
        first = self._first_user()
        least = self.served(self._last_left if first is None else first)
        self._served[user] = max(self.served(user), least)

    def _first_user(self) -> str | None:
        users = self._users
        while users:
            counter, user = users[0]
            if user not in self._queues:
                heapq.heappop(users)
                self._listed.remove(user)
            elif counter < self._served[user]:
                heapq.heapreplace(users, (self._served[user], user))
            else:
                return user
        return None

    def _forget_idle_users(self) -> None:
        """O(1) amortised: only once those who do not wait outnumber those who do."""
        queues, served = self._queues, self._served
        too_many = len(served) > 2 * MAX_IDLE_USERS + len(queues)
        if too_many:
            idle = sorted((u for u in served if u not in queues and u != self._last_left), key=served.__getitem__)
            for user in idle[:-MAX_IDLE_USERS]:
                del served[user]
        if too_many or len(self._users) > 2 * len(queues) + 64:
            self._users = [(served[user], user) for user in queues]
            heapq.heapify(self._users)
            self._listed = set(queues)


class WaitingLine:
    """All that wait: the queue, and the swapped, who come back before it. Closed while the discipline changes."""

    def __init__(self, order: QueueOrder, config: SchedulerConfig) -> None:
        self.closed = False
        self._begin(order, config)

    def _begin(self, order: QueueOrder, config: SchedulerConfig) -> None:
        self._order = order
        self.queue: WaitingQueue = make_queue(order, config)
        self.swapped = HeapQueue(order)

    def arrange(self, order: QueueOrder, config: SchedulerConfig) -> None:
        """Line all up in another order, or by other weights."""
        if isinstance(self.queue, FairQueue) and order.name == "fair":
            self.queue.weigh(config.user_weights)
            return
        waiting = self.in_order()
        self._begin(order, config)
        for request in waiting:
            self.push(request)

    def __len__(self) -> int:
        return len(self.queue) + len(self.swapped)

    def push(self, request: Request) -> None:
        line = self.swapped if request.status is RequestStatus.SWAPPED else self.queue
        line.push(request)

    def place_anew(self, request: Request) -> None:
        """Move a request to where its priority, which has just changed, puts it."""
        if self._order.by_priority:
            request.epoch += 1  # its old place is dead
            self.forget(request, request.status)
            self.push(request)

    def head(self) -> Request | None:
        return None if self.closed else self.first()

    def first(self) -> Request | None:
        """The head, whether the line is closed or not."""
        waiting = self.queue.head()
        if not len(self.swapped):
            return waiting
        swapped = self.swapped.head()
        if swapped is None or (waiting is not None and self._order.outranks(waiting, swapped)):
            return waiting
        return swapped

    def holders(self) -> list[Request]:
        """Swapped requests that still refer to blocks on the device, which they share: O(swapped)."""
        return [request for request in self.swapped.in_order() if any(request.block_ids)] if len(self.swapped) else []

    def forget(self, request: Request, status: RequestStatus) -> None:
        """Account for a request that has just left; ``status`` is what it was."""
        if status is RequestStatus.SWAPPED:
            self.swapped.forget(request)
        else:
            self.queue.forget(request)

    def in_order(self) -> list[Request]:
        """All, those in host memory first."""
        return [*self.swapped.in_order(), *self.queue.in_order()]


_Entry = tuple[tuple[Any, ...], int, Request]
"""(key, epoch, request); keys end with the id, so requests are never compared."""


def _lives(entry: _Entry) -> bool:
    _, epoch, request = entry
    return request.epoch == epoch and request.status in WAITING_STATES
