"""What scheduling costs: ``python -m tests.scheduler_bench [--disciplines vllm,orca] [--vllm PYTHON] [--json]``.

Two figures a case. *step*: the whole ``EngineCore.step`` with a runner that answers at once, whose time is taken off:
inbox, plan, validation, update, outputs, events with their reasons, record. *scheduler*: schedule, update and settle
alone, events included. Prefix cache on. A figure is the minimum and, after the slash, the median, in µs of CPU time of
the thread, over ``--passes`` passes through all cases.

``--vllm`` names a Python in whose environment vLLM is installed: its own scheduler goes through the same cases, pass by
pass in turn with ours. The columns marked * were measured elsewhere, on another machine (2 cores of an EPYC of the Zen
4 generation): vLLM 0.32, Transformers 5.24, nano-vllm, which has neither priorities nor events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from functools import cache, partial

from rich.console import Console
from rich.table import Table

from engine.config import DISCIPLINES, ORDERS, SchedulerConfig
from engine.core import EngineCore
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduling.discipline import make_discipline
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.scheduler import Scheduler
from tests.scheduler_bench_vllm import OtherProcess
from tests.scheduler_cases import (
    ANSWER_TOKEN,
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Case,
    Make,
    Samples,
    Setup,
    Step,
    cases,
    run_pass,
)

END_IDS = frozenset({0, 2})
"""A model's own: looked for in every token, never there."""
TARGETS = {
    "256 running": 600,
    "256 running, 1,000 blocks": 600,
    "256 running, 1,000 waiting": 600,
    "256 running, 10,000 waiting": 600,
    "256 running, 100,000 waiting": 600,
    "256 running, tight pool": 600,
    "add and start 1,024 tokens": 175,
    "the same, whole hit": 150,
    "end 2,048 tokens": 21,
}
"""Most µs."""
ELSEWHERE = {
    "32 running": ("372", "163", "26"),
    "256 running": ("2,940", "1,360", "200"),
    "256 running, 10,000 waiting": ("2,890", "3,000–4,800", "205"),
    "256 running, 100,000 waiting": ("2,921", "53,000", "205"),
    "256 running, tight pool": ("2,680", "1,200", "217"),
    "add and start 1,024 tokens": ("335", "259", "175"),
    "the same, whole hit": ("281", "212", "47,000"),
    "end 2,048 tokens": ("44", "24", "21"),
}
"""µs of vLLM, Transformers, nano-vllm, prefix cache on."""


@cache
def params_of(max_tokens: int) -> SamplingParams:
    """What a client sends: none of the scheduler's work."""
    return SamplingParams(max_tokens=max_tokens)


def answers(output: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput([[ANSWER_TOKEN] if sampled else [] for sampled in output.samples], [])


class CoreSubject:
    """A whole engine core but for its model and its text."""

    def __init__(self, config: SchedulerConfig, setup: Setup) -> None:
        self.num_preemptions = 0
        self._executing = 0.0
        self._core = EngineCore(
            self,
            scheduler=config,
            num_blocks=setup.num_blocks,
            block_size=BLOCK_SIZE,
            prefix_cache=True,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            token_budget=setup.token_budget,
            eos_token_ids=END_IDS,
        )

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        began = time.thread_time()
        result = answers(output)
        self._executing = time.thread_time() - began
        return result

    def add(self, request_id: int, prompt: list[int], max_tokens: int) -> None:
        self._core.add_request(request_id, prompt, params_of(max_tokens))

    def step(self) -> Step:
        self._executing = 0.0
        began = time.thread_time()
        record = self._core.step().record
        seconds = time.thread_time() - began - self._executing
        if record is None:
            return Step(seconds, 0, 0)
        self.num_preemptions = record.totals.preemptions
        return Step(seconds, len(record.request_ids), sum(record.num_tokens))

    def end(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self._core.abort(request_id)
        self._core.step()


class SchedulerSubject:
    """The scheduler with its memory, and nothing around it."""

    def __init__(self, config: SchedulerConfig, setup: Setup) -> None:
        self._scheduler = Scheduler(
            config,
            num_blocks=setup.num_blocks,
            block_size=BLOCK_SIZE,
            prefix_cache=True,
            token_budget=setup.token_budget,
        )
        self._requests: dict[int, Request] = {}
        self._steps = 0

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.counters.preemptions

    def add(self, request_id: int, prompt: list[int], max_tokens: int) -> None:
        params = params_of(max_tokens)
        request = Request(request_id, prompt, params, max_tokens=max_tokens, stop_token_ids=END_IDS)
        self._requests[request_id] = request
        self._scheduler.memory.prepare(request)
        self._scheduler.add(request)

    def step(self) -> Step:
        scheduler = self._scheduler
        self._steps += 1
        began = time.thread_time()
        plan = scheduler.schedule(self._steps, began)
        scheduled = time.thread_time()
        if plan is None:
            scheduler.take_events()
            return Step(scheduled - began, 0, 0)
        result = answers(plan)
        executed = time.thread_time()
        update = scheduler.update(plan, result, executed)
        left = scheduler.settle({plan.requests[row]: reason for row, reason in update.ended.items()})
        scheduler.take_events()
        seconds = scheduled - began + time.thread_time() - executed
        for request in left:
            del self._requests[request.request_id]
        return Step(seconds, len(plan.requests), plan.total_tokens)

    def end(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self._scheduler.finish(self._requests.pop(request_id), FinishReason.ABORT)
        self._scheduler.take_events()


def makers(discipline: str, order: str) -> dict[str, Make]:
    def config(setup: Setup) -> SchedulerConfig:
        return SchedulerConfig(discipline=discipline, order=order, max_num_seqs=setup.max_num_seqs)

    return {
        "step": lambda setup: CoreSubject(config(setup), setup),
        "scheduler": lambda setup: SchedulerSubject(config(setup), setup),
    }


def applies(case: Case, discipline: str) -> bool:
    if case.needs_prefix_hits and discipline == "static":  # which does not look for any
        return False
    return not case.needs_preemption or make_discipline(SchedulerConfig(discipline=discipline)).preempts


def measure(options: argparse.Namespace) -> dict[tuple[str, str], dict[str, Samples]]:
    """(discipline, column) → case → samples; the passes of all columns alternate."""
    runs = {}
    for discipline in options.disciplines:
        chosen = [case for case in cases() if options.only in case.name and applies(case, discipline)]
        for column, make in makers(discipline, options.order).items():
            runs[discipline, column] = partial(run_pass, make, chosen)
    if options.vllm:
        runs["vllm", "vLLM"] = OtherProcess(options.vllm, options.only)
    merged: dict[tuple[str, str], dict[str, Samples]] = {key: {} for key in runs}
    for _ in range(options.passes):
        for key, run in runs.items():
            for name, samples in run().items():
                merged[key].setdefault(name, Samples()).merge(samples)
    return merged


def figure(samples: Samples | None) -> str:
    if samples is None:
        return ""
    return f"{1e6 * min(samples.seconds):,.0f} / {1e6 * statistics.median(samples.seconds):,.0f}"


def rows_of(merged: dict[tuple[str, str], dict[str, Samples]]) -> list[dict[str, object]]:
    return [
        {
            "discipline": discipline,
            "column": column,
            "case": name,
            "min_us": 1e6 * min(samples.seconds),
            "median_us": 1e6 * statistics.median(samples.seconds),
            "mean_us": 1e6 * statistics.fmean(samples.seconds),
            "target_us": TARGETS.get(name),
            "elsewhere_us": ELSEWHERE.get(name),
            **{key: statistics.fmean(values) for key, values in samples.counts.items()},
        }
        for (discipline, column), results in merged.items()
        for name, samples in results.items()
    ]


def flatness(results: dict[str, Samples]) -> str:
    """How the least time of a step with 256 running changes with who waits and with the pool."""
    least = {name: min(samples.seconds) for name, samples in results.items()}
    parts = [
        f"{least[name] / least['256 running'] - 1:+.0%} with {name.removeprefix('256 running, ')}"
        for name in ("256 running, 100,000 waiting", "256 running, 1,000 blocks")
        if name in least and "256 running" in least
    ]
    return ", ".join(parts)


def table_of(merged: dict[tuple[str, str], dict[str, Samples]], discipline: str) -> Table:
    table = Table(title=f"{discipline}: µs, minimum / median", title_justify="left")
    columns = ["step", "scheduler", "vLLM"]
    elsewhere = ["vLLM*", "Transformers*", "nano-vllm*"]
    table.add_column("case")
    for name in ("target", *columns, *elsewhere):
        table.add_column(name, justify="right")
    results = [merged.get((discipline if name != "vLLM" else "vllm", name), {}) for name in columns]
    for case in cases():
        found = [each.get(case.name) for each in results]
        if any(found):
            target = str(TARGETS.get(case.name, ""))
            table.add_row(case.name, target, *map(figure, found), *ELSEWHERE.get(case.name, ("",) * 3))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--disciplines", type=lambda text: text.split(","), default=["vllm"], help=", ".join(DISCIPLINES)
    )
    parser.add_argument("--order", choices=ORDERS, default="fcfs")
    parser.add_argument("--only", default="", help="measure the cases whose name contains this")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that can import vllm")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    merged = measure(options)
    if options.json:
        print(json.dumps(rows_of(merged)))
        return
    console = Console(width=140)
    for discipline in options.disciplines:
        console.print(table_of(merged, discipline))
    for (discipline, column), results in merged.items():
        counts = {name: statistics.fmean(values) for each in results.values() for name, values in each.counts.items()}
        facts = [f"{name.replace('_', ' ')} {value:,.2f}" for name, value in counts.items()]
        if flat := flatness(results):
            facts.insert(0, flat)
        if facts:
            console.print(f"{discipline}, {column}: {', '.join(facts)}")


if __name__ == "__main__":
    main()
