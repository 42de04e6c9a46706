"""What the compare panel offers and checks, without Qt: from the fields of its form to a plan for the engine.

::

    workload (a scenario, the load panel's, a recorded one)  ─┐
    disciplines, or one knob with its values                  ├─▶ CompareChoice ─▶ faults, remarks, ComparePlan
    seeds, baseline, warm-up, objectives                     ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from app.lab.load_model import lengths_of, misfits
from app.translation import tr
from app.words import as_sentence, count, seconds_label
from engine.config import ORDERS, PREEMPTIONS, ConfigError, EngineConfig
from engine.messages import ComparePlan, ModelInfo, Variant
from engine.variants import MAX_RUNS, NEEDS_ITS_OWN_LOAD, baseline_of, parse_seeds, product, variant_config
from engine.workload import EngineOptions, ShapeError, Workload, WorkloadError

MAX_REQUESTS = 200_000
"""Of all seeds together: a plan goes to the engine as one message, and its result comes back as one."""
Build = Callable[["int | None"], Workload]
"""The workload of a seed; None: its own."""


class CompareFault(ValueError):
    """Why this comparison cannot be started, a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Knob:
    """An option of :class:`EngineOptions` whose values can be compared on one loaded model."""

    name: str
    title: str
    usual: tuple[str, ...]
    """The values there are, or, where they are typed, an example of some."""
    unit: str = ""
    """What is typed counts this; empty where values are ticked."""

    @property
    def typed(self) -> bool:
        return bool(self.unit)


KNOBS = (
    Knob("token_budget", tr("token budget"), ("64", "256", "1024"), tr("tokens per step")),
    Knob("max_num_seqs", tr("max sequences"), ("4", "8", "16"), tr("requests at once")),
    Knob("chunked_prefill", tr("chunked prefill"), ("on", "off")),
    Knob("chunk_size", tr("chunk size"), ("32", "128", "512"), tr("tokens of a prompt per step")),
    Knob("kv_blocks", "pool", ("32", "64", "128"), tr("KV blocks")),
    Knob("block_size", tr("block size"), ("8", "16", "32"), tr("tokens per KV block")),
    Knob("prefix_cache", tr("prefix cache"), ("on", "off")),
    Knob("watermark", "watermark", ("0", "0.05", "0.2"), tr("share of the pool that admission leaves free")),
    Knob("preemption", tr("preemption"), PREEMPTIONS),
    Knob("order", tr("order"), ORDERS),
    Knob("speculative", tr("speculation"), ("off", "ngram")),
)


@dataclass(frozen=True, slots=True)
class CompareLoad:
    """What every variant has to do."""

    title: str
    build: Build
    watch: str = ""
    options: EngineOptions = field(default_factory=EngineOptions)
    """Over what the engine was loaded with."""
    seeded: bool = True
    """Whether other seeds make other workloads; a recorded one is as it was."""


@dataclass(frozen=True, slots=True)
class CompareChoice:
    """A comparison as it stands in the form."""

    load: CompareLoad
    disciplines: tuple[str, ...] = ()
    """None: what the engine runs under."""
    knob: Knob | None = None
    values: tuple[str, ...] = ()
    """Of the knob, as typed: every discipline runs under each."""
    seeds: str = ""
    baseline: str = ""
    """Empty: see :meth:`baseline_name`."""
    warm_up: int = 1
    objectives: dict[str, float] | None = None
    """Of goodput, in milliseconds."""
    beside_recorded: bool = False
    """Whether the result stands beside a recorded run, so that a single variant is a comparison already."""

    def variants(self) -> list[Variant]:
        """Raises :class:`CompareFault` where there is nothing to compare, or a value is impossible."""
        made = named_variants(self.disciplines, self.knob, self.values)
        if len(made) < 2 and not self.beside_recorded:
            raise CompareFault(tr("{name} alone has nothing to be compared with: add another.", name=made[0].name))
        return made

    def baseline_name(self, variants: Sequence[Variant]) -> str:
        """The chosen one where it runs; else ``static``, the bus that the others are measured by; else the first."""
        names = [variant.name for variant in variants]
        return self.baseline if self.baseline in names else baseline_of(names)

    def plan(self) -> ComparePlan:
        """Raises :class:`CompareFault`."""
        variants, seeds = self.variants(), self.seed_list()
        runs = len(variants) * len(seeds)
        if runs > MAX_RUNS:
            raise CompareFault(
                tr(
                    "{variants} and {seeds} make {runs:,} runs; {max_runs} are the most. Take fewer of either.",
                    variants=count(len(variants), "variant"),
                    seeds=count(len(seeds), "seed"),
                    runs=runs,
                    max_runs=MAX_RUNS,
                )
            )
        try:
            workloads = [self.load.build(seed) for seed in seeds]
        except (WorkloadError, ShapeError) as error:
            raise CompareFault(as_sentence(str(error))) from error
        requests = sum(len(workload.requests) for workload in workloads)
        if requests > MAX_REQUESTS:
            raise CompareFault(
                tr(
                    "The workloads of all seeds have {requests:,} requests; {max_requests:,} are the most. "
                    "Take fewer seeds or requests.",
                    requests=requests,
                    max_requests=MAX_REQUESTS,
                )
            )
        if not all(workload.requests for workload in workloads):
            raise CompareFault(tr("The workload has no requests."))
        baseline = self.baseline_name(variants)
        return ComparePlan(
            title=self.load.title,
            watch=self.load.watch.strip(),
            options=self.load.options,
            variants=sorted(variants, key=lambda variant: variant.name != baseline),  # what the others are held against
            baseline=baseline,
            workloads=workloads,
            seeds=list(seeds),
            warm_up=self.warm_up,
            objectives=self.objectives,
        )

    def seed_list(self) -> list[int | None]:
        """Raises :class:`CompareFault`."""
        try:
            seeds = parse_seeds(self.seeds)
        except ValueError as error:
            raise CompareFault(as_sentence(str(error))) from error
        if not self.load.seeded and seeds != [None]:
            raise CompareFault(tr("A recorded workload is as it was: it has no other seeds. Leave the seeds empty."))
        return seeds


def named_variants(disciplines: Sequence[str], knob: Knob | None, values: Sequence[str]) -> list[Variant]:
    """Every discipline under every value of the knob. Raises :class:`CompareFault`."""
    if knob is None and not disciplines:
        raise CompareFault(tr("Tick the disciplines to compare, at least two."))
    if knob is not None and not values:
        raise CompareFault(
            tr("Give the values of {title} to compare, e.g. {usual}.", title=knob.title, usual=", ".join(knob.usual))
        )
    try:
        made = product(disciplines, [] if knob is None else [(knob.name, values)])
    except ValueError as error:
        raise CompareFault(as_sentence(str(error))) from error
    names = [variant.name for variant in made]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise CompareFault(tr("{twice} is there twice; each runs once for every seed.", twice=twice[0]))
    return made


def parse_values(text: str) -> tuple[str, ...]:
    """The values in a field: separated by commas, semicolons or spaces."""
    return tuple(text.replace(",", " ").replace(";", " ").split())


# What this engine can do of a plan -----------------------------------------------------------------------------------


def plan_fault(plan: ComparePlan, config: EngineConfig, info: ModelInfo) -> str:
    """Why this engine cannot run the plan to any use; empty where it can."""
    said = plan.options.said()
    for name in NEEDS_ITS_OWN_LOAD:
        running = getattr(config, name)
        if name in said and said[name] != running:
            return tr(
                "This workload wants {name} {said}; the engine runs with {running}. Restart the engine with it first.",
                name=name.replace("_", " "),
                said=said[name],
                running=tr("its own") if running is None else running,
            )
    lengths = [r for workload in plan.workloads for r in lengths_of(workload)]
    shortest, smallest = min(r.prompt for r in lengths), min(r.prompt + r.output for r in lengths)
    if shortest >= info.max_model_len:
        return tr(
            "Every prompt would be refused: the shortest has {shortest:,} tokens, the model's context holds "
            "{max_model_len:,}.",
            shortest=shortest,
            max_model_len=info.max_model_len,
        )
    for variant in plan.variants:
        try:
            pool = variant_info(variant, plan, config, info)
        except ConfigError as error:
            return f"{variant.name}: {error}."
        room = pool.num_blocks * pool.block_size
        if min(smallest, info.max_model_len) > room:
            return tr(
                "{name}: no request fits. The smallest takes {smallest:,} tokens, prompt and answer; the pool "
                "has {num_blocks:,} blocks of {block_size}, {room:,} tokens.",
                name=variant.name,
                smallest=smallest,
                num_blocks=pool.num_blocks,
                block_size=pool.block_size,
                room=room,
            )
    return ""


def plan_remarks(plan: ComparePlan, config: EngineConfig, info: ModelInfo) -> list[str]:
    """What will happen to requests that this engine, or the pool of a variant, cannot hold; none where all fit."""
    lengths = [r for workload in plan.workloads for r in lengths_of(workload)]
    under: dict[str, list[str]] = {}
    for variant in plan.variants:
        for sentence in misfits(lengths, variant_info(variant, plan, config, info)):
            under.setdefault(sentence, []).append(variant.name)
    everywhere = len(plan.variants)
    return [s if len(names) == everywhere else f"{', '.join(names)}: {s}" for s, names in under.items()]


def variant_info(variant: Variant, plan: ComparePlan, config: EngineConfig, info: ModelInfo) -> ModelInfo:
    """The loaded model with the pool of a variant; one that says no size keeps the memory of the loaded pool.

    Raises :class:`engine.config.ConfigError`.
    """
    cache = variant_config(plan, variant, config).cache
    blocks = cache.num_blocks
    if blocks is None:
        blocks = info.num_blocks * info.block_size // cache.block_size
    return msgspec.structs.replace(info, num_blocks=blocks, block_size=cache.block_size)


def plan_summary(plan: ComparePlan, tokens_per_second: float | None) -> str:
    """``6 runs: 3 variants, 2 seeds, 96 requests each; about 3:20 min.``"""
    runs = len(plan.variants) * len(plan.seeds)
    requests = {len(workload.requests) for workload in plan.workloads}
    each = f"{min(requests):,}" if len(requests) == 1 else f"{min(requests):,} to {max(requests):,}"
    seeds = f", {count(len(plan.seeds), 'seed')}" if plan.seeds != [None] else ""
    text = tr(
        "{runs}: {variants}{seeds}, {each} requests each",
        runs=count(runs, "run"),
        variants=count(len(plan.variants), "variant"),
        seeds=seeds,
        each=each,
    )
    seconds = expected_seconds(plan, tokens_per_second)
    if seconds is None:
        last = _arrivals_end(plan)
        return (
            tr("{text}; at least {last}, until the last has arrived.", text=text, last=seconds_label(last))
            if last
            else f"{text}."
        )
    return tr("{text}; about {seconds} at the rate of the last result.", text=text, seconds=seconds_label(seconds))


def expected_seconds(plan: ComparePlan, tokens_per_second: float | None) -> float | None:
    """How long all runs take where the engine computes so many tokens (prompt and output) per second; None: unknown.

    A run takes at least until its last request has arrived; warm-ups are left out.
    """
    if not tokens_per_second:
        return None
    seconds = 0.0
    for workload in plan.workloads:
        tokens = sum(r.prompt + r.output for r in lengths_of(workload))
        last = max((request.arrival_s for request in workload.requests), default=0.0)
        seconds += max(last, tokens / tokens_per_second)
    return seconds * len(plan.variants)


def _arrivals_end(plan: ComparePlan) -> float:
    ends = (max((r.arrival_s for r in workload.requests), default=0.0) for workload in plan.workloads)
    return sum(ends) * len(plan.variants)
