"""The variants of a comparison: what each changes of the engine, how they are asked for and what they ran under. Light.

``--disciplines static,vllm --vary token_budget=64,128`` asks for the product: ``static token_budget=64`` and so on. A
variant is an :class:`engine.workload.EngineOptions` over those that all have; all run on one loaded model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from engine.comparison import Result, runs_of, variants_of
from engine.config import DISCIPLINES, SPECULATION_DRAFT, EngineConfig
from engine.events import Keyframe
from engine.load_shapes import MAX_SEED
from engine.messages import ComparePlan, Variant
from engine.workload import EngineOptions

MAX_RUNS = 100

KNOBS = {
    "discipline": "discipline",
    "order": "order",
    "preemption": "preemption",
    "max_num_seqs": "max sequences",
    "token_budget": "token budget",
    "chunked_prefill": "chunked prefill",
    "chunk_size": "chunk size",
    "kv_blocks": "KV blocks",
    "block_size": "tokens per block",
    "swap_blocks": "blocks on the host",
    "watermark": "watermark",
    "prefix_cache": "prefix cache",
    "speculative": "speculation",
    "draft_tokens": "draft tokens",
    "ageing": "ageing, s",
    "static_delivery": "static delivery",
    "waiting_served_ratio": "waiting served ratio",
    "max_waiting_tokens": "max waiting tokens",
}
"""What may differ from variant to variant, and what it is called."""
NEEDS_ITS_OWN_LOAD = ("model", "dtype", "kv_dtype", "device", "threads", "max_model_len", "cuda_graphs", "overlap")
"""Options that take another engine: a comparison loads the model once."""
AS_LOADED = "auto"
"""As a value of ``--vary``: what the knob is without it."""


# Asking --------------------------------------------------------------------------------------------------------------


def parse_disciplines(text: str) -> list[str]:
    """Raises ValueError with what is wrong."""
    known = ", ".join(DISCIPLINES)
    names = _values(text)
    if not names:
        raise ValueError(f"--disciplines is empty; name some of {known}")
    for name in names:
        if name not in DISCIPLINES:
            raise ValueError(f"discipline {name!r} is unknown; it must be one of {known}")
        if names.count(name) > 1:
            raise ValueError(f"discipline {name!r} is named twice; each runs once for every seed")
    return names


def parse_vary(text: str) -> tuple[str, list[str]]:
    """``token_budget=64,128``: the knob and its values as typed. Raises ValueError with what is wrong."""
    knob, equals, values = text.partition("=")
    knob = knob.strip().replace("-", "_")
    if not equals:
        raise ValueError(f"--vary has {text!r}; write KNOB=a,b,c, e.g. token_budget=64,128")
    if knob in NEEDS_ITS_OWN_LOAD:
        raise ValueError(f"--vary cannot change {knob}: all variants run on one loaded model")
    if knob not in KNOBS:
        raise ValueError(f"--vary has the knob {knob!r}; it must be one of {', '.join(KNOBS)}")
    found = _values(values)
    if not found:
        raise ValueError(f"--vary gives no values of {knob}; write {knob}=a,b,c")
    for value in found:
        if found.count(value) > 1:
            raise ValueError(f"--vary has {knob}={value} twice; each runs once for every seed")
    return knob, found


def parse_seeds(text: str) -> list[int | None]:
    """``1,2,3`` or ``1-3``; empty: one run with the workload's own. Raises ValueError with what is wrong."""
    seeds: list[int | None] = []
    for part in text.replace(",", " ").split():
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is no seed; seeds are whole numbers from 0 on, e.g. 1,2,3 or 1-3")
        low, high = int(first), int(last) if dash else int(first)
        if high > MAX_SEED:
            raise ValueError(f"the seed {high} is too large; a seed is {MAX_SEED:,} at most")
        if high < low:
            raise ValueError(f"the seeds run from {low} to {high}; the first must not be the larger")
        if high - low >= MAX_RUNS or len(seeds) >= MAX_RUNS:
            raise ValueError(f"the seeds {part} are more than {MAX_RUNS} runs")
        seeds += range(low, high + 1)
    twice = [seed for seed in seeds if seeds.count(seed) > 1]
    if twice:
        raise ValueError(f"the seed {twice[0]} is there twice")
    return seeds or [None]


def _values(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def product(disciplines: Sequence[str], varied: Sequence[tuple[str, Sequence[str]]]) -> list[Variant]:
    """Every discipline under every combination of values. Raises ValueError for an impossible value."""
    knobs = [knob for knob, _ in varied] + (["discipline"] if disciplines else [])
    for knob in knobs:
        if knobs.count(knob) > 1:
            raise ValueError(f"{knob} is varied twice; give all its values at once")
    made = []
    for discipline in disciplines or [""]:
        for values in itertools.product(*(values for _, values in varied)):
            chosen = list(zip((knob for knob, _ in varied), values, strict=True))
            said = {knob: _parsed(knob, value) for knob, value in chosen}
            words = ([discipline] if discipline else []) + [f"{knob}={value}" for knob, value in chosen]
            if discipline:
                said["discipline"] = discipline
            made.append(Variant(" ".join(words), EngineOptions(**said)))
    drafts = {d for v in made if (d := v.options.speculative) and d.startswith(SPECULATION_DRAFT)}
    if len(drafts) > 1:
        raise ValueError(f"one draft model can be loaded, not {len(drafts)}: {', '.join(sorted(drafts))}")
    return made


def _parsed(knob: str, value: str) -> Any:
    """The value of an option. Raises ValueError."""
    if value == AS_LOADED:
        return None
    wanted = EngineOptions.__annotations__[knob]
    if "bool" in wanted:
        if value not in ("on", "off"):
            raise ValueError(f"{knob} is {value!r}; it is on or off")
        return value == "on"
    kind: type = int if "int" in wanted else float if "float" in wanted else str
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{knob} is {value!r}; it is a {'whole number' if kind is int else 'number'}") from None


def baseline_of(names: Sequence[str]) -> str:
    """``static`` where it is among them, else the first."""
    return "static" if "static" in names else names[0]


# Running under them --------------------------------------------------------------------------------------------------


def variant_config(plan: ComparePlan, variant: Variant, base: EngineConfig) -> EngineConfig:
    """What a variant runs under, ``base`` being what the engine runs with. Raises :class:`engine.config.ConfigError`.

    A variant that says the size of a block but not how many there are keeps the tokens that pool and host hold.
    """
    common = plan.options.config(base).cache
    config = variant.options.over(plan.options).config(base)
    said = variant.options.said()
    if "block_size" not in said:
        return config

    def scaled(count: int | None) -> int | None:
        return None if count is None else count * common.block_size // config.cache.block_size

    changes: dict[str, Any] = {}
    if "kv_blocks" not in said and common.num_blocks is not None:
        changes["num_blocks"] = max(1, scaled(common.num_blocks) or 0)
    if "swap_blocks" not in said:
        changes["swap_blocks"] = scaled(common.swap_blocks)
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, **changes))


def load_config(plan: ComparePlan, base: EngineConfig) -> EngineConfig:
    """What to load for all variants: as for the baseline, with room for the most sequences that one of them runs, with
    the draft model that one of them asks for, and what one of them leaves open is measured. Raises
    :class:`engine.config.ConfigError`."""
    configs = {variant.name: variant_config(plan, variant, base) for variant in plan.variants}
    chosen = configs[plan.baseline]
    schedulers, caches = [c.scheduler for c in configs.values()], [c.cache for c in configs.values()]

    def open_if_one_is(kind: list[Any], own: Any, name: str) -> int | None:
        return None if any(getattr(each, name) is None for each in kind) else getattr(own, name)

    drafts = next((s.speculative for s in schedulers if s.draft_model is not None), chosen.scheduler.speculative)
    scheduler = dataclasses.replace(
        chosen.scheduler,
        speculative=drafts,
        max_num_seqs=max(scheduler.max_num_seqs for scheduler in schedulers),
        max_num_batched_tokens=open_if_one_is(schedulers, chosen.scheduler, "max_num_batched_tokens"),
    )
    cache = dataclasses.replace(
        chosen.cache,
        num_blocks=open_if_one_is(caches, chosen.cache, "num_blocks"),
        swap_blocks=open_if_one_is(caches, chosen.cache, "swap_blocks"),
    )
    return dataclasses.replace(chosen, scheduler=scheduler, cache=cache)


def knobs_of(config: EngineConfig, begun: Keyframe) -> dict[str, Any]:
    """The values of ``KNOBS`` in a run: what was measured, as the core says it, in place of what was left open."""
    found = {f.name: getattr(config.scheduler, f.name) for f in dataclasses.fields(config.scheduler)}
    found |= {"block_size": begun.block_size, "kv_blocks": begun.num_blocks, "swap_blocks": begun.num_host_blocks}
    found |= {"token_budget": begun.token_budget, "prefix_cache": config.cache.prefix_cache}
    return {name: found[name] for name in KNOBS}


# What they ran under -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class KnobRow:
    label: str
    values: dict[str, str]
    """By variant."""

    @property
    def differs(self) -> bool:
        return len(set(self.values.values())) > 1


def knob_rows(result: Result) -> list[KnobRow]:
    """What each variant ran under; first what differs."""
    first = {name: runs_of(result, name)[0]["knobs"] for name in variants_of(result)}
    rows = [
        KnobRow(label, {name: _knob_text(knobs.get(key)) for name, knobs in first.items()})
        for key, label in KNOBS.items()
    ]
    return sorted(rows, key=lambda row: not row.differs)


def _knob_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
