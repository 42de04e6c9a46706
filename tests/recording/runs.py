"""Runs of a real core on a make-believe model, to record."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.core import EngineCore
from engine.events import StepRecord
from engine.recording import RunHeader, RunWriter
from engine.request import SamplingParams
from engine.run_state import RunState
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from tests.oracles import EngineProbe, KVCheckingRunner, make_core

LIMIT = 64 * 2**20


class TimedRunner(KVCheckingRunner):
    """Takes make-believe time: 20 ms a step and 1 ms a token."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.now = 100.0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        seconds = 0.02 + 0.001 * output.total_tokens
        self.now += seconds
        result = super().execute(output)
        return ModelRunnerOutput(
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            errors=result.errors,
            drafts=result.drafts,
            prepare_seconds=0.1 * seconds,
            forward_seconds=0.8 * seconds,
            sample_seconds=0.1 * seconds,
        )


def timed_core(**knobs: Any) -> EngineCore:
    """A small pool, so that there is pressure."""
    runner = TimedRunner(knobs.get("block_size", 16))
    given = {"num_blocks": 24, "max_num_seqs": 6, "num_host_blocks": 24, **knobs}
    return make_core(runner=runner, clock=lambda: runner.now, **given)


KNOBS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "swap": {"preemption": "swap"},
    "priority": {"order": "priority", "preemption": "auto"},
    "static": {"discipline": "static"},
    "orca": {"discipline": "orca"},
    "drafts": {"speculative": "ngram"},
    "overlap": {"overlap": True},
}


def drive(probe: EngineProbe, seed: int, requests: int = 25) -> Iterator[StepRecord]:
    """Random requests that share beginnings, have branches, are refused and aborted; gives each record right after
    its step."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(1000) for _ in range(40)] for _ in range(3)]
    left = requests
    ids: list[int] = []
    while left or probe.core.has_work:
        if left and rng.random() < 0.4:
            left -= 1
            prompt = rng.choice(beginnings)[: rng.randrange(41)] + [rng.randrange(1000)] * rng.randrange(1, 40)
            if rng.random() < 0.05:
                prompt = [1] * 5_000  # longer than the model's context
            params = SamplingParams(max_tokens=rng.randrange(1, 40), n=rng.choice([1, 1, 1, 2]), temperature=1.0)
            user = rng.choice(["", "ann", "ben"])
            ids.append(probe.add(prompt, params, priority=rng.randrange(3), user=user))
        if ids and rng.random() < 0.03:
            probe.core.abort(rng.choice(ids))
        result = probe.step()
        if result.record is not None:
            yield result.record


def record_run(
    path: Path,
    core: EngineCore,
    seed: int = 1,
    *,
    after: Callable[[StepRecord, EngineProbe, RunWriter], None] = lambda record, probe, writer: None,
    keyframe: bool = True,
    close: bool = True,
    limit_bytes: int = LIMIT,
    texts: bool = False,
    requests: int = 25,
) -> list[StepRecord]:
    """Record a random run of ``core``; ``after`` is called behind each step that was added."""
    probe = EngineProbe(core)
    first = core.keyframe() if keyframe else None
    writer = RunWriter(path, RunHeader(texts=texts), limit_bytes=limit_bytes, keyframe=first)
    records = []
    for record in drive(probe, seed, requests):
        writer.add(record, core.keyframe)
        records.append(record)
        after(record, probe, writer)
    if close:
        writer.close()
    else:
        writer.flush()
    return records


def assert_same_state(one: RunState, other: RunState) -> None:
    """All that is drawn of a moment; of requests that have left and of the ledger a jump knows less."""
    assert one.keyframe() == other.keyframe()
    assert (one.step, one.time) == (other.step, other.time)
    assert one.last_record == other.last_record
    assert np.array_equal(one.block_refs, other.block_refs)
    assert np.array_equal(one.block_hashed, other.block_hashed)
    kept = one.block_hashed | (one.block_refs > 0)
    assert np.array_equal(one.block_owner[kept], other.block_owner[kept])
    assert (one.batch, one.deferred) == (other.batch, other.deferred)
