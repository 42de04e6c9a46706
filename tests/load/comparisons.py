"""Comparisons for the tests: on cores that serve by the clock, and results by the figures that a test is about."""

from __future__ import annotations

from typing import Any

from engine.comparing import Comparison
from engine.config import EngineConfig
from engine.events import StepRecord
from engine.lanes import SpanKind
from engine.messages import ComparePlan, Variant
from engine.variants import KNOBS, baseline_of
from engine.workload import EngineOptions, Workload, WorkloadRequest


class Silent:
    """An audience that notes who ran and ends the runs after ``steps`` steps."""

    def __init__(self, steps: int = 10**9) -> None:
        self.began: list[tuple[int, str, int | None]] = []
        self.steps_left = steps
        self.records: list[StepRecord] = []

    def begin(self, run: int, name: str, seed: int | None, core: Any) -> None:
        self.began.append((run, name, seed))

    def warming_up(self, run: Any) -> None: ...

    def running(self, run: Any) -> None: ...

    def stepped(self, record: StepRecord) -> None:
        self.records.append(record)
        self.steps_left -= 1

    def stop_wanted(self) -> bool:
        return self.steps_left <= 0


def workload(count: int = 3, name: str = "w") -> Workload:
    return Workload(name, tuple(WorkloadRequest(2, prompt_tokens=4, seed=i) for i in range(count)))


def disciplines(*names: str) -> list[Variant]:
    return [Variant(name, EngineOptions(discipline=name)) for name in names]


def plan_of(
    variants: list[Variant], seeds: list[int | None] | None = None, load: Workload | None = None, **given: Any
) -> ComparePlan:
    seeds = seeds or [None]
    settings = {"title": "A title", "watch": "", "options": EngineOptions(), "warm_up": 0} | given
    baseline = settings.pop("baseline", None) or baseline_of([variant.name for variant in variants])
    return ComparePlan(
        variants=variants, baseline=baseline, workloads=[load or workload()] * len(seeds), seeds=seeds, **settings
    )


def compared(loaded: Any, plan: ComparePlan, audience: Silent | None = None) -> Comparison:
    made = Comparison(loaded, EngineConfig(), plan, audience or Silent())
    made.run()
    return made


def run_result(
    variant: str, seed: int = 1, lanes: list[list[tuple[int, float, float, int]]] = (), **figures: Any
) -> dict:  # type: ignore[assignment]
    """A run with all that the readers of a result take for granted."""
    none = {"tokens": None, "seconds": None}
    kinds = ("padding", "recomputed", "rejected_drafts", "reserved", "tail")
    words = ("model_id", "weights_sha256", "backend", "backend_reason", "device", "dtype", "latency_from", "date")
    timeline = [
        {
            "request": number,
            "priority": 0,
            "user": "",
            "arrival": 0.0,
            "spans": spans,
            "preempted_at": [],
            "end": spans[-1][2],
            "reason": "length",
        }
        for number, spans in enumerate(lanes or [[(int(SpanKind.DECODE), 0.0, 1.0, 3)]], 1)
    ]
    return {
        "variant": variant,
        "seed": seed,
        "knobs": dict.fromkeys(KNOBS),
        "timeline": timeline,
        "waste": {kind: dict(none) for kind in kinds},
        "static_totals": None,
        "workload": "w",
        **dict.fromkeys(words, "<x>"),
        "threads": 1,
        "num_prompts": len(timeline),
        "request_rate": "inf",
        "goodput_objectives_ms": None,
        **figures,
    }


def result_of(runs: list[dict[str, Any]], **given: Any) -> dict[str, Any]:
    names = list(dict.fromkeys(run["variant"] for run in runs))
    return {
        "title": "A title",
        "watch": "",
        "variants": [{"name": name, "options": {}} for name in names],
        "baseline": names[0],
        "interrupted": False,
        "failures": {},
        "ratios": {},
        "same_ids": {},
        "runs": runs,
    } | given
