"""The same workload through several disciplines: ``python -m engine.compare``, one table and one JSON.

The model is loaded once; every run gets a fresh core on it, with empty queues and an empty prefix cache. For each seed
every discipline has its turn, so that whatever else the machine does meanwhile meets them alike::

    seed 1:  static  orca  vllm  …        ratio = a discipline's figure / the baseline's, of one seed;
    seed 2:  static  orca  vllm  …        the median over the seeds is shown

Exit 0: every request of every run completed; 1: a run failed or was interrupted; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from engine.bench import BenchFailure, StopSignal, load, own_stdout, run_bench, run_faults
from engine.bench_options import (
    Chosen,
    add_engine_options,
    add_load_options,
    add_result_options,
    add_workload_options,
    check_usage,
    choose,
)
from engine.bench_report import Progress
from engine.bench_run import prepare
from engine.compare_html import html_report
from engine.compare_report import print_comparison
from engine.config import DISCIPLINES, EngineConfig
from engine.output_files import OutputFailure, printing, write_target
from engine.request import FinishReason
from engine.same_ids import Sameness, compare_ids, top_two_gaps
from engine.workload import Workload, WorkloadError

if TYPE_CHECKING:
    from engine.loader import LoadedEngine

STATISTICS = ("mean", "median", "p50", "p90", "p99")
LATENCIES = ("ttft", "tpot", "itl", "e2el", "service_ttft", "service_e2el")
RATIO_KEYS = (
    "duration",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "request_goodput",
    "steps",
    "slot_utilisation",
    "slot_utilisation_run",
    "running_peak",
    "running_mean",
    *(f"{statistic}_{latency}_ms" for latency in LATENCIES for statistic in STATISTICS),
)
"""Figures of which ratios are given."""
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
MAX_RUNS = 100


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batchscope compare", description="The same workload through several disciplines, on one loaded model."
    )
    add_workload_options(parser)
    parser.add_argument("--disciplines", metavar="a,b,…", help=f"of {', '.join(DISCIPLINES)}")
    add_engine_options(parser, discipline=False)
    # The first run must not pay for what every first step of a process pays.
    loads = add_load_options(parser, warm_up=1)
    loads.add_argument("--seeds", metavar="1,2,3", help="of prompts, arrivals and sampling: a run of each with each")
    result = add_result_options(parser)
    result.add_argument("--html", metavar="FILE", help="write a report that needs no network")
    return parser


def parse_disciplines(text: str | None) -> list[str]:
    """Raises ValueError with what is wrong."""
    known = ", ".join(DISCIPLINES)
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if not names:
        raise ValueError(f"--disciplines is empty; name some of {known}")
    for name in names:
        if name not in DISCIPLINES:
            raise ValueError(f"discipline {name!r} is unknown; it must be one of {known}")
        if names.count(name) > 1:
            raise ValueError(f"discipline {name!r} is named twice; each runs once for every seed")
    return names


def parse_seeds(text: str | None) -> list[int | None]:
    """No seeds: one run with the workload's own. Raises ValueError with what is wrong."""
    if text is None:
        return [None]
    seeds: list[int | None] = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise ValueError(f"--seeds has {part.strip()!r}; seeds are whole numbers from 0 on, e.g. 1,2,3")
        seed = int(part)
        if seed in seeds:
            raise ValueError(f"--seeds has {seed} twice")
        seeds.append(seed)
    return seeds


# Running -------------------------------------------------------------------------------------------------------------


def run_fresh(loaded: LoadedEngine, workload: Workload, config: EngineConfig, **given: Any) -> dict[str, Any]:
    """:func:`engine.bench.run_bench` under ``config`` on a core of its own; only knobs of the scheduler, the prefix
    cache and the seed may differ from what was loaded."""
    core = loaded.fresh_core(config.scheduler, prefix_cache=config.cache.prefix_cache, seed=config.seed)
    return run_bench(dataclasses.replace(loaded, core=core), workload, config, **given)


@dataclasses.dataclass
class Comparison:
    """The runs of one command; what is complete stays when :meth:`run` is left early, in whatever way."""

    loaded: LoadedEngine
    disciplines: Sequence[str]
    chosen: Chosen
    seeds: Sequence[int | None]
    warm_up: int = 0
    progress: Progress | None = None
    stop_wanted: Callable[[], bool] = lambda: False
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Results with their output ids, in the order they were made."""
    sameness: dict[str, Sameness] = dataclasses.field(default_factory=dict)
    """For each discipline but the baseline, how its answers agree with those."""

    def run(self) -> None:
        """Raises :class:`BenchFailure` where a run cannot even warm up."""
        for workload, seed in zip(self.chosen.workloads, self.seeds, strict=True):
            of_seed = self._run_seed(workload, seed)
            self._compare_ids(workload, of_seed)
            if self.stop_wanted():
                return

    def _run_seed(self, workload: Workload, seed: int | None) -> dict[str, dict[str, Any]]:
        config = self.chosen.config if seed is None else dataclasses.replace(self.chosen.config, seed=seed)
        of_seed: dict[str, dict[str, Any]] = {}
        for name in self.disciplines:
            if self.progress is not None:
                self.progress.label = f"{len(self.runs) + 1} of {len(self.disciplines) * len(self.seeds)}, {name}"
            scheduler = dataclasses.replace(config.scheduler, discipline=name)
            result = run_fresh(
                self.loaded,
                workload,
                dataclasses.replace(config, scheduler=scheduler),
                warm_up=self.warm_up,
                objectives=self.chosen.objectives,
                save_outputs=True,
                progress=self.progress,
                stop_wanted=self.stop_wanted,
            )
            if self.stop_wanted():
                break
            of_seed[name] = result
            self.runs.append(result)
        return of_seed

    def _compare_ids(self, workload: Workload, of_seed: dict[str, dict[str, Any]]) -> None:
        loaded = self.loaded
        reference = of_seed.pop(baseline_of(self.disciplines), None)
        if reference is None or not of_seed:
            return
        prepared = prepare(workload, loaded.codec, loaded.info.vocab_size, loaded.info.max_model_len)
        prompts = [request.prompt_token_ids for request in prepared]
        for name, result in of_seed.items():
            answers = (completed_ids(reference), completed_ids(result))
            found = compare_ids(prompts, *answers, lambda prefixes: top_two_gaps(loaded, prefixes))
            self.sameness[name] = self.sameness.get(name, Sameness()) + found


def completed_ids(result: dict[str, Any]) -> list[list[int] | None]:
    """The answers of a run with its outputs, in order of the workload; None where there is no whole one."""
    ids: list[list[int] | None] = result["output_token_ids"]
    reasons = result["finish_reasons"]
    return [a if reason in COMPLETE else None for a, reason in zip(ids, reasons, strict=True)]


# Figures -------------------------------------------------------------------------------------------------------------


def baseline_of(disciplines: Sequence[str]) -> str:
    """``static`` where it is among them, else the first."""
    return "static" if "static" in disciplines else disciplines[0]


def ratios_to(runs: Sequence[dict[str, Any]], baseline: str) -> dict[str, dict[str, float | None]]:
    """For each discipline the median over the seeds of its figures divided by the baseline's of the same seed.

    None where no seed has both, or the baseline's is 0.
    """
    of_baseline = {run["seed"]: run for run in runs if run["discipline"] == baseline}
    result: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(run["discipline"] for run in runs):
        pairs = [(run, of_baseline[run["seed"]]) for run in runs if run["discipline"] == name]
        result[name] = {
            key: _median_ratio([(run.get(key), base.get(key)) for run, base in pairs]) for key in RATIO_KEYS
        }
    return result


def _median_ratio(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    values = [value / base for value, base in pairs if value is not None and base]
    return statistics.median(values) if values else None


def comparison(
    runs: list[dict[str, Any]], sameness: dict[str, Sameness], baseline: str, *, interrupted: bool
) -> dict[str, Any]:
    """The result of ``compare``; ratios only where a run of the baseline was completed."""
    has_baseline = any(run["discipline"] == baseline for run in runs)
    seeds_done = {run["seed"] for run in runs if run["discipline"] == baseline}
    return {
        "baseline": baseline,
        "interrupted": interrupted,
        "ratios": ratios_to([r for r in runs if r["seed"] in seeds_done], baseline) if has_baseline else {},
        "same_ids": {name: dataclasses.asdict(found) for name, found in sameness.items()},
        "runs": runs,
    }


# The command ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    check_usage(parser, args)
    try:
        disciplines, seeds = parse_disciplines(args.disciplines), parse_seeds(args.seeds)
    except ValueError as error:
        parser.error(str(error))
    if len(disciplines) * len(seeds) > MAX_RUNS:
        parser.error(f"{len(disciplines)} disciplines and {len(seeds)} seeds are more than {MAX_RUNS} runs")
    try:
        chosen = choose(parser, args, seeds)
    except WorkloadError as error:
        return _fail(str(error))
    with own_stdout(args.json == "-") as out:
        return _run_and_report(args, disciplines, seeds, chosen, out)


def _fail(message: str) -> int:
    print(f"batchscope compare: {message}", file=sys.stderr)
    return 1


def _run_and_report(
    args: argparse.Namespace, disciplines: list[str], seeds: list[int | None], chosen: Chosen, out: TextIO
) -> int:
    first = dataclasses.replace(chosen.config.scheduler, discipline=baseline_of(disciplines))
    made: Comparison | None = None
    interrupted, fault = False, ""
    try:
        with Progress() as progress:
            loaded = load(dataclasses.replace(chosen.config, scheduler=first), progress)
            with StopSignal() as stop:
                made = Comparison(loaded, disciplines, chosen, seeds, args.warmup, progress, lambda: stop.wanted)
                made.run()
                interrupted = stop.wanted
    except (BenchFailure, OSError) as error:
        fault = str(error)
    except KeyboardInterrupt:
        interrupted = True
    runs = made.runs if made is not None else []
    if interrupted:
        fault = f"interrupted; {len(runs)} of {len(disciplines) * len(seeds)} runs are complete"
    if made is None or not runs:
        return _fail(fault)
    result = comparison(runs, made.sameness, baseline_of(disciplines), interrupted=interrupted)
    faults = [f"{run['discipline']}, seed {run['seed']}: {fault}" for run in runs for fault in run_faults(run)]
    for sentence in faults + ([fault] if fault else []):
        _fail(sentence)
    if not args.save_outputs:
        for run in runs:
            del run["output_token_ids"]
    try:
        _deliver(args, result, chosen, out)
    except OutputFailure as failure:
        return _fail(str(failure))
    return 1 if faults or fault else 0


def _deliver(args: argparse.Namespace, result: dict[str, Any], chosen: Chosen, out: TextIO) -> None:
    """Print and write the result; what cannot be printed is written all the same. Raises :class:`OutputFailure`."""
    plain = msgspec.to_builtins(result)
    text = json.dumps(plain, allow_nan=False, indent=2) + "\n"
    try:
        with printing(out):
            if args.json == "-":
                out.write(text)
            else:
                print_comparison(plain, out)
    finally:
        if args.json is not None and args.json != "-":
            write_target("--json", args.json, text)
        if args.html is not None:
            write_target("--html", args.html, html_report(plain, chosen.scenario))


if __name__ == "__main__":
    sys.exit(main())
