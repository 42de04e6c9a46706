"""Runs for the Qt-free halves of the scope: genuine ones, step by step, and records made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.scope.panel import RunHistory
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.events import Keyframe, RowKind, RunTotals, StepRecord, StepTimings
from engine.request import SamplingParams
from engine.run_state import RunState
from tests.app.scripted import TimedRunner
from tests.oracles import VOCAB_SIZE


class Run:
    """A genuine run, step by step, folded into the run state and the histories."""

    def __init__(
        self, *, num_blocks: int = 20, token_budget: int = 48, scheduler: SchedulerConfig | None = None
    ) -> None:
        self.runner = TimedRunner(16)
        self.scheduler = scheduler or SchedulerConfig()
        self.core = EngineCore(
            self.runner,
            scheduler=self.scheduler,
            num_blocks=num_blocks,
            block_size=16,
            prefix_cache=True,
            max_model_len=1024,
            vocab_size=VOCAB_SIZE,
            token_budget=token_budget,
            clock=lambda: self.runner.now,
        )
        self.state = RunState()
        self.history = RunHistory()
        self.records: list[StepRecord] = []
        self.restore(self.core.keyframe())

    def restore(self, keyframe: Keyframe) -> None:
        self.state.restore(keyframe)
        self.history.restore(keyframe)

    def add(self, request_id: int, prompt: int, output: int, **given) -> None:
        ids = given.pop("ids", None) or [(request_id * 37 + i) % VOCAB_SIZE for i in range(prompt)]
        self.core.add_request(request_id, ids, SamplingParams(max_tokens=output), **given)

    def step(self, steps: int = 1) -> StepRecord | None:
        record = None
        for _ in range(steps):
            if not self.core.has_work:
                break
            record = self.core.step().record
            if record is not None:
                self.records.append(record)
                self.state.apply(record)
                self.history.apply(record)
        return record

    def crunch(self) -> None:
        """Six requests in a pool too small for them, until all are done."""
        for request_id in range(1, 7):
            self.add(request_id, 40 + request_id, 60)
            self.step(3)
        self.step(10_000)


def record_of(
    step: int,
    *,
    time: float,
    seconds: float,
    output: int = 0,
    prompt: int = 0,
    running: int = 1,
    events: Sequence[Any] = (),
    rows: Sequence[tuple[int, RowKind, int, int, int, int]] = (),
) -> StepRecord:
    """rows: (request id, kind, tokens, new tokens, padding, drafts)."""
    totals = RunTotals(steps=step, output_tokens=output, prompt_tokens=prompt)
    ids, kinds, tokens, new, padding, drafts = ([row[i] for row in rows] for i in range(6))
    columns = (ids, tokens, tokens, [int(kind) for kind in kinds], new)
    timings = StepTimings(forward=seconds)
    return StepRecord(
        step,
        time,
        timings,
        list(events),
        *columns,
        running,
        0,
        0,
        0,
        64,
        totals,
        padding if any(padding) else [],
        drafts if any(drafts) else [],
    )
