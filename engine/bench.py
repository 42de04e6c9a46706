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

from engine.bench_options import (
    Chosen,
    add_engine_options,
    add_load_options,
    add_record_options,
    add_result_options,
    add_workload_options,
    check_usage,
    choose,
)
from engine.bench_record import RunRecording
from engine.bench_report import Progress, print_table
from engine.bench_run import PreparedRequest, WorkloadRun, prepare, warm_up_requests
from engine.config import EngineConfig
from engine.events import Keyframe, StepRecord
from engine.failures import describe, step_failure
from engine.load_shapes import MAX_SEED
from engine.metrics import RunRecorder, summarise
from engine.output_files import OutputFailure, deliver
from engine.quick_import import quick_import
from engine.step_counters import StepCounters
from engine.workload import Workload, WorkloadError

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.loader import LoadedEngine


class BenchFailure(Exception):
    """The run cannot be made or finished; the message is for the user."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="batchscope bench", description="One run of a workload, without a window.")
    add_workload_options(parser)
    add_engine_options(parser)
    load = add_load_options(parser)
    load.add_argument("--seed", type=int, metavar="N", help="of prompts, arrivals and sampling")
    load.add_argument(
        "--find-rate", action="store_true", help="search the request rate where the queue starts to grow, in probes"
    )
    result = add_result_options(parser)
    add_record_options(result)
    return parser


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
    with quick_import():
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
    on_record: Callable[[WorkloadRun, StepRecord], None] = lambda run, record: None,
    recording: RunRecording | None = None,
) -> dict[str, Any]:
    """Run ``workload`` and return the result; ``interrupted`` and ``failure`` tell of one cut short. ``on_record`` gets
    the record of each step, those of the warm-up too, which is a run of its own. ``recording`` gets those of the run
    itself and is closed after it.

    Raises :class:`BenchFailure` where not even the warm-up runs through.
    """
    core, info = loaded.core, loaded.info
    prepared = prepare(workload, loaded.codec, info.vocab_size, info.max_model_len)
    before = warm_up_requests(prepared, warm_up, loaded.codec, info.vocab_size)
    warmed = _warm_up(core, before, workload, progress, stop_wanted, on_record) if before else None
    begun = core.keyframe()
    counters = StepCounters(
        begun.totals,
        num_blocks=begun.num_blocks,
        block_size=begun.block_size,
        max_num_seqs=begun.max_num_seqs,
        kv_bytes_per_block=info.kv_bytes_per_block,
    )
    run = WorkloadRun(
        core
        if recording is None
        else recording.of(core, loaded.codec.decode, config=config, info=info, workload=workload.name),
        prepared,
        time.perf_counter,
        time.sleep,
        workload.arrivals.max_concurrency,
        workload.open_loop,
        first_id=1 + len(before),
        counters=counters,
        stop_wanted=stop_wanted,
        on_progress=progress.running if progress else lambda run: None,
        on_record=on_record,
    )
    failure = ""
    try:
        run.run()
    except Exception as error:  # a device fault or lack of memory in a step: what completed is still a result
        failure = step_failure(error)
    finally:
        if recording is not None:
            recording.close()
    timelines = run.recorder.timelines
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "workload": workload.name,
        **_engine_facts(loaded, config, begun),
        **summarise(timelines, workload, elapsed=run.elapsed, objectives=objectives),
        **counters.summary(),
        "interrupted": stop_wanted(),
        "failure": failure,
        "first_token_at": first_token_at(warmed or run.recorder),
        "peak_memory_mb": round(peak_memory_mb(), 1),
    }
    if save_outputs:
        result["output_token_ids"] = [t.token_ids for t in timelines]
    return result


def _warm_up(
    core: EngineCore,
    before: Sequence[PreparedRequest],
    workload: Workload,
    progress: Progress | None,
    stop_wanted: Callable[[], bool],
    on_record: Callable[[WorkloadRun, StepRecord], None],
) -> RunRecorder:
    """Run what goes before the workload. Raises :class:`BenchFailure`: nothing of it counts yet."""
    try:
        return WorkloadRun(
            core,
            before,
            time.perf_counter,
            time.sleep,
            workload.arrivals.max_concurrency,
            stop_wanted=stop_wanted,
            on_progress=progress.warming_up if progress else lambda run: None,
            on_record=on_record,
        ).run()
    except Exception as error:  # as in the run itself
        raise BenchFailure(f"the warm-up failed: {step_failure(error)}") from error


def first_token_at(recorder: RunRecorder) -> float | None:
    """When the first token of all was there, in seconds since the epoch, so that whoever started this process can tell
    how long that took; None without a token."""
    instants = [recorder.start + t.token_times[0] for t in recorder.timelines if t.token_times]
    if not instants:
        return None
    return datetime.datetime.now(datetime.UTC).timestamp() - (time.perf_counter() - min(instants))


def _engine_facts(loaded: LoadedEngine, config: EngineConfig, begun: Keyframe) -> dict[str, Any]:
    info, scheduler = loaded.info, config.scheduler
    return {
        "backend": info.backend,
        "backend_reason": info.backend_reason,
        "model_id": info.name,
        "weights_sha256": info.weights_sha256,
        "dtype": info.dtype,
        "kv_dtype": info.kv_dtype,
        "device": info.device,
        "threads": info.threads,
        "discipline": scheduler.discipline,
        "order": scheduler.order,
        "preemption": scheduler.preemption,
        "speculative": scheduler.speculative,
        "chunked_prefill": scheduler.chunked_prefill,
        "max_num_seqs": begun.max_num_seqs,
        "token_budget": begun.token_budget,
        "max_model_len": info.max_model_len,
        "block_size": begun.block_size,
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    check_usage(parser, args)
    if args.seed is not None and not 0 <= args.seed <= MAX_SEED:
        parser.error(f"--seed is {args.seed}; it must be 0 to {MAX_SEED:,}")
    try:
        chosen = choose(parser, args, [args.seed])
    except WorkloadError as error:
        print(f"batchscope bench: {error}", file=sys.stderr)
        return 1
    with own_stdout(args.json == "-") as out:
        if args.find_rate:
            from engine.saturation_run import report_rate

            return report_rate(args, chosen, out)
        return _run_and_report(args, chosen, out)


def _run_and_report(args: argparse.Namespace, chosen: Chosen, out: TextIO) -> int:
    recording = RunRecording(args.record, args.record_texts) if args.record else None
    try:
        with Progress() as progress:
            loaded = load(chosen.config, progress)
            with StopSignal() as stop:
                result = run_bench(
                    loaded,
                    chosen.workloads[0],
                    chosen.config,
                    warm_up=args.warmup,
                    objectives=chosen.objectives,
                    save_outputs=args.save_outputs,
                    progress=progress,
                    stop_wanted=lambda: stop.wanted,
                    recording=recording,
                )
    except (BenchFailure, OSError) as error:
        print(f"batchscope bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("batchscope bench: interrupted before there was a result", file=sys.stderr)
        return 1
    code = _verdict(result)
    if recording is not None and recording.failure:
        print(f"batchscope bench: the run was not recorded to its end: {recording.failure}", file=sys.stderr)
        code = 1
    try:
        text = json.dumps(msgspec.to_builtins(result), allow_nan=False, indent=2) + "\n"
        deliver(args.json, text, out, lambda: print_table(result, out))
    except OutputFailure as failure:
        print(f"batchscope bench: {failure}", file=sys.stderr)
        code = 1
    return code


def _verdict(result: dict[str, Any]) -> int:
    """Say on the error output what went wrong, and give the exit code."""
    if clipped := result["rows_clipped"]:
        context = f"{result['max_model_len']:,} tokens"
        print(
            f"batchscope bench: {clipped:,} requests were clipped to the model's context of {context}", file=sys.stderr
        )
    faults = run_faults(result)
    if result["interrupted"]:
        completed = f"{result['completed']} of {result['num_prompts']}"
        faults.insert(1 if result["failure"] else 0, f"interrupted; {completed} requests had completed")
    for fault in faults:
        print(f"batchscope bench: {fault}", file=sys.stderr)
    return 1 if faults else 0


def run_faults(result: dict[str, Any]) -> list[str]:
    """What went wrong in a run, a sentence each."""
    faults = [result["failure"]] if result["failure"] else []
    if shrinks := result.get("pool_shrinks"):
        first, last, steps = shrinks[0], shrinks[-1], "step" if len(shrinks) == 1 else "steps"
        faults.append(
            f"memory ran out in {len(shrinks)} {steps} ({last['cause']}), and the pool shrank from "
            f"{first['before']:,} to {last['num_blocks']:,} KV blocks"
        )
    if failed := result["failed"]:
        reasons = list(dict.fromkeys(error for error in result["errors"] if error))
        more = f" (and {len(reasons) - 3} other reasons)" if len(reasons) > 3 else ""
        faults.append(f"{failed} of {result['num_prompts']} requests failed: {'; '.join(reasons[:3])}{more}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
