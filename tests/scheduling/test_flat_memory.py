"""What has finished leaves nothing behind, in any discipline, whatever way it ended."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter, deque

import psutil
import pytest

from engine.config import DISCIPLINES
from engine.core import EngineCore
from engine.request import Request, SamplingParams
from engine.scheduling import orders
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from tests.oracles import make_core

NUM_BLOCKS = 48


class FixedRunner:
    """Gives every request the same token: no memory of its own that could hide what the engine keeps."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput([[5] if sampled else [] for sampled in output.samples], [])


def busy_core(discipline: str, order: str) -> EngineCore:
    return make_core(
        runner=FixedRunner(),
        discipline=discipline,
        order=order,
        preemption="swap",
        num_blocks=NUM_BLOCKS,
        num_host_blocks=16,
        block_size=4,
        speculative="ngram",
    )


def serve(core: EngineCore, first: int, count: int) -> None:
    """Requests of every kind: several answers, refused, aborted while they wait, run or are unknown, ever new users."""
    rng = random.Random(first)
    for request_id in range(first, first + count):
        n = 1 + (request_id % 5 == 0)
        prompt = [] if request_id % 11 == 0 else [rng.randrange(900) for _ in range(rng.randint(1, 24))]
        params = SamplingParams(max_tokens=rng.randint(1, 16), n=n)
        core.add_request(request_id, prompt, params, user=f"user {request_id}", priority=request_id % 3)
        if request_id % 4 == 0:
            core.abort(request_id - request_id % 8)
        for _ in range(rng.randrange(4)):
            core.step()
    while core.has_work:
        core.step()
    core.add_request(first + count, [1], SamplingParams(max_tokens=1))  # so that the last plan is a small one
    while core.has_work:
        core.step()


def objects() -> Counter[str]:
    """The engine's objects and plain containers: what else Python makes for itself is not the engine's."""
    gc.collect()
    kinds = map(type, gc.get_objects())
    plain = (list, dict, tuple, deque)
    # Some metaclasses of other libraries answer __module__ with a descriptor.
    return Counter(kind.__name__ for kind in kinds if kind in plain or str(kind.__module__).startswith("engine."))


@pytest.mark.parametrize("order", ["fcfs", "fair"])
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_objects_do_not_add_up(discipline: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MAX_IDLE_USERS", 20)
    core = busy_core(discipline, order)
    serve(core, 1, 150)
    before = objects()
    serve(core, 1_000, 450)
    grown = objects() - before
    assert sum(grown.values()) <= 20, grown
    assert grown[Request.__name__] == 0
    assert not core._roster.requests and not core._roster.families and not core._roster.withheld._held


def test_bytes_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of numbers are no objects to the collector, but they have a size."""
    monkeypatch.setattr(orders, "MAX_IDLE_USERS", 20)
    core = busy_core("vllm", "fair")
    serve(core, 1, 300)
    tracemalloc.start()
    try:
        serve(core, 1_000, 300)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        serve(core, 2_000, 900)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 16_384, "18 bytes a request"


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_a_hundred_thousand_requests_leave_nothing() -> None:
    core = busy_core("vllm", "fair")
    serve(core, 1, 40_000)  # more users than the queue keeps counters of
    before, process = objects(), psutil.Process()
    resident = process.memory_info().rss
    serve(core, 100_000, 60_000)
    grown = objects() - before
    assert grown[Request.__name__] == 0 and sum(grown.values()) <= 100, grown
    # The counters kept of idle users come and go: at most 20,000 of them, of some 200 bytes.
    assert process.memory_info().rss - resident < 8_000_000
    assert len(core._scheduler.memory.pool.registered_blocks()) <= NUM_BLOCKS
