"""A comparison's turn on the engine: it waits for the answers that run, then nobody else steps until it is over.

::

    Compare ──▶ running answers end ──▶ run_comparison(floor, plan) ──▶ a fresh core, and what was held back
                  requests that come are held back, and told when they are aborted
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from engine.config import SchedulerConfig
from engine.messages import (
    Abort,
    AddRequest,
    CancelCompare,
    Compare,
    ComparePlan,
    CompareProgress,
    Output,
    Reconfigure,
    Record,
    Reply,
    SetPriority,
)
from engine.request import FinishReason
from engine.wire import BadConfig, BadPlan, BadRequest, Incoming

if TYPE_CHECKING:
    from engine.core import EngineCore, StepResult
    from engine.loader import LoadedEngine


class Floor(Protocol):
    """The engine in the hands of a comparison (:func:`engine.comparing.run_comparison`).

    For each run: a core of ``loaded.fresh_core``, ``begin(core)``, then ``stepped`` after every step of it. A run may
    go on as long as it likes if it asks ``stop_wanted`` before every step, and ten times a second while it waits.
    """

    @property
    def loaded(self) -> LoadedEngine: ...

    @property
    def scheduler(self) -> SchedulerConfig:
        """The knobs of the core that had served so far: what the options of plan and variants change."""

    def send(self, reply: Reply) -> None: ...

    def begin(self, core: EngineCore) -> None:
        """Frames tell of ``core`` from here on, first of all its state."""

    def stepped(self, result: StepResult) -> None:
        """Have the window see a step of the core that began last."""

    def stop_wanted(self) -> bool:
        """Take the commands that have come: whether the comparison is to end now, with what is complete."""


class Turn:
    """A comparison that waits for its turn, or has it, and what must wait for its end."""

    def __init__(self, plan: ComparePlan, send: Callable[..., None]) -> None:
        self.plan = plan
        self.cancelled = False
        self._send = send
        self._held: dict[int, Incoming] = {}
        """By their place in the order in which they came."""
        self._requests: dict[int, int] = {}
        """Request id → place."""
        self._places = itertools.count()
        self._told: tuple[int, int] | None = None
        self._most = 0

    def tell_waiting(self, running: int) -> None:
        """Say how many answers have yet to end before it begins."""
        self._most = max(self._most, running)
        told = (self._most - running, self._most)
        if told != self._told:
            self._told = told
            runs = len(self.plan.variants) * len(self.plan.workloads)
            self._send(CompareProgress(-1, runs, "", None, completed=told[0], requests=told[1]))

    def take(self, command: Incoming) -> bool:
        """Whether ``command`` is of the comparison or must wait until it is over; else it is to be obeyed."""
        match command:
            case CancelCompare():
                self.cancelled = True
            case AddRequest(request_id=request_id):
                self._requests[request_id] = self._hold(command)
            case BadRequest() | Reconfigure() | BadConfig() | Record() | Compare() | BadPlan():
                self._hold(command)
            case SetPriority(request_id=request_id) if request_id in self._requests:
                self._hold(command)
            case Abort(request_id=request_id) if request_id in self._requests:
                self._abort(request_id)
            case _:
                return False
        return True

    def _hold(self, command: Incoming) -> int:
        place = next(self._places)
        self._held[place] = command
        return place

    def _abort(self, request_id: int) -> None:
        """End a request that no core has seen."""
        command = self._held.pop(self._requests.pop(request_id))
        assert isinstance(command, AddRequest)
        now = time.perf_counter()
        for index in range(command.params.n):
            self._send(Output(request_id, now, [], finish_reason=FinishReason.ABORT, index=index))

    def held(self) -> list[Incoming]:
        """What is to be obeyed when it is over, in order."""
        return list(self._held.values())
