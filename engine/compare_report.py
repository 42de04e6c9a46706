"""What ``compare`` shows on a terminal, and the figures it shares with the report in HTML."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from engine.bench_report import NOT_AVAILABLE
from engine.same_ids import NEAR_TIE


@dataclass(frozen=True, slots=True)
class Figure:
    label: str
    key: str
    unit: str = ""
    digits: int = 0
    higher_is_better: bool | None = None
    """None: neither is."""
    meaning: str = ""
    """Its definition, for the reader of a report."""

    def text(self, value: float | None) -> str:
        if value is None:
            return NOT_AVAILABLE
        if self.unit == "%":
            return f"{value:.0%}"
        return f"{value:,.{self.digits}f}" + (f" {self.unit}" if self.unit else "")


FIGURES = (
    Figure("requests per second", "request_throughput", "/s", 2, True, "Completed requests / duration of the run."),
    Figure(
        "output throughput", "output_throughput", "tok/s", 1, True, "Output tokens of completed requests / duration."
    ),
    Figure("duration", "duration", "s", 1, False, "From the first arrival to the last token."),
    Figure("mean TTFT", "mean_ttft_ms", "ms", 0, False, "Time to first token, queueing included."),
    Figure("P99 TTFT", "p99_ttft_ms", "ms", 0, False, "Its 99th percentile."),
    Figure("mean TPOT", "mean_tpot_ms", "ms", 0, False, "(E2EL - TTFT) / (output tokens - 1) of each request."),
    Figure("P99 ITL", "p99_itl_ms", "ms", 0, False, "99th percentile of the gaps between two tokens of a request."),
    Figure("mean E2EL", "mean_e2el_ms", "ms", 0, False, "End-to-end latency, queueing included."),
    Figure("P99 E2EL", "p99_e2el_ms", "ms", 0, False, "Its 99th percentile."),
    Figure("steps", "steps", "", 0, None, "Iterations of the engine that computed something."),
    Figure(
        "slots used while waiting",
        "slot_utilisation",
        "%",
        0,
        True,
        "Places taken by requests without a complete answer / max_num_seqs, over the steps during which one waited.",
    ),
    Figure("slots used, whole run", "slot_utilisation_run", "%", 0, True, "The same over all steps."),
    Figure("running at once, mean", "running_mean", "", 1, True, "Requests without a complete answer, mean per step."),
    Figure("KV blocks, peak", "kv_blocks_peak", "", 0, None, "Most blocks that requests referred to at one moment."),
    Figure("padding tokens", "padding_tokens", "", 0, False, "Computed only to fill a static batch."),
    Figure("preemptions", "preemptions", "", 0, None, "Running requests whose blocks were taken."),
    Figure("recomputed tokens", "recomputed_tokens", "", 0, False, "Computed a second time after a preemption."),
    Figure("prefix-hit tokens", "prefix_hit_tokens", "", 0, None, "Prompt tokens found in the prefix cache."),
)


def disciplines_of(result: dict[str, Any]) -> list[str]:
    """In the order of their first runs."""
    return list(dict.fromkeys(run["discipline"] for run in result["runs"]))


def median_of(runs: Sequence[dict[str, Any]], discipline: str, key: str) -> float | None:
    """The median over the seeds of those runs that have the figure."""
    values = [v for run in runs if run["discipline"] == discipline and (v := run.get(key)) is not None]
    return statistics.median(values) if values else None


def shown_figures(result: dict[str, Any]) -> list[Figure]:
    """Those that are not 0 or missing everywhere."""
    return [f for f in FIGURES if any(run.get(f.key) for run in result["runs"])]


def ratio_text(result: dict[str, Any], discipline: str, key: str) -> str:
    """``2.41×``; empty for the baseline and where there is no ratio."""
    value = result["ratios"].get(discipline, {}).get(key)
    return "" if value is None or discipline == result["baseline"] else f"{value:.2f}×"


def ids_text(result: dict[str, Any], discipline: str) -> str:
    """How a discipline's answers agree with the baseline's, in words."""
    found = result["same_ids"].get(discipline)
    if found is None:
        return "reference" if discipline == result["baseline"] else NOT_AVAILABLE
    parts = [f"{found['same']} same"]
    parts += [f"{found['near_ties']} near ties"] if found["near_ties"] else []
    parts += [f"{found['different']} different"] if found["different"] else []
    parts += [f"{found['not_compared']} not compared"] if found["not_compared"] else []
    return ", ".join(parts)


def title_of(result: dict[str, Any]) -> str:
    first = result["runs"][0]
    return f"{first['workload']} · {first['model_id']} · {first['dtype']} on {first['device']}"


def footnote(result: dict[str, Any]) -> str:
    seeds = len({run["seed"] for run in result["runs"]})
    medians = f"Medians over {seeds} seeds. " if seeds > 1 else ""
    return (
        f"{medians}× is the ratio to {result['baseline']}. Ids are the same, or a near tie: they differ only from a "
        f"token on where the two highest logits of {result['baseline']} lie within {NEAR_TIE:g}."
    )


def print_comparison(result: dict[str, Any], stream: TextIO) -> None:
    """The figures most people look for, a discipline a column; the JSON has them all."""
    names = disciplines_of(result)
    console = Console(file=stream, width=None if stream.isatty() else 28 + 26 * len(names))
    console.print(title_of(result), style="bold", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for figure in shown_figures(result):
        cells = []
        for name in names:
            value = figure.text(median_of(result["runs"], name, figure.key))
            ratio = ratio_text(result, name, figure.key)
            cells.append(f"{value}  [dim]{ratio:>6}[/dim]" if len(names) > 1 else value)
        table.add_row(figure.label, *cells)
    table.add_row("ids", *(ids_text(result, name) for name in names))
    console.print(table)
    console.print(f"\n{footnote(result)}", style="dim", soft_wrap=True)
