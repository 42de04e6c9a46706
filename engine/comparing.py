"""The same workload through several variants of one loaded engine: for the command, and for the window.

The model is loaded once; every run gets a fresh core on it, with empty queues and an empty prefix cache. For each seed
every variant has its turn, so that whatever else the machine does meanwhile meets them alike::

    seed 1:  static  orca  vllm  …        ratio = a variant's figure / the baseline's, of one seed;
    seed 2:  static  orca  vllm  …        the median over the seeds is shown

A variant that cannot run is left out and told; the others run. A run that was cut short is no run.
"""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from engine.bench import BenchFailure, run_bench, run_faults
from engine.bench_run import WorkloadRun, prepare
from engine.comparison import ratios_to
from engine.config import ConfigError, EngineConfig
from engine.core import StepResult
from engine.events import StepRecord
from engine.failures import describe
from engine.lanes import Lane, Lanes
from engine.messages import MAX_MESSAGE_BYTES, CompareDone, ComparePlan, CompareProgress, Variant
from engine.models.errors import ModelLoadError
from engine.request import FinishReason
from engine.same_ids import Sameness, compare_ids, top_two_gaps
from engine.spans import LANES_SAVED, saved_lane
from engine.variants import NEEDS_ITS_OWN_LOAD, knobs_of, variant_config
from engine.workload import Workload

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.floor import Floor
    from engine.loader import LoadedEngine

COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
PROGRESS_SECONDS = 0.2
"""Between two messages of how far a run is."""
MAX_RESULT_BYTES = MAX_MESSAGE_BYTES - 2**20
DETAILS = ("itls", "input_lens", "output_lens", "ttfts", "start_times", "errors", "finish_reasons")
"""A value for each request, which every view of a comparison can do without."""


class Audience(Protocol):
    """Who watches the runs, and may end them."""

    def begin(self, run: int, name: str, seed: int | None, core: EngineCore) -> None:
        """Run number ``run`` of the comparison, from 0, of the variant ``name`` begins on ``core``."""

    def warming_up(self, run: WorkloadRun) -> None:
        """After each step of the warm-up."""

    def running(self, run: WorkloadRun) -> None:
        """After each step of the run itself."""

    def stepped(self, record: StepRecord) -> None: ...

    def stop_wanted(self) -> bool:
        """Asked before every step, and several times a second while a run waits for arrivals."""


# Runs ----------------------------------------------------------------------------------------------------------------


class Timelines:
    """Follows the records of runs one after the other; keeps those of the last."""

    def __init__(self) -> None:
        self._run: WorkloadRun | None = None
        self._lanes = Lanes()

    def add(self, run: WorkloadRun, record: StepRecord) -> None:
        if run is not self._run:
            self._run, self._lanes = run, Lanes()
        self._lanes.apply(record)

    def summary(self) -> list[dict[str, Any]]:
        """The lanes of the last run as a result has them, in order of the workload."""
        run = self._run
        if run is None:
            return []
        lanes = self._lanes.lanes
        return [
            _saved(run, index, lanes.get(run.first_id + index)) for index in range(min(len(run.prepared), LANES_SAVED))
        ]


def _saved(run: WorkloadRun, index: int, lane: Lane | None) -> dict[str, Any]:
    asked, seen, start = run.prepared[index].request, run.recorder.timelines[index], run.recorder.start
    return saved_lane(
        index + 1,
        lane,
        start,
        priority=asked.priority,
        user=asked.user,
        arrival=start + asked.arrival_s if lane is None else lane.arrival,
        end=None if seen.finished is None else start + seen.finished,
        reason=seen.finish_reason or "",
    )


def run_fresh(
    loaded: LoadedEngine,
    workload: Workload,
    config: EngineConfig,
    *,
    on_core: Callable[[EngineCore], None] = lambda core: None,
    on_record: Callable[[WorkloadRun, StepRecord], None] = lambda run, record: None,
    **given: Any,
) -> dict[str, Any]:
    """:func:`engine.bench.run_bench` under ``config`` on a core of its own, which ``on_core`` gets before its first
    step. The result has its ``knobs`` and ``timeline``, too. ``given`` is what else :func:`run_bench` takes.

    Raises :class:`BenchFailure` where this engine cannot run under ``config``.
    """
    core = _fresh_core(loaded, config)
    on_core(core)
    timelines, begun = Timelines(), core.keyframe()

    def follow(run: WorkloadRun, record: StepRecord) -> None:
        timelines.add(run, record)
        on_record(run, record)

    fresh = dataclasses.replace(loaded, core=core, info=loaded.info_of(core))
    result = run_bench(fresh, workload, config, on_record=follow, **given)
    result["knobs"] = knobs_of(config, begun)
    result["timeline"] = timelines.summary()
    return result


def _fresh_core(loaded: LoadedEngine, config: EngineConfig) -> EngineCore:
    for name in NEEDS_ITS_OWN_LOAD:
        wanted, has = getattr(config, name), getattr(loaded.config, name)
        if wanted != has:
            raise BenchFailure(f"{name} is {wanted}, but the engine was loaded with {has}; load it again with that")
    cache = config.cache
    try:
        return loaded.fresh_core(
            config.scheduler,
            prefix_cache=cache.prefix_cache,
            seed=config.seed,
            block_size=cache.block_size,
            kv_blocks=cache.num_blocks,
            swap_blocks=cache.swap_blocks,
            drafts_on_call=False,
        )
    except (ConfigError, ModelLoadError) as error:
        raise BenchFailure(str(error)) from error


@dataclasses.dataclass
class Comparison:
    """The runs of one plan; what is complete stays when :meth:`run` is left early, in whatever way."""

    loaded: LoadedEngine
    base: EngineConfig
    """What the options of plan and variants change."""
    plan: ComparePlan
    audience: Audience
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Results with their output ids, in the order they were made."""
    sameness: dict[str, Sameness] = dataclasses.field(default_factory=dict)
    """For each variant but the baseline, how its answers agree with those."""
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why a variant could not run, by its name. It is not tried again with another seed."""

    @property
    def num_runs(self) -> int:
        return len(self.plan.variants) * len(self.plan.workloads)

    def run(self) -> None:
        for number, (workload, seed) in enumerate(zip(self.plan.workloads, self.plan.seeds, strict=True)):
            of_seed = self._run_seed(number * len(self.plan.variants), workload, seed)
            if self.audience.stop_wanted():
                return
            self._compare_ids(workload, of_seed)

    def _run_seed(self, before: int, workload: Workload, seed: int | None) -> dict[str, dict[str, Any]]:
        """The results by variant; ``before``: runs of other seeds."""
        of_seed: dict[str, dict[str, Any]] = {}
        for number, variant in enumerate(self.plan.variants, before):
            if variant.name in self.failures:
                continue
            try:
                result = self._run(number, variant, workload, seed)
            except (BenchFailure, ConfigError) as error:
                self.failures[variant.name] = str(error)
                continue
            if self.audience.stop_wanted():
                break
            result["variant"] = variant.name
            of_seed[variant.name] = result
            self.runs.append(result)
        return of_seed

    def _run(self, number: int, variant: Variant, workload: Workload, seed: int | None) -> dict[str, Any]:
        config = variant_config(self.plan, variant, self.base)
        if seed is not None:
            config = dataclasses.replace(config, seed=seed)
        audience = self.audience
        return run_fresh(
            self.loaded,
            workload,
            config,
            on_core=lambda core: audience.begin(number, variant.name, seed, core),
            on_record=lambda run, record: audience.stepped(record),
            warm_up=self.plan.warm_up,
            objectives=self.plan.objectives,
            save_outputs=True,
            progress=audience,
            stop_wanted=audience.stop_wanted,
        )

    def _compare_ids(self, workload: Workload, of_seed: dict[str, dict[str, Any]]) -> None:
        loaded = self.loaded
        reference = of_seed.pop(self.plan.baseline, None)
        if reference is None or not of_seed:
            return
        prepared = prepare(workload, loaded.codec, loaded.info.vocab_size, loaded.info.max_model_len)
        prompts = [request.prompt_token_ids for request in prepared]
        for name, result in of_seed.items():
            answers = (completed_ids(reference), completed_ids(result))
            found = compare_ids(prompts, *answers, lambda prefixes: top_two_gaps(loaded, prefixes))
            self.sameness[name] = self.sameness.get(name, Sameness()) + found

    def faults(self) -> list[str]:
        """What went wrong, a sentence each."""
        told = [f"{name} could not run: {sentence}" for name, sentence in self.failures.items()]
        return told + [
            f"{run['variant']}, seed {run['seed']}: {fault}" for run in self.runs for fault in run_faults(run)
        ]

    def result(self, *, interrupted: bool, save_outputs: bool = False) -> dict[str, Any]:
        """As :mod:`engine.comparison` describes it."""
        plan = self.plan
        left_out = () if save_outputs else ("output_token_ids",)
        return {
            "title": plan.title,
            "watch": plan.watch,
            "variants": [{"name": v.name, "options": v.options.said()} for v in plan.variants],
            "baseline": plan.baseline,
            "interrupted": interrupted,
            "failures": self.failures,
            "ratios": ratios_to(self.runs, plan.baseline),
            "same_ids": {name: dataclasses.asdict(found) for name, found in self.sameness.items()},
            "runs": [{key: value for key, value in run.items() if key not in left_out} for run in self.runs],
        }


def completed_ids(result: dict[str, Any]) -> list[list[int] | None]:
    """The answers of a run with its outputs, in order of the workload; None where there is no whole one."""
    ids: list[list[int] | None] = result["output_token_ids"]
    reasons = result["finish_reasons"]
    return [a if reason in COMPLETE else None for a, reason in zip(ids, reasons, strict=True)]


# For the window ------------------------------------------------------------------------------------------------------


def run_comparison(floor: Floor, plan: ComparePlan) -> CompareDone:
    """Run a plan within the engine process, on what is loaded there. The floor's core is to be replaced afterwards."""
    base = dataclasses.replace(floor.loaded.config, scheduler=floor.scheduler)
    audience = _Window(floor, plan)
    made = Comparison(floor.loaded, base, plan, audience)
    fault = ""
    try:
        made.run()
    except Exception as error:  # a fault of the comparison itself must not take the engine with it
        traceback.print_exc()
        fault = f"The comparison failed: {describe(error)}"
    interrupted = audience.stopped
    if interrupted:
        fault = f"Cancelled; {len(made.runs)} of {made.num_runs} runs are complete"
    if not made.num_runs:
        fault = "The comparison names no variant, or no workload: there was nothing to run"
    told = [*made.faults(), *([fault] if fault else [])]
    encoded = encode(made.result(interrupted=interrupted)) if made.runs else b""
    return CompareDone(encoded, " ".join(f"{sentence.rstrip('.')}." for sentence in told))


def encode(result: dict[str, Any], limit: int = MAX_RESULT_BYTES) -> bytes:
    """The result as JSON of at most ``limit`` bytes: where it is longer, the timelines of all seeds but a variant's
    first go, then what is told of single requests, then every timeline."""
    first = {run["variant"]: number for number, run in reversed(list(enumerate(result["runs"])))}
    bare: dict[str, Any] = {key: [] for key in DETAILS}

    def cut(changes: Callable[[bool], dict[str, Any]]) -> bytes:
        runs = [run | changes(first[run["variant"]] == number) for number, run in enumerate(result["runs"])]
        return msgspec.json.encode(result | {"runs": runs})

    cuts: tuple[Callable[[bool], dict[str, Any]], ...] = (
        lambda is_first: {},
        lambda is_first: {} if is_first else {"timeline": []},
        lambda is_first: bare if is_first else bare | {"timeline": []},
        lambda is_first: bare | {"timeline": []},
    )
    text = b""
    for changes in cuts:
        text = cut(changes)
        if len(text) <= limit:
            break
    return text


class _Window:
    """The audience behind the floor: frames of every step, and a few messages a second of how far a run is."""

    def __init__(self, floor: Floor, plan: ComparePlan) -> None:
        self.stopped = False
        self._floor = floor
        self._runs = len(plan.variants) * len(plan.workloads)
        self._run, self._name = 0, ""
        self._seed: int | None = None
        self._told_at = -math.inf

    def begin(self, run: int, name: str, seed: int | None, core: EngineCore) -> None:
        self._run, self._name, self._seed = run, name, seed
        self._told_at = -math.inf
        self._floor.begin(core)

    def warming_up(self, run: WorkloadRun) -> None:
        self._tell(run, warming_up=True)

    def running(self, run: WorkloadRun) -> None:
        self._tell(run, warming_up=False)

    def _tell(self, run: WorkloadRun, *, warming_up: bool) -> None:
        now, ended, requests = time.perf_counter(), run.recorder.ended, len(run.prepared)
        if now - self._told_at >= PROGRESS_SECONDS or ended == requests:
            self._told_at = now
            told = CompareProgress(self._run, self._runs, self._name, self._seed, ended, requests, warming_up)
            self._floor.send(told)

    def stepped(self, record: StepRecord) -> None:
        self._floor.stepped(StepResult(record, []))

    def stop_wanted(self) -> bool:
        self.stopped = self.stopped or self._floor.stop_wanted()
        return self.stopped
