"""What a step did: one typed event per change, with its reason, and the step's columns. All that views are made of.

Every *change* is an event. What merely goes on (a decode row, the next chunk) is an entry in the record's columns, not
an object. The state of the run at any step is a fold over the records before it (``engine.run_state``); a
:class:`Keyframe` is that state written out, so a fold can begin anywhere.

Times are seconds on the engine's clock (``time.perf_counter`` unless one is injected).
"""

from __future__ import annotations

import enum

import msgspec


class RowKind(enum.IntEnum):
    """What a row of a step computes."""

    DECODE = 0
    """The newest token of a request whose earlier tokens are all in the cache."""
    PREFILL = 1
    """Prompt tokens, a whole prompt or a chunk of it."""
    RECOMPUTE = 2
    """Tokens that had been computed once and were lost to a preemption."""


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="event", gc=False):
    """Base of all events."""


class Arrived(Event, frozen=True):
    request_id: int
    prompt_tokens: int
    max_tokens: int
    priority: int
    user: str
    arrival_time: float


class Admitted(Event, frozen=True):
    """Waiting to running."""

    request_id: int
    cached_tokens: int
    """Tokens found in the prefix cache."""
    waited: float
    """Seconds since its arrival, or since its preemption."""
    resumed: bool
    """Whether it had run before and was preempted."""


class Deferred(Event, frozen=True):
    """The head of the queue cannot join; sent when the binding reason changes. Those behind it are behind it."""

    request_id: int
    reason: str
    """``blocks``, ``slots``, ``budget`` or ``watermark``."""
    needed: int
    available: int
    """Of what ``reason`` names: blocks, slots (max_num_seqs) or tokens of the budget."""


class Preempted(Event, frozen=True):
    request_id: int
    """The victim."""
    beneficiary: int
    """The request for which room was made; the victim itself where it yielded for its own growth."""
    rule: str
    """Why this one: e.g. ``lowest priority, latest arrival``."""
    mode: str
    """``recompute``."""
    tokens: int
    """Computed tokens that are lost and will be computed again."""
    blocks: int
    """References given back."""


class BlocksAllocated(Event, frozen=True):
    """Blocks handed to a request for writing; each has one reference now."""

    request_id: int
    blocks: list[int]


class BlocksShared(Event, frozen=True):
    """Blocks of the prefix cache joined a request's table: one reference more each."""

    request_id: int
    blocks: list[int]


class BlocksCached(Event, frozen=True):
    """Full blocks got a hash and can be found by others from now on."""

    request_id: int
    blocks: list[int]


class BlocksEvicted(Event, frozen=True):
    """Cached blocks nobody refers to lost their hash, because ``request_id`` needed room."""

    request_id: int
    blocks: list[int]


class BlockCopied(Event, frozen=True):
    """Copy-on-write: ``request_id`` now refers to ``destination`` instead of ``source``."""

    request_id: int
    source: int
    destination: int


class BlocksFreed(Event, frozen=True):
    """A request gave up its references. A block with none left is cached if it has a hash, else free."""

    request_id: int
    blocks: list[int]


class Rejected(Event, frozen=True):
    """Refused at once: it could never run."""

    request_id: int
    message: str


class Finished(Event, frozen=True):
    request_id: int
    reason: str
    """A :class:`engine.request.FinishReason`."""
    output_tokens: int


AnyEvent = (
    Arrived
    | Admitted
    | Deferred
    | Preempted
    | BlocksAllocated
    | BlocksShared
    | BlocksCached
    | BlocksEvicted
    | BlockCopied
    | BlocksFreed
    | Rejected
    | Finished
)


class StepTimings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Seconds that the parts of one step took."""

    schedule: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    detokenise: float = 0.0

    @property
    def total(self) -> float:
        return self.schedule + self.prepare + self.forward + self.sample + self.detokenise


class RunTotals(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Counts since the engine started; they only rise. A view that missed frames still has every count right."""

    steps: int = 0
    arrived: int = 0
    finished: int = 0
    """Ended in any way, rejected and aborted ones included."""
    prompt_tokens: int = 0
    """Prompt tokens computed for the first time."""
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed a second time after a preemption."""
    prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache at admission."""
    prefix_hit_tokens: int = 0
    rejected: int = 0


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One iteration: its events in order, its columns, its timings."""

    step: int
    time: float
    """When the step began."""
    timings: StepTimings
    events: list[AnyEvent]
    # Columns: one entry per request in the step's batch, in the order of execution.
    request_ids: list[int]
    num_tokens: list[int]
    """Tokens computed for it in this step."""
    num_computed: list[int]
    """Its computed tokens after this step."""
    kinds: list[int]
    """:class:`RowKind` of each row."""
    new_tokens: list[int]
    """Output tokens that this step gave it: 0 in the middle of a prefill."""
    # Gauges after the step.
    num_running: int
    num_waiting: int
    """Waiting, preempted ones included."""
    free_blocks: int
    """Blocks without reference and without hash."""
    cached_blocks: int
    """Blocks without reference that still have a hash: free to take, and findable until taken."""
    token_budget: int
    totals: RunTotals


class RequestState(msgspec.Struct, array_like=True):
    """What the views know of one request; a row of a :class:`Keyframe`."""

    request_id: int
    arrival_time: float
    prompt_tokens: int
    max_tokens: int
    priority: int
    user: str
    status: int
    """A :class:`engine.request.RequestStatus`."""
    num_computed: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    blocks: list[int]
    """Its block table."""
    admitted_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    finish_reason: str = ""


class Keyframe(msgspec.Struct, frozen=True, array_like=True):
    """The whole state after ``step``: a fold may begin here."""

    step: int
    time: float
    num_blocks: int
    """Size of the pool, the null block not counted; block ids run from 1 to num_blocks."""
    block_size: int
    max_num_seqs: int
    token_budget: int
    requests: list[RequestState]
    """All that are not finished: running ones in order of execution, then waiting ones in order of the queue."""
    cached_blocks: list[int]
    """Blocks that have a hash, with or without references."""
    deferred: Deferred | None
    """Why the head of the queue waits, where something waits."""
    totals: RunTotals
