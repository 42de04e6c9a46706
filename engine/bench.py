"""One run of a workload without a window: ``python -m engine.bench``, figures in the words of ``vllm bench serve``.

The engine runs in this process. ``--json -`` writes to standard output and nothing else goes there. Exit 0: every
request completed; 1: the run failed, was interrupted, or a request failed; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import msgspec
import psutil

from engine.bench_report import Progress, print_table
from engine.bench_run import WorkloadRun, prepare, warm_up_requests
from engine.config import DEVICES, DISCIPLINES, DTYPES, ORDERS, PREEMPTIONS, ConfigError, EngineConfig
from engine.failures import describe, step_failure
from engine.metrics import StepCounters, parse_goodput, summarise
from engine.output_files import OutputFailure, printing, target_fault, write_target
from engine.workload import (
    Arrivals,
    EngineOptions,
    Scenario,
    ShapeError,
    UnknownScenarioError,
    Workload,
    WorkloadError,
    list_scenarios,
    load_scenario,
    load_workload,
)

if TYPE_CHECKING:
    from engine.loader import LoadedEngine


MAX_WARM_UP = 10_000
"""Requests: far more than warms anything up."""


class BenchFailure(Exception):
    """The run cannot be made or finished; the message is for the user."""


# Options -------------------------------------------------------------------------------------------------------------


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options of :class:`EngineOptions`, under the same names."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", metavar="starter|FOLDER|HUB-ID", help="default: starter")
    group.add_argument("--discipline", choices=DISCIPLINES)
    group.add_argument("--order", choices=ORDERS)
    group.add_argument("--preemption", choices=PREEMPTIONS)
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="most requests running at once (32)")
    group.add_argument("--token-budget", type=int, metavar="N", help="tokens per step (measured at load)")
    group.add_argument("--chunked-prefill", type=_switch, metavar="on|off")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest context in tokens")
    group.add_argument("--watermark", type=float, metavar="X", help="share of the pool that admission leaves free (0)")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per KV block (16)")
    group.add_argument("--kv-blocks", type=int, metavar="N", help="blocks in the pool (from the free memory)")
    group.add_argument("--prefix-cache", type=_switch, metavar="on|off")
    group.add_argument("--ageing", type=float, metavar="S", help="seconds of waiting that outweigh one priority level")
    group.add_argument("--dtype", choices=DTYPES)
    group.add_argument("--device", choices=DEVICES)
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (the physical cores)")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="batchscope bench", description="One run of a workload, without a window.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--workload", metavar="FILE", help="a Batchscope jsonl: one request a line")
    what.add_argument("--scenario", metavar="NAME", help=f"{', '.join(list_scenarios())}, or a .toml of yours")
    add_engine_options(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--max-concurrency", type=int, metavar="N", help="most requests in flight at once")
    load.add_argument("--request-rate", type=float, metavar="R", help="requests per second; inf: all at once")
    load.add_argument("--burstiness", type=float, metavar="B", help="shape of the gamma gaps; 1: Poisson")
    load.add_argument("--ramp", metavar="FROM:TO:linear|exponential", help="a request rate that changes over the run")
    load.add_argument("--warmup", type=int, default=0, metavar="N", help="requests of its own before, not counted (0)")
    load.add_argument("--seed", type=int, metavar="N", help="of prompts, arrivals and sampling")
    result = parser.add_argument_group("result")
    result.add_argument("--goodput", metavar="ttft:MS,tpot:MS,e2el:MS", help="count requests that meet these")
    result.add_argument("--save-outputs", action="store_true", help="add output_token_ids, in order of the workload")
    result.add_argument("--json", metavar="FILE", help="write the result; - is standard output")
    return parser


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """What the command line says of the engine."""
    return EngineOptions(**{name: getattr(args, name) for name in EngineOptions.__struct_fields__})


def chosen_workload(args: argparse.Namespace, scenario: Scenario | None) -> Workload:
    """The workload under the arrivals of the command line. Raises :class:`WorkloadError` and :class:`ShapeError`."""
    if scenario is not None:
        workload, seed = scenario.build(args.seed), args.seed if args.seed is not None else scenario.seed
    else:
        seed = args.seed or 0
        workload = load_workload(args.workload, seed=seed)
    said = {
        n: v for n in ("request_rate", "burstiness", "ramp", "max_concurrency") if (v := getattr(args, n)) is not None
    }
    if not said:
        return workload
    if args.request_rate is not None and args.ramp is None:
        said["ramp"] = None
    elif args.ramp is not None and args.request_rate is None:
        said["request_rate"] = None
    merged = {name: getattr(workload.arrivals, name) for name in Arrivals.__struct_fields__} | said
    return workload.with_arrivals(Arrivals(**merged), seed)


# Running -------------------------------------------------------------------------------------------------------------


class StopSignal:
    """The first Ctrl+C ends the run after the step in progress, so that there is a result; the second at once."""

    def __init__(self) -> None:
        self.wanted = False
        self._previous: Any = None

    def __enter__(self) -> StopSignal:
        with contextlib.suppress(ValueError):  # not on the main thread: then nobody sends one
            self._previous = signal.signal(signal.SIGINT, self._caught)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _caught(self, signum: int, frame: object) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


def load(config: EngineConfig, progress: Progress) -> LoadedEngine:
    """Load the model. Raises :class:`BenchFailure`."""
    from engine.loader import load_engine
    from engine.models.errors import ModelLoadError

    try:
        return load_engine(config, progress.loading)
    except ModelLoadError as error:
        raise BenchFailure(str(error)) from error
    except Exception as error:  # whatever a driver or a tokeniser throws; the sentence is all that helps here
        raise BenchFailure(f"the model could not be loaded: {describe(error)}") from error


def run_bench(
    loaded: LoadedEngine,
    workload: Workload,
    config: EngineConfig,
    *,
    warm_up: int = 0,
    objectives: dict[str, float] | None = None,
    save_outputs: bool = False,
    progress: Progress | None = None,
    stop_wanted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run ``workload`` and return the result; ``interrupted`` and ``failure`` tell of one cut short.

    Raises :class:`BenchFailure` where not even the warm-up runs through.
    """
    core, info = loaded.core, loaded.info
    prepared = prepare(workload, loaded.codec, info.vocab_size, info.max_model_len)
    before = warm_up_requests(prepared, warm_up, loaded.codec, info.vocab_size)
    clock, sleep = time.perf_counter, time.sleep
    if before:
        try:
            WorkloadRun(
                core,
                before,
                clock,
                sleep,
                workload.arrivals.max_concurrency,
                stop_wanted=stop_wanted,
                on_progress=progress.warming_up if progress else lambda run: None,
            ).run()
        except Exception as error:  # as in the run itself, but nothing of it counts yet
            raise BenchFailure(f"the warm-up failed: {step_failure(error)}") from error
    counters = StepCounters(core.keyframe().totals, num_blocks=info.num_blocks, max_num_seqs=info.max_num_seqs)
    run = WorkloadRun(
        core,
        prepared,
        clock,
        sleep,
        workload.arrivals.max_concurrency,
        workload.open_loop,
        first_id=1 + len(before),
        counters=counters,
        stop_wanted=stop_wanted,
        on_progress=progress.running if progress else lambda run: None,
    )
    failure = ""
    try:
        run.run()
    except Exception as error:  # a device fault or lack of memory in a step: what completed is still a result
        failure = step_failure(error)
    timelines = run.recorder.timelines
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "workload": workload.name,
        **_engine_facts(loaded, config),
        **summarise(timelines, workload, elapsed=run.elapsed, objectives=objectives),
        **counters.summary(),
        "interrupted": stop_wanted(),
        "failure": failure,
        "peak_memory_mb": round(peak_memory_mb(), 1),
    }
    if save_outputs:
        result["output_token_ids"] = [t.token_ids for t in timelines]
    return result


def _engine_facts(loaded: LoadedEngine, config: EngineConfig) -> dict[str, Any]:
    info, scheduler = loaded.info, config.scheduler
    return {
        "backend": info.backend,
        "backend_reason": info.backend_reason,
        "model_id": info.name,
        "weights_sha256": info.weights_sha256,
        "dtype": info.dtype,
        "device": info.device,
        "threads": info.threads,
        "discipline": scheduler.discipline,
        "order": scheduler.order,
        "preemption": scheduler.preemption,
        "max_num_seqs": info.max_num_seqs,
        "token_budget": info.token_budget,
        "max_model_len": info.max_model_len,
        "block_size": info.block_size,
        "prefix_cache": config.cache.prefix_cache,
        "seed": config.seed,
        "load_seconds": info.load_seconds,
    }


def peak_memory_mb() -> float:
    """Most memory that this process ever had resident, in MB of 2^20 bytes."""
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) / 2**20 if sys.platform == "darwin" else float(peak) / 2**10


# The command ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_stdout(wanted: bool) -> Iterator[TextIO]:
    """The real standard output, while everybody else's prints go to the error output (where ``wanted``)."""
    if not wanted or sys.stdout is None:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr), open(kept, "w", encoding="utf-8", closefd=False) as stream:
            yield stream
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _usage(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with 2 where the options make no sense, before anything heavy is loaded."""
    if not args.workload and not args.scenario:
        names = ", ".join(list_scenarios())
        parser.error(f"nothing to run: give --workload FILE (one request a line) or --scenario NAME ({names})")
    if fault := target_fault("--json", args.json):
        parser.error(fault)
    if not 0 <= args.warmup <= MAX_WARM_UP:
        parser.error(f"--warmup is {args.warmup}; it must be 0 to {MAX_WARM_UP:,}")
    if args.seed is not None and args.seed < 0:
        parser.error(f"--seed is {args.seed}; it must be at least 0")


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    _usage(parser, args)
    try:
        objectives = parse_goodput(args.goodput) if args.goodput else None
        scenario = load_scenario(args.scenario) if args.scenario else None
        options = engine_options(args)
        config = options.over(scenario.engine if scenario else EngineOptions()).config()
        workload = chosen_workload(args, scenario)
    except UnknownScenarioError as error:
        parser.error(str(error))
    except WorkloadError as error:
        print(f"batchscope bench: {error}", file=sys.stderr)
        return 1
    except (ConfigError, ShapeError, ValueError) as error:
        parser.error(str(error))
    with own_stdout(args.json == "-") as out:
        return _run_and_report(args, config, workload, objectives, out)


def _run_and_report(
    args: argparse.Namespace,
    config: EngineConfig,
    workload: Workload,
    objectives: dict[str, float] | None,
    out: TextIO,
) -> int:
    try:
        with Progress() as progress:
            loaded = load(config, progress)
            with StopSignal() as stop:
                result = run_bench(
                    loaded,
                    workload,
                    config,
                    warm_up=args.warmup,
                    objectives=objectives,
                    save_outputs=args.save_outputs,
                    progress=progress,
                    stop_wanted=lambda: stop.wanted,
                )
    except (BenchFailure, OSError) as error:
        print(f"batchscope bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("batchscope bench: interrupted before there was a result", file=sys.stderr)
        return 1
    code = _verdict(result)
    try:
        _deliver(args.json, result, out)
    except OutputFailure as failure:
        print(f"batchscope bench: {failure}", file=sys.stderr)
        code = 1
    return code


def _deliver(target: str | None, result: dict[str, Any], out: TextIO) -> None:
    """Print and write the result; what cannot be printed is written all the same. Raises :class:`OutputFailure`."""
    text = json.dumps(msgspec.to_builtins(result), allow_nan=False, indent=2) + "\n"
    try:
        with printing(out):
            if target == "-":
                out.write(text)
            else:
                print_table(result, out)
    finally:
        if target is not None and target != "-":
            write_target("--json", target, text)


def _verdict(result: dict[str, Any]) -> int:
    """Say on the error output what went wrong, and give the exit code."""
    total, failed = result["num_prompts"], result["failed"]
    if result["failure"]:
        print(f"batchscope bench: {result['failure']}", file=sys.stderr)
    if result["interrupted"]:
        print(
            f"batchscope bench: interrupted; {result['completed']} of {total} requests had completed", file=sys.stderr
        )
    if failed:
        reasons = list(dict.fromkeys(error for error in result["errors"] if error))
        more = f" (and {len(reasons) - 3} other reasons)" if len(reasons) > 3 else ""
        print(f"batchscope bench: {failed} of {total} requests failed: {'; '.join(reasons[:3])}{more}", file=sys.stderr)
    return 1 if result["failure"] or result["interrupted"] or failed else 0


if __name__ == "__main__":
    sys.exit(main())
