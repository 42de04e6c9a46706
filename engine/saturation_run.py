"""``bench --find-rate``: the search of :mod:`engine.saturation` on a loaded model, a fresh core for every probe."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from engine.bench import BenchFailure, StopSignal, load
from engine.bench_options import Chosen
from engine.bench_report import Progress, figure
from engine.bench_run import WorkloadRun, prepare, warm_up_requests
from engine.config import EngineConfig
from engine.failures import step_failure
from engine.output_files import OutputFailure, deliver
from engine.saturation import Probe, SaturationSearch, first_rate_of, judge, probe_size, probe_workload
from engine.workload import Workload

if TYPE_CHECKING:
    from engine.loader import LoadedEngine


def find_rate(
    loaded: LoadedEngine,
    workload: Workload,
    config: EngineConfig,
    *,
    warm_up: int = 1,
    progress: Progress | None = None,
    stop_wanted: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Probe until the rate is found, stopped or given up; the result of the search beside what it ran on.

    A probe in progress when it is stopped counts for nothing. Raises :class:`BenchFailure` where a step fails.
    """
    requests = probe_size(config.scheduler.max_num_seqs)
    search = SaturationSearch(first_rate_of(workload))
    while (rate := search.next_rate) is not None:
        number = len(search.probes)
        if progress is not None:
            progress.label = f"Probe {number + 1}, {rate:.3g} requests/s"
        probe = _probe(
            loaded,
            probe_workload(workload, rate, number, requests),
            config,
            rate,
            warm_up=warm_up,
            clock=clock,
            sleep=sleep,
            stop_wanted=stop_wanted,
            on_progress=progress.running if progress is not None else lambda run: None,
        )
        if stop_wanted():
            search.cancelled = True
        else:
            search.note(probe)
    info = loaded.info
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "workload": workload.name,
        "model_id": info.name,
        "backend": info.backend,
        "dtype": info.dtype,
        "device": info.device,
        "discipline": config.scheduler.discipline,
        "order": config.scheduler.order,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "requests_per_probe": requests,
        "interrupted": stop_wanted(),
        **search.result(),
    }


def _probe(
    loaded: LoadedEngine, workload: Workload, config: EngineConfig, rate: float, *, warm_up: int, **given: Any
) -> Probe:
    core = loaded.fresh_core(config.scheduler, prefix_cache=config.cache.prefix_cache, seed=config.seed)
    info = loaded.info
    prepared = prepare(workload, loaded.codec, info.vocab_size, info.max_model_len)
    before = warm_up_requests(prepared, warm_up, loaded.codec, info.vocab_size)
    try:
        WorkloadRun(core, before, **{**given, "on_progress": lambda run: None}).run()
        run = WorkloadRun(core, prepared, open_loop=True, first_id=1 + len(before), **given)
        run.run()
    except Exception as error:  # a device fault or lack of memory in a step
        raise BenchFailure(f"the probe at {rate:.3g} requests/s failed: {step_failure(error)}") from error
    return judge(run.recorder.timelines, rate)


# The command ---------------------------------------------------------------------------------------------------------


def report_rate(args: argparse.Namespace, chosen: Chosen, out: TextIO) -> int:
    """Load, search, print and write; gives the exit code: 0 where the rate was found."""
    try:
        with Progress() as progress:
            loaded = load(chosen.config, progress)
            with StopSignal() as stop:
                result = find_rate(
                    loaded,
                    chosen.workloads[0],
                    chosen.config,
                    warm_up=args.warmup,
                    progress=progress,
                    stop_wanted=lambda: stop.wanted,
                )
    except (BenchFailure, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted before there was a result")
    code = 0 if result["saturation_rate"] is not None else _fail(result["summary"])
    try:
        text = json.dumps(result, allow_nan=False, indent=2) + "\n"
        deliver(args.json, text, out, lambda: print_probes(result, out))
    except OutputFailure as failure:
        return _fail(str(failure))
    return code


def _fail(message: str) -> int:
    print(f"batchscope bench: {message}", file=sys.stderr)
    return 1


def print_probes(result: dict[str, Any], stream: TextIO) -> None:
    console = Console(file=stream, width=None if stream.isatty() else 100, markup=False)
    where = f"{result['dtype']} on {result['device']}"
    title = f"{result['workload']} · {result['model_id']} · {where} · {result['discipline']}"
    console.print(title, style="bold", soft_wrap=True)
    table = Table(title="Requests per second", title_justify="left", box=None, pad_edge=False)
    for column in ("asked", "offered", "achieved", "P99 TTFT, ms", "the queue"):
        table.add_column(column, justify="left" if column == "the queue" else "right")
    for probe in sorted(result["probes"], key=lambda probe: float(probe["rate"])):
        rates = (figure(probe[key], 3) for key in ("rate", "offered", "achieved"))
        table.add_row(*rates, figure(probe["p99_ttft_ms"]), "grew" if probe["grew"] else "held")
    console.print(table)
    console.print(result["summary"], soft_wrap=True)
