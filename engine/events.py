"""What a step did: one typed event per change, with its reason, and the step's columns. All that views are made of.

Every *change* is an event. What merely goes on (a decode row, the next chunk) is an entry in the record's columns, not
an object. The state of the run at any step is a fold over the records before it (``engine.run_state``); a
:class:`Keyframe` is that state written out, so a fold can begin anywhere.

Times are seconds on the engine's clock (``time.perf_counter`` unless one is injected).
"""

from __future__ import annotations

import enum

import msgspec

from engine.config import SchedulerConfig


class RowKind(enum.IntEnum):
    """What a row of a step computes."""

    DECODE = 0
    """The newest token of a request whose earlier tokens are all in the cache."""
    PREFILL = 1
    """Prompt tokens, a whole prompt or a chunk of it."""
    RECOMPUTE = 2
    """Tokens that had been computed once and were lost to a preemption."""
    PADDING = 3
    """Nothing of its own: a row of a static batch that is shorter than others, or over already."""


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="event", gc=False):
    """Base of all events."""


class Arrived(Event, frozen=True):
    request_id: int
    prompt_tokens: int
    max_tokens: int
    priority: int
    user: str
    arrival_time: float
    parent: int = 0
    """The request whose prompt it shares, where that asked for several answers."""
    prefix: list[int] = []
    """The first 32 bits of the chained digest of each full block of its prompt: prompts whose lists begin alike begin
    alike. Empty without a prefix cache."""


class Reprioritised(Event, frozen=True):
    """A request got another priority while it waited or ran; it counts from this step on."""

    request_id: int
    priority: int


class Admitted(Event, frozen=True):
    """Waiting to running."""

    request_id: int
    cached_tokens: int
    """Tokens that it need not compute: found in the prefix cache, those of the request whose prompt it shares, or all
    that it had computed where it was swapped."""
    waited: float
    """Seconds since its arrival, or since its preemption."""
    resumed: bool
    """Whether it had run before and was preempted."""


class Deferred(Event, frozen=True):
    """The head of the queue cannot join; sent when the binding reason changes. Those behind it are behind it."""

    request_id: int
    reason: str
    """What binds, and of what ``needed`` and ``available`` are counts:

    ``blocks``     free KV blocks
    ``watermark``  free KV blocks, those included that admission leaves to the running requests
    ``resume``     free KV blocks, those included that let a preempted request and the running ones grow for a while
    ``promised``   KV blocks neither in use nor promised to running requests until their ends
    ``slots``      places in the batch (max_num_seqs)
    ``budget``     tokens of the step's budget
    ``batch``      places in a static batch, which nobody joins until it has ended (available: 0)
    ``joining``    waiting requests: fewer than the share of the running ones that makes them join (``tgi``)
    ``draining``   running requests that must end before the discipline changes (available: 0)
    """
    needed: int
    available: int


RULE_OUT_OF_MEMORY = "memory ran out in the step"
"""Why all that ran are preempted where the KV storage is made anew: what they hold in it is lost."""


class Preempted(Event, frozen=True):
    request_id: int
    """The victim."""
    beneficiary: int
    """The request for which room was made; the victim itself where it yielded for its own growth, or for nobody."""
    rule: str
    """Why this one: e.g. ``lowest priority, latest arrival``."""
    mode: str
    """What was done: ``recompute`` or ``swap``."""
    tokens: int
    """Its computed tokens: lost and to be computed again, or kept in host memory."""
    blocks: int
    """References given back."""
    swapped_blocks: int = 0
    """Blocks moved to host memory."""
    recompute_seconds: float | None = None
    """Estimate: computing ``tokens`` again. None: nothing was measured."""
    swap_seconds: float | None = None
    """Estimate: moving its blocks out and back."""
    fallback: str = ""
    """Why it was not swapped although it should have been."""


class SwappedOut(Event, frozen=True):
    """A preempted request's blocks moved to host memory. In its table they leave empty places."""

    request_id: int
    blocks: list[int]
    host_blocks: list[int]


class SwappedIn(Event, frozen=True):
    """They came back: ``blocks``, which have one reference now, fill the empty places of the table in order."""

    request_id: int
    blocks: list[int]
    host_blocks: list[int]


class SwapDropped(Event, frozen=True):
    """A swapped request gave up what it had in host memory and on the device: it is computed again."""

    request_id: int
    host_blocks: list[int]
    reason: str


class Recovered(Event, frozen=True):
    """A preempted request is again where it was: the end of what its preemption cost."""

    request_id: int
    seconds: float
    """Since it was preempted; where that happened several times before it recovered, since the first."""
    recomputed_tokens: int
    """In that time."""


class Ended(Event, frozen=True):
    """An answer is complete, but its row stays in a static batch until the last one ends."""

    request_id: int
    reason: str
    output_tokens: int


class BatchStarted(Event, frozen=True):
    """A static batch has been formed; nobody joins until it has ended."""

    batch: int
    request_ids: list[int]
    padded_prompt: int
    """Tokens of its longest prompt, to which all are padded."""


class BatchEnded(Event, frozen=True):
    """All answers of a static batch are complete. With p prompt and o output tokens of each of its B requests:"""

    batch: int
    size: int
    """B."""
    steps: int
    useful_tokens: int
    """Computed for the requests themselves."""
    padding_tokens: int
    eta: float
    """Σ(p + o) / (B · max(p + o)), the literature's efficiency."""
    predicted_useful: float
    """Σ(p + o - 1) / (B · (max p + max o - 1)): the useful share of what padded batching computes."""
    measured_useful: float
    """``useful_tokens`` / all that was computed."""


class Reconfigured(Event, frozen=True):
    """The scheduler's knobs were changed while it runs."""

    discipline: str
    order: str
    preemption: str
    pending_discipline: str = ""
    """The one that takes over when the batch has drained."""
    max_num_seqs: int = 0
    """0: as before."""
    scheduler: SchedulerConfig | None = None
    """All knobs as they are in force or, the discipline, wanted."""


class PoolShrunk(Event, frozen=True):
    """Memory ran out in a step, and the KV storage was made anew with fewer blocks. Nobody refers to a block any more,
    none is cached; who asked for more tokens than the pool holds is cut to that."""

    num_blocks: int
    """Of the pool from here on, the null block not counted."""
    before: int
    cause: str
    """What the step raised."""
    withdrawn: list[int] = []
    """Requests of which the record of a step in flight counted a token that did not come."""


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
    parents: list[int] = []
    """For each the block whose content comes before its own, as ``Keyframe.cached_parents`` has it."""


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
    | Reprioritised
    | Admitted
    | Deferred
    | Preempted
    | SwappedOut
    | SwappedIn
    | SwapDropped
    | Recovered
    | Ended
    | BatchStarted
    | BatchEnded
    | Reconfigured
    | PoolShrunk
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
    """Counts since the engine started; a view that missed frames still has every count right. They only rise, but for
    an output token that was counted while its step was in flight, and did not come."""

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
    computed_tokens: int = 0
    """Tokens that requests had computed, for the first time or again, rejected drafts included, padding not."""
    padding_tokens: int = 0
    """Tokens computed only to fill a static batch."""
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    draft_tokens: int = 0
    """Tokens that speculation proposed."""
    accepted_tokens: int = 0
    """Proposed tokens that the model itself would have given."""


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
    """Output tokens that this step gave it: 0 in the middle of a prefill. Where the step is ``in_flight``, these are
    under way; when clients got them :mod:`engine.handout` says."""
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
    # Further columns, as long as the others, or empty where all their entries would be 0.
    padding: list[int] = []
    """Padding computed in each row, behind its tokens."""
    drafts: list[int] = []
    """Drafted tokens among ``num_tokens``; those accepted are among ``new_tokens``."""
    # Further gauges.
    num_slots: int = 0
    """Places in the batch taken by requests without a complete answer while the step ran."""
    num_swapped: int = 0
    """Of those waiting, how many are in host memory."""
    host_blocks_used: int = 0
    reserved_tokens: int = 0
    """KV slots in blocks that running requests hold and have not begun to fill, while the step ran."""
    tail_tokens: int = 0
    """Empty KV slots in the blocks that running requests have begun to fill, while the step ran."""
    in_flight: bool = False
    """Whether the step was still computed when its record was written: its tokens had yet to arrive."""
    landed_at: float = 0.0
    """When the tokens of the record before arrived, engine clock; 0: none did."""

    @property
    def end(self) -> float:
        """When the step ended, engine clock."""
        return self.time + self.timings.total

    @property
    def takeable_blocks(self) -> int:
        """Blocks to which no request refers."""
        return self.free_blocks + self.cached_blocks

    def accepted_drafts(self) -> list[int]:
        """Of each row's drafts, how many were accepted: the last new token of a row is the model's own. Empty, as
        ``drafts``, in a step without any."""
        if not self.drafts:
            return []
        return [min(drafts, max(new - 1, 0)) for drafts, new in zip(self.drafts, self.new_tokens, strict=True)]


def pool_after(record: StepRecord, num_blocks: int) -> int:
    """Blocks of the pool after a step, ``num_blocks`` being those before it."""
    for event in record.events:
        if isinstance(event, PoolShrunk):
            num_blocks = event.num_blocks
    return num_blocks


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
    host_blocks: list[int] = []
    """Blocks in host memory; the table has as many zeros."""
    parent: int = 0


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
    num_host_blocks: int = 0
    """Size of the pool of host memory."""
    discipline: str = ""
    order: str = ""
    preemption: str = ""
    pending_discipline: str = ""
    cached_parents: list[int] = []
    """For each of ``cached_blocks`` the block whose content precedes its own in the chain of the prefix cache; 0: it
    begins a prompt, or what came before is not cached any more."""
    batch: BatchStarted | None = None
    """The static batch that runs."""
    scheduler: SchedulerConfig | None = None
    """All knobs."""
