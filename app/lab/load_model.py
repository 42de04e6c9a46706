"""What the load panel checks and shows, without Qt: whether this engine can serve a load, and a result's figures."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from app.translation import tr
from app.words import NOT_AVAILABLE, count
from engine.config import EngineConfig
from engine.messages import ModelInfo
from engine.metrics import RequestTimeline, distribution
from engine.workload import EngineOptions, Workload, WorkloadShape, longest, prompt_length

NOT_READY: dict[str, str] = {
    "stopped": tr("No model is loaded yet: load one, then start the load."),
    "starting": tr("The engine is starting; the load can begin when the model is ready."),
    "loading": tr("The model is loading; the load can begin when it is ready."),
    "failed": tr("The model could not be loaded: load another one, then start the load."),
    "dead": tr("The engine has died: restart it, then start the load."),
}
"""State of the engine -> what stands between it and a load."""
LIVE_ROWS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2EL", "e2el"))
ORIGIN_ROWS = (
    (tr("due TTFT"), "schedule_ttft"),
    (tr("due E2EL"), "schedule_e2el"),
    (tr("service TTFT"), "service_ttft"),
    (tr("service E2EL"), "service_e2el"),
)
"""From the intended arrival, and from the first admission."""
LIVE_COLUMNS = (tr("mean"), "p50", "p90", "p99")


def shape_fault(shape: WorkloadShape, max_model_len: int | None) -> str:
    """Why a load of these numbers cannot be served by a model of that context; empty where it can."""
    prompt, output = longest(shape.prompt_tokens), longest(shape.output_tokens)
    shared = shape.shared_prefix.tokens if shape.shared_prefix else 0
    total = shared + prompt + output
    if max_model_len is None or total <= max_model_len:
        return ""
    beginning = tr("A shared beginning of {shared:,}, a", shared=shared) if shared else "A"
    return tr(
        "{beginning} prompt of up to {prompt:,} and an answer of up to {output:,} tokens make {total:,}; the model's "
        "context holds {max_model_len:,}. Lower one of them.",
        beginning=beginning,
        prompt=prompt,
        output=output,
        total=total,
        max_model_len=max_model_len,
    )


@dataclass(frozen=True, slots=True)
class RequestLength:
    """Tokens of a request; a prompt given as text counts as 0, its length is the engine's to find."""

    prompt: int
    output: int


def lengths_of(workload: Workload) -> list[RequestLength]:
    return [RequestLength(prompt_length(r), r.output_tokens) for r in workload.requests]


def clip_remarks(workload: Workload, max_model_len: int) -> list[str]:
    """What of a trace is longer than the model's context, and what becomes of it."""
    counted = [r for r in workload.requests if r.clip and r.prompt is None]
    clipped = sum(r.clipped(prompt_length(r), max_model_len) is not r for r in counted)
    remarks = []
    if clipped:
        remarks.append(
            tr(
                "{clipped:,} of {requests} will be clipped to the model's context of {max_model_len:,} tokens.",
                clipped=clipped,
                requests=count(len(workload.requests), "request"),
                max_model_len=max_model_len,
            )
        )
    if any(r.clip and r.prompt is not None for r in workload.requests):
        remarks.append(
            tr(
                "Prompts are texts: the engine counts their tokens and clips what is longer than its context of "
                "{max_model_len:,}.",
                max_model_len=max_model_len,
            )
        )
    return remarks


def fitted(workload: Workload, max_model_len: int) -> Workload:
    """The workload with the lengths that remain of what is clipped."""
    requests = tuple(r.clipped(prompt_length(r), max_model_len) for r in workload.requests)
    return dataclasses.replace(workload, requests=requests)


def misfits(lengths: list[RequestLength], info: ModelInfo) -> list[str]:
    """Sentences about requests that this engine will refuse or cut short; none where all fit."""
    sentences = []
    refused = [r.prompt for r in lengths if r.prompt >= info.max_model_len]
    if refused:
        sentences.append(
            tr(
                "{prompts} of up to {refused:,} tokens will be refused: the model's context holds {max_model_len:,}.",
                prompts=count(len(refused), "prompt"),
                refused=max(refused),
                max_model_len=info.max_model_len,
            )
        )
    cut = [r for r in lengths if r.prompt < info.max_model_len < r.prompt + r.output]
    if cut:
        sentences.append(
            tr(
                "{answers} will end at the model's context of {max_model_len:,} tokens.",
                answers=count(len(cut), "answer"),
                max_model_len=info.max_model_len,
            )
        )
    pool = info.num_blocks * info.block_size
    needs = [min(r.prompt + r.output, info.max_model_len) for r in lengths if r.prompt < info.max_model_len]
    large = [need for need in needs if need > pool]
    if large:
        sentences.append(
            tr(
                "{requests} of up to {large:,} tokens cannot fit: the pool has "
                "{num_blocks:,} blocks of {block_size}, {pool:,} tokens.",
                requests=count(len(large), "request"),
                large=max(large),
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                pool=pool,
            )
        )
    return sentences


def differences(wanted: EngineConfig, running: EngineConfig) -> list[str]:
    """``name wanted (running)`` for each option in which the two differ, by the names of the command line."""
    names = (
        ("model", lambda c: c.model),
        ("dtype", lambda c: c.dtype),
        ("kv_dtype", lambda c: c.kv_dtype),
        ("device", lambda c: c.device),
        ("cuda_graphs", lambda c: c.cuda_graphs),
        ("overlap", lambda c: c.overlap),
        ("threads", lambda c: c.threads),
        ("max_model_len", lambda c: c.max_model_len),
        ("memory_limit", lambda c: c.memory_limit),
        ("seed", lambda c: c.seed),
        ("block_size", lambda c: c.cache.block_size),
        ("kv_blocks", lambda c: c.cache.num_blocks),
        ("prefix_cache", lambda c: c.cache.prefix_cache),
        ("swap_blocks", lambda c: c.cache.swap_blocks),
        ("discipline", lambda c: c.scheduler.discipline),
        ("order", lambda c: c.scheduler.order),
        ("preemption", lambda c: c.scheduler.preemption),
        ("max_num_seqs", lambda c: c.scheduler.max_num_seqs),
        ("token_budget", lambda c: c.scheduler.max_num_batched_tokens),
        ("chunked_prefill", lambda c: c.scheduler.chunked_prefill),
        ("chunk_size", lambda c: c.scheduler.chunk_size),
        ("watermark", lambda c: c.scheduler.watermark),
        ("ageing", lambda c: c.scheduler.ageing),
        ("user_weights", lambda c: c.scheduler.user_weights),
        ("static_delivery", lambda c: c.scheduler.static_delivery),
        ("waiting_served_ratio", lambda c: c.scheduler.waiting_served_ratio),
        ("max_waiting_tokens", lambda c: c.scheduler.max_waiting_tokens),
        ("speculative", lambda c: c.scheduler.speculative),
        ("draft_tokens", lambda c: c.scheduler.draft_tokens),
    )
    return [
        tr(
            "{name} {wanted} (now {running})",
            name=name.replace("_", " "),
            wanted=_knob(get(wanted)),
            running=_knob(get(running)),
        )
        for name, get in names
        if get(wanted) != get(running)
    ]


def _knob(value: Any) -> str:
    if value is None:
        return "automatic"
    if isinstance(value, bool):
        return tr("on") if value else tr("off")
    if isinstance(value, dict):
        return ",".join(f"{user}={weight:g}" for user, weight in value.items()) or tr("none")
    return f"{value:,}" if isinstance(value, int) else str(value)


class ScenarioConfigs:
    """Which configuration a scenario wants of the engine.

    A scenario's options go over the configuration that the user chose, not over what an earlier scenario made of it.
    """

    def __init__(self) -> None:
        self._chosen: EngineConfig | None = None
        self._made: EngineConfig | None = None

    def wanted(self, options: EngineOptions, running: EngineConfig) -> EngineConfig:
        """What the engine should run with. Raises :class:`engine.config.ConfigError`."""
        if self._chosen is None or running != self._made:
            self._chosen = running
        return options.config(self._chosen)

    def restarted(self, config: EngineConfig) -> None:
        """The engine was restarted with ``config`` for the sake of a scenario."""
        self._made = config


def live_latencies(timelines: list[RequestTimeline], *, open_loop: bool) -> dict[str, float | None]:
    """Distributions in mid-run: TTFT and ITL of whatever has tokens, TPOT and E2EL of what has completed."""
    origins = [t.scheduled if open_loop else t.sent for t in timelines]
    pairs = list(zip(timelines, origins, strict=True))
    result: dict[str, float | None] = {}
    result |= distribution((t.ttft(o) for t, o in pairs), "ttft")
    result |= distribution((gap for t in timelines for gap in t.itls), "itl")
    result |= distribution((t.tpot for t in timelines if t.completed), "tpot")
    result |= distribution((t.e2el(o) for t, o in pairs if t.completed), "e2el")
    result |= distribution((t.ttft(t.scheduled) for t in timelines), "schedule_ttft")
    result |= distribution((t.ttft(t.service_origin) for t in timelines), "service_ttft")
    result |= distribution((t.e2el(t.scheduled) for t in timelines if t.completed), "schedule_e2el")
    result |= distribution((t.e2el(t.service_origin) for t in timelines if t.completed), "service_e2el")
    return result


def milliseconds(value: float | None) -> str:
    """A latency for a reader: ms below a second, else seconds; ``n/a`` without a sample."""
    if value is None:
        return NOT_AVAILABLE
    if value >= 999.5:
        return f"{value / 1e3:,.1f} s" if value >= 9_995 else f"{value / 1e3:.2f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:,.1f} ms"


def result_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The result of a run as name and figure, ``n/a`` where there is no sample."""

    def number(key: str, digits: int = 0, unit: str = "") -> str:
        value = summary.get(key)
        return NOT_AVAILABLE if value is None else f"{value:,.{digits}f}{unit}"

    rows = [
        (tr("completed"), f"{number('completed')} of {number('num_prompts')}"),
        (tr("failed"), number("failed")),
        (tr("duration"), number(tr("duration"), 1, " s")),
        (tr("prompt tokens"), number("total_input_tokens")),
        (tr("output tokens"), number("total_output_tokens")),
        (tr("output tokens/s"), number("output_throughput", 1)),
        (tr("all tokens/s"), number("total_token_throughput", 1)),
        (tr("requests/s"), number("request_throughput", 2)),
        (tr("most at once"), number("max_concurrent_requests")),
        (tr("preemptions"), number("preemptions")),
        (tr("recomputed tokens"), number("recomputed_tokens")),
        (tr("prefix-hit tokens"), number("prefix_hit_tokens")),
    ]
    if summary.get("goodput_objectives_ms"):
        rows.insert(8, (tr("goodput, requests/s"), number("request_goodput", 2)))
    if summary.get("rows_clipped"):
        rows.append((tr("clipped requests"), number("rows_clipped")))
    if summary.get("paused_seconds"):
        rows.append((tr("held up meanwhile"), number("paused_seconds", 1, " s")))
    if summary.get("swapped_blocks"):
        rows.append((tr("swapped blocks"), number("swapped_blocks")))
    if summary.get("padding_tokens"):
        rows.append((tr("padding tokens"), number("padding_tokens")))
    if summary.get("draft_tokens"):
        rows.append((tr("drafts accepted"), f"{number('accepted_tokens')} of {number('draft_tokens')}"))
    if summary.get("unfinished"):
        rows.insert(2, (tr("not finished"), number("unfinished")))
    return rows
