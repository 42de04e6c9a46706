"""What the load panel offers and checks, without Qt: a workload by its ranges, and whether this engine can serve it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from app.words import count
from engine.config import EngineConfig
from engine.messages import ModelInfo
from engine.metrics import RequestTimeline, distribution
from engine.workload import (
    Arrivals,
    EngineOptions,
    PriorityShare,
    Uniform,
    Workload,
    WorkloadShape,
)

ArrivalKind = Literal["at once", "closed loop", "open loop"]
NOT_AVAILABLE = "n/a"
LIVE_ROWS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2EL", "e2el"))
LIVE_COLUMNS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class LoadRanges:
    """A load by its ranges; lengths in tokens."""

    requests: int = 16
    prompt_low: int = 32
    prompt_high: int = 128
    output_low: int = 16
    output_high: int = 64
    arrivals: ArrivalKind = "at once"
    concurrency: int = 4
    """Closed loop: requests in flight."""
    rate: float = 2.0
    """Open loop: requests per second."""
    burstiness: float = 1.0
    """Open loop: 1 is Poisson."""
    urgent_percent: int = 0
    """Share of requests of priority 0; the others have priority 1. 0: all alike."""
    seed: int = 0

    def fault(self, max_model_len: int | None) -> str:
        """Why this load cannot be started; empty where it can."""
        for name, low, high in (
            ("Prompt", self.prompt_low, self.prompt_high),
            ("Answer", self.output_low, self.output_high),
        ):
            if low > high:
                return f"{name} lengths run from {low:,} to {high:,} tokens: the first must not be the larger."
        longest = self.prompt_high + self.output_high
        if max_model_len is not None and longest > max_model_len:
            return (
                f"A prompt of up to {self.prompt_high:,} and an answer of up to {self.output_high:,} tokens make "
                f"{longest:,}; the model's context holds {max_model_len:,}. Lower one of them."
            )
        return ""

    def build(self) -> Workload:
        """Draw the requests. Raises :class:`engine.workload.ShapeError`."""
        arrivals = Arrivals()
        if self.arrivals == "closed loop":
            arrivals = Arrivals(max_concurrency=self.concurrency)
        elif self.arrivals == "open loop":
            arrivals = Arrivals(request_rate=self.rate, burstiness=self.burstiness)
        priorities = []
        if self.urgent_percent:
            priorities = [PriorityShare(0, self.urgent_percent), PriorityShare(1, 100 - self.urgent_percent)]
        shape = WorkloadShape(
            requests=self.requests,
            prompt_tokens=Uniform(low=self.prompt_low, high=self.prompt_high),
            output_tokens=Uniform(low=self.output_low, high=self.output_high),
            priorities=priorities,
            arrivals=arrivals,
            seed=self.seed,
        )
        return shape.build("ranges")


@dataclass(frozen=True, slots=True)
class RequestLength:
    """Tokens of a request; a prompt given as text counts as 0, its length is the engine's to find."""

    prompt: int
    output: int


def lengths_of(workload: Workload) -> list[RequestLength]:
    return [RequestLength(r.prompt_tokens or len(r.prompt_token_ids or ()), r.output_tokens) for r in workload.requests]


def misfits(lengths: list[RequestLength], info: ModelInfo) -> list[str]:
    """Sentences about requests that this engine will refuse or cut short; none where all fit."""
    sentences = []
    refused = [r.prompt for r in lengths if r.prompt >= info.max_model_len]
    if refused:
        sentences.append(
            f"{count(len(refused), 'prompt')} of up to {max(refused):,} tokens will be refused: the model's context "
            f"holds {info.max_model_len:,}."
        )
    cut = [r for r in lengths if r.prompt < info.max_model_len < r.prompt + r.output]
    if cut:
        sentences.append(
            f"{count(len(cut), 'answer')} will end at the model's context of {info.max_model_len:,} tokens."
        )
    pool = info.num_blocks * info.block_size
    needs = [min(r.prompt + r.output, info.max_model_len) for r in lengths if r.prompt < info.max_model_len]
    large = [need for need in needs if need > pool]
    if large:
        sentences.append(
            f"{count(len(large), 'request')} of up to {max(large):,} tokens cannot fit: the pool has "
            f"{info.num_blocks:,} blocks of {info.block_size}, {pool:,} tokens."
        )
    return sentences


def differences(wanted: EngineConfig, running: EngineConfig) -> list[str]:
    """``name wanted (running)`` for each option in which the two differ, by the names of the command line."""
    names = (
        ("model", lambda c: c.model),
        ("dtype", lambda c: c.dtype),
        ("device", lambda c: c.device),
        ("threads", lambda c: c.threads),
        ("max_model_len", lambda c: c.max_model_len),
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
        f"{name.replace('_', ' ')} {_knob(get(wanted))} (now {_knob(get(running))})"
        for name, get in names
        if get(wanted) != get(running)
    ]


def _knob(value: Any) -> str:
    if value is None:
        return "automatic"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ",".join(f"{user}={weight:g}" for user, weight in value.items()) or "none"
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
    return result


def milliseconds(value: float | None) -> str:
    """A latency for a reader: ms below ten seconds, else seconds; ``n/a`` without a sample."""
    if value is None:
        return NOT_AVAILABLE
    if value >= 10_000:
        return f"{value / 1e3:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:,.1f} ms"


def result_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The result of a run as name and figure, ``n/a`` where there is no sample."""

    def number(key: str, digits: int = 0, unit: str = "") -> str:
        value = summary.get(key)
        return NOT_AVAILABLE if value is None else f"{value:,.{digits}f}{unit}"

    rows = [
        ("completed", f"{number('completed')} of {number('num_prompts')}"),
        ("failed", number("failed")),
        ("duration", number("duration", 1, " s")),
        ("prompt tokens", number("total_input_tokens")),
        ("output tokens", number("total_output_tokens")),
        ("output tokens/s", number("output_throughput", 1)),
        ("all tokens/s", number("total_token_throughput", 1)),
        ("requests/s", number("request_throughput", 2)),
        ("most at once", number("max_concurrent_requests")),
        ("service E2EL p50", milliseconds(summary.get("p50_service_e2el_ms"))),
        ("preemptions", number("preemptions")),
        ("recomputed tokens", number("recomputed_tokens")),
        ("prefix-hit tokens", number("prefix_hit_tokens")),
    ]
    if summary.get("swapped_blocks"):
        rows.append(("swapped blocks", number("swapped_blocks")))
    if summary.get("padding_tokens"):
        rows.append(("padding tokens", number("padding_tokens")))
    if summary.get("draft_tokens"):
        rows.append(("drafts accepted", f"{number('accepted_tokens')} of {number('draft_tokens')}"))
    if summary.get("unfinished"):
        rows.insert(2, ("not finished", number("unfinished")))
    return rows
