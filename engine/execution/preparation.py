"""A checkpoint onto the device that was chosen, in a type and with a pool that fit; on the CPU where the GPU fails."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.execution.backends import load_backend
from engine.execution.device import (
    DeviceChoice,
    cpu_choice,
    gpu_failure,
    library_choice,
    with_int8,
    without_float16,
)
from engine.execution.device_memory import CudaMemory
from engine.execution.first_step import measure_step
from engine.execution.gpu_pool import Fitted, fit_to_gpu
from engine.execution.host import available_memory
from engine.execution.loaded_model import LoadedModel
from engine.execution.sizing import (
    LARGEST_BUDGET,
    LARGEST_GPU_BUDGET,
    MemoryPlan,
    StepMeasurement,
    format_bytes,
    plan_memory,
    prompt_step,
    shortage,
)
from engine.failures import is_out_of_memory
from engine.models.checkpoint import Checkpoint, Progress
from engine.models.errors import LoadErrorKind, ModelLoadError, NotFiniteError
from engine.models.transformers_spec import ModelSpec, TransformersSpec
from engine.text.codec import TextCodec


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be loaded."""

    config: EngineConfig
    checkpoint: Checkpoint
    draft: Checkpoint | None
    codec: Callable[[], TextCodec]
    """Waits until it is read."""


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model on its device, warmed up."""

    choice: DeviceChoice
    model: LoadedModel
    memory: MemoryPlan
    max_model_len: int
    token_budget: int
    seconds_per_token: float


def prepare(source: Source, choice: DeviceChoice, progress: Progress) -> ReadyModel:
    """On the CPU where the GPU fails: whatever it or its compiler raises, the model still runs there. It is asked once,
    not again and again."""
    try:
        return _prepare_finite(source, choice, progress)
    except Exception as error:
        if not choice.is_gpu:
            raise
        failure = gpu_failure(error)
        if source.config.device == "cuda":
            if isinstance(error, ModelLoadError):
                raise
            kind: LoadErrorKind = "memory" if is_out_of_memory(error) else "unsupported"
            raise ModelLoadError(f"device is cuda, but {failure}. Use --device cpu, or auto.", kind) from error
        traceback.print_exc()
    # The error is gone, and with it the model that it held in the GPU's memory.
    _release_gpu()
    return _prepare_finite(source, cpu_choice(source.config, failure), progress)


def _release_gpu() -> None:
    with contextlib.suppress(Exception):  # it may not work at all
        gc.collect()
        torch.cuda.empty_cache()


def _prepare_finite(source: Source, choice: DeviceChoice, progress: Progress) -> ReadyModel:
    """With activations in float32, where float16 was nobody's wish and is too small for the model's numbers."""
    try:
        return _prepare_on(source, choice, progress)
    except NotFiniteError:
        if choice.dtype != torch.float16 or source.config.dtype not in ("auto", "int8"):
            raise
    # The error is gone, and with it the model that it held in memory.
    if choice.is_gpu:
        _release_gpu()
    return _prepare_on(source, without_float16(choice), progress)


def _prepare_on(source: Source, choice: DeviceChoice, progress: Progress) -> ReadyModel:
    config, checkpoint = source.config, source.checkpoint
    available = torch.cuda.mem_get_info(choice.device)[0] if choice.is_gpu else available_memory()
    choice = _in_a_type_that_fits(source, choice, available)
    own = _choice_for(checkpoint, config, choice, available)
    spec = checkpoint.spec(own.dtype, own.weight_dtype, own.kv_dtype)
    drafting = None if source.draft is None else _choice_for(source.draft, config, choice, available)
    draft_spec = None
    if source.draft is not None and drafting is not None:
        draft_spec = source.draft.spec(drafting.dtype, drafting.weight_dtype, drafting.kv_dtype)
    max_model_len = _max_model_len(config, spec)
    memory = plan_memory(
        spec,
        config,
        max_model_len,
        available,
        on_gpu=choice.is_gpu,
        host_bytes=available_memory(),
        draft=draft_spec,
    )
    stage = f"Loading the weights: about {format_bytes(memory.needed_bytes)} of {format_bytes(available)} free"
    graphs = config.cuda_graphs
    backends, specs = [load_backend(checkpoint, spec, choice, stage, progress, cuda_graphs=graphs)], [spec]
    if source.draft is not None and draft_spec is not None:
        drafting_stage = "Loading the draft model"
        backends.append(load_backend(source.draft, draft_spec, choice, drafting_stage, progress, cuda_graphs=graphs))
        specs.append(draft_spec)
    limit = config.memory_limit
    model = LoadedModel(
        backends,
        specs,
        config.scheduler.speculative if draft_spec is not None else None,
        None if limit is None else limit - memory.weight_bytes,
        CudaMemory(choice.device) if choice.is_gpu else None,
    )

    def measure(largest: int) -> StepMeasurement:
        most = LARGEST_GPU_BUDGET if choice.is_gpu else LARGEST_BUDGET
        return measure_step(config, source.codec(), spec, model.forward, largest, most)

    fitted = (fit_to_gpu if choice.is_gpu else _fit_to_cpu)(model, memory, config, max_model_len, measure, progress)
    model.allocate_host(fitted.memory.num_host_blocks)
    reasons = [own.reason, fitted.note, model.graphs_problem]
    own = dataclasses.replace(own, reason="; ".join(filter(None, reasons)))
    return ReadyModel(own, model, fitted.memory, max_model_len, fitted.step.token_budget, fitted.step.seconds_per_token)


def _fit_to_cpu(
    model: LoadedModel,
    plan: MemoryPlan,
    config: EngineConfig,
    max_model_len: int,
    measure: Callable[[int], StepMeasurement],
    progress: Progress,
) -> Fitted:
    """The planned pool: on a CPU what steps need is little beside it."""
    block_size = config.cache.block_size
    model.allocate(block_size, plan.num_blocks)
    preparation = model.backend.preparation()
    if preparation:
        progress(preparation, 0, 0)
        model.forward(prompt_step(1, block_size))
    progress("Measuring how many tokens a step may have", 0, 0)
    return Fitted(plan, measure(min(max_model_len, plan.num_blocks * block_size)), "")


def _in_a_type_that_fits(source: Source, choice: DeviceChoice, free_bytes: int) -> DeviceChoice:
    """``choice``, with int8 where the type is left to us and a GPU has no room for more."""
    config, checkpoint = source.config, source.checkpoint
    if not choice.is_gpu or config.dtype != "auto" or not checkpoint.is_native:
        return choice  # the Transformers library has no int8
    opened = [checkpoint] if source.draft is None else [checkpoint, source.draft]
    specs = [each.spec(choice.dtype, kv_dtype=choice.kv_dtype if each.is_native else None) for each in opened]
    why = shortage(specs, config, _max_model_len(config, specs[0]), free_bytes)
    return with_int8(choice, why) if why else choice


def _choice_for(checkpoint: Checkpoint, config: EngineConfig, choice: DeviceChoice, free_bytes: int) -> DeviceChoice:
    """``choice`` as the checkpoint's family can be run. Raises :class:`ModelLoadError`."""
    if checkpoint.is_native:
        return choice
    spec = checkpoint.spec(choice.dtype)
    assert isinstance(spec, TransformersSpec)
    usable = free_bytes if config.memory_limit is None else min(free_bytes, config.memory_limit)
    return library_choice(choice, config, spec, usable)


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    asked = config.max_model_len
    if asked is None:
        return spec.max_position
    if asked > spec.max_position:
        why = spec.limit_reason if isinstance(spec, TransformersSpec) else ""
        raise ModelLoadError(
            f"max_model_len is {asked:,}, but {why or f'the model was made for {spec.max_position:,} tokens'}; "
            f"use --max-model-len {spec.max_position} or less.",
            "unsupported",
        )
    return asked
