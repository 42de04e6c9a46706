"""What scheduling itself costs: ``python -m tests.scheduler_bench [--json]``.

A runner that computes nothing answers at once and its time is taken off, so a figure is one whole ``EngineCore.step``
without execution: inbox, plan, validation, update, outputs, events and record. All running requests decode, prefix
cache on; block edges, where a request takes a block and registers another, are spread over the steps. Times are CPU
time of this thread; where the machine is busy with other things, which share its caches and cores, the low figures are
nearest to what the work itself takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.request import SamplingParams
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput

PROMPT_TOKENS = 64
BLOCK_SIZE = 16


class InstantRunner:
    """Answers every sampled row with the same token and keeps the time that took."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        began = time.thread_time()
        result = ModelRunnerOutput([[7] if sampled else [] for sampled in output.samples], [])
        self.seconds = time.thread_time() - began
        return result


def make_core(running: int, num_blocks: int, *, prefix_cache: bool = True) -> tuple[EngineCore, InstantRunner]:
    runner = InstantRunner()
    core = EngineCore(
        runner,
        scheduler=SchedulerConfig(max_num_seqs=running),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        prefix_cache=prefix_cache,
        max_model_len=1 << 20,
        vocab_size=50_000,
        token_budget=8_192,
    )
    return core, runner


def measure_steps(running: int, waiting: int, steps: int) -> list[float]:
    """Seconds of each of ``steps`` steps in which all of ``running`` decode and ``waiting`` wait."""
    core, runner = make_core(running, running * ((PROMPT_TOKENS + steps + 128) // BLOCK_SIZE))
    params = SamplingParams(max_tokens=steps + 1_000)
    for request_id in range(1, running + waiting + 1):
        prompt = [(request_id * 7 + i) % 50_000 for i in range(PROMPT_TOKENS + request_id % BLOCK_SIZE)]
        core.add_request(request_id, prompt, params, arrival_time=float(request_id))
    while (record := core.step().record) is not None and (record.num_running < running or any(record.kinds)):
        pass
    times = []
    for _ in range(steps):
        began = time.thread_time()
        core.step()
        times.append(time.thread_time() - began - runner.seconds)
    return times


def measure_add(prompt_tokens: int, repeats: int) -> list[float]:
    """Seconds of adding one prompt, its blocks digested."""
    core, _ = make_core(32, 4_096)
    times = []
    for request_id in range(1, repeats + 1):
        prompt = [(request_id * 31 + i * 17) % 50_000 for i in range(prompt_tokens)]
        began = time.thread_time()
        core.add_request(request_id, prompt, SamplingParams(max_tokens=8))
        times.append(time.thread_time() - began)
    return times


def summarise(times: list[float]) -> dict[str, float]:
    microseconds = sorted(1e6 * seconds for seconds in times)
    return {
        "mean_us": round(statistics.fmean(microseconds), 1),
        "min_us": round(microseconds[0], 1),
        "p10_us": round(microseconds[len(microseconds) // 10], 1),
        "p50_us": round(statistics.median(microseconds), 1),
        "p99_us": round(microseconds[int(0.99 * (len(microseconds) - 1))], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--waiting", type=int, nargs="*", default=[0, 10_000])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        {
            "case": "step",
            "running": running,
            "waiting": waiting,
            **summarise(measure_steps(running, waiting, options.steps)),
        }
        for running in (32, 256)
        for waiting in options.waiting
    ]
    rows.append({"case": "add a 1,024-token prompt", **summarise(measure_add(1_024, 300))})
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        where = f"{row['running']:>4} running {row['waiting']:>7,} waiting" if "running" in row else ""
        figures = "   ".join(f"{name} {row[f'{name}_us']:>8}" for name in ("mean", "min", "p10", "p50", "p99"))
        print(f"{row['case']:<26}{where:<30} {figures}  µs")


if __name__ == "__main__":
    main()
