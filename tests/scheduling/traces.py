"""Random traffic against a core: requests that arrive, fork, fail and are aborted in any state, knobs that change.

:func:`run_trace` holds at every step what :class:`tests.oracles.EngineProbe` and the checking runner hold: tables that
lead to one's own tokens, invariants, the fold, progress. At the end it holds that every answer is the cold one up to
where it ended, that every end has its reason, and that the pools are whole.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.config import DISCIPLINES, ORDERS, PREEMPTIONS, STATIC_DELIVERIES
from engine.events import Rejected
from engine.request import RequestStatus, SamplingParams, branch_id
from engine.scheduling.costs import PreemptionCosts
from engine.scheduling.plan import SchedulerOutput
from tests.oracles import EngineProbe, KVCheckingRunner, assert_pool_whole, cold_answer, make_core

_DRIVER_ERROR = RuntimeError("CUDA error: out of memory")
MAX_MODEL_LEN = 60
POOL_TOKENS = (64, 96, 160)
USERS = "abc"
CLOCK_TICKS = 10**9


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    num_answers: int
    length: int
    """Tokens of each answer, if nothing comes between."""


@dataclass
class Trace:
    """A core, what was asked of it, and what was done to it."""

    rng: random.Random
    probe: EngineProbe
    runner: KVCheckingRunner
    asked: dict[int, Asked] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    poisoned: set[int] = field(default_factory=set)
    aborted_in: Counter[str] = field(default_factory=Counter)
    """Status → how many were aborted in it."""
    ranked_in: Counter[str] = field(default_factory=Counter)
    """Status → how often a priority changed in it."""

    @property
    def room(self) -> int:
        """The longest context that the pool holds as it is."""
        return self.probe.core.limits.longest

    def __post_init__(self) -> None:
        self._heads = [[self.rng.randrange(900) for _ in range(30)] for _ in range(3)]

    def arrive(self) -> None:
        rng = self.rng
        prompt = rng.choice(self._heads)[: rng.randrange(31)] + [rng.randrange(900) for _ in range(rng.randint(1, 12))]
        num_answers = rng.choice([1, 1, 1, 1, 2, 3])
        max_tokens, ends_after = rng.randint(1, 24), rng.choice([None, rng.randint(1, 24)])
        request_id = self.probe.add(
            prompt,
            SamplingParams(max_tokens=max_tokens, n=num_answers),
            priority=rng.randrange(3),
            user=rng.choice(USERS),
            ends_after=ends_after,
        )
        room = MAX_MODEL_LEN - len(prompt)
        self.asked[request_id] = Asked(prompt, num_answers, min(max_tokens, ends_after or max_tokens, room))

    def abort(self) -> None:
        """Somebody in a state that is drawn first, so that rare states have their share; or somebody known no more."""
        present: dict[int, list[int]] = {}
        for request in self.probe.core.keyframe().requests:
            present.setdefault(request.status, []).append(request.request_id)
        present[RequestStatus.FINISHED] = list(self.asked)
        status = self.rng.choice(sorted(present))
        self._abort(self.rng.choice(present[status]) % (1 << 32), RequestStatus(status).name)

    def abort_during(self, plan: SchedulerOutput) -> None:
        """One of those whose step is being executed, or anybody; those on their way back from the host first."""
        coming = {block for _, block in plan.swap_in}
        back = [request for request in plan.requests if not coming.isdisjoint(request.block_ids)]
        request = self.rng.choice(back or plan.requests)
        self._abort(request.request_id % (1 << 32), "SWAPPED IN" if back else "EXECUTING")

    def _abort(self, request_id: int, state: str) -> None:
        self.probe.core.abort(request_id)
        answers = [branch_id(request_id, index) for index in range(self.asked[request_id].num_answers)]
        if any(self.probe.answers[answer].last is None for answer in answers):
            self.aborted.add(request_id)
            self.aborted_in[state] += 1

    def poison(self) -> None:
        """Somebody's next row fails."""
        request_id = self.rng.choice(list(self.asked))
        index = self.rng.randrange(self.asked[request_id].num_answers)
        self.runner.failures[branch_id(request_id, index)] = "poisoned"
        self.poisoned.add(request_id)

    def rank(self) -> None:
        """Another priority for anybody, in whatever state it is."""
        request_id = self.rng.choice(sorted(self.asked))
        core = self.probe.core
        request = core._roster.requests.get(request_id)
        self.ranked_in[request.status.name.lower() if request is not None else "over"] += 1
        core.set_priority(request_id, self.rng.randrange(4))

    def change_knobs(self) -> None:
        """A few knobs at once, each to any value it may have."""
        rng, core = self.rng, self.probe.core
        values: dict[str, Any] = {
            "discipline": rng.choice(DISCIPLINES),
            "order": rng.choice(ORDERS),
            "ageing": rng.choice([None, 3.0]),
            "user_weights": rng.choice([{}, {"a": 5.0, "b": 0.5}]),
            "preemption": rng.choice(PREEMPTIONS),
            "max_num_seqs": rng.randint(1, 8),
            "max_num_batched_tokens": rng.choice([1, 3, 16, 64]),
            "chunked_prefill": rng.random() < 0.5,
            "chunk_size": rng.choice([None, 1, 5, 16]),
            "watermark": rng.choice([0.0, 0.3]),
            "static_delivery": rng.choice(STATIC_DELIVERIES),
            "waiting_served_ratio": rng.choice([0.0, 0.3, 2.0]),
            "max_waiting_tokens": rng.choice([0, 4, 20]),
            "speculative": rng.choice(["off", core._proposer]),
            "draft_tokens": rng.randint(1, 5),
        }
        names = rng.sample(sorted(values), rng.randint(1, 4))
        changed = {name: values[name] for name in names}
        core.reconfigure(dataclasses.replace(core._scheduler.config, **changed))

    def run_short(self) -> None:
        """Memory runs out in the next step."""
        error = self.rng.choice([torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), _DRIVER_ERROR])
        self.runner.shortage = (self.rng.choice(["before", "after", "awaited"]), error)

    def check_answers(self) -> None:
        refused = {event.request_id for event in self.probe.of(Rejected)}
        for request_id, asked in self.asked.items():
            if request_id in refused:
                assert self.room <= len(asked.prompt) < MAX_MODEL_LEN, "there is a pool for all until it shrinks"
                continue
            for index in range(asked.num_answers):
                answer = self.probe.answers[branch_id(request_id, index)]
                expected = cold_answer(asked.prompt, asked.length, index=index)
                if answer.finish_reason == "length":  # a pool that shrinks may hold less than was asked for
                    expected = expected[: max(self.room - len(asked.prompt), len(answer.token_ids))]
                assert answer.token_ids == expected[: len(answer.token_ids)], f"request {request_id}.{index}"
                reasons = {"length"}
                reasons |= {"abort"} if request_id in self.aborted else set()
                reasons |= {"error"} if request_id in self.poisoned else set()
                reasons |= {"error"} if answer.last is not None and "Memory ran out" in answer.last.error else set()
                assert answer.finish_reason in reasons, f"request {request_id}.{index}"
                if answer.finish_reason == "length":
                    assert answer.token_ids == expected, f"request {request_id}.{index}"
        totals = self.probe.records[-1].totals
        assert totals.arrived == totals.finished
        assert totals.output_tokens == sum(len(answer.token_ids) for answer in self.probe.answers.values())


def start_trace(seed: object, *, block_size: int, host: str = "whole", **settings: Any) -> Trace:
    """``host``: how much host memory there is: ``none``, ``few`` blocks, or the ``whole`` pool's."""
    rng = random.Random(f"{seed} {block_size} {host} {sorted(settings.items())}")
    num_blocks = rng.choice(POOL_TOKENS) // block_size
    core = make_core(
        **{
            "token_budget": rng.choice([7, 16, 64]),
            "max_num_seqs": rng.randint(2, 6),
            "costs": rng.choice([None, PreemptionCosts(1.0, 0.5 * block_size), PreemptionCosts(1.0, 2.0 * block_size)]),
            **settings,
        },
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_blocks={"none": 0, "few": 3, "whole": num_blocks}[host],
        max_model_len=MAX_MODEL_LEN,
        clock=iter(range(CLOCK_TICKS)).__next__,
    )
    runner = core._runner
    assert isinstance(runner, KVCheckingRunner)
    return Trace(rng, EngineProbe(core, max_quiet_steps=12 * MAX_MODEL_LEN), runner)


def run_trace(
    seed: object,
    *,
    num_requests: int = 20,
    aborts: float = 0.08,
    failures: float = 0.02,
    changes: float = 0.0,
    ranks: float = 0.0,
    shortages: float = 0.0,
    pauses: float = 0.0,
    **settings: Any,
) -> Trace:
    """``aborts``, ``failures``, ``changes``, ``ranks``, ``shortages`` and ``pauses`` are probabilities a step."""
    trace = start_trace(seed, **settings)
    rng, core = trace.rng, trace.probe.core
    while len(trace.asked) < num_requests or core.has_work:
        if len(trace.asked) < num_requests and rng.random() < 0.5:
            trace.arrive()
        if trace.asked and rng.random() < aborts:
            if rng.random() < 0.5:
                trace.abort()
            else:
                trace.runner.during = trace.abort_during
        if trace.asked and rng.random() < failures:
            trace.poison()
        if rng.random() < changes:
            trace.change_knobs()
        if trace.asked and rng.random() < ranks:
            trace.rank()
        if rng.random() < shortages:
            trace.run_short()
        if pauses and rng.random() < pauses:
            trace.probe.take_in()
        if trace.probe.step().notice:
            trace.probe.step()  # not twice in a row: two steps that compute nothing would be no progress
        trace.runner.during = trace.runner.shortage = None
    assert_pool_whole(core)
    trace.check_answers()
    return trace
