"""What sampling takes and gives; each backend samples on its own device.

Randomness is a function of (seed, position) alone, so a seeded request draws the same tokens whoever shares its batch,
and again after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class SamplingRow:
    """The parameters of one row of logits; the defaults are greedy. Not to be changed, though not frozen: a step makes
    one for each row that is drawn, and to freeze it takes three times as long."""

    temperature: float = 0.0
    """0 (and anything below 1e-5): argmax."""
    top_k: int = 0
    """Keep the k likeliest; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches p; at least one token."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p × the likeliest."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    position: int = 0
    """Index of the token to be drawn in its request, prompt included."""
    prompt_token_ids: list[int] = field(default_factory=list)
    """Given only where a penalty needs it: repetition looks at prompt and output, presence and frequency at output."""
    output_token_ids: list[int] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)
    banned_token_ids: tuple[int, ...] = ()
    """Set to minus infinity: stop tokens before ``min_tokens``."""
    logprobs: int | None = None
    """How many alternatives to report; None: no log-probabilities at all."""

    @property
    def is_plain_greedy(self) -> bool:
        """Whether argmax over the raw logits answers this row."""
        return self.temperature < 1e-5 and self.is_drawn_on_device

    @property
    def is_drawn_on_device(self) -> bool:
        """Whether temperature, truncation and the random draw answer this row: it needs no list of tokens."""
        return (
            self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and not self.logit_bias
            and not self.banned_token_ids
            and self.logprobs is None
        )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    rows: list[SamplingRow]
    """One for each row of logits."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-softmax of the model's logits, before temperature, penalties and truncation."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens, best first."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    token_ids: torch.Tensor
    """int64 [R] on the backend's device; -1 where the row's logits were not finite."""
    logprobs: list[TokenLogprobs | None]
    """One for each row, or empty where no row asked."""
    arrival: Callable[[], torch.Tensor] | None = None
    """Waits for the copy in host memory that is under way; None: none is."""

    def on_host(self) -> torch.Tensor:
        """``token_ids`` in host memory; waits for the device."""
        return self.token_ids.cpu() if self.arrival is None else self.arrival()
