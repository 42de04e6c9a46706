"""What goes through the two pipes between the window and the engine process: msgspec structs as MessagePack.

Wire format: 4 bytes, little-endian, length of the payload; then the payload, one tagged struct.
Commands go to the engine, replies come back. Tokens (:class:`Output`) are never dropped and arrive in order. Step
records (:class:`Frame`) are sent only while the client has acknowledged the frame before; what piles up meanwhile goes
into the next frame, and past ``MAX_FRAME_RECORDS`` it is replaced by a keyframe, so a slow window misses frames, not
counts, and never slows the engine.
"""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig, SchedulerConfig
from engine.events import Keyframe, StepRecord
from engine.request import SamplingParams
from engine.workload import EngineOptions, Workload

PROTOCOL_VERSION = 5
MAX_FRAME_RECORDS = 512
MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    """``system``, ``user`` or ``assistant``."""
    content: str


class Variant(msgspec.Struct, frozen=True):
    """One column of a comparison: what it changes of the engine that the others run on."""

    name: str
    options: EngineOptions


class ComparePlan(msgspec.Struct, frozen=True):
    """The same workloads through several variants; for each seed every variant has its turn."""

    title: str
    watch: str
    """What to look at; may be empty."""
    options: EngineOptions
    """Over what the engine was loaded with, under every variant's own."""
    variants: list[Variant]
    baseline: str
    """The variant to whose figures the ratios are."""
    workloads: list[Workload]
    """One for each seed."""
    seeds: list[int | None]
    warm_up: int = 1
    objectives: dict[str, float] | None = None
    """Of goodput, in milliseconds."""


# Commands ------------------------------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, tag=True, tag_field="command"):
    """Base of what the client sends."""


class LoadModel(Command, frozen=True):
    """Load a model; the first command of an engine process, once."""

    config: EngineConfig


class AddRequest(Command, frozen=True):
    """Exactly one of ``messages``, ``prompt``, ``prompt_token_ids`` and ``prompt_tokens`` is given."""

    request_id: int
    """Chosen by the client, never used twice."""
    params: SamplingParams
    messages: list[ChatMessage] | None = None
    """A conversation, put through the model's chat template."""
    continues: bool = False
    """Of ``messages``: the last is the assistant's and not finished; the model goes on where it ends."""
    drop_oldest: bool = False
    """Of ``messages``: where they do not fit, the oldest are left out, as :class:`ContextCut` tells; else the
    request is refused."""
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_tokens: int | None = None
    """A synthetic prompt of this many tokens, made from ``synthetic_seed``."""
    synthetic_seed: int = 0
    prompt_limit: int | None = None
    """Of a longer prompt only the first so many tokens are taken."""
    priority: int = 0
    user: str = ""
    arrival_time: float | None = None
    """``time.perf_counter`` of the client (a machine's processes share the clock); None: when the engine reads it."""
    ends_after: int | None = None
    """Where a replayed request really ends, in output tokens; the scheduler does not see it."""
    stream_text: bool = True
    """Whether outputs carry text; load tests do without."""


class Abort(Command, frozen=True):
    request_id: int


class AckFrame(Command, frozen=True):
    """The client has taken the frame with this number; the next may come."""

    number: int


class CountTokens(Command, frozen=True):
    """Asks how long a conversation is as a prompt; answered by :class:`TokenCount`."""

    query_id: int
    messages: list[ChatMessage]
    continues: bool = False
    """As in :class:`AddRequest`."""
    max_tokens: int | None = None
    """What the answer would ask for; None: what a chat asks for where its user set no limit."""


class Reconfigure(Command, frozen=True):
    """Change the scheduler's knobs: the discipline when the batch has drained, everything else at once."""

    scheduler: SchedulerConfig


class SetPriority(Command, frozen=True):
    """Another priority for a request that waits or runs, from the next step on; unknown ones are ignored."""

    request_id: int
    priority: int


class SetPace(Command, frozen=True):
    """Pause between two steps, or run on. While it pauses, requests are taken in but nothing is scheduled."""

    paused: bool


class StepOnce(Command, frozen=True):
    """While it pauses: take one step, where there is something to do."""


class Record(Command, frozen=True):
    """Write every step from the next on to a run file (:mod:`engine.recording`); an empty path ends it."""

    path: str
    limit_bytes: int
    """Where the file would grow beyond this, its oldest segments go."""
    texts: bool = False
    """Whether prompts and answers are kept, too."""


class Compare(Command, frozen=True):
    """Run a comparison once the running answers have ended; requests that come meanwhile wait until it is over."""

    plan: ComparePlan


class CancelCompare(Command, frozen=True):
    """End the comparison after the step in progress; what is complete is its result."""


class Shutdown(Command, frozen=True):
    pass


AnyCommand = (
    LoadModel
    | AddRequest
    | Abort
    | AckFrame
    | CountTokens
    | Reconfigure
    | SetPriority
    | SetPace
    | StepOnce
    | Record
    | Compare
    | CancelCompare
    | Shutdown
)


# Replies -------------------------------------------------------------------------------------------------------------


class Reply(msgspec.Struct, frozen=True, tag=True, tag_field="reply"):
    """Base of what the engine sends."""


class Hello(Reply, frozen=True):
    """First of all, before any heavy import."""

    protocol: int
    pid: int


class Loading(Reply, frozen=True):
    stage: str
    """A sentence for the user, e.g. ``Downloading the starter model``."""
    done: int = 0
    total: int = 0
    """In bytes, tensors or steps; 0: unknown."""


class ModelInfo(msgspec.Struct, frozen=True):
    """What is loaded, for the toolbar, the doctor and the results."""

    name: str
    architecture: str
    parameters: int
    weights_sha256: str
    dtype: str
    """Type of the weights."""
    kv_dtype: str
    """Type of keys and values."""
    device: str
    backend: str
    backend_reason: str
    threads: int
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_bytes_per_block: int
    weight_bytes: int
    max_num_seqs: int
    token_budget: int
    has_chat_template: bool
    """Else conversations are written in a plain format, which :mod:`engine.text` states."""
    load_seconds: float
    num_host_blocks: int = 0
    """Room for the blocks of swapped requests in host memory."""
    has_system_role: bool = True
    """Whether the chat template takes system messages; else they are put before the first user message."""


class Ready(Reply, frozen=True):
    info: ModelInfo
    keyframe: Keyframe


class LoadFailed(Reply, frozen=True):
    """The model could not be loaded; the process ends after this."""

    message: str
    kind: str
    """``offline`` (no model and no way to fetch it), ``memory``, ``unsupported``, ``damaged`` or ``other``."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Output(Reply, frozen=True, gc=False):
    """New tokens of one request; with ``finish_reason`` the last of it."""

    request_id: int
    time: float
    """Engine clock, when the step that gave them ended."""
    token_ids: list[int]
    text: str = ""
    """Text that is certain now: never half a character, never the beginning of a stop string."""
    logprobs: list[TokenLogprob] = []
    finish_reason: str | None = None
    """A :class:`engine.request.FinishReason`."""
    error: str = ""
    """With ``error``: the sentence for the user."""
    prompt_tokens: int = 0
    """With the last: length of the prompt."""
    cached_tokens: int = 0
    """With the last: prompt tokens that the prefix cache saved."""
    preemptions: int = 0
    index: int = 0
    """Which answer, where the request asked for several."""


class Frame(Reply, frozen=True):
    number: int
    records: list[StepRecord]
    keyframe: Keyframe | None = None
    """Where records had to be dropped: the state after the last dropped one; fold ``records`` from here."""


class TokenCount(Reply, frozen=True):
    query_id: int
    tokens: int
    """Of all messages, none left out."""
    error: str = ""
    """Why the template, or the tokenizer, refuses the conversation."""
    dropped_messages: int = 0
    """How many of the oldest messages, the system prompt not counted, would be left out to make it fit."""
    kept_tokens: int = 0
    """Of the messages that would be left."""


class ContextCut(Reply, frozen=True):
    """A conversation did not fit into the model's context, and its oldest messages were left out, as it allowed."""

    request_id: int
    dropped_messages: int
    """The system prompt, which stays, not counted."""
    prompt_tokens: int
    """Of what is left."""


class ConfigRefused(Reply, frozen=True):
    """A :class:`Reconfigure` that changes nothing; what is accepted is told by the step records."""

    message: str


class Paced(Reply, frozen=True):
    """Whether the engine pauses now; the answer to :class:`SetPace`."""

    paused: bool


class RecordingFailed(Reply, frozen=True):
    """The run file cannot be written any more; the engine goes on without."""

    message: str


class PoolShrank(Reply, frozen=True):
    """Memory ran out in a step; the engine goes on with a smaller pool. The records tell it, too."""

    message: str
    info: ModelInfo
    """What is loaded, with the pool as it is."""


class CompareProgress(Reply, frozen=True):
    """Where a comparison is. While one goes on, frames tell of the run in progress, each beginning with a keyframe."""

    run: int
    """The run in progress, from 0; -1: the answers that were running have yet to end."""
    runs: int
    name: str
    """Its variant."""
    seed: int | None
    completed: int
    """Requests that have ended."""
    requests: int
    warming_up: bool = False


class CompareDone(Reply, frozen=True):
    """The comparison is over and the engine is free, with empty queues and an empty prefix cache."""

    result: bytes
    """JSON, as ``compare --json`` writes it; empty where there is none."""
    error: str = ""
    """Why there is none, or not all of it."""


class Failed(Reply, frozen=True):
    """The engine cannot go on (out of memory in a step, a device fault); the process ends after this."""

    message: str


AnyReply = (
    Hello
    | Loading
    | Ready
    | LoadFailed
    | Output
    | Frame
    | TokenCount
    | ContextCut
    | ConfigRefused
    | Paced
    | RecordingFailed
    | PoolShrank
    | CompareProgress
    | CompareDone
    | Failed
)
