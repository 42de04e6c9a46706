"""When memory runs out in a step: the KV storage is made anew with fewer blocks, and everybody is computed again.

::

    step ─▶ runner raises: out of memory ─▶ free, make a smaller pool ─▶ all wait, nothing computed ─▶ next step
                     ▲                                                                                    │
                     └───────────── once more: smaller still; after a few in a row, those in it end ◀─────┘

Tokens that a client has got are kept: a request that is computed again goes on behind them, as after any preemption by
recomputing. The fault may be of the moment (another program took the memory) or of the size of a step; in both cases
what the pool gives back is room for the next. Light: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from engine.failures import describe, is_out_of_memory
from engine.request import Request

if TYPE_CHECKING:
    from engine.scheduling.plan import SchedulerOutput
    from engine.scheduling.scheduler import Scheduler

A = TypeVar("A")
T = TypeVar("T")

KEPT_SHARE = 0.8
"""Of the pool's blocks."""
MOST_KEPT_SHARE = 0.95
"""The first time that memory runs out, a request that needs more than ``KEPT_SHARE`` still keeps its room, if that is
no more than this."""
STEPS_TRIED = 4
"""Memory may run out in so many steps in a row; the requests of the last of them end with an error."""
LAST_TOKEN_LOST = "Memory ran out in the step of this answer's last token ({cause}), so it ends here. Send it again."


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came of it."""

    notice: str
    """For the user."""
    ended: dict[Request, str]
    """Requests that cannot go on, each with its sentence."""


class PoolRecovery:
    def __init__(self, resize: Callable[[int], int] | None) -> None:
        """``resize`` frees the KV storage and makes it anew with at most so many blocks: how many there are then. It
        raises where not even one fits. None: nothing can be made smaller, and memory that runs out ends the engine."""
        self._resize = resize
        self._failures = 0
        """Steps in a row in which memory ran out."""
        self._failed: Sequence[Request] = ()
        self.shortage = ""
        """What a step raised whose memory ran out, until :meth:`recover`; empty: none did."""
        self.withdrawn: list[Request] = []
        """Whose last token had been told while it was under way, and did not come."""

    def attempt(self, run: Callable[[A], T], given: A, plan: SchedulerOutput, *, done: bool = True) -> T | None:
        """What ``run(given)`` gives; None where memory ran out in it, see :attr:`shortage`. Other errors pass through.
        ``done``: whether the step of ``plan`` has been computed with that."""
        try:
            result = run(given)
        except Exception as error:
            if self._resize is None or not is_out_of_memory(error):
                raise
            self.shortage = describe(error)  # the error itself would keep the step's tensors alive
            self._failed = plan.requests
            return None
        if done:
            self._failures = 0
        return result

    def recover(self, scheduler: Scheduler, unborn: Iterable[Request]) -> Recovery:
        """After a :attr:`shortage`. ``unborn``: those that wait for another's
        first token, and are in no queue. Whoever the smaller pool cannot hold is among :attr:`Recovery.ended` and has
        yet to be ended; others are cut to what it holds. No complete answer may still have its row."""
        assert self._resize is not None
        cause, self.shortage = self.shortage, ""
        failed, self._failed = self._failed, ()
        withdrawn, self.withdrawn = self.withdrawn, []
        self._failures += 1
        memory, before, running = scheduler.memory, scheduler.memory.num_blocks, len(scheduler.running)
        alive = [*scheduler.running, *scheduler.waiting.in_order()]
        needs = [memory.blocks_for(request.footprint) for request in alive]
        num_blocks = self._resize(smaller_pool(before, needs if self._failures == 1 else []))
        scheduler.start_over(num_blocks, cause, withdrawn)
        ended = {request: _no_room(request, num_blocks, memory.block_size) for request in alive}
        if self._failures >= STEPS_TRIED:
            ended |= {request: _given_up(num_blocks, cause) for request in failed if request in ended}
            self._failures = 0
        ended = {request: message for request, message in ended.items() if message}
        for request in (*alive, *unborn):
            if request not in ended:
                request.cut_to(num_blocks * memory.block_size + 1)
        return Recovery(_notice(before, num_blocks, running, len(ended), cause), ended)


def smaller_pool(num_blocks: int, needs: Iterable[int]) -> int:
    """The blocks of the next pool, at least one: ``KEPT_SHARE`` of them, or what the largest of ``needs`` takes that is
    within ``MOST_KEPT_SHARE``."""
    most = int(num_blocks * MOST_KEPT_SHARE)
    return max(1, int(num_blocks * KEPT_SHARE), *(need for need in needs if need <= most))


def _no_room(request: Request, num_blocks: int, block_size: int) -> str:
    room = num_blocks * block_size
    if request.num_tokens <= room:
        return ""
    return (
        f"Memory ran out, and the pool of KV blocks was made smaller: it has {num_blocks:,} blocks ({room:,} tokens), "
        f"and this request, at {request.num_tokens:,} tokens, needs {-(-request.num_tokens // block_size):,}. Load a "
        "smaller model, or close other programs that use the memory, and send it again."
    )


def _given_up(num_blocks: int, cause: str) -> str:
    return (
        f"Memory ran out in {STEPS_TRIED} steps in a row ({cause}), though the pool of KV blocks was made smaller each "
        f"time, down to {num_blocks:,}. Load the model with a smaller token budget (--token-budget) or a smaller "
        "max_num_seqs, or close other programs that use the memory."
    )


def _notice(before: int, num_blocks: int, running: int, ended: int, cause: str) -> str:
    told = (
        f"Memory ran out in a step ({cause}). The pool of KV blocks was made smaller, from {before:,} to "
        f"{num_blocks:,}, and what was running ({running:,}) is computed again."
    )
    return f"{told} Requests that ended with an error because of it: {ended:,}." if ended else told
