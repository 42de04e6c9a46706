"""Every knob of the engine: frozen, validated dataclasses, light enough for the window to import.

A bad value raises :class:`ConfigError` with the knob's name, the value and the range.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DISCIPLINES: tuple[str, ...] = ("vllm",)
ORDERS: tuple[str, ...] = ("fcfs", "priority")
PREEMPTIONS: tuple[str, ...] = ("recompute",)
DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")
DEVICES: tuple[str, ...] = ("auto", "cpu", "cuda")

STARTER_MODEL = "starter"
"""The model name that stands for the built-in starter model."""
DEFAULT_CHAT_MAX_TOKENS = 1024
"""What a chat asks for where its user set no limit."""


class ConfigError(ValueError):
    """A knob with an impossible value; the message names it."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


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

    def __post_init__(self) -> None:
        size = self.block_size
        _require(
            1 <= size <= 256 and size & (size - 1) == 0, f"block_size is {size}; it must be a power of two, 1 to 256"
        )
        _require(
            self.num_blocks is None or self.num_blocks >= 1, f"kv_blocks is {self.num_blocks}; it must be at least 1"
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    discipline: str = "vllm"
    """Which planner decides who runs: the files of ``engine/scheduling``."""
    order: str = "fcfs"
    """Order of the waiting queue."""
    preemption: str = "recompute"
    """What happens to a request whose blocks are taken."""
    max_num_seqs: int = 32
    """Most requests running at once."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step; None: as many as the device computes in about 150 ms, measured at load."""
    chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps, beside decodes."""
    watermark: float = 0.0
    """Share of the pool that admission leaves free for the running requests to grow into."""
    ageing: float | None = None
    """Order ``priority``: seconds of waiting that outweigh one level of priority; None: priorities are strict."""

    def __post_init__(self) -> None:
        _one_of("discipline", self.discipline, DISCIPLINES)
        _one_of("order", self.order, ORDERS)
        _one_of("preemption", self.preemption, PREEMPTIONS)
        _require(1 <= self.max_num_seqs <= 65_536, f"max_num_seqs is {self.max_num_seqs}; it must be 1 to 65,536")
        budget = self.max_num_batched_tokens
        _require(budget is None or budget >= 1, f"token_budget is {budget}; it must be at least 1")
        _require(0.0 <= self.watermark < 1.0, f"watermark is {self.watermark}; it must be at least 0 and below 1")
        _require(self.ageing is None or self.ageing > 0, f"ageing is {self.ageing}; it must be above 0 seconds")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = STARTER_MODEL
    """``starter``, a folder with a checkpoint, or a repository of the Hugging Face cache (``org/name``)."""
    dtype: str = "auto"
    """Type of weights and activations; auto: the fastest that this device computes natively."""
    device: str = "auto"
    """Where the model runs; auto: the GPU where one works, else the CPU."""
    threads: int | None = None
    """CPU threads of the backend; None: the physical cores."""
    max_model_len: int | None = None
    """Longest context of a request, prompt and answer, in tokens; None: what the model was made for."""
    seed: int = 0
    """Seeds those requests that bring no seed of their own."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, DEVICES)
        _require(bool(self.model), "model is empty; name a folder, a repository or 'starter'")
        _require(self.threads is None or 1 <= self.threads <= 1024, f"threads is {self.threads}; it must be 1 to 1,024")
        length = self.max_model_len
        _require(length is None or length >= 2, f"max_model_len is {length}; it must be at least 2")
