"""How much memory a model takes, how many KV blocks there is room for, how many tokens a step may have, and what a
preemption costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import EngineConfig
from engine.failures import is_out_of_memory
from engine.model_catalog import SMALL_POOL_TOKENS
from engine.models.architecture import expected_tensors
from engine.models.errors import ModelLoadError
from engine.models.footprint import FLOAT32_BYTES, WORKING_BYTES, weight_bytes, working_bytes
from engine.models.transformers_spec import ModelSpec, TransformersSpec
from kernels.backend import Backend
from kernels.spec import HostStep

CPU_POOL_BYTES = 1280 * 2**20
"""A CPU is busy with far fewer tokens than memory could hold; more would only take it from other programs."""
POOL_SHARE = 0.6
"""Of what is free beside the weights, at most this share goes to the pool unless its size is given."""
GPU_POOL_SHARE = 0.9
HOST_SHARE = 0.5
"""Of the host memory that is left beside weights, pool and working memory, at most this share goes to swapped blocks
unless their number is given."""
STEP_TARGET_SECONDS = 0.13
"""A step of this length on an empty context stays under 150 ms with one."""
SMALLEST_BUDGET = 64
"""Beside 32 decodes there must be room for a chunk of a prompt, or whoever comes last gets one token a step. A step of
fewer tokens is hardly shorter anyway: it reads all weights too."""
LARGEST_BUDGET = 2048
LARGEST_GPU_BUDGET = 8192
"""A GPU's matrix units are busy with far fewer tokens: a larger step would only keep the decodes that share it waiting,
and its activations would take the pool's memory."""
RUNS = 2
"""Every measurement is the best of so many: the first may pay for an operator's set-up or for memory that was never
touched, and another program may have had the cores meanwhile."""
_LOGIT_COPIES = 3
MOVED_BLOCKS = 8
"""Blocks that are moved together to measure what one costs."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weight_bytes: int
    block_bytes: int
    num_blocks: int
    """The null block not counted."""
    num_host_blocks: int
    """Room for swapped blocks in host memory; it is taken only as they come."""
    working_bytes: int
    """What is needed beside weights and blocks, while loading or later."""
    available_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + (self.num_blocks + 1) * self.block_bytes + self.working_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that KV blocks may take, and what bounds them, as the end of a sentence."""

    bytes: int
    why: str


def room_for_blocks(free_bytes: int, limit_bytes: int | None) -> Room:
    """The smaller of what is free beside the model and its work and what the memory limit leaves beside the weights
    (None: there is no limit)."""
    if limit_bytes is not None and limit_bytes < free_bytes:
        return Room(limit_bytes, "left by the memory limit (memory_limit)")
    return Room(free_bytes, "free")


def plan_memory(
    spec: ModelSpec,
    config: EngineConfig,
    max_model_len: int,
    available_bytes: int,
    *,
    on_gpu: bool,
    host_bytes: int = 0,
    draft: ModelSpec | None = None,
) -> MemoryPlan:
    """Before anything is loaded. Raises :class:`ModelLoadError` of kind ``memory`` that says what is needed and free.

    ``available_bytes`` are free on the device, ``host_bytes`` beside it on a GPU's host. A model of drafts, ``draft``,
    has as many blocks as the model: weights and blocks are those of both.
    """
    specs = [spec] if draft is None else [spec, draft]
    weight_bytes = sum(map(_weight_bytes, specs))
    block_bytes = sum(_block_bytes(each, config.cache.block_size, on_gpu=on_gpu) for each in specs)
    working_bytes = _working_bytes(specs, config.scheduler.max_num_seqs)
    model_bytes = weight_bytes + working_bytes
    who = "The model needs" if draft is None else "The model and its draft model need"
    if available_bytes < model_bytes + 2 * block_bytes:
        raise ModelLoadError(
            f"{who} about {format_bytes(model_bytes + 2 * block_bytes)} in {type_name(spec)}, and "
            f"{format_bytes(available_bytes)} are free. Close other programs, or choose a smaller model.",
            "memory",
        )
    limit = config.memory_limit
    if limit is not None and limit < weight_bytes + 2 * block_bytes:
        raise ModelLoadError(
            f"{who} about {format_bytes(weight_bytes + 2 * block_bytes)} for weights and KV blocks in "
            f"{type_name(spec)}, and the memory limit is {format_bytes(limit)} (memory_limit). Raise it in the "
            "settings, or choose a smaller model.",
            "memory",
        )
    if on_gpu:
        _refuse_host(specs, host_bytes)
    room = room_for_blocks(available_bytes - model_bytes, None if limit is None else limit - weight_bytes)
    num_blocks = _num_blocks(config, max_model_len, room, block_bytes, on_gpu=on_gpu)
    host_room = host_bytes - WORKING_BYTES if on_gpu else room.bytes - (num_blocks + 1) * block_bytes
    num_host_blocks = _num_host_blocks(config.cache.swap_blocks, num_blocks, host_room, block_bytes)
    return MemoryPlan(weight_bytes, block_bytes, num_blocks, num_host_blocks, working_bytes, available_bytes)


def shortage(specs: Sequence[ModelSpec], config: EngineConfig, max_model_len: int, available_bytes: int) -> str:
    """Why a GPU with ``available_bytes`` free has no room for the models beside the pool that was asked for or, without
    a given number, ``SMALL_POOL_TOKENS`` tokens: a clause with the numbers; empty where it has."""
    block_size, limit = config.cache.block_size, config.memory_limit
    num_blocks = config.cache.num_blocks or -(-min(SMALL_POOL_TOKENS, max_model_len) // block_size)
    block_bytes = sum(_block_bytes(spec, block_size, on_gpu=True) for spec in specs)
    kept = sum(map(_weight_bytes, specs)) + (num_blocks + 1) * block_bytes
    needed = kept + _working_bytes(specs, config.scheduler.max_num_seqs)
    with_pool = f"with room for {num_blocks * block_size:,} tokens {dtype_name(specs[0].dtype)} needs about"
    if needed > available_bytes:
        return f"{with_pool} {format_bytes(needed)}, and {format_bytes(available_bytes)} are free"
    if limit is not None and kept > limit:
        return f"{with_pool} {format_bytes(kept)}, and the memory limit is {format_bytes(limit)}"
    return ""


def _refuse_host(specs: Sequence[ModelSpec], host_bytes: int) -> None:
    """On a GPU: what the Transformers library computes is put together in the host's memory, and goes to the GPU as a
    whole. The system would end the process where that is too small."""
    for spec in specs:
        needed = _weight_bytes(spec) + WORKING_BYTES
        if isinstance(spec, TransformersSpec) and host_bytes < needed:
            raise ModelLoadError(
                f"{spec.architecture} runs through {spec.library}, which puts a model together in the host's memory: "
                f"it needs about {format_bytes(needed)} there in {type_name(spec)}, and "
                f"{format_bytes(max(0, host_bytes))} are free. Close other programs, or choose a smaller model.",
                "memory",
            )


def _block_bytes(spec: ModelSpec, block_size: int, *, on_gpu: bool) -> int:
    """Over all layers. On a CPU a native decoder fills a block up to whole vectors, which counts where it is small."""
    if on_gpu or isinstance(spec, TransformersSpec):
        return spec.kv_bytes_per_token() * block_size
    from kernels.cpu.attention import block_values  # where a GPU computes, numba need not be there

    values = block_values(spec.num_kv_heads, spec.head_dim, block_size)
    return spec.num_layers * values * spec.dtype.itemsize


def _num_blocks(config: EngineConfig, max_model_len: int, room: Room, block_bytes: int, *, on_gpu: bool) -> int:
    """Blocks of the pool. Without a given number the least of: what all of ``max_num_seqs`` could fill, a share of the
    memory left beside the model, and on a CPU ``CPU_POOL_BYTES``."""
    block_size, asked = config.cache.block_size, config.cache.num_blocks
    if asked is None:
        useful = config.scheduler.max_num_seqs * -(-max_model_len // block_size)
        share = int(room.bytes * (GPU_POOL_SHARE if on_gpu else POOL_SHARE)) // block_bytes
        bounded = useful if on_gpu else min(useful, CPU_POOL_BYTES // block_bytes)
        return max(1, min(bounded, share))
    _refuse_pool(asked, block_size, block_bytes, room)
    return asked


def fit_blocks(
    block_size: int,
    num_blocks: int,
    swap_blocks: int | None,
    block_bytes: int,
    room: Room,
    host_bytes: int | None = None,
) -> int:
    """The host blocks that there will be beside a pool of ``num_blocks`` of a model that is loaded already.

    ``room`` is that of the pool, and ``host_bytes`` are free on a GPU's host; None: they are the same memory.
    ``swap_blocks`` None: as many as the pool has, as far as memory goes. Raises :class:`ModelLoadError` of
    kind ``memory`` where it does not fit.
    """
    _refuse_pool(num_blocks, block_size, block_bytes, room)
    left = room.bytes - (num_blocks + 1) * block_bytes if host_bytes is None else host_bytes - WORKING_BYTES
    return _num_host_blocks(swap_blocks, num_blocks, left, block_bytes)


def _refuse_pool(asked: int, block_size: int, block_bytes: int, room: Room) -> None:
    fitting = max(0, room.bytes // block_bytes - 1)
    if asked > fitting:
        raise ModelLoadError(
            f"{asked:,} KV blocks of {block_size} tokens need {format_bytes((asked + 1) * block_bytes)}, and beside "
            f"the model {format_bytes(max(0, room.bytes))} are {room.why}: at most {fitting:,} blocks fit "
            f"(--kv-blocks {fitting}).",
            "memory",
        )


def _num_host_blocks(asked: int | None, num_blocks: int, room: int, block_bytes: int) -> int:
    """Host blocks for swapped requests. Without a given number as many as the pool has, within a share of ``room``."""
    if asked is None:
        return max(0, min(num_blocks, int(room * HOST_SHARE) // block_bytes - 1))
    fitting = max(0, room // block_bytes - 1)
    if asked > fitting:
        raise ModelLoadError(
            f"{asked:,} blocks of host memory for swapped requests need {format_bytes((asked + 1) * block_bytes)}, and "
            f"{format_bytes(max(0, room))} are left beside model and pool: at most {fitting:,} blocks fit "
            f"(--swap-blocks {fitting}).",
            "memory",
        )
    return asked


def _weight_bytes(spec: ModelSpec) -> int:
    """Of the model as a backend keeps it."""
    if isinstance(spec, TransformersSpec):
        return spec.parameters * spec.dtype.itemsize
    return weight_bytes(expected_tensors(spec).values(), type_name(spec), spec.dtype.itemsize)


def _working_bytes(specs: Sequence[ModelSpec], max_num_seqs: int) -> int:
    """Of several models the most: they are packed one after the other. What the Transformers library computes needs no
    packing, but keeps a few copies of the logits at a time."""
    return max(
        WORKING_BYTES + _LOGIT_COPIES * max_num_seqs * spec.vocab_size * FLOAT32_BYTES
        if isinstance(spec, TransformersSpec)
        else working_bytes(spec.hidden_size, spec.intermediate_size)
        for spec in specs
    )


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    token_budget: int
    seconds_per_token: float
    """In a prefill of the largest size that was tried and fast enough."""


def measure_token_budget(
    forward: Callable[[HostStep], torch.Tensor],
    *,
    largest: int,
    block_size: int,
    clock: Callable[[], float],
    most: int = LARGEST_BUDGET,
    target: float = STEP_TARGET_SECONDS,
) -> StepMeasurement:
    """Tokens that one step may compute within ``target`` seconds: a multiple of 16, from 64 to ``most``.

    Times real prefills of 64, 128, 256 … tokens, at most ``largest`` (what pool and model hold), and stops at the first
    of which twice as many would take too long, or for which there is no memory.
    """
    largest = max(1, min(largest, most))
    fast_size, fast_seconds, out_of_memory = 0, 0.0, False
    size = min(SMALLEST_BUDGET, largest)
    while True:
        try:
            seconds = prefill_seconds(forward, size, block_size, clock, enough=target / 2)
        except Exception as error:
            if fast_size == 0 or not is_out_of_memory(error):
                raise
            out_of_memory = True
            break
        if seconds > target:
            break
        fast_size, fast_seconds = size, seconds
        if size == largest or seconds > target / 2:
            break
        size = min(2 * size, largest)
    if fast_size == 0:
        return StepMeasurement(SMALLEST_BUDGET, seconds / size)
    reachable = fast_size if out_of_memory else fast_size * target / max(fast_seconds, 1e-9)
    # Where the last size was fast and no larger one fits the pool, a step of several requests still may be larger.
    bound = min(reachable, most) if size == fast_size else min(reachable, size)
    return StepMeasurement(max(SMALLEST_BUDGET, int(bound) // 16 * 16), fast_seconds / fast_size)


def prefill_seconds(
    forward: Callable[[HostStep], torch.Tensor],
    num_tokens: int,
    block_size: int,
    clock: Callable[[], float],
    *,
    enough: float = 0.0,
) -> float:
    """What a step takes that computes one prompt of ``num_tokens``, on an empty context. One that takes less than
    ``enough`` is not run again."""
    step = prompt_step(num_tokens, block_size)
    best = math.inf
    for _ in range(RUNS):
        best = min(best, _timed(forward, step, clock))
        if best < enough:
            break
    return best


def block_move_seconds(backend: Backend, num_blocks: int, clock: Callable[[], float]) -> float:
    """What moving one block over all layers out to the host and back in takes, measured on a few of the pool's
    ``num_blocks``. Leaves the backend with room for those few on the host and no more."""
    count = min(MOVED_BLOCKS, num_blocks)
    pairs = [(block, block) for block in range(1, count + 1)]
    backend.allocate_host_kv(count + 1)
    best = math.inf
    for _ in range(RUNS):
        begin = clock()
        backend.swap_out(pairs)
        backend.swap_in(pairs)
        if backend.device.type == "cuda":
            torch.cuda.synchronize(backend.device)
        best = min(best, clock() - begin)
    return best / count


def prompt_step(num_tokens: int, block_size: int) -> HostStep:
    """One prompt of ``num_tokens`` zeros in the blocks 1, 2, …, with logits of its last token."""
    blocks = -(-num_tokens // block_size)
    positions = np.arange(num_tokens)
    return HostStep(
        token_ids=np.zeros(num_tokens, np.int64),
        positions=positions,
        slot_mapping=positions + block_size,
        query_start=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([num_tokens], np.int32),
        block_tables=np.arange(1, blocks + 1, dtype=np.int32)[None],
        logits_rows=np.array([num_tokens - 1]),
    )


def format_bytes(count: int) -> str:
    if count < 2**30:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**30:,.1f} GiB"


def type_name(spec: ModelSpec) -> str:
    """What a user calls the type of a model: that of its matrices."""
    return dtype_name(spec.weight_dtype or spec.dtype)


def kv_type_name(spec: ModelSpec) -> str:
    """The type in which keys and values are kept."""
    return dtype_name(spec.kv_dtype or spec.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _timed(forward: Callable[[HostStep], torch.Tensor], step: HostStep, clock: Callable[[], float]) -> float:
    begin = clock()
    forward(step)[0, 0].item()  # waits for the device
    return clock() - begin
