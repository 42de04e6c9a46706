"""The cases that :mod:`tests.scheduler_bench` measures, over any scheduler that adds, steps and ends requests.

Nothing but the standard library and psutil, so that the same cases run in the environment of another engine. Times are
CPU time of this thread: on a busy machine they are nearest to the work itself, and the lowest are nearest of all.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import psutil

BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
MAX_MODEL_LEN = 1 << 16
ANSWER_TOKEN = 7
"""What every answer consists of."""
NO_BUDGET = 1 << 20
"""A token budget that never binds."""
DECODE_STEPS = 24
"""Steps of one round: few enough that 256 requests stay within 1,000 blocks."""
PROMPT_TOKENS = 1_024
FREED_TOKENS = 2_048
TIGHT_TOKENS = 753
"""To 768: 48 blocks. 256 requests take 16 blocks a step, and one that yields gives 48 back: every third step."""


@dataclass(frozen=True, slots=True)
class Setup:
    max_num_seqs: int
    num_blocks: int
    token_budget: int = NO_BUDGET


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    """CPU time of scheduling and updating; what stands for the model is not counted."""
    rows: int
    tokens: int


class Subject(Protocol):
    """A scheduler on test, with what answers in the model's place."""

    num_preemptions: int

    def add(self, request_id: int, prompt: list[int], max_tokens: int) -> None: ...

    def step(self) -> Step: ...

    def end(self, request_ids: Iterable[int]) -> None:
        """End running requests as a client would that no longer wants them."""


Make = Callable[[Setup], Subject]


@dataclass(slots=True)
class Samples:
    """Seconds, each of one step or one request, and what else a case counted."""

    seconds: list[float] = field(default_factory=list)
    counts: dict[str, list[float]] = field(default_factory=dict)

    def merge(self, other: Samples) -> None:
        self.seconds += other.seconds
        for name, values in other.counts.items():
            self.counts.setdefault(name, []).extend(values)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    measure: Callable[[Make], Samples]
    needs_preemption: bool = False
    needs_prefix_hits: bool = False


def cases() -> list[Case]:
    def steps(name: str, running: int, waiting: int = 0, num_blocks: int = 100_000) -> Case:
        return Case(name, lambda make: decode(make, running, waiting, num_blocks))

    return [
        *(
            case
            for running in (32, 256)
            for case in (
                steps(f"{running} running", running),
                steps(f"{running} running, 1,000 blocks", running, num_blocks=1_000),
                *(steps(f"{running} running, {n:,} waiting", running, n) for n in (1_000, 10_000, 100_000)),
            )
        ),
        Case("256 running, tight pool", decode_in_tight_pool, needs_preemption=True),
        Case("add and start 1,024 tokens", lambda make: start_prompts(make, cached=False)),
        Case("the same, whole hit", lambda make: start_prompts(make, cached=True), needs_prefix_hits=True),
        Case("end 2,048 tokens", end_requests),
        Case("100,000 requests, whole", run_many),
    ]


def run_pass(make: Make, chosen: list[Case]) -> dict[str, Samples]:
    """Each case in a process of its own, forked from this one, which stays small. In one process the memory that a
    large case gave back would stay resident, and the next could leak into it unseen."""
    return {case.name: _run_apart(make, case) for case in chosen}


def _run_apart(make: Make, case: Case) -> Samples:
    context = multiprocessing.get_context("fork")  # what is to be measured cannot be pickled
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(case.measure(make)))
    process.start()
    theirs.close()
    try:
        samples: Samples = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{case.name!r} ended with exit code {process.exitcode}") from None
    process.join()
    return samples


def prompt_of(request_id: int, length: int) -> list[int]:
    """Token ids that no other request begins with."""
    return [(request_id * 7_919 + i * 31) % VOCAB_SIZE for i in range(length)]


@contextmanager
def _subject(make: Make, setup: Setup) -> Iterator[Subject]:
    """A fresh one, garbage collection as in production: what a load leaves behind is frozen."""
    gc.collect()
    subject = make(setup)
    gc.freeze()
    try:
        yield subject
    finally:
        gc.unfreeze()


def decode(make: Make, running: int, waiting: int, num_blocks: int, rounds: int = 6) -> Samples:
    """Steps in which all running requests decode. Their lengths differ by up to a block, so that in every step one in
    16 takes a block and registers another."""
    samples = Samples()
    with _subject(make, Setup(running, num_blocks)) as subject:
        ids = iter(range(1, 1 << 30))

        def add(count: int) -> None:
            for request_id in [next(ids) for _ in range(count)]:
                subject.add(request_id, prompt_of(request_id, 1 + request_id % BLOCK_SIZE), DECODE_STEPS + 2)

        add(waiting)
        for _ in range(rounds):
            add(running)
            while subject.step().rows < running:
                pass
            for _ in range(DECODE_STEPS):
                step = subject.step()
                if step.rows == step.tokens == running:
                    samples.seconds.append(step.seconds)
            subject.step()  # in which they end
    if len(samples.seconds) < rounds * DECODE_STEPS // 2:
        raise RuntimeError(f"only {len(samples.seconds)} of {rounds * DECODE_STEPS} steps were decodes alone")
    return samples


def decode_in_tight_pool(make: Make, running: int = 256, steps: int = 72) -> Samples:
    samples = Samples()
    with _subject(make, Setup(running, running * -(-TIGHT_TOKENS // BLOCK_SIZE))) as subject:
        for request_id in range(1, running + 1):
            subject.add(request_id, prompt_of(request_id, TIGHT_TOKENS + request_id % BLOCK_SIZE), 1_024)
        while subject.num_preemptions == 0:
            subject.step()
        before, rows = subject.num_preemptions, 0
        for _ in range(steps):
            step = subject.step()
            samples.seconds.append(step.seconds)
            rows += step.rows
        samples.counts["preemptions_per_step"] = [(subject.num_preemptions - before) / steps]
        samples.counts["mean_running"] = [rows / steps]
    return samples


def start_prompts(make: Make, *, cached: bool, count: int = 256, rounds: int = 3) -> Samples:
    """Seconds per request of adding ``count`` prompts and of the one step that computes them."""
    samples = Samples()
    with _subject(make, Setup(count, 100_000)) as subject:
        for turn in range(rounds):
            ids = range(1 + 2 * turn * count, 1 + (2 * turn + 1) * count)
            prompts = [prompt_of(request_id, PROMPT_TOKENS) for request_id in ids]
            seconds, step = _start(subject, ids, prompts)
            if cached:
                again = range(ids.stop, ids.stop + count)
                seconds, step = _start(subject, again, prompts)
            expected = count * (BLOCK_SIZE if cached else PROMPT_TOKENS)
            if step.tokens != expected:
                raise RuntimeError(f"a step of {step.tokens:,} tokens; {expected:,} were to be computed")
            samples.seconds.append(seconds / count)
    return samples


def _start(subject: Subject, ids: range, prompts: list[list[int]]) -> tuple[float, Step]:
    began = time.thread_time()
    for request_id, prompt in zip(ids, prompts, strict=True):
        subject.add(request_id, prompt, 8)
    seconds = time.thread_time() - began
    step = subject.step()
    subject.end(ids)
    return seconds + step.seconds, step


def end_requests(make: Make, count: int = 256, rounds: int = 3) -> Samples:
    samples = Samples()
    with _subject(make, Setup(count, 100_000)) as subject:
        for turn in range(rounds):
            ids = range(1 + turn * count, 1 + (turn + 1) * count)
            for request_id in ids:
                subject.add(request_id, prompt_of(request_id, FREED_TOKENS - 1), 8)
            subject.step()
            subject.step()
            began = time.thread_time()
            subject.end(ids)
            samples.seconds.append((time.thread_time() - began) / count)
    return samples


def run_many(make: Make, count: int = 100_000, warm_up: int = 20_000, batch: int = 256) -> Samples:
    """Requests of up to two blocks and two output tokens; what memory grows by after the first ``warm_up``."""
    samples = Samples()
    with _subject(make, Setup(batch, 10_000)) as subject:
        before = (0, 0)
        for first in range(1, count + warm_up + 1, batch):
            if not samples.seconds and first > warm_up:
                before = _memory()
            ids = range(first, first + batch)
            prompts = [prompt_of(request_id, 8 + request_id % BLOCK_SIZE) for request_id in ids]
            began = time.thread_time()
            for request_id, prompt in zip(ids, prompts, strict=True):
                subject.add(request_id, prompt, 2)
            seconds = time.thread_time() - began + subject.step().seconds + subject.step().seconds
            if first > warm_up:
                samples.seconds.append(seconds / batch)
        after = _memory()
    samples.counts["rss_growth_mb"] = [(after[0] - before[0]) / 1e6]
    samples.counts["object_growth"] = [after[1] - before[1]]
    return samples


def _memory() -> tuple[int, int]:
    """(resident bytes, live objects that the garbage collector knows)."""
    gc.collect()
    return psutil.Process().memory_info().rss, len(gc.get_objects())
