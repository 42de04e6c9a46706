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

PROTOCOL_VERSION = 2
MAX_FRAME_RECORDS = 512
MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    """``system``, ``user`` or ``assistant``."""
    content: str


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
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_tokens: int | None = None
    """A synthetic prompt of this many tokens, made from ``synthetic_seed``."""
    synthetic_seed: int = 0
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


class Reconfigure(Command, frozen=True):
    """Change the scheduler's knobs: the discipline when the batch has drained, everything else at once."""

    scheduler: SchedulerConfig


class Shutdown(Command, frozen=True):
    pass


AnyCommand = LoadModel | AddRequest | Abort | AckFrame | CountTokens | Reconfigure | Shutdown


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
    load_seconds: float
    num_host_blocks: int = 0
    """Room for the blocks of swapped requests in host memory."""


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
    error: str = ""


class ConfigRefused(Reply, frozen=True):
    """A :class:`Reconfigure` that changes nothing; what is accepted is told by the step records."""

    message: str


class Failed(Reply, frozen=True):
    """The engine cannot go on (out of memory in a step, a device fault); the process ends after this."""

    message: str


AnyReply = Hello | Loading | Ready | LoadFailed | Output | Frame | TokenCount | ConfigRefused | Failed
