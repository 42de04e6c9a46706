"""How much memory a model takes, how many KV blocks there is room for, how many tokens a step may have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.models.architecture import expected_tensors
from engine.models.errors import ModelLoadError
from kernels.spec import DecoderSpec, StepBatch

CPU_POOL_BYTES = 1280 * 2**20
"""A CPU is busy with far fewer tokens than memory could hold; more would only take it from other programs."""
POOL_SHARE = 0.6
"""Of what is free beside the weights, at most this share goes to the pool unless its size is given."""
GPU_POOL_SHARE = 0.9
WORKING_BYTES = 192 * 2**20
"""Activations and the libraries' own."""
STEP_TARGET_SECONDS = 0.13
"""A step of this length on an empty context stays under 150 ms with one."""
SMALLEST_BUDGET = 64
"""Beside 32 decodes there must be room for a chunk of a prompt, or whoever comes last gets one token a step. A step of
fewer tokens is hardly shorter anyway: it reads all weights too."""
LARGEST_BUDGET = 2048


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weight_bytes: int
    block_bytes: int
    num_blocks: int
    """The null block not counted."""
    working_bytes: int
    """What is needed beside weights and blocks, while loading or later."""
    available_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + (self.num_blocks + 1) * self.block_bytes + self.working_bytes


def plan_memory(
    spec: DecoderSpec, config: EngineConfig, max_model_len: int, available_bytes: int, *, on_gpu: bool
) -> MemoryPlan:
    """Before anything is loaded. Raises :class:`ModelLoadError` of kind ``memory`` that says what is needed and free.

    Without a given number, the pool is the least of: what all of ``max_num_seqs`` could fill, a share of the memory
    left beside the weights, and on a CPU ``CPU_POOL_BYTES``.
    """
    weight_bytes = sum(math.prod(shape) for shape in expected_tensors(spec).values()) * spec.dtype.itemsize
    block_size = config.cache.block_size
    block_bytes = spec.kv_bytes_per_token() * block_size
    working_bytes = _working_bytes(spec, on_gpu=on_gpu)
    room = available_bytes - weight_bytes - working_bytes
    if room < 2 * block_bytes:
        need = weight_bytes + working_bytes + 2 * block_bytes
        raise ModelLoadError(
            f"The model needs about {format_bytes(need)} in {dtype_name(spec.dtype)}, and "
            f"{format_bytes(available_bytes)} are free. Close other programs, or choose a smaller model.",
            "memory",
        )
    fitting = room // block_bytes - 1
    asked = config.cache.num_blocks
    if asked is None:
        useful = config.scheduler.max_num_seqs * -(-max_model_len // block_size)
        share = int(room * (GPU_POOL_SHARE if on_gpu else POOL_SHARE)) // block_bytes
        bounded = useful if on_gpu else min(useful, CPU_POOL_BYTES // block_bytes)
        return MemoryPlan(weight_bytes, block_bytes, max(1, min(bounded, share)), working_bytes, available_bytes)
    if asked > fitting:
        raise ModelLoadError(
            f"{asked:,} KV blocks of {block_size} tokens need {format_bytes((asked + 1) * block_bytes)} beside "
            f"{format_bytes(weight_bytes + working_bytes)} for the model, and {format_bytes(available_bytes)} are "
            f"free: at most {fitting:,} blocks fit (--kv-blocks {fitting}).",
            "memory",
        )
    return MemoryPlan(weight_bytes, block_bytes, asked, working_bytes, available_bytes)


def _working_bytes(spec: DecoderSpec, *, on_gpu: bool) -> int:
    """Beside weights and blocks: one layer's gate and up in float32, joined and in parts, while they are packed; on a
    CPU a tied head too, which is packed while the embedding stays as it is."""
    packing = 2 * 2 * spec.intermediate_size * spec.hidden_size * torch.float32.itemsize
    head = 0 if on_gpu or not spec.tie_embeddings else spec.vocab_size * spec.hidden_size * spec.dtype.itemsize
    return WORKING_BYTES + packing + head


def measure_token_budget(
    forward: Callable[[StepBatch], torch.Tensor],
    device: torch.device,
    *,
    largest: int,
    block_size: int,
    clock: Callable[[], float],
    target: float = STEP_TARGET_SECONDS,
) -> int:
    """Tokens that one step may compute within ``target`` seconds: a multiple of 16, from 64 to 2,048.

    Times real prefills of 64, 128, 256 … tokens, at most ``largest`` (what pool and model hold), and stops at the first
    that takes too long. Each size is the best of three runs: the first may pay for the operators' set-up, and another
    program may have had the cores meanwhile.
    """
    largest = max(1, min(largest, LARGEST_BUDGET))
    fast_size, fast_seconds = 0, 0.0
    size = min(SMALLEST_BUDGET, largest)
    while True:
        batch = warm_up_batch(size, block_size, device)
        seconds = min(_timed(forward, batch, clock) for _ in range(3))
        if seconds > target:
            break
        fast_size, fast_seconds = size, seconds
        if size == largest:
            break
        size = min(2 * size, largest)
    if fast_size == 0:
        return SMALLEST_BUDGET
    reachable = fast_size * target / max(fast_seconds, 1e-9)
    # Where the last size was fast and no larger one fits the pool, a step of several requests still may be larger.
    bound = min(reachable, LARGEST_BUDGET) if size == fast_size else min(reachable, size)
    return max(SMALLEST_BUDGET, int(bound) // 16 * 16)


def warm_up_batch(num_tokens: int, block_size: int, device: torch.device) -> StepBatch:
    """One prompt of ``num_tokens`` zeros in the blocks 1, 2, …, with logits of its last token."""
    blocks = -(-num_tokens // block_size)
    positions = torch.arange(num_tokens)
    return StepBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=(positions + block_size).to(device),
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_tables=torch.arange(1, blocks + 1, dtype=torch.int32, device=device)[None],
        logits_rows=torch.tensor([num_tokens - 1], device=device),
        query_lens_list=[num_tokens],
        seq_lens_list=[num_tokens],
    )


def format_bytes(count: int) -> str:
    if count < 2**30:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**30:,.1f} GiB"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _timed(forward: Callable[[StepBatch], torch.Tensor], batch: StepBatch, clock: Callable[[], float]) -> float:
    begin = clock()
    forward(batch)[0, 0].item()  # waits for the device
    return clock() - begin
