"""What a schedule says and what its execution answers: plain frozen data between the scheduler and the model runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.request import Request

if TYPE_CHECKING:  # torch is heavy, and a scheduler does without
    from kernels.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. The columns run in parallel, one entry per request, in the order of execution.

    A row computes ``num_new_tokens[i]`` tokens of ``requests[i]`` from position ``starts[i]`` on, and is sampled from
    exactly when that reaches the end of the request's tokens. Behind them it may compute padding, which nothing reads,
    or drafts, which the model checks::

        tokens   |  computed before  | new tokens | padding or drafts |
                 0                start         end    ≤ capacity of the blocks

    Memory moves before anything is computed: first out to the host, then copies on the device, then in from the host.
    """

    step: int
    requests: list[Request]
    epochs: list[int]
    """The requests' epochs when they were scheduled: a result of an older one is dropped."""
    starts: list[int]
    num_new_tokens: list[int]
    block_tables: list[list[int]]
    """Each request's block ids, to be read only until the next call of ``schedule``."""
    samples: list[bool]
    """Whether the row's last token is the request's last: a new one is drawn."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination), to be done before the step."""
    kinds: list[int] = field(default_factory=list)
    """:class:`engine.events.RowKind` of each row."""
    padding: list[int] = field(default_factory=list)
    """Padding tokens of each row; empty: none anywhere. A row of padding alone has no new tokens."""
    draft_limits: list[int] = field(default_factory=list)
    """How many tokens may be drafted for each row; empty: none anywhere. Only rows that decode have any."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(block, host block)."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, block)."""
    token_budget: int = 0
    """What it was planned within; only a prompt that may not be split exceeds it."""

    @property
    def total_tokens(self) -> int:
        """Of the step's budget, drafts at their most."""
        return sum(self.num_new_tokens) + sum(self.padding) + sum(self.draft_limits)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What the sampled rows of a :class:`SchedulerOutput` gave, in the same order, one entry per row of the plan."""

    token_ids: list[list[int]]
    """New tokens per row: empty where the row was not sampled; with speculation the accepted drafts and one more."""
    logprobs: list[list[TokenLogprobs]]
    """As many as token ids, where the request asked; else empty."""
    errors: dict[int, str] = field(default_factory=dict)
    """Row index → why this row alone failed (its logits were not finite)."""
    prepare_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    drafts: list[int] = field(default_factory=list)
    """How many tokens were drafted for each row; empty: none anywhere."""
