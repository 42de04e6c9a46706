"""The same workload through several variants: ``python -m engine.compare``, one table and one JSON.

A variant is a discipline, a value of a knob, or both. What is run and in what order is said in
:mod:`engine.comparing`. Exit 0: every request of every run completed; 1: a run failed or was interrupted; 2: wrong
usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import msgspec

from engine.bench import BenchFailure, StopSignal, load, own_stdout
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
from engine.bench_run import WorkloadRun
from engine.compare_html import html_report
from engine.compare_report import print_comparison
from engine.comparing import Comparison
from engine.config import DISCIPLINES, EngineConfig
from engine.events import StepRecord
from engine.messages import ComparePlan, Variant
from engine.output_files import OutputFailure, deliver, write_target
from engine.variants import (
    KNOBS,
    MAX_RUNS,
    baseline_of,
    load_config,
    parse_disciplines,
    parse_seeds,
    parse_vary,
    product,
    variant_config,
)
from engine.workload import EngineOptions, WorkloadError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batchscope compare",
        description="The same workload through several disciplines, or under several values of a knob, on one loaded "
        "model.",
    )
    add_workload_options(parser)
    variants = parser.add_argument_group("variants", "all combinations run, each once for every seed")
    variants.add_argument("--disciplines", metavar="a,b,…", help=f"of {', '.join(DISCIPLINES)}")
    variants.add_argument(
        "--vary",
        action="append",
        metavar="KNOB=a,b,…",
        help=f"a knob and its values, on|off for a switch, auto for what it is otherwise; may be given several times. "
        f"Knobs: {', '.join(KNOBS)}. A block size alone keeps the tokens that the pool holds",
    )
    variants.add_argument("--baseline", metavar="NAME", help="the variant that ratios are to (static, else the first)")
    add_engine_options(parser, discipline=False)
    # The first run must not pay for what every first step of a process pays.
    loads = add_load_options(parser, warm_up=1)
    loads.add_argument(
        "--seeds", metavar="1,2,3", help="of prompts, arrivals and sampling, or 1-3: a run of each with each"
    )
    result = add_result_options(parser)
    result.add_argument("--html", metavar="FILE", help="write a report that needs no network")
    return parser


def _variants(args: argparse.Namespace) -> list[Variant]:
    """Raises ValueError with what is wrong."""
    if args.disciplines is None and not args.vary:
        raise ValueError("nothing to compare: give --disciplines a,b,… or --vary KNOB=a,b,…")
    disciplines = parse_disciplines(args.disciplines) if args.disciplines is not None else []
    return product(disciplines, [parse_vary(text) for text in args.vary or ()])


def _seeds(text: str | None) -> list[int | None]:
    """Raises ValueError with what is wrong."""
    if text is not None and not text.strip():
        raise ValueError("--seeds is empty; write seeds, e.g. 1,2,3 or 1-3")
    try:
        return parse_seeds(text or "")
    except ValueError as error:
        raise ValueError(f"--seeds: {error}") from None


def plan_of(args: argparse.Namespace, variants: list[Variant], seeds: list[int | None], chosen: Chosen) -> ComparePlan:
    """What the command line asks for; ``chosen`` has a workload for each of ``seeds``."""
    scenario = chosen.scenario
    return ComparePlan(
        title=scenario.title if scenario else chosen.workloads[0].name,
        watch=scenario.watch.strip() if scenario else "",
        options=EngineOptions(),
        variants=variants,
        baseline=args.baseline or baseline_of([variant.name for variant in variants]),
        workloads=chosen.workloads,
        seeds=seeds,
        warm_up=args.warmup,
        objectives=chosen.objectives,
    )


class Terminal:
    """The audience of the command: a bar that tells of ``runs`` runs, and Ctrl+C."""

    def __init__(self, progress: Progress, runs: int, stop_wanted: Callable[[], bool] = lambda: False) -> None:
        self.stop_wanted = stop_wanted
        self._progress = progress
        self._runs = runs

    def begin(self, run: int, name: str, seed: int | None, core: object) -> None:
        self._progress.label = f"{run + 1} of {self._runs}, {name}"

    def warming_up(self, run: WorkloadRun) -> None:
        self._progress.warming_up(run)

    def running(self, run: WorkloadRun) -> None:
        self._progress.running(run)

    def stepped(self, record: StepRecord) -> None:
        pass


# The command ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    check_usage(parser, args)
    try:
        variants, seeds = _variants(args), _seeds(args.seeds)
        names = [variant.name for variant in variants]
        if args.baseline is not None and args.baseline not in names:
            raise ValueError(f"--baseline is {args.baseline!r}; it must be one of {', '.join(names)}")
    except ValueError as error:
        parser.error(str(error))
    if len(variants) * len(seeds) > MAX_RUNS:
        parser.error(f"{len(variants)} variants and {len(seeds)} seeds are more than {MAX_RUNS} runs")
    try:
        chosen = choose(parser, args, seeds)
    except WorkloadError as error:
        return _fail(str(error))
    plan = plan_of(args, variants, seeds, chosen)
    try:
        to_load = load_config(plan, chosen.config)
        for variant in variants:
            variant_config(plan, variant, chosen.config)
    except ValueError as error:  # a knob with an impossible value
        parser.error(str(error))
    with own_stdout(args.json == "-") as out:
        return _run_and_report(args, plan, chosen.config, to_load, out)


def _fail(message: str) -> int:
    print(f"batchscope compare: {message}", file=sys.stderr)
    return 1


def _run_and_report(
    args: argparse.Namespace, plan: ComparePlan, base: EngineConfig, to_load: EngineConfig, out: TextIO
) -> int:
    made: Comparison | None = None
    interrupted, fault = False, ""
    try:
        with Progress() as progress:
            loaded = load(to_load, progress)
            with StopSignal() as stop:
                runs = len(plan.variants) * len(plan.workloads)
                made = Comparison(loaded, base, plan, Terminal(progress, runs, lambda: stop.wanted))
                made.run()
                interrupted = stop.wanted
    except (BenchFailure, OSError) as error:
        fault = str(error)
    except KeyboardInterrupt:
        interrupted = True
    if made is not None and interrupted:
        fault = f"interrupted; {len(made.runs)} of {made.num_runs} runs are complete"
    elif interrupted:
        fault = "interrupted before a run was complete"
    faults = [*(made.faults() if made is not None else []), *([fault] if fault else [])]
    for sentence in faults:
        _fail(sentence)
    if made is None or not made.runs:
        return 1
    try:
        _deliver(args, made.result(interrupted=interrupted, save_outputs=args.save_outputs), out)
    except OutputFailure as failure:
        return _fail(str(failure))
    return 1 if faults else 0


def _deliver(args: argparse.Namespace, result: dict[str, Any], out: TextIO) -> None:
    """Print and write the result; what cannot be printed is written all the same. Raises :class:`OutputFailure`."""
    text = msgspec.json.encode(result).decode() + "\n"
    plain = msgspec.json.decode(text)
    try:
        deliver(args.json, text, out, lambda: print_comparison(plain, out))
    finally:
        if args.html is not None:
            write_target("--html", args.html, html_report(plain))


if __name__ == "__main__":
    sys.exit(main())
