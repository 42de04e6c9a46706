"""How many KV blocks a GPU has room for: its largest steps are run over a pool of a few blocks, and what they took is
kept free, beside what recorded steps took and a margin.

::

    the GPU's memory  | others' | weights | KV blocks                      | recorded steps | largest step | margin |
                                          └─ what is left when the rest has been measured: the pool ─┘
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from engine.config import SPECULATION_OFF, EngineConfig
from engine.execution.loaded_model import LoadedModel
from engine.execution.sizing import (
    LARGEST_GPU_BUDGET,
    SMALLEST_BUDGET,
    MemoryPlan,
    Room,
    StepMeasurement,
    fit_blocks,
    format_bytes,
)
from engine.execution.warm_up import StepSizes
from engine.failures import is_out_of_memory
from engine.models.checkpoint import Progress
from engine.models.errors import ModelLoadError

LEAST_MARGIN = 256 * 2**20
MARGIN_SHARE = 1 / 50
"""Of the GPU's memory: for what torch's allocator cannot use between the pieces that it has cut, and for others."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Of a GPU's memory, in bytes, all over the same few KV blocks."""

    total: int
    free: int
    """Before steps were recorded."""
    free_when_ready: int
    """With the recorded steps and the buffers."""
    free_after_steps: int
    """After the largest steps; torch keeps what they took."""
    peak: int
    """What torch took for them. Kernels and libraries take memory beside it."""


def working_bytes(readings: Readings) -> int:
    """What must stay free beside weights and KV blocks."""
    ready = max(0, readings.free - readings.free_when_ready)
    steps = max(readings.peak, readings.free_when_ready - readings.free_after_steps)
    return ready + steps + max(LEAST_MARGIN, int(readings.total * MARGIN_SHARE))


@dataclass(frozen=True, slots=True)
class Fitted:
    memory: MemoryPlan
    """With the pool as it was made."""
    step: StepMeasurement
    note: str
    """What the user should know of it; empty: nothing."""


def fit_to_gpu(
    model: LoadedModel,
    plan: MemoryPlan,
    config: EngineConfig,
    max_model_len: int,
    measure: Callable[[int], StepMeasurement],
    progress: Progress,
) -> Fitted:
    """Give ``model``, whose weights are loaded, as many KV blocks as its GPU has room for, run all that it will launch,
    and record its decode steps. ``measure``: the tokens that a step may have, from the longest prompt that there are
    blocks for. Raises :class:`ModelLoadError` with the numbers where a pool of one block does not fit, or not the one
    that was asked for.
    """
    block_size, requests = config.cache.block_size, config.scheduler.max_num_seqs
    speculates = config.scheduler.speculative != SPECULATION_OFF
    logits = 1 + config.scheduler.draft_tokens if speculates else 1
    few = -(-min(max_model_len, LARGEST_GPU_BUDGET) // block_size)
    few = max(1, min(few, plan.num_blocks, model.memory.free_bytes() // 2 // plan.block_bytes))
    model.allocate(block_size, few)
    progress(model.backend.preparation(), 0, 0)
    model.warm_up(StepSizes(requests, min(few * block_size, SMALLEST_BUDGET), max_model_len, logits))
    progress("Measuring how many tokens a step may have", 0, 0)
    step = measure(min(max_model_len, few * block_size))
    while True:
        progress("Measuring how much memory a step takes", 0, 0)
        sizes = StepSizes(requests, step.token_budget, max_model_len, logits)
        room = _room_beside(model, sizes, block_size, few)
        num_blocks = -1 if room is None else room.bytes // plan.block_bytes - 1
        smallest = config.scheduler.max_num_batched_tokens is not None or step.token_budget <= SMALLEST_BUDGET
        # A step cannot have more tokens than the pool: the memory that a larger one takes is better spent on blocks.
        if num_blocks * block_size >= step.token_budget or smallest:
            break
        step = dataclasses.replace(step, token_budget=max(SMALLEST_BUDGET, step.token_budget // 32 * 16))
        model.allocate(block_size, few)
    if room is None or num_blocks < 1:
        raise _too_small(model, step.token_budget, room)
    return _allocated(model, plan, config, max_model_len, step, room, progress)


def _room_beside(model: LoadedModel, sizes: StepSizes, block_size: int, few: int) -> Room | None:
    """For KV blocks, of which there are ``few``, beside steps of these sizes; None: they alone are too large. No blocks
    are left afterwards."""
    memory, fits = model.memory, True
    try:
        memory.release()
        free = memory.free_bytes()
        model.make_ready(sizes)
        memory.release()
        ready = memory.free_bytes()
        memory.watch()
        model.run_heaviest(sizes)
        model.working_bytes = working_bytes(
            Readings(memory.total_bytes(), free, ready, memory.free_bytes(), memory.peak_bytes())
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    model.release(block_size)
    return model.room() if fits else None


def _allocated(
    model: LoadedModel,
    plan: MemoryPlan,
    config: EngineConfig,
    max_model_len: int,
    step: StepMeasurement,
    room: Room,
    progress: Progress,
) -> Fitted:
    """The pool, as large as was asked for or as there is room for, and where even that does not fit, smaller."""
    cache, host_bytes = config.cache, model.host_bytes()
    block_size, most = cache.block_size, room.bytes // plan.block_bytes - 1
    useful = config.scheduler.max_num_seqs * -(-max_model_len // block_size)
    wanted = cache.num_blocks or min(useful, most)
    fit_blocks(block_size, wanted, cache.swap_blocks, plan.block_bytes, room, host_bytes)  # refuses what does not fit
    progress("Recording decode steps", 0, 0)
    made = model.allocate_what_fits(block_size, wanted)
    note = ""
    if made < wanted:
        if cache.num_blocks is not None:
            raise ModelLoadError(
                f"{wanted:,} KV blocks of {block_size} tokens were to fit into the GPU's memory, but it ran out: "
                f"{made:,} blocks do (--kv-blocks {made}).",
                "memory",
            )
        note = f"{made:,} KV blocks instead of {wanted:,}, because memory ran out at the load"
    num_host_blocks = fit_blocks(block_size, made, cache.swap_blocks, plan.block_bytes, room, host_bytes)
    fitted = dataclasses.replace(
        plan, num_blocks=made, num_host_blocks=num_host_blocks, working_bytes=model.working_bytes
    )
    return Fitted(fitted, step, note)


def _too_small(model: LoadedModel, token_budget: int, room: Room | None) -> ModelLoadError:
    if room is None:
        return ModelLoadError(
            f"The model is loaded, but a step of {token_budget:,} tokens does not fit into the GPU's memory beside it: "
            f"{format_bytes(model.memory.free_bytes())} are free. Use a smaller --token-budget or a smaller model, or "
            "close other programs that use the GPU.",
            "memory",
        )
    return ModelLoadError(
        f"The model is loaded, but beside it and a step of {token_budget:,} tokens "
        f"({format_bytes(model.working_bytes)}) {format_bytes(max(0, room.bytes))} are {room.why}, less than two KV "
        f"blocks take. Use a smaller --token-budget or a smaller model, or close other programs that use the GPU.",
        "memory",
    )
