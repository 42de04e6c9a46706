"""The shapes a load is made of, as plain numbers: lengths, arrivals, shares, synthetic prompts.

Everything is drawn from a seed, so the same file gives the same load on every machine. Light: msgspec, and numpy
only where something is drawn: the engine process knows these shapes before it may load anything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np

MAX_DRAWN_LENGTH = 1_000_000
"""Longest prompt or answer that a distribution may give, in tokens."""
MAX_SEED = 2**32 - 1
"""Of a workload: those of its requests, a million for each, go into a message."""


class ShapeError(ValueError):
    """A shape with an impossible value; the message names it."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(message)


class Uniform(msgspec.Struct, frozen=True, tag="uniform", tag_field="kind", forbid_unknown_fields=True):
    """Every whole number from ``low`` to ``high``, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _require(
            1 <= self.low <= self.high <= MAX_DRAWN_LENGTH,
            f"uniform lengths {self.low} to {self.high}: need 1 ≤ low ≤ high ≤ {MAX_DRAWN_LENGTH:,}",
        )


def _check_limits(kind: str, low: int, high: int) -> None:
    _require(
        1 <= low <= high <= MAX_DRAWN_LENGTH,
        f"{kind} limits {low:,} to {high:,}: need 1 ≤ low ≤ high ≤ {MAX_DRAWN_LENGTH:,}",
    )


def _check_number(name: str, value: float, *, zero: bool = False) -> None:
    fits = math.isfinite(value) and (value > 0 or (zero and value == 0))
    _require(fits, f"{name} is {value}; it must be {'at least' if zero else 'above'} 0")


class LogNormal(msgspec.Struct, frozen=True, tag="lognormal", tag_field="kind", forbid_unknown_fields=True):
    """``median`` · exp(``sigma`` · N(0, 1)), rounded, clipped to ``low`` … ``high``: how conversations look."""

    median: float
    sigma: float
    low: int = 1
    high: int = 4096

    def __post_init__(self) -> None:
        _check_number("lognormal median", self.median)
        _check_number("lognormal sigma", self.sigma, zero=True)
        _check_limits("lognormal", self.low, self.high)


class Normal(msgspec.Struct, frozen=True, tag="normal", tag_field="kind", forbid_unknown_fields=True):
    """``mean`` + ``deviation`` · N(0, 1), rounded, clipped to ``low`` … ``high``."""

    mean: float
    deviation: float
    low: int = 1
    high: int = 4096

    def __post_init__(self) -> None:
        _check_number("normal mean", self.mean)
        _check_number("normal deviation", self.deviation, zero=True)
        _check_limits("normal", self.low, self.high)


class Exponential(msgspec.Struct, frozen=True, tag="exponential", tag_field="kind", forbid_unknown_fields=True):
    """Exponentially distributed with ``mean``, rounded, clipped to ``low`` … ``high``: many short, few long."""

    mean: float
    low: int = 1
    high: int = 4096

    def __post_init__(self) -> None:
        _check_number("exponential mean", self.mean)
        _check_limits("exponential", self.low, self.high)


Lengths = int | list[int] | Uniform | LogNormal | Normal | Exponential
"""A constant, an explicit list that is gone through in turn, or a distribution."""


def longest(lengths: Lengths) -> int:
    """The largest length that may come, in tokens; 0 of an empty list."""
    if isinstance(lengths, int):
        return lengths
    return max(lengths, default=0) if isinstance(lengths, list) else lengths.high


def draw_lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> list[int]:
    """``count`` lengths in tokens. Raises :class:`ShapeError` on an impossible one, which it names."""
    import numpy as np

    if isinstance(lengths, int):
        lengths = [lengths]
    if isinstance(lengths, list):
        _require(bool(lengths), "the list of lengths is empty; give at least one")
        for length in (min(lengths), max(lengths)):
            _require(
                1 <= length <= MAX_DRAWN_LENGTH,
                f"length {length:,} is impossible; lengths are 1 to {MAX_DRAWN_LENGTH:,} tokens",
            )
        return list(itertools.islice(itertools.cycle(lengths), count))
    if isinstance(lengths, Uniform):
        return [int(n) for n in rng.integers(lengths.low, lengths.high + 1, size=count)]
    if isinstance(lengths, LogNormal):
        drawn = lengths.median * np.exp(lengths.sigma * rng.standard_normal(count))
    elif isinstance(lengths, Normal):
        drawn = lengths.mean + lengths.deviation * rng.standard_normal(count)
    else:
        drawn = rng.exponential(lengths.mean, size=count)
    return [int(n) for n in np.clip(np.rint(drawn), lengths.low, lengths.high)]


class Ramp(msgspec.Struct, frozen=True):
    """A request rate that goes from ``start`` to ``end`` requests per second over the requests of the run."""

    start: float
    end: float
    shape: Literal["linear", "exponential"]

    def rate_at(self, progress: float) -> float:
        """Requests per second at ``progress``, 0 for the first request and 1 for the last."""
        if self.shape == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)


def parse_ramp(text: str) -> Ramp:
    """``FROM:TO:linear`` or ``FROM:TO:exponential``, rates in requests per second. Raises :class:`ShapeError`."""
    try:
        start_text, end_text, shape = text.split(":")
        start, end = float(start_text), float(end_text)
    except ValueError:
        raise ShapeError(f"ramp {text!r} is not FROM:TO:linear or FROM:TO:exponential, e.g. 1:8:linear") from None
    _require(shape in ("linear", "exponential"), f"ramp shape is {shape!r}; it must be linear or exponential")
    for name, rate in (("start", start), ("end", end)):
        _require(rate > 0 and math.isfinite(rate), f"ramp {name} is {rate:g} requests per second; it must be above 0")
    return Ramp(start, end, "linear" if shape == "linear" else "exponential")


class Arrivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When requests come.

    Nothing given: all at once. ``request_rate`` or ``ramp``: an open loop, which does not wait for answers.
    ``max_concurrency`` alone: a closed loop, the next request comes when one is answered; with a rate it is a cap.
    """

    request_rate: float | None = None
    """Requests per second; None (or infinite): all at once."""
    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps: 1 is Poisson, below 1 burstier, above 1 more even, infinite exactly even."""
    max_concurrency: int | None = None
    """Most requests in flight at once."""
    ramp: str | None = None
    """``FROM:TO:linear`` or ``FROM:TO:exponential``, in place of ``request_rate``."""

    def __post_init__(self) -> None:
        rate = self.request_rate
        _require(rate is None or rate > 0, f"request_rate is {rate}; it must be above 0 requests per second")
        _require(self.burstiness > 0, f"burstiness is {self.burstiness}; it must be above 0 (1 = Poisson)")
        cap = self.max_concurrency
        _require(cap is None or cap >= 1, f"max_concurrency is {cap}; it must be at least 1")
        if self.ramp is not None:
            parse_ramp(self.ramp)
            _require(rate is None, "request_rate and ramp exclude each other; give one of them")

    @property
    def has_schedule(self) -> bool:
        """Whether arrival times follow from a rate (else they are all 0, or the file's own)."""
        return self.ramp is not None or (self.request_rate is not None and math.isfinite(self.request_rate))


def arrival_times(count: int, arrivals: Arrivals, seed: int) -> list[float]:
    """When each of ``count`` requests arrives, in seconds after the start; the first arrives at 0.

    The gap before request i is gamma distributed with shape ``burstiness`` and mean 1 / rate(i), the process of
    ``vllm bench serve``; a ramp's rate is taken at progress i / (count - 1).
    """
    import numpy as np

    if not arrivals.has_schedule or count == 0:
        return [0.0] * count
    if arrivals.ramp is not None:
        ramp = parse_ramp(arrivals.ramp)
        rates = np.array([ramp.rate_at(i / max(count - 1, 1)) for i in range(1, count)])
    else:
        assert arrivals.request_rate is not None
        rates = np.full(count - 1, arrivals.request_rate)
    if math.isinf(arrivals.burstiness):
        gaps = 1.0 / rates
    else:
        rng = np.random.default_rng([seed, 0xA221])
        gaps = rng.gamma(arrivals.burstiness, 1.0, size=count - 1) / (arrivals.burstiness * rates)
    return [0.0, *(float(t) for t in np.cumsum(gaps))]


def draw_shares(values: list[Any], shares: list[float], count: int, rng: np.random.Generator) -> list[Any]:
    """``count`` of ``values``, each as often as its share of the sum says. Raises :class:`ShapeError` on bad shares."""
    import numpy as np

    weights = np.array(shares, dtype=np.float64)
    _require(
        bool(np.all(np.isfinite(weights)) and np.all(weights >= 0)), f"shares {shares} must be numbers of at least 0"
    )
    _require(float(weights.sum()) > 0, f"shares {shares} must not all be 0")
    return [values[i] for i in rng.choice(len(values), size=count, p=weights / weights.sum())]


def synthetic_prompt(
    length: int,
    vocab_size: int,
    seed: int,
    forbidden: Collection[int] = (),
    *,
    prefix: Sequence[tuple[int, int]] = (),
) -> list[int]:
    """``length`` ordinary token ids, drawn evenly from the vocabulary without ``forbidden`` (the special ids).

    ``prefix``: (tokens, seed) of the pieces that it begins with; what they leave is drawn from ``seed``. The same
    arguments give the same ids on every machine. Raises :class:`ShapeError` where nothing is left to draw.
    """
    import numpy as np

    _require(length >= 1, f"prompt_tokens is {length}; a prompt has at least 1 token")
    # No sorting of the whole vocabulary: the engine makes a prompt between two steps.
    ordinary = np.ones(vocab_size, dtype=np.bool_)
    ordinary[[i for i in forbidden if i < vocab_size]] = False
    allowed = np.flatnonzero(ordinary)
    _require(len(allowed) > 0, f"all {vocab_size} tokens of the vocabulary are special: no ordinary prompt can be made")
    ids: list[int] = []
    for tokens, piece_seed in (*prefix, (length, seed)):
        rng = np.random.default_rng([piece_seed, 0x9207])
        ids += allowed[rng.integers(0, len(allowed), size=min(tokens, length - len(ids)))].tolist()
    return ids
