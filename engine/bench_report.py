"""What a run of ``bench`` shows on a terminal: progress while it runs, a table at the end."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

if TYPE_CHECKING:
    from engine.bench_run import WorkloadRun

NOT_AVAILABLE = "n/a"


class Progress:
    """A bar on the error output where that is a terminal; nothing in a pipe."""

    def __init__(self) -> None:
        self._bar: RichProgress | None = None
        self._stage = ""
        self.label = "Requests"
        """What the run in progress is called."""
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("Loading", total=None, note="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def loading(self, stage: str, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=stage, completed=done, total=total or None)

    def warming_up(self, run: WorkloadRun) -> None:
        self._show("Warm-up", run)

    def running(self, run: WorkloadRun) -> None:
        self._show(self.label, run)

    def _show(self, stage: str, run: WorkloadRun) -> None:
        if self._bar is None:
            return
        if self._stage != stage:
            self._stage = stage
            self._bar.reset(self._task)  # the time of this stage, not of the one before it
        recorder = run.recorder
        elapsed = run.clock() - recorder.start
        rate = recorder.output_tokens / elapsed if elapsed > 0 else 0.0
        note = f"{len(recorder.open)} in flight · {rate:.0f} tok/s"
        total = len(run.prepared)
        self._bar.update(self._task, description=stage, completed=recorder.ended, total=total, note=note)


def figure(value: Any, digits: int = 1) -> str:
    """A number for a reader; ``n/a`` where there is no sample."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def print_table(result: dict[str, Any], stream: TextIO) -> None:
    """The figures most people look for; the JSON has them all."""
    # The names of files and users are no markup.
    console = Console(file=stream, width=None if stream.isatty() else 100, markup=False)
    where = f"{result['dtype']} on {result['device']}"
    title = f"{result['workload']} · {result['model_id']} · {where} · {result['discipline']}"
    console.print(title, style="bold", soft_wrap=True)
    counts = Table(show_header=False, box=None, pad_edge=False)
    counts.add_column(style="dim")
    counts.add_column(justify="right")
    for name, value in _count_rows(result):
        if value:
            counts.add_row(name, value)
    console.print(counts)
    console.print()
    console.print(_latency_table(result))
    if result["failed"] or result["unfinished"]:
        completed = f"{figure(result['completed'])} of {figure(result['num_prompts'])} requests"
        console.print(f"\nTokens and latencies are those of the {completed} that completed.", soft_wrap=True)


def _count_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and figure; an empty figure is not shown."""

    def several(*keys: str) -> str:
        return " / ".join(figure(result[key]) for key in keys)

    static = result["static_totals"]
    shares = (static["eta"], static["predicted_useful"], static["measured_useful"]) if static else ()
    return [
        ("completed / failed / unfinished", several("completed", "failed", "unfinished")),
        (
            "rows of the file read / clipped / rejected",
            several("rows_read", "rows_clipped", "rows_rejected")
            if result["rows_clipped"] or result["rows_rejected"]
            else "",
        ),
        ("duration", f"{figure(result['duration'], 2)} s"),
        ("input / output tokens", several("total_input_tokens", "total_output_tokens")),
        ("output throughput", f"{figure(result['output_throughput'])} tok/s"),
        ("total throughput", f"{figure(result['total_token_throughput'])} tok/s"),
        ("request throughput", f"{figure(result['request_throughput'], 2)} /s"),
        ("goodput", f"{figure(result['request_goodput'], 2)} /s" if result["goodput_objectives_ms"] else ""),
        ("steps / preemptions", several("steps", "preemptions")),
        ("recomputed / prefix-hit tokens", several("recomputed_tokens", "prefix_hit_tokens")),
        (
            "blocks swapped out / in",
            several("swapped_blocks", "swapped_in_blocks") if result["swapped_blocks"] else "",
        ),
        (
            "drafted / accepted tokens",
            f"{several('draft_tokens', 'accepted_tokens')} ({_percent(result['acceptance_rate'])})"
            if result["draft_tokens"]
            else "",
        ),
        ("padding tokens", figure(result["padding_tokens"]) if result["padding_tokens"] else ""),
        ("static batches: η / useful predicted / measured", " / ".join(map(_percent, shares))),
        ("KV blocks, peak of all", f"{figure(result['kv_blocks_peak'])} of {figure(result['kv_blocks_total'])}"),
        ("running at once, mean / peak", f"{figure(result['running_mean'])} / {figure(result['running_peak'])}"),
        (
            "slot utilisation while waiting / run",
            f"{_percent(result['slot_utilisation'])} / {_percent(result['slot_utilisation_run'])}",
        ),
        ("peak memory / load", f"{figure(result['peak_memory_mb'], 0)} MB / {figure(result['load_seconds'])} s"),
    ]


def _percent(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:.0%}"


def _latency_table(result: dict[str, Any]) -> Table:
    table = Table(title=f"Milliseconds, from {result['latency_from']}", title_justify="left", box=None, pad_edge=False)
    columns = ("mean", "p50", "p90", "p99")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    rows = [
        ("TTFT", "ttft"),
        ("TPOT", "tpot"),
        ("ITL", "itl"),
        ("E2EL", "e2el"),
        ("TTFT, service only", "service_ttft"),
        ("E2EL, service only", "service_e2el"),
    ]
    if result["latency_from"] != "intended arrival":
        rows += [("TTFT, intended arrival", "schedule_ttft"), ("E2EL, intended arrival", "schedule_e2el")]
    for name, key in rows:
        table.add_row(name, *(figure(result[f"{column}_{key}_ms"]) for column in columns))
    for kind in ("priority", "user"):
        groups = result[f"by_{kind}"]
        for group, part in groups.items() if len(groups) > 1 else ():
            for name, key in (("TTFT", "ttft"), ("E2EL", "e2el")):
                label = f"{name}, {kind} {group or '(none)'}"
                table.add_row(label, *(figure(part[f"{column}_{key}_ms"]) for column in columns))
    return table
