"""Whoever is in the engine, from its addition to its last output: several answers to one prompt, texts as they grow,
and what clients get when somebody leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from engine.answer import Answers
from engine.delivery import Withheld, last_output
from engine.messages import Output
from engine.request import BRANCH_STRIDE, PENDING, FinishReason, Request, RequestStatus
from engine.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.text.codec import TextCodec


class Roster:
    def __init__(self, scheduler: Scheduler, codec: TextCodec | None) -> None:
        self._scheduler = scheduler
        self.requests: dict[int, Request] = {}
        """All that are not finished, by id: those that have yet to be queued and those that have left the scheduler and
        wait for their last token included."""
        self.families: dict[int, list[Request]] = {}
        """All answers of a request that asked for several, by its id, until none is left."""
        self.answers = Answers(codec)
        self.withheld = Withheld()

    def __contains__(self, client_id: int) -> bool:
        """Whether any answer to a client's request is here."""
        return client_id in self.requests or client_id in self.families

    def enter(self, answers: list[Request], stream_text: bool) -> None:
        """The answers of one request."""
        if len(answers) > 1:
            self.families[answers[0].request_id] = answers
        for request in answers:
            self.requests[request.request_id] = request
            self.answers.begin(request, stream_text)

    def answers_to(self, client_id: int) -> Iterator[Request]:
        """Those of a client's request that are here, as long as they are."""
        family = self.families.get(client_id)
        for request_id in [client_id] if family is None else [member.request_id for member in family]:
            if (request := self.requests.get(request_id)) is not None:
                yield request

    def unborn(self) -> list[Request]:
        """Those that wait for another's first token, and are in no queue."""
        return [branch for request in self.requests.values() for branch in request.branches]

    def start_branches(self, request: Request, now: float | None) -> None:
        """The prompt of a request is computed, and further answers to it may begin. ``now``: when its first token was
        there; None: it is under way."""
        request.first_token_time = now
        for branch in request.branches:
            self._scheduler.add(branch)
        request.branches = []

    def rank(self, client_id: int, priority: int) -> None:
        """Another priority for all answers."""
        for request in self.answers_to(client_id):
            for branch in request.branches:  # not in a queue yet
                branch.priority = priority
            self._scheduler.set_priority(request, priority)

    # Leaving ------------------------------------------------------------------------------------------------------

    def abort(self, request: Request, now: float) -> list[Output]:
        """End a request in whatever state it is: what clients get."""
        over = request.status in (RequestStatus.ENDED, RequestStatus.FINISHED)
        if over and request.token_ids[-1] != PENDING and not self.withheld.holds(request):
            return []  # its answer is complete and was handed out; only its row goes on
        text = "" if over else self.answers.flush(request)
        self._scheduler.finish(request, FinishReason.ABORT)
        request.finish_reason = FinishReason.ABORT  # also where only its last token was still to come
        if request.token_ids[-1] == PENDING:
            self._scheduler.drop_output(request, 1)
        given = [last_output(request, now, [], text), *self._forget(request, now)]
        passed = self.withheld.pass_on(given, [request, *request.branches], now, holding=False)
        request.branches = []
        return passed

    def fail(self, errors: Mapping[Request, str], now: float, left: Sequence[Request] = ()) -> list[Output]:
        """End requests in whatever state they are, each with its sentence, beside those that have ``left``: what
        clients get."""
        given = []
        for request, message in errors.items():
            self._scheduler.finish(request, FinishReason.ERROR)
            request.finish_reason = FinishReason.ERROR  # also where only its last token was still to come
            given.append(last_output(request, now, [], self.answers.flush(request), error=message))
        return self.let_go([*left, *errors], given, now, errors)

    def let_go(
        self, left: Sequence[Request], given: list[Output], now: float, messages: Mapping[Request, str]
    ) -> list[Output]:
        """Forget those that have left, ``messages`` saying why where it was an error; what clients get now of what was
        ``given`` and of what was held back."""
        gone = list(left)
        for request in left:
            given += self._forget(request, now, messages.get(request, ""))
            gone += request.branches
        return self.withheld.pass_on(given, gone, now, holding=self._scheduler.discipline.withholds_answers)

    def _forget(self, request: Request, now: float, error: str = "") -> list[Output]:
        """Forget a request that has left. Other answers to its prompt that have not begun end with it, and these
        outputs say so."""
        client_id = request.request_id % BRANCH_STRIDE
        given = []
        for gone in (request, *request.branches):
            del self.requests[gone.request_id]
            self.answers.forget(gone)
            if gone is not request:
                gone.status, gone.finish_reason = RequestStatus.FINISHED, request.finish_reason
                given.append(last_output(gone, now, [], "", error=error))
        family = self.families.get(client_id)
        if family is not None and not any(member.request_id in self.requests for member in family):
            del self.families[client_id]
        return given

    # For tests ----------------------------------------------------------------------------------------------------

    def check(self, elsewhere: set[int]) -> None:
        """Raise AssertionError where somebody is known that neither runs nor waits, nor is among ``elsewhere``."""
        scheduler = self._scheduler
        known = {request.request_id for request in (*scheduler.running, *scheduler.waiting.in_order())}
        known |= {branch.request_id for branch in self.unborn()} | elsewhere
        assert known == set(self.requests), "requests are known that neither run nor wait"
        assert set(self.answers.request_ids) <= set(self.requests), "texts of finished requests are kept"
        for client_id, family in self.families.items():
            assert any(member.request_id in self.requests for member in family), f"request {client_id} is kept"
