"""What a run file costs: ``python -m tests.recording.cost [STEPS]`` writes a run of 500 requests on 16,384 blocks and
prints what a step of writing, opening the file and a jump take."""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from engine.core import EngineCore
from engine.recording import RunHeader, RunReader, RunWriter
from engine.request import SamplingParams
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from tests.oracles import make_core

NUM_BLOCKS, RUNNING, STEP_SECONDS = 16_384, 450, 0.02


class CheapRunner:
    """A token for every row that asks for one."""

    def __init__(self) -> None:
        self.now = 0.0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.now += STEP_SECONDS
        tokens = [[request.num_tokens % 997] if wanted else [] for request, wanted in _rows(output)]
        return ModelRunnerOutput(token_ids=tokens, logprobs=[], errors={}, forward_seconds=STEP_SECONDS)


def _rows(output: SchedulerOutput) -> list:
    return list(zip(output.requests, output.samples, strict=True))


def busy_core() -> EngineCore:
    runner = CheapRunner()
    return make_core(
        runner=runner,
        clock=lambda: runner.now,
        num_blocks=NUM_BLOCKS,
        token_budget=2_048,
        max_num_seqs=RUNNING,
        max_model_len=8_192,
    )


def write_run(path: Path, steps: int, limit_bytes: int = 2**30) -> list[float]:
    """About 450 requests run and 50 wait all the time; seconds that each step's writing took."""
    rng = random.Random(1)
    core = busy_core()
    writer = RunWriter(path, RunHeader(), limit_bytes=limit_bytes, keyframe=core.keyframe())
    beginnings = [[rng.randrange(1000) for _ in range(256)] for _ in range(8)]
    taken, known, next_id = [], 0, 1
    while len(taken) < steps:
        while known < RUNNING + 50:
            prompt = rng.choice(beginnings)[: rng.randrange(256)] + [rng.randrange(1000) for _ in range(200)]
            core.add_request(next_id, prompt, SamplingParams(max_tokens=rng.randrange(50, 600)), user=f"u{next_id % 5}")
            next_id += 1
            known += 1
        record = core.step().record
        assert record is not None
        begun = time.thread_time()
        writer.add(record, core.keyframe)
        taken.append(time.thread_time() - begun)
        known = record.num_running + record.num_waiting
    writer.close()
    return taken


def _milliseconds(values: list[float]) -> str:
    ordered = sorted(values)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    return f"median {1e3 * statistics.median(ordered):.2f}, P99 {1e3 * p99:.2f}, most {1e3 * ordered[-1]:.1f} ms"


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        begun = time.thread_time()
        taken = write_run(path, steps)
        whole = time.thread_time() - begun
        size = path.stat().st_size
        print(f"{steps:,} steps, {size / 2**20:.1f} MB, {size / steps:,.0f} bytes a step; the run took {whole:.0f} s")
        print(f"writing a step: {_milliseconds(taken)}; mean {1e3 * sum(taken) / steps:.3f} ms")
        begun = time.thread_time()
        reader = RunReader(path)
        print(f"opening: {1e3 * (time.thread_time() - begun):.1f} ms, {len(reader._index.segment_steps)} segments")
        rng, jumps = random.Random(2), []
        for _ in range(200):
            step = rng.randrange(reader.first_step, reader.last_step + 1)
            begun = time.thread_time()
            state = reader.state_at(step)
            jumps.append(time.thread_time() - begun)
        print(f"jumps anywhere: {_milliseconds(jumps)} ({len(state.requests)} requests in the last)")
        near, middle = [], reader.last_step // 2
        for step in range(middle, middle + 60):
            begun = time.thread_time()
            reader.state_at(step)
            near.append(time.thread_time() - begun)
        print(f"step by step: {_milliseconds(near)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
