"""The result of a comparison: its figures, what is said of them, and how a saved one is read. Light.

::

    {"title", "watch", "variants": [{"name", "options"}], "baseline", "interrupted", "failures": {variant: sentence},
     "ratios": {variant: {key: x}}, "same_ids": {variant: {…}},
     "runs": [the result of a bench + "variant", "seed", "knobs": {option: value},
              "timeline": [{"request", "priority", "user", "arrival", "spans": [[kind, begin, end, tokens], …],
                            "preempted_at", "end", "reason"}, …]]}

Times of a timeline are seconds after the start of its run, its lanes are in the order of the workload, and a span's
kind is an :class:`engine.lanes.SpanKind`. What stands for a variant is the median over its seeds, each a run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.lanes import SpanKind
from engine.same_ids import NEAR_TIE

NOT_AVAILABLE = "n/a"
Result = dict[str, Any]
Run = dict[str, Any]

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


# Figures -------------------------------------------------------------------------------------------------------------


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
    zero_counts: bool = False
    """Whether it is worth showing where it is 0 everywhere."""

    def text(self, value: float | None) -> str:
        if value is None:
            return NOT_AVAILABLE
        if self.unit == "%":
            return f"{value:.0%}"
        return f"{value:,.{self.digits}f}" + (f" {self.unit}" if self.unit else "")

    @property
    def direction(self) -> str:
        return {True: "higher is better", False: "lower is better", None: ""}[self.higher_is_better]


FIGURES = (
    Figure("requests per second", "request_throughput", "/s", 2, True, "Completed requests / duration of the run."),
    Figure(
        "goodput",
        "request_goodput",
        "/s",
        2,
        True,
        "Completed requests that meet every objective / duration of the run.",
        zero_counts=True,
    ),
    Figure(
        "output throughput", "output_throughput", "tok/s", 1, True, "Output tokens of completed requests / duration."
    ),
    Figure("duration", "duration", "s", 1, False, "From the start of the run to the last token."),
    Figure("mean TTFT", "mean_ttft_ms", "ms", 0, False, "Time to first token, queueing included."),
    Figure("P99 TTFT", "p99_ttft_ms", "ms", 0, False, "Its 99th percentile."),
    Figure("mean TPOT", "mean_tpot_ms", "ms", 0, False, "(E2EL - TTFT) / (output tokens - 1) of each request."),
    Figure("mean ITL", "mean_itl_ms", "ms", 0, False, "Gap between two tokens of a request."),
    Figure("P99 ITL", "p99_itl_ms", "ms", 0, False, "Its 99th percentile."),
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
    Figure(
        "drafts accepted", "acceptance_rate", "%", 0, True, "Drafted tokens that the model itself would have given."
    ),
)
CHARTED = frozenset(
    {
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "mean_ttft_ms",
        "p99_ttft_ms",
        "p99_itl_ms",
        "mean_e2el_ms",
        "p99_e2el_ms",
        "slot_utilisation",
        "preemptions",
    }
)
"""Figures that have bars, beside a row of the table."""
WASTE = {
    "padding": "padding, tokens computed",
    "recomputed": "recomputed, tokens",
    "rejected_drafts": "rejected drafts, tokens",
    "reserved": "reserved but unused, KV slots",
    "tail": "tail of the last block, KV slots",
}
"""Kinds of waste in a run's ``waste``, and what they count."""
EFFICIENCY = {
    "eta": "η, the literature's efficiency",
    "predicted_useful": "useful share of the work, predicted",
    "measured_useful": "useful share of the work, measured",
}
"""Of static batches, in a run's ``static_totals``."""
DEFINITIONS = {
    "padding, recomputed, rejected drafts": "Tokens that were computed; their seconds are each step's time times their "
    "share of the tokens it computed.",
    "reserved, tail": "The mean of empty KV slots that running requests hold, weighted by time; their seconds are "
    "pool-seconds, step time times slots divided by the slots of the pool.",
    "η": "Σ(prompt + output) / (B · max(prompt + output)) of a static batch of B requests.",
    "useful share": "Σ(p + o - 1) / (B · (max p + max o - 1)) predicted from p prompt and o output tokens; measured: "
    "tokens computed for the requests themselves / all that were computed.",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the seeds of a variant."""

    least: float
    median: float
    most: float
    seeds: int
    """How many of them have it."""


def variants_of(result: Result) -> list[str]:
    """Those that have a run, in the order of the plan."""
    ran = {run["variant"] for run in result["runs"]}
    return [variant["name"] for variant in result["variants"] if variant["name"] in ran]


def runs_of(result: Result, variant: str) -> list[Run]:
    return [run for run in result["runs"] if run["variant"] == variant]


def spread_of(runs: Sequence[Run], variant: str, key: str) -> Spread | None:
    """None where no seed has the figure."""
    values = [value for run in runs if run["variant"] == variant and (value := run.get(key)) is not None]
    return Spread(min(values), statistics.median(values), max(values), len(values)) if values else None


def median_of(runs: Sequence[Run], variant: str, key: str) -> float | None:
    """The median over the seeds of those runs that have the figure."""
    spread = spread_of(runs, variant, key)
    return None if spread is None else spread.median


def shown_figures(result: Result) -> list[Figure]:
    """Those that are not missing, or 0 and not worth a row, everywhere."""

    def tells(figure: Figure, value: float | None) -> bool:
        return value is not None and (value != 0 or figure.zero_counts)

    return [f for f in FIGURES if any(tells(f, run.get(f.key)) for run in result["runs"])]


def charted_figures(result: Result) -> list[Figure]:
    return [figure for figure in shown_figures(result) if figure.key in CHARTED]


def ratios_to(runs: Sequence[Run], baseline: str) -> dict[str, dict[str, float | None]]:
    """For each variant the median over the seeds of its figures divided by the baseline's of the same seed.

    None where no seed has both, or the baseline's is 0; empty where the baseline has no run.
    """
    of_baseline = {run["seed"]: run for run in runs if run["variant"] == baseline}
    if not of_baseline:
        return {}
    result: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(run["variant"] for run in runs):
        pairs = [(r, of_baseline[r["seed"]]) for r in runs if r["variant"] == name and r["seed"] in of_baseline]
        result[name] = {
            key: _median_ratio([(run.get(key), base.get(key)) for run, base in pairs]) for key in RATIO_KEYS
        }
    return result


def _median_ratio(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    values = [value / base for value, base in pairs if value is not None and base]
    return statistics.median(values) if values else None


def waste_of(result: Result, variant: str, kind: str) -> tuple[float | None, float | None]:
    """Tokens or KV slots of one kind of ``WASTE``, and their seconds: medians over the seeds."""
    wastes = [run["waste"][kind] for run in runs_of(result, variant)]

    def median(name: str) -> float | None:
        values = [waste[name] for waste in wastes if waste[name] is not None]
        return statistics.median(values) if values else None

    return median("tokens"), median("seconds")


def efficiency_of(result: Result, variant: str) -> dict[str, float | None] | None:
    """What ``EFFICIENCY`` names, medians over the seeds; None for a variant that formed no static batch."""
    totals = [run["static_totals"] for run in runs_of(result, variant) if run["static_totals"]]
    if not totals:
        return None
    values = {key: [t[key] for t in totals if t[key] is not None] for key in EFFICIENCY}
    return {key: statistics.median(found) if found else None for key, found in values.items()}


# Words ---------------------------------------------------------------------------------------------------------------


def ratio_text(result: Result, variant: str, key: str) -> str:
    """``2.41×``; empty for the baseline and where there is no ratio."""
    value = result["ratios"].get(variant, {}).get(key)
    return "" if value is None or variant == result["baseline"] else f"{value:.2f}×"


def ids_text(result: Result, variant: str) -> str:
    """How a variant's answers agree with the baseline's, in words."""
    found = result["same_ids"].get(variant)
    if found is None:
        return "reference" if variant == result["baseline"] else NOT_AVAILABLE
    parts = [f"{found['same']} same"]
    parts += [f"{found['near_ties']} near ties"] if found["near_ties"] else []
    parts += [f"{found['different']} different"] if found["different"] else []
    parts += [f"{found['not_compared']} not compared"] if found["not_compared"] else []
    return ", ".join(parts)


def subtitle_of(result: Result) -> str:
    first = result["runs"][0]
    return f"{first['workload']} · {first['model_id']} · {first['dtype']} on {first['device']}"


def footnote(result: Result) -> str:
    seeds = len({run["seed"] for run in result["runs"]})
    medians = f"Medians over {seeds} seeds. " if seeds > 1 else ""
    return (
        f"{medians}× is the ratio to {result['baseline']}. Ids are the same, or a near tie: they differ only from a "
        f"token on where the two highest logits of {result['baseline']} lie within {NEAR_TIE:g}."
    )


# Saved ones ----------------------------------------------------------------------------------------------------------

MAX_FILE_BYTES = 512 * 2**20


class ComparisonError(ValueError):
    """A file that holds no comparison, a sentence for the user."""


class _Variant(msgspec.Struct):
    name: str
    options: dict[str, Any]


class _Lane(msgspec.Struct):
    request: int
    priority: int
    user: str
    arrival: float
    spans: list[tuple[int, float, float, int]]
    preempted_at: list[float]
    end: float | None
    reason: str


class _Waste(msgspec.Struct):
    tokens: float | None
    seconds: float | None


class _Run(msgspec.Struct):
    """What the readers of a run take for granted."""

    variant: str
    seed: int | None
    knobs: dict[str, Any]
    timeline: list[_Lane]
    waste: dict[str, _Waste]
    static_totals: dict[str, float | None] | None
    workload: str
    model_id: str
    weights_sha256: str
    backend: str
    backend_reason: str
    device: str
    dtype: str
    threads: int
    num_prompts: int
    request_rate: float | str | None
    latency_from: str
    goodput_objectives_ms: dict[str, float] | None
    date: str


class _Comparison(msgspec.Struct):
    title: str
    watch: str
    variants: list[_Variant]
    baseline: str
    interrupted: bool
    failures: dict[str, str]
    ratios: dict[str, dict[str, float | None]]
    same_ids: dict[str, dict[str, int]]
    runs: list[_Run]


def load_comparison(path: str | Path) -> Result:
    """Read what ``compare --json`` or the window has saved. Raises :class:`ComparisonError`."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ComparisonError(f"{path} has {size:,} bytes; a comparison has at most {MAX_FILE_BYTES:,}.")
        return read_comparison(path.read_bytes())
    except OSError as error:
        raise ComparisonError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ComparisonError as error:
        raise ComparisonError(f"{path}: {error}") from error


def read_comparison(text: bytes) -> Result:
    """A result from its JSON, all that its readers need checked. Raises :class:`ComparisonError`."""
    try:
        result = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ComparisonError(f"this is no comparison: {error}.") from error
    if not isinstance(result, dict) or not isinstance(result.get("runs"), list):
        raise ComparisonError("this is no comparison: it has no runs.")
    if "variants" not in result:
        raise ComparisonError(
            "this comparison was saved by a version that kept neither variants nor timelines; run it again."
        )
    try:
        checked = msgspec.convert(result, _Comparison)
    except msgspec.ValidationError as error:
        raise ComparisonError(f"this is no comparison that this version reads: {error}.") from error
    _check(checked, result["runs"])
    return result


def _check(checked: _Comparison, runs: list[Run]) -> None:
    names = {variant.name for variant in checked.variants}
    if not runs:
        raise ComparisonError("this comparison has no run that was completed.")
    kinds = {int(kind) for kind in SpanKind}
    for checked_run, run in zip(checked.runs, runs, strict=True):
        if checked_run.variant not in names:
            raise ComparisonError(f"a run is of {checked_run.variant!r}, which is none of the variants.")
        if missing := [kind for kind in WASTE if kind not in checked_run.waste]:
            raise ComparisonError(f"a run of {checked_run.variant} does not tell its waste by {missing[0]}.")
        for figure in FIGURES:
            value = run.get(figure.key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ComparisonError(f"{figure.key} of {checked_run.variant} is {value!r}, not a number.")
        for lane in checked_run.timeline:
            if unknown := {span[0] for span in lane.spans} - kinds:
                raise ComparisonError(
                    f"a timeline has states of kind {min(unknown)}, which this version does not know."
                )
