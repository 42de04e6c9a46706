"""Workloads and scenarios: what is asked of the engine, and when.

A *workload* is a list of requests, from a file (``engine.traces``) or drawn from shapes. A *scenario* is a TOML
file with a title, what to watch for, a workload and engine options. Light: no torch, so the window may import it.

A scenario by its numbers; ``file = "NAME.jsonl"`` beside it may stand in place of the shapes::

    title = "Rush hour"
    watch = "What to look at."

    [workload]
    requests = 40
    prompt_tokens = { kind = "lognormal", median = 64, sigma = 0.6, low = 16, high = 256 }
    output_tokens = [50, 150, 80]                     # in turn; also a number, or uniform, normal, exponential
    max_tokens = 512                                  # what clients ask; default: what they get
    priorities = [{ priority = 0, share = 0.25 }, { priority = 1, share = 0.75 }]
    users = [{ user = "ann" }, { user = "ben" }]
    shared_prefix = { tokens = 128, groups = 4 }
    arrivals = { ramp = "1:4:linear" }                # or request_rate, burstiness, max_concurrency
    seed = 3

    [engine]                                          # the options of ``bench``, with underscores
    order = "priority"
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.load_shapes import (
    MAX_SEED,
    Arrivals,
    Exponential,
    Lengths,
    LogNormal,
    Normal,
    ShapeError,
    Uniform,
    arrival_times,
    draw_lengths,
    draw_shares,
    longest,
    parse_ramp,
    synthetic_prompt,
)
from engine.traces import load_workload
from engine.workload_files import (
    BATCHSCOPE,
    MAX_NUMBER,
    MAX_REQUESTS,
    RowCounts,
    Workload,
    WorkloadError,
    WorkloadRequest,
    estimated_tokens,
    prompt_length,
    request_seed,
    with_seed,
)

__all__ = [
    "BATCHSCOPE",
    "MAX_REQUESTS",
    "Arrivals",
    "EngineOptions",
    "Exponential",
    "Lengths",
    "LogNormal",
    "Normal",
    "PriorityShare",
    "RowCounts",
    "Scenario",
    "ShapeError",
    "SharedPrefix",
    "Uniform",
    "UnknownScenarioError",
    "UserShare",
    "Workload",
    "WorkloadError",
    "WorkloadRequest",
    "WorkloadShape",
    "arrival_times",
    "estimated_tokens",
    "list_scenarios",
    "load_scenario",
    "load_workload",
    "longest",
    "parse_ramp",
    "prompt_length",
    "synthetic_prompt",
    "with_seed",
]

SCENARIO_FOLDER = Path(__file__).resolve().parents[1] / "assets" / "scenarios"


# Workloads made from shapes ------------------------------------------------------------------------------------------


class PriorityShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    priority: int
    share: float = 1.0

    def __post_init__(self) -> None:
        if abs(self.priority) > MAX_NUMBER:
            raise ShapeError(f"priority is {self.priority:,}; it must be {-MAX_NUMBER:,} to {MAX_NUMBER:,}")


class UserShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user: str
    share: float = 1.0


class SharedPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens put before the drawn prompt length: each request takes one of ``groups`` prefixes."""

    tokens: int
    groups: int = 1

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.groups < 1:
            raise ShapeError(
                f"shared_prefix has tokens {self.tokens} and groups {self.groups}; both must be at least 1"
            )


def _check_seed(seed: int) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise ShapeError(f"seed is {seed}; it must be 0 to {MAX_SEED:,}")


class WorkloadShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload by its numbers; :meth:`build` draws the requests."""

    requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    max_tokens: Lengths | None = None
    """What clients ask; None: exactly what they get. A drawn value below a request's output is raised to it."""
    priorities: list[PriorityShare] = []
    users: list[UserShare] = []
    shared_prefix: SharedPrefix | None = None
    arrivals: Arrivals = Arrivals()
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise ShapeError(f"requests is {self.requests}; it must be 1 to {MAX_REQUESTS:,}")
        _check_seed(self.seed)

    def build(self, name: str, seed: int | None = None) -> Workload:
        """Draw the requests; ``seed`` replaces the shape's own. Raises :class:`ShapeError`."""
        seed = self.seed if seed is None else seed
        count = self.requests
        # One stream per quantity, so that changing one shape leaves the other draws as they were.
        import numpy as np

        streams = [np.random.default_rng([seed, number]) for number in range(6)]
        prompts = draw_lengths(self.prompt_tokens, count, streams[0])
        outputs = draw_lengths(self.output_tokens, count, streams[1])
        asked = draw_lengths(self.max_tokens, count, streams[2]) if self.max_tokens is not None else outputs
        priorities = [0] * count
        if self.priorities:
            levels = [p.priority for p in self.priorities]
            priorities = draw_shares(levels, [p.share for p in self.priorities], count, streams[3])
        users = [""] * count
        if self.users:
            users = draw_shares([u.user for u in self.users], [u.share for u in self.users], count, streams[4])
        prefixes: list[tuple[tuple[int, int], ...]] = [()] * count
        if shared := self.shared_prefix:
            groups = streams[5].integers(0, shared.groups, size=count)
            prefixes = [((shared.tokens, request_seed(seed, MAX_REQUESTS - 1 - int(group))),) for group in groups]
        requests = tuple(
            WorkloadRequest(
                output_tokens=outputs[i],
                prompt_tokens=sum(tokens for tokens, _ in prefixes[i]) + prompts[i],
                max_tokens=max(asked[i], outputs[i]),
                priority=priorities[i],
                user=users[i],
                seed=request_seed(seed, i),
                prefix=prefixes[i],
            )
            for i in range(count)
        )
        return Workload(name, requests).with_arrivals(self.arrivals, seed)


# Scenarios -----------------------------------------------------------------------------------------------------------


class UnknownScenarioError(WorkloadError):
    """Neither the name of a built-in scenario nor the path of a ``.toml`` file."""


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The engine's knobs by their names on the command line; None: not said here."""

    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    kv_dtype: str | None = None
    cuda_graphs: bool | None = None
    overlap: bool | None = None
    threads: int | None = None
    max_model_len: int | None = None
    seed: int | None = None
    block_size: int | None = None
    kv_blocks: int | None = None
    prefix_cache: bool | None = None
    discipline: str | None = None
    order: str | None = None
    preemption: str | None = None
    max_num_seqs: int | None = None
    token_budget: int | None = None
    chunked_prefill: bool | None = None
    chunk_size: int | None = None
    watermark: float | None = None
    ageing: float | None = None
    user_weights: dict[str, float] | None = None
    swap_blocks: int | None = None
    speculative: str | None = None
    draft_tokens: int | None = None
    static_delivery: str | None = None
    waiting_served_ratio: float | None = None
    max_waiting_tokens: int | None = None

    def said(self) -> dict[str, Any]:
        """The options that are given, by name."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}

    def over(self, base: EngineOptions) -> EngineOptions:
        """These options where they say something, ``base`` elsewhere."""
        return EngineOptions(**{**base.said(), **self.said()})

    def config(self, base: EngineConfig | None = None) -> EngineConfig:
        """``base`` (the defaults) with these options in place. Raises :class:`engine.config.ConfigError`."""
        base = base or EngineConfig()
        said = self.said()

        def pick(target: type, names: dict[str, str] | None = None) -> dict[str, Any]:
            aliases = names or {}
            fields = {f.name for f in dataclasses.fields(target)}
            return {aliases.get(n, n): v for n, v in said.items() if aliases.get(n, n) in fields}

        cache = dataclasses.replace(base.cache, **pick(CacheConfig, {"kv_blocks": "num_blocks"}))
        scheduler = dataclasses.replace(
            base.scheduler, **pick(SchedulerConfig, {"token_budget": "max_num_batched_tokens"})
        )
        return dataclasses.replace(base, cache=cache, scheduler=scheduler, **pick(EngineConfig))


class _FileWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str
    """A workload file beside the scenario, of any format of ``engine.traces``."""
    arrivals: Arrivals = Arrivals()
    seed: int = 0

    def __post_init__(self) -> None:
        _check_seed(self.seed)


class _ScenarioFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    watch: str
    workload: dict[str, Any]
    engine: EngineOptions = EngineOptions()


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """A load worth looking at, with the engine options that make it so."""

    name: str
    title: str
    watch: str
    """What to watch for, a sentence or two."""
    engine: EngineOptions
    seed: int
    source: WorkloadShape | Path
    """Shapes, or a workload file."""
    arrivals: Arrivals

    def build(self, seed: int | None = None) -> Workload:
        """The scenario's workload; ``seed`` replaces the file's own. Raises :class:`WorkloadError`."""
        seed = self.seed if seed is None else seed
        if isinstance(self.source, Path):
            loaded = load_workload(self.source, seed=seed).with_arrivals(self.arrivals, seed)
            return dataclasses.replace(loaded, name=self.name)
        try:
            return self.source.build(self.name, seed)
        except ShapeError as error:
            raise WorkloadError(f"scenario {self.name}: {error}") from error


def list_scenarios() -> list[str]:
    """Names of the built-in scenarios, sorted."""
    return sorted(path.stem for path in SCENARIO_FOLDER.glob("*.toml"))


def load_scenario(name: str) -> Scenario:
    """A built-in scenario by name, or one of the user's by the path of its ``.toml``.

    Raises :class:`WorkloadError`: :class:`UnknownScenarioError` where ``name`` is neither.
    """
    path = Path(name) if name.endswith(".toml") else SCENARIO_FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and name not in list_scenarios():
        names = ", ".join(list_scenarios())
        raise UnknownScenarioError(f"no scenario is called {name!r}; give one of {names}, or the path of a .toml file")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        parsed = msgspec.convert(raw, _ScenarioFile)
        source: WorkloadShape | Path
        if "file" in parsed.workload:
            from_file = msgspec.convert(parsed.workload, _FileWorkload)
            source, arrivals, seed = path.parent / from_file.file, from_file.arrivals, from_file.seed
        else:
            shape = msgspec.convert(parsed.workload, WorkloadShape)
            source, arrivals, seed = shape, shape.arrivals, shape.seed
        parsed.engine.config()
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, ValueError) as error:
        raise WorkloadError(f"{path}: {error}") from error
    return Scenario(path.stem, parsed.title, parsed.watch, parsed.engine, seed, source, arrivals)
