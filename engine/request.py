"""A request: what a client asks, and how far the engine has come with it.

Light: the window imports :class:`SamplingParams` and the enumerations. One rule carries a request through its life: it
has ``num_tokens`` (prompt + output) and ``num_computed_tokens``, and a step lets the second catch up with the first.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field


class RequestError(ValueError):
    """A request that is refused; the message names the parameter, the value and the way out."""


class RequestStatus(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Waiting again, its blocks taken: what it had computed is computed once more."""
    SWAPPED = 3
    """Waiting again, its keys and values in host memory."""
    FINISHED = 4
    ENDED = 5
    """Its answer is complete, but its row stays in a static batch until the last one ends."""


WAITING_STATES = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED})


BRANCH_STRIDE = 1 << 32
"""Clients' request ids lie below it."""
MAX_BRANCHES = 128


def branch_id(request_id: int, index: int) -> int:
    """Id of answer ``index`` of a request that asked for several; index 0 is the request itself."""
    return request_id + index * BRANCH_STRIDE


def branch_of(request_id: int) -> tuple[int, int]:
    """(id of the client's request, index of the answer)."""
    return request_id % BRANCH_STRIDE, request_id // BRANCH_STRIDE


def request_name(request_id: int) -> str:
    """How a request is shown: ``12``, or ``12.1`` for its second answer."""
    client_id, index = branch_of(request_id)
    return f"{client_id}.{index}" if index else str(client_id)


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """A stop token or string."""
    LENGTH = "length"
    """``max_tokens``, the model's length, or the end of a replayed request."""
    ABORT = "abort"
    ERROR = "error"
    """Refused, or failed alone; the output's ``error`` says why."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to end. The defaults are greedy. Raises :class:`RequestError` on a bad value."""

    temperature: float = 0.0
    """0: always the likeliest token."""
    top_k: int = 0
    """Choose among the k likeliest; 0: all. Larger than the vocabulary: all."""
    top_p: float = 1.0
    """Choose among the likeliest that together reach this probability, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output; above 0."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token already in the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """The same, times how often it occurred, -2 to 2."""
    seed: int | None = None
    """Same seed, same answer, whoever shares the batch; None: drawn by the engine."""
    max_tokens: int | None = None
    """Most output tokens; None: as many as the model's length leaves. More than that is cut to it."""
    min_tokens: int = 0
    """No stop before this many output tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the answer, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own end-of-sequence ids; ``stop_token_ids`` still end."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """Report the log-probability of each token and of this many alternatives; None: none."""
    n: int = 1
    """Answers to the same prompt, each drawn with a seed of its own; they share the prompt's blocks."""

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

        check(_finite(self.temperature) and 0.0 <= self.temperature <= 100.0, "temperature", "0 to 100")
        check(self.top_k >= 0, "top_k", "at least 0")
        check(_finite(self.top_p) and 0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        check(_finite(self.min_p) and 0.0 <= self.min_p <= 1.0, "min_p", "0 to 1")
        check(_finite(self.repetition_penalty) and self.repetition_penalty > 0.0, "repetition_penalty", "above 0")
        check(_finite(self.presence_penalty) and -2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "-2 to 2")
        check(_finite(self.frequency_penalty) and -2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "-2 to 2")
        check(self.seed is None or 0 <= self.seed < 2**63, "seed", "0 to 2^63 - 1")
        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        check(self.min_tokens >= 0, "min_tokens", "at least 0")
        check(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        check(all(self.stop), "stop", "strings that are not empty")
        check(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "0 to 20")
        check(1 <= self.n <= MAX_BRANCHES, "n", f"1 to {MAX_BRANCHES}")
        check(
            all(_finite(b) and -100 <= b <= 100 for b in self.logit_bias.values()),
            "logit_bias",
            "values of -100 to 100",
        )


def _finite(value: float) -> bool:
    return math.isfinite(value)


PENDING = -1
"""Stands among a request's tokens for one that the device has yet to sample, or that is on its way to the host."""


class Request:
    """One request inside the engine. The scheduler owns its counters; nobody else writes them.

    ``max_tokens`` is what the client asked (cut to the model's room): all that a scheduler may look at. ``ends_after``
    is where a replayed request really ends; only the update after a step looks at it.
    """

    __slots__ = (
        "__weakref__",
        "admitted_time",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "branches",
        "cache_edge",
        "capacity",
        "ends_after",
        "epoch",
        "finish_reason",
        "first_token_time",
        "footprint",
        "host_blocks",
        "length_limit",
        "lost_tokens",
        "max_tokens",
        "min_length",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "padded",
        "params",
        "parent",
        "preempted_at",
        "prefill_end",
        "priority",
        "queued_since",
        "recomputed_tokens",
        "request_id",
        "seed",
        "status",
        "stop_token_ids",
        "token_ids",
        "user",
    )

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        arrival_time: float = 0.0,
        priority: int = 0,
        user: str = "",
        ends_after: int | None = None,
        seed: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        """Prompt and output, end to end."""
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.max_tokens = max_tokens
        self.ends_after = ends_after
        self.arrival_time = arrival_time
        """Engine clock, seconds."""
        self.priority = priority
        """Lower runs first."""
        self.user = user
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        """All ids that end it: the client's own and, unless it ignores them, the model's."""
        self.length_limit = self.num_prompt_tokens + min(max_tokens, ends_after or max_tokens)
        """Prompt and output at which it ends by length. Only the update after a step looks at it."""
        self.footprint = self.num_prompt_tokens + max_tokens - 1
        """Tokens whose keys and values it may ever need: those of the last one are never read."""
        self.min_length = self.num_prompt_tokens + params.min_tokens
        """Prompt and output before which no stop id ends it."""
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_computed_tokens = 0
        """Tokens whose keys and values are in the cache."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache at the first admission."""
        self.num_preemptions = 0
        self.lost_tokens = 0
        """Most tokens that a preemption took from it: up to here computing is done a second time."""
        self.recomputed_tokens = 0
        """Of these, computed again since ``preempted_at``."""
        self.prefill_end = self.num_prompt_tokens
        """Positions from here on are decodes; preemption moves it up to what was computed."""
        self.epoch = 0
        """Bumped by preemption, abort and another place in the queue: what a step or the queue holds of an older epoch
        is dropped."""
        self.queued_since = arrival_time
        """When it began to wait: its arrival, or its last preemption."""
        self.preempted_at: float | None = None
        """When the first preemption that it has not recovered from took it back; None: it is again where it was."""
        self.padded = 0
        """Positions of padding computed behind its tokens (discipline ``static``)."""
        self.branches: list[Request] = []
        """Further answers to the same prompt, which begin once it is computed; empty from then on."""
        self.parent: Request | None = None
        """The request whose prompt this one shares, for a further answer."""
        self.admitted_time: float | None = None
        """First admission."""
        self.first_token_time: float | None = None
        # Owned by the KV cache manager.
        self.block_ids: list[int] = []
        """Its block table; 0 where the block is in host memory."""
        self.host_blocks: list[int] = []
        """The host blocks of a swapped request, in order of the places in the table that are 0."""
        self.capacity = 0
        """Tokens that its blocks hold and it may write without asking."""
        self.block_hashes: list[bytes] = []
        """Chained digests of the full blocks of ``token_ids``, as far as they have been computed."""
        self.cache_edge = 0
        """Computed tokens at which its next block is full and joins the prefix cache."""

    def cut_to(self, longest: int) -> None:
        """End at ``longest`` tokens, prompt and answer, where it would go on beyond them."""
        most = min(self.max_tokens, longest - self.num_prompt_tokens)
        self.max_tokens = most
        self.length_limit = self.num_prompt_tokens + min(most, self.ends_after or most)
        self.footprint = self.num_prompt_tokens + most - 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name.lower()}, prompt {self.num_prompt_tokens}, "
            f"output {self.num_output_tokens}, computed {self.num_computed_tokens}, epoch {self.epoch})"
        )
