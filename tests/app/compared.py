"""Genuine comparisons for the compare panel: real cores on make-believe time, through :mod:`engine.comparing`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine import bench
from engine.comparing import Comparison
from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.messages import ComparePlan, ModelInfo, Variant
from engine.variants import baseline_of
from engine.workload import EngineOptions, Workload, load_scenario
from tests.app.scripted import ScriptedClient, TimedRunner
from tests.load.fake_engine import FakeCodec
from tests.oracles import VOCAB_SIZE


@dataclass
class TimedEngine:
    """What :class:`engine.loader.LoadedEngine` is to a comparison: fresh cores, all on one clock."""

    num_blocks: int = 64
    now: float = 100.0
    config: EngineConfig = field(default_factory=EngineConfig)
    core: Any = None
    codec: Any = field(default_factory=FakeCodec)
    info: ModelInfo = field(default_factory=lambda: ScriptedClient().info())
    runner: TimedRunner | None = None

    def clock(self) -> float:
        return self.now if self.runner is None else self.runner.now

    def sleep(self, seconds: float) -> None:
        assert self.runner is not None
        self.runner.now += max(seconds, 1e-6)

    def fresh_core(self, scheduler: SchedulerConfig, **given: Any) -> EngineCore:
        size, blocks = given.get("block_size") or 16, given.get("kv_blocks") or self.num_blocks
        begun = self.clock()
        self.runner = TimedRunner(size)
        self.runner.now = begun
        return EngineCore(
            self.runner,
            scheduler=scheduler,
            num_blocks=blocks,
            block_size=size,
            prefix_cache=given.get("prefix_cache") is not False,
            max_model_len=2048,
            vocab_size=VOCAB_SIZE,
            token_budget=scheduler.max_num_batched_tokens or 64,
            clock=self.clock,
        )

    def info_of(self, core: EngineCore) -> ModelInfo:
        frame = core.keyframe()
        return msgspec.structs.replace(self.info, num_blocks=frame.num_blocks, block_size=frame.block_size)


class Alone:
    """Nobody watches; ``stops_before``: the number of the run before which somebody cancels."""

    def __init__(self, stops_before: int | None = None) -> None:
        self.stops_before = stops_before
        self.run = -1

    def begin(self, run: int, name: str, seed: int | None, core: EngineCore) -> None:
        self.run = run

    def warming_up(self, run: Any) -> None: ...

    def running(self, run: Any) -> None: ...

    def stepped(self, record: Any) -> None: ...

    def stop_wanted(self) -> bool:
        return self.stops_before is not None and self.run >= self.stops_before


Compared = Callable[..., dict[str, Any]]


def plan_of(
    disciplines: tuple[str, ...] = ("static", "orca", "vllm"),
    seeds: tuple[int | None, ...] = (None,),
    scenario: str = "bus-and-metro",
    workloads: list[Workload] | None = None,
    **given: Any,
) -> ComparePlan:
    chosen = load_scenario(scenario)
    return ComparePlan(
        title=chosen.title,
        watch=chosen.watch,
        options=given.pop("options", chosen.engine),
        variants=given.pop("variants", [Variant(name, EngineOptions(discipline=name)) for name in disciplines]),
        baseline=given.pop("baseline", baseline_of(disciplines)),
        workloads=workloads or [chosen.build(seed) for seed in seeds],
        seeds=list(seeds),
        **given,
    )


def compare_now(monkeypatch: pytest.MonkeyPatch, plan: ComparePlan, stops_before: int | None = None) -> dict[str, Any]:
    """The result as ``compare --json`` writes it."""
    engine = TimedEngine()
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=engine.clock, sleep=engine.sleep))
    audience = Alone(stops_before)
    made = Comparison(engine, engine.config, plan, audience)
    made.run()
    return msgspec.json.decode(msgspec.json.encode(made.result(interrupted=audience.stop_wanted())))
