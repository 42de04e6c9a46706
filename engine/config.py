"""Every knob of the engine: frozen, validated dataclasses, light enough for the window to import.

A bad value raises :class:`ConfigError` with the knob's name, the value and the range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

DISCIPLINES: tuple[str, ...] = tuple(
    sorted(
        path.stem.replace("_", "-")
        for path in (Path(__file__).parent / "scheduling" / "disciplines").glob("*.py")
        if not path.stem.startswith("_")
    )
)
"""One file each: a new one there is a new name here, and nothing else has to know."""
ORDERS: tuple[str, ...] = ("fcfs", "priority", "fair")
PREEMPTIONS: tuple[str, ...] = ("recompute", "swap", "auto")
STATIC_DELIVERIES: tuple[str, ...] = ("batch", "row")
SPECULATION_OFF = "off"
SPECULATION_NGRAM = "ngram"
SPECULATION_DRAFT = "draft:"
"""Followed by the folder of a smaller model with the same tokenizer."""
MAX_DRAFT_TOKENS = 16
DTYPES: tuple[str, ...] = ("auto", "int8", "bfloat16", "float16", "float32")
DEVICES: tuple[str, ...] = ("auto", "cpu", "cuda")
KV_DTYPES: tuple[str, ...] = ("auto", "fp8")

STARTER_MODEL = "starter"
"""The model name that stands for the built-in starter model."""
DEFAULT_CHAT_MAX_TOKENS = 1024
"""What a chat asks for where its user set no limit."""
MOST_TOKENS = 2**31 - 1
"""Of a knob that counts tokens: what every table of steps and every message holds."""


class ConfigError(ValueError):
    """A knob with an impossible value; the message names it."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _tokens(name: str, value: int, least: int) -> None:
    _require(value >= least, f"{name} is {value}; it must be at least {least}")
    _require(value <= MOST_TOKENS, f"{name} is {value:,}; it must be at most {MOST_TOKENS:,}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int = 16
    """Tokens per KV block: a power of two from 1 to 256."""
    num_blocks: int | None = None
    """KV blocks in the pool, the null block not counted; None: sized from the memory that is free at load."""
    prefix_cache: bool = True
    """Whether full blocks are kept and shared by requests that begin alike."""
    swap_blocks: int | None = None
    """Blocks of host memory for swapped requests; None: as many as the pool has, as far as memory goes."""

    def __post_init__(self) -> None:
        size = self.block_size
        _require(
            1 <= size <= 256 and size & (size - 1) == 0, f"block_size is {size}; it must be a power of two, 1 to 256"
        )
        _require(
            self.num_blocks is None or self.num_blocks >= 1, f"kv_blocks is {self.num_blocks}; it must be at least 1"
        )
        _require(
            self.swap_blocks is None or self.swap_blocks >= 0,
            f"swap_blocks is {self.swap_blocks}; it must be 0 or more",
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    discipline: str = "vllm"
    """Which planner decides who runs: the files of ``engine/scheduling/disciplines``."""
    order: str = "fcfs"
    """Order of the waiting queue: arrival, priority, or the least served user first."""
    preemption: str = "recompute"
    """What happens to the keys and values of a request whose blocks are taken: computed again, moved to host memory
    and back, or whichever of the two is estimated to take less time."""
    max_num_seqs: int = 32
    """Most requests running at once."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step; None: as many as the device computes in about 150 ms, measured at load."""
    chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps, beside decodes."""
    chunk_size: int | None = None
    """Most tokens of one prompt in one step, where prompts come in chunks; None: as many as the budget leaves."""
    watermark: float = 0.0
    """Share of the pool that admission leaves free for the running requests to grow into."""
    ageing: float | None = None
    """Order ``priority``: seconds of waiting that outweigh one level of priority; None: priorities are strict."""
    user_weights: dict[str, float] = field(default_factory=dict)
    """Order ``fair``: a user's share relative to the others; 1 for those not named."""
    static_delivery: str = "batch"
    """Discipline ``static``: answers are handed out when the batch ends, or each row as it is made."""
    waiting_served_ratio: float = 0.3
    """Discipline ``tgi``: waiting requests join once they number at least this share of the running ones."""
    max_waiting_tokens: int = 20
    """Discipline ``tgi``: decode steps after which waiting requests join whatever their number."""
    speculative: str = SPECULATION_OFF
    """Who drafts tokens that a step checks together: ``off``, ``ngram`` (looks them up in the request itself) or
    ``draft:FOLDER`` (a smaller model)."""
    draft_tokens: int = 4
    """Most tokens drafted for a request in one step."""

    def __post_init__(self) -> None:
        _one_of("discipline", self.discipline, DISCIPLINES)
        _one_of("order", self.order, ORDERS)
        _one_of("preemption", self.preemption, PREEMPTIONS)
        _require(1 <= self.max_num_seqs <= 65_536, f"max_num_seqs is {self.max_num_seqs}; it must be 1 to 65,536")
        if self.max_num_batched_tokens is not None:
            _tokens("token_budget", self.max_num_batched_tokens, 1)
        if self.chunk_size is not None:
            _tokens("chunk_size", self.chunk_size, 1)
        _require(0.0 <= self.watermark < 1.0, f"watermark is {self.watermark}; it must be at least 0 and below 1")
        _require(self.ageing is None or self.ageing > 0, f"ageing is {self.ageing}; it must be above 0 seconds")
        for user, weight in self.user_weights.items():
            ok = math.isfinite(weight) and weight > 0
            _require(ok, f"the weight of user {user!r} is {weight}; it must be a number above 0")
        _one_of("static_delivery", self.static_delivery, STATIC_DELIVERIES)
        ratio = self.waiting_served_ratio
        _require(math.isfinite(ratio) and ratio >= 0, f"waiting_served_ratio is {ratio}; it must be 0 or more")
        _tokens("max_waiting_tokens", self.max_waiting_tokens, 0)
        _require(
            self.speculative in (SPECULATION_OFF, SPECULATION_NGRAM) or self.draft_model is not None,
            f"speculative is {self.speculative!r}; it must be off, ngram or draft:FOLDER",
        )
        _require(
            1 <= self.draft_tokens <= MAX_DRAFT_TOKENS,
            f"draft_tokens is {self.draft_tokens}; it must be 1 to {MAX_DRAFT_TOKENS}",
        )

    @property
    def draft_model(self) -> str | None:
        """The draft model that ``speculative`` names; None without one."""
        name = self.speculative.removeprefix(SPECULATION_DRAFT)
        return name if name and name != self.speculative else None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = STARTER_MODEL
    """``starter``, a folder with a checkpoint, or a repository of the Hugging Face cache (``org/name``)."""
    dtype: str = "auto"
    """Type of weights and activations; int8: weights of 8 bits, the rest in bfloat16 or what auto takes in its place;
    auto: int8 on a CPU (a family that runs through Transformers: float32, or bfloat16 where that would fill the
    memory), on a GPU bfloat16 or, where it does not compute that natively, float16 (float32 where the model's numbers
    are too large), with weights of 8 bits where others would leave no room for a pool."""
    kv_dtype: str = "auto"
    """Type of keys and values; auto: that of the activations; fp8, on GPUs that have it: half of 16 bits, so that a
    pool holds twice the tokens and a long context is read in half the time, less exactly."""
    device: str = "auto"
    """Where the model runs; auto: the GPU where one works, else the CPU."""
    cuda_graphs: bool = True
    """Whether a GPU replays whole decode steps that were recorded at the load, instead of being told each kernel."""
    overlap: bool = True
    """Whether on a GPU a step is scheduled while the one before is computed. What ends by a stop token or a stop string
    is then seen one step late."""
    threads: int | None = None
    """CPU threads of the backend; None: the physical cores."""
    max_model_len: int | None = None
    """Longest context of a request, prompt and answer, in tokens; None: what the model was made for."""
    memory_limit: int | None = None
    """Most bytes that weights and KV blocks may take on the device; None: what is free at the load, less a margin."""
    seed: int = 0
    """Seeds those requests that bring no seed of their own."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        _one_of("device", self.device, DEVICES)
        _require(bool(self.model), "model is empty; name a folder, a repository or 'starter'")
        _require(self.threads is None or 1 <= self.threads <= 1024, f"threads is {self.threads}; it must be 1 to 1,024")
        length = self.max_model_len
        _require(length is None or length >= 2, f"max_model_len is {length}; it must be at least 2")
        limit = self.memory_limit
        _require(limit is None or limit >= 1, f"memory_limit is {limit}; it must be at least 1 byte")
