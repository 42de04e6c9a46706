"""A core that serves by the clock: no model, no torch, time that the test moves.

``slots`` requests are served side by side, each takes ``service`` seconds and gives its tokens evenly over them; the
others queue in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engine.config import EngineConfig, SchedulerConfig
from engine.events import Admitted, BlocksAllocated, BlocksFreed, Keyframe, RunTotals, StepRecord, StepTimings
from engine.messages import Output
from engine.request import SamplingParams


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += max(seconds, 1e-9)


@dataclass
class Job:
    request_id: int
    prompt: int
    wanted: int
    given: int = 0
    arrival_time: float | None = None


@dataclass
class FakeCore:
    clock: Clock
    service: float = 0.5
    slots: int = 1
    refuse_longer_than: int = 10**9
    dies_at_step: int | None = None
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    pending: list[Output] = field(default_factory=list)
    added: list[tuple[int, list[int], dict[str, Any]]] = field(default_factory=list)
    steps: int = 0
    output_tokens: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.pending)

    def add_request(self, request_id: int, prompt_token_ids: list[int], params: SamplingParams, **given: Any) -> None:
        self.added.append((request_id, prompt_token_ids, {"params": params, **given}))
        if len(prompt_token_ids) > self.refuse_longer_than:
            self.reject(
                request_id, f"prompt has {len(prompt_token_ids)} tokens, the model takes {self.refuse_longer_than}"
            )
            return
        wanted = min(given["ends_after"], params.max_tokens or 10**9)
        self.waiting.append(Job(request_id, len(prompt_token_ids), wanted, arrival_time=given["arrival_time"]))

    def reject(self, request_id: int, message: str) -> None:
        now = self.clock()
        self.pending.append(Output(request_id, now, [], finish_reason="error", error=message))

    def keyframe(self) -> Keyframe:
        return Keyframe(
            step=self.steps,
            time=self.clock(),
            num_blocks=100,
            block_size=16,
            max_num_seqs=self.slots,
            token_budget=64,
            requests=[],
            cached_blocks=[],
            deferred=None,
            totals=self.totals,
        )

    @property
    def totals(self) -> RunTotals:
        return RunTotals(steps=self.steps, output_tokens=self.output_tokens, computed_tokens=self.output_tokens)

    def step(self) -> Any:
        """One step gives every running request a token; a request's whole service is ``service`` seconds."""
        self.steps += 1
        if self.dies_at_step == self.steps:
            raise RuntimeError("the device is on fire")
        events: list[Any] = []
        begun = self.clock()
        while self.waiting and len(self.running) < self.slots:
            job = self.waiting.popleft()
            self.running.append(job)
            events.append(BlocksAllocated(job.request_id, [job.request_id]))
            events.append(Admitted(job.request_id, 0, 0.0, False))
        outputs, self.pending = self.pending, []
        rows = list(self.running)
        if rows:
            self.clock.now += min(self.service / job.wanted for job in rows)
        for job in rows:
            job.given += 1
            done = job.given == job.wanted
            outputs.append(
                Output(
                    job.request_id,
                    self.clock(),
                    [job.given],
                    finish_reason="length" if done else None,
                    prompt_tokens=job.prompt if done else 0,
                )
            )
        self.running = [job for job in rows if job.given < job.wanted]
        events += [BlocksFreed(job.request_id, [job.request_id]) for job in rows if job.given == job.wanted]
        self.output_tokens += len(rows)
        record = StepRecord(
            step=self.steps,
            time=begun,
            timings=StepTimings(forward=self.clock() - begun),
            events=events,
            request_ids=[job.request_id for job in rows],
            num_tokens=[1] * len(rows),
            num_computed=[job.prompt + job.given for job in rows],
            kinds=[0] * len(rows),
            new_tokens=[1] * len(rows),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            free_blocks=100 - len(rows),
            cached_blocks=0,
            token_budget=64,
            totals=self.totals,
            num_slots=len(rows),
        )
        return SimpleNamespace(record=record, outputs=outputs)


class FakeCodec:
    vocab_size = 1_000
    special_ids = frozenset({0, 1})

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 1_000 for c in text]


@dataclass
class FakeLoaded:
    """A loaded engine whose fresh cores come from ``make``; it notes for what they were asked."""

    make: Callable[[SchedulerConfig], FakeCore]
    core: Any = None
    codec: Any = field(default_factory=FakeCodec)
    info: Any = field(default_factory=lambda: _fake_info())
    config: EngineConfig = field(default_factory=EngineConfig)
    asked: list[tuple[SchedulerConfig, int | None]] = field(default_factory=list)

    def fresh_core(self, scheduler: SchedulerConfig, *, seed: int | None = None, **others: Any) -> FakeCore:
        self.asked.append((scheduler, seed))
        return self.make(scheduler)

    def info_of(self, core: FakeCore) -> Any:
        return self.info


def _fake_info() -> Any:
    facts = ("name", "weights_sha256", "dtype", "kv_dtype", "device", "backend", "backend_reason")
    numbers = {"vocab_size": 100, "max_model_len": 4096, "kv_bytes_per_block": 64, "threads": 1, "load_seconds": 1.0}
    return SimpleNamespace(**dict.fromkeys(facts, "<x>"), **numbers)
