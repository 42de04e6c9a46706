"""A step that the device computes while the next one is scheduled.

::

    iteration          k - 1              k                  k + 1
    scheduler     plan k-1 ┐         plan k ┐           plan k+1 ┐
    device        ──k-2────┴─────k-1────────┴─────k──────────────┴───
    core              take in k-1 as expected │ tokens of k-1 arrive, then take in k as expected │ tokens of k arrive

Whatever a plan gives but the tokens themselves is known when it is launched: which rows are sampled, how far each
request is then, and whose answer reaches its limit. So a step is taken in at once, with :data:`engine.request.PENDING`
in place of its tokens, and the next plan starts from there. The tokens come an iteration later. Only what depends on
their values is seen late: an answer that ends by a stop token, a stop string or a failure has one more row under way,
which is dropped by its epoch.

An answer that reaches its limit has left the scheduler when its last token arrives; had that been a stop token, or not
come, the client is told so, while the event says ``length``. Records count tokens when they are under way, and the
next one, made for that where there would be none, tells when they arrived (:mod:`engine.handout`); one that does not
come is taken off its totals.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.messages import Output
from engine.request import PENDING, FinishReason, Request
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.results import StepUpdate


class Runner(Protocol):
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...


class OverlappingRunner(Runner, Protocol):
    """For cores that overlap: ``execute`` in two halves, of which the first waits for nothing."""

    def launch(self, output: SchedulerOutput) -> Any: ...

    def collect(self, flight: Any) -> ModelRunnerOutput: ...


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched and taken in as expected."""

    flight: Any
    """What the runner's ``launch`` gave."""
    plan: SchedulerOutput
    update: StepUpdate
    """What it was expected to give."""
    left: list[Request]
    """Those that have left the scheduler with it and wait for their last tokens."""


@dataclass(frozen=True, slots=True)
class Landed:
    """What the step in flight gave its clients, and what that took; false where there was none."""

    outputs: list[Output] = field(default_factory=list)
    waited: float = 0.0
    """Seconds until the device was done."""
    seconds: float = 0.0
    """In all."""

    def __bool__(self) -> bool:
        return self.seconds > 0 or bool(self.outputs)


def expected(plan: SchedulerOutput) -> ModelRunnerOutput:
    """What a step without drafts will give, all but the tokens."""
    return ModelRunnerOutput([[PENDING] if sampled else [] for sampled in plan.samples], [])


def waits_for_tokens(step: InFlight | None) -> bool:
    """Whether the next step cannot be laid out before the tokens of ``step`` have come: penalties count them."""
    if step is None:
        return False
    return any(
        request.params.repetition_penalty != 1.0
        or request.params.presence_penalty != 0.0
        or request.params.frequency_penalty != 0.0
        for request in step.plan.requests
    )


def under_way(step: InFlight, alive: Container[int]) -> Iterator[int]:
    """Rows whose request waits for a token of the step. Those whose ids are not among ``alive`` any more, aborted
    since, wait for none."""
    for row, (request, pending) in enumerate(zip(step.plan.requests, step.update.new_tokens, strict=True)):
        if pending and request.request_id in alive:
            assert request.token_ids[-1] == PENDING, f"{request!r} waits for no token"
            yield row


def arrived(step: InFlight, result: ModelRunnerOutput, alive: Container[int], now: float) -> StepUpdate:
    """What a step gave: its tokens are put, ``now``, in the places of those :func:`under_way`. ``ended`` has every
    answer that is over: as it was expected, or by its token."""
    update = StepUpdate([[] for _ in step.plan.requests], step.update.num_computed)
    for row in under_way(step, alive):
        request = step.plan.requests[row]
        if row in result.errors:
            del request.token_ids[-1]
            update.ended[row] = FinishReason.ERROR
            continue
        (token,) = result.token_ids[row]
        request.token_ids[-1] = token
        if request.first_token_time is None:
            request.first_token_time = now
        update.new_tokens[row] = [token]
        if token in request.stop_token_ids and request.num_tokens >= request.min_length:
            update.ended[row] = FinishReason.STOP
        elif row in step.update.ended:
            update.ended[row] = step.update.ended[row]
    return update
