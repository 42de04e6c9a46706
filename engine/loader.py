"""From a configuration to an engine that runs: model, device, memory, token budget, each chosen with a reason.

::

    resolve ─▶ headers ─▶ device and type ─▶ memory estimate ─▶ weights ─▶ pool ─▶ measure a step ─▶ core
                               ▲                                               │
                               └────────── the GPU failed, device auto ────────┘
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.config import SPECULATION_OFF, STARTER_MODEL, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.environment import usable_cores
from engine.execution.backends import load_backend
from engine.execution.device import (
    DeviceChoice,
    choose_device,
    cpu_choice,
    gpu_failure,
    library_choice,
    without_float16,
)
from engine.execution.first_step import measure_step
from engine.execution.host import available_memory
from engine.execution.loaded_model import LoadedModel, StorageSize
from engine.execution.sizing import (
    LARGEST_BUDGET,
    MemoryPlan,
    dtype_name,
    format_bytes,
    kv_type_name,
    plan_memory,
    prompt_step,
    type_name,
)
from engine.failures import is_out_of_memory
from engine.messages import ModelInfo
from engine.model_catalog import model_title
from engine.models.checkpoint import Checkpoint, Progress, resolve_model
from engine.models.errors import LoadErrorKind, ModelLoadError, NotFiniteError
from engine.models.transformers_spec import ModelSpec, TransformersSpec
from engine.scheduling.costs import PreemptionCosts
from engine.text.codec import TextCodec


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    core: EngineCore
    info: ModelInfo
    codec: TextCodec
    config: EngineConfig
    """What was asked for at the load."""
    model: LoadedModel
    size: StorageSize
    """Of the KV storage, as the load decided it."""
    make_core: Callable[..., EngineCore]
    """A core over the storage as it is, with all that the load decided: wants ``scheduler`` and ``drafts``, as
    :attr:`engine.config.SchedulerConfig.speculative` names them; whatever else is named replaces it."""

    def fresh_core(
        self,
        scheduler: SchedulerConfig,
        *,
        prefix_cache: bool | None = None,
        seed: int | None = None,
        block_size: int | None = None,
        kv_blocks: int | None = None,
        swap_blocks: int | None = None,
        drafts_on_call: bool = True,
    ) -> EngineCore:
        """A core on the same model under other knobs, its queues and its prefix cache empty. It takes the place of
        every core before it, since all write to one KV storage. None: as at the load.

        The storage is made anew only where its size changes: a core reads no block that it has not written, and what a
        block still holds behind its owner's last token does not matter (:mod:`kernels.cpu.attention` says why). Blocks
        of another size are as many as hold the tokens that the pool held, unless ``kv_blocks`` says how many.

        ``drafts_on_call``: whether a draft model keeps up although nobody asks for drafts yet, so that the core can
        change to them; else it costs nothing, but they cannot be had later.

        Raises :class:`ConfigError` for drafts that this engine was not loaded with, and :class:`ModelLoadError` for
        blocks that do not fit into memory; the storage is then as before.
        """
        drafts = scheduler.speculative
        if drafts_on_call and self.model.draft_name is not None:
            drafts = self.model.draft_name
        self._resize(block_size, kv_blocks, swap_blocks)
        changes = {"prefix_cache": prefix_cache, "seed": seed}
        said = {name: value for name, value in changes.items() if value is not None}
        return self.make_core(scheduler=scheduler, drafts=drafts, **said)

    def _resize(self, block_size: int | None, kv_blocks: int | None, swap_blocks: int | None) -> None:
        size = self.size
        wanted = block_size or size.block_size
        if kv_blocks is None:
            kv_blocks = size.num_blocks * size.block_size // wanted
        same = (wanted, kv_blocks) == (size.block_size, size.num_blocks)
        if same and swap_blocks in (None, size.num_host_blocks):
            self.model.resize(size)
        else:
            self.model.resize_to_fit(wanted, max(1, kv_blocks), swap_blocks)

    def info_of(self, core: EngineCore) -> ModelInfo:
        """What is loaded, as the core made last has it."""
        state, size = core.keyframe(), self.model.size
        return msgspec.structs.replace(
            self.info,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            num_host_blocks=size.num_host_blocks,
            kv_bytes_per_block=self.model.block_bytes(),
            max_num_seqs=state.max_num_seqs,
            token_budget=state.token_budget,
        )


def load_engine(
    config: EngineConfig, progress: Progress, clock: Callable[[], float] = time.perf_counter
) -> LoadedEngine:
    """Load a model and make it ready for its first request. ``clock`` times the steps from then on.

    Raises :class:`ModelLoadError` with a sentence for the user; memory is estimated before anything is loaded.
    """
    begin = time.perf_counter()
    folder = resolve_model(config.model, progress)
    progress("Reading the model", 0, 0)
    checkpoint = Checkpoint.open(folder)
    # The tokenizer beside the weights: packing those leaves Python's lock to others.
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as aside:
        coming = aside.submit(TextCodec.from_folder, folder)
        draft = None
        if config.scheduler.draft_model is not None:
            draft = _open_draft(config.model, config.scheduler.draft_model, checkpoint, coming.result(), progress)
        choice = choose_device(config)
        threads = config.threads or usable_cores()
        torch.set_num_threads(threads)
        source = _Source(config, checkpoint, draft, coming.result)
        ready = _prepare_somewhere(source, choice, progress)
        codec = coming.result()
    progress("Reading the weights once for their SHA-256", 0, 0)
    make_core = partial(
        _make_core,
        ready.model,
        ready.seconds_per_token,
        prefix_cache=config.cache.prefix_cache,
        max_model_len=ready.max_model_len,
        vocab_size=ready.model.spec.vocab_size,
        token_budget=ready.token_budget,
        eos_token_ids=checkpoint.eos_token_ids | (set() if codec.eos_token_id is None else {codec.eos_token_id}),
        codec=codec,
        cache_key=_cache_key(checkpoint, ready.model.spec),
        seed=config.seed,
        clock=clock,
    )
    core = make_core(scheduler=config.scheduler, drafts=ready.model.draft_name or SPECULATION_OFF)
    info = _model_info(config, checkpoint, codec, ready, threads, time.perf_counter() - begin)
    # What is loaded stays: a collection within a step need not walk through it.
    gc.collect()
    gc.freeze()
    return LoadedEngine(core, info, codec, config, ready.model, ready.model.size, make_core)


def _make_core(
    model: LoadedModel, seconds_per_token: float, *, scheduler: SchedulerConfig, drafts: str, **given: Any
) -> EngineCore:
    size, proposer = model.size, model.proposer(drafts)
    return EngineCore(
        model.runner(proposer),
        scheduler=scheduler,
        block_size=size.block_size,
        num_blocks=size.num_blocks,
        num_host_blocks=size.num_host_blocks,
        costs=PreemptionCosts(seconds_per_token, model.move_seconds),
        proposer=proposer.name,
        **given,
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """What is to be loaded."""

    config: EngineConfig
    checkpoint: Checkpoint
    draft: Checkpoint | None
    codec: Callable[[], TextCodec]
    """Waits until it is read."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A model on its device, warmed up."""

    choice: DeviceChoice
    model: LoadedModel
    memory: MemoryPlan
    max_model_len: int
    token_budget: int
    seconds_per_token: float


def _open_draft(model: str, name: str, checkpoint: Checkpoint, codec: TextCodec, progress: Progress) -> Checkpoint:
    """The checkpoint of the draft model ``name``: its tokens must be the model's. Raises :class:`ModelLoadError`."""
    draft = Checkpoint.open(resolve_model(name, progress))
    own, drafts = (each.spec(torch.float32).vocab_size for each in (checkpoint, draft))
    if own != drafts:
        raise ModelLoadError(
            f"{name} cannot draft for {model}: the draft model has {drafts:,} tokens, the model {own:,}. Choose "
            "a smaller model of the same family.",
            "unsupported",
        )
    different = codec.different_token(TextCodec.from_folder(draft.folder))
    if different is not None:
        raise ModelLoadError(
            f"{name} cannot draft for {model}: their tokenizers differ, first at token {different:,}. Choose a "
            "smaller model of the same family.",
            "unsupported",
        )
    return draft


def _prepare_somewhere(source: _Source, choice: DeviceChoice, progress: Progress) -> _Ready:
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


def _prepare_finite(source: _Source, choice: DeviceChoice, progress: Progress) -> _Ready:
    """In float32, where float16 was nobody's wish and is too small for the model's numbers."""
    try:
        return _prepare(source, choice, progress)
    except NotFiniteError:
        if choice.dtype != torch.float16 or source.config.dtype != "auto":
            raise
    # The error is gone, and with it the model that it held in memory.
    if choice.is_gpu:
        _release_gpu()
    return _prepare(source, without_float16(choice), progress)


def _prepare(source: _Source, choice: DeviceChoice, progress: Progress) -> _Ready:
    config, checkpoint = source.config, source.checkpoint
    available = torch.cuda.mem_get_info(choice.device)[0] if choice.is_gpu else available_memory()
    own = _choice_for(checkpoint, config, choice, available)
    spec = checkpoint.spec(own.dtype, own.weight_dtype, own.kv_dtype)
    drafting = None if source.draft is None else _choice_for(source.draft, config, choice, available)
    draft_spec = None
    if source.draft is not None and drafting is not None:
        draft_spec = source.draft.spec(drafting.dtype, drafting.weight_dtype, drafting.kv_dtype)
    max_model_len = _max_model_len(config, spec)
    block_size = config.cache.block_size
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
    backends, specs = [load_backend(checkpoint, spec, choice, stage, progress)], [spec]
    if source.draft is not None and draft_spec is not None:
        backends.append(load_backend(source.draft, draft_spec, choice, "Loading the draft model", progress))
        specs.append(draft_spec)
    limit = config.memory_limit
    model = LoadedModel(
        backends,
        specs,
        config.scheduler.speculative if draft_spec is not None else None,
        None if limit is None else limit - memory.weight_bytes,
    )
    model.allocate(block_size, memory.num_blocks)
    preparation = model.backend.preparation()
    if preparation:
        progress(preparation, 0, 0)
        model.forward(prompt_step(1, block_size))
    progress("Measuring how many tokens a step may have", 0, 0)
    largest = min(max_model_len, memory.num_blocks * block_size)
    step = measure_step(config, source.codec(), spec, model.forward, largest, LARGEST_BUDGET)
    model.allocate_host(memory.num_host_blocks)
    return _Ready(own, model, memory, max_model_len, step.token_budget, step.seconds_per_token)


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


def _cache_key(checkpoint: Checkpoint, spec: ModelSpec) -> bytes:
    """Prefixes the hash of every KV block: whatever changes keys and values changes it."""
    digest = hashlib.sha256(checkpoint.sha256.encode())
    if isinstance(spec, TransformersSpec):
        digest.update(spec.fingerprint())
        return digest.digest()
    types = f"{dtype_name(spec.dtype)}|{type_name(spec)}|{kv_type_name(spec)}"
    digest.update(f"|{spec.architecture}|{types}|{spec.rope_attention_scaling}|".encode())
    digest.update(spec.inv_freq.numpy().tobytes())
    digest.update(repr((spec.rope_layers, spec.sliding_window)).encode())
    return digest.digest()


def _model_info(
    config: EngineConfig,
    checkpoint: Checkpoint,
    codec: TextCodec,
    ready: _Ready,
    threads: int,
    load_seconds: float,
) -> ModelInfo:
    block_size = config.cache.block_size
    return ModelInfo(
        name=_display_name(config.model),
        architecture=ready.model.spec.architecture,
        parameters=checkpoint.parameters,
        weights_sha256=checkpoint.sha256,
        dtype=type_name(ready.model.spec),
        kv_dtype=kv_type_name(ready.model.spec),
        device=str(ready.choice.device),
        backend=ready.model.backend.name,
        backend_reason=ready.choice.reason,
        threads=threads,
        vocab_size=ready.model.spec.vocab_size,
        max_model_len=ready.max_model_len,
        num_blocks=ready.memory.num_blocks,
        block_size=block_size,
        kv_bytes_per_block=ready.memory.block_bytes,
        weight_bytes=ready.memory.weight_bytes,
        max_num_seqs=config.scheduler.max_num_seqs,
        token_budget=ready.token_budget,
        has_chat_template=codec.has_chat_template,
        has_system_role=codec.has_system_role,
        load_seconds=load_seconds,
        num_host_blocks=ready.memory.num_host_blocks,
    )


def _display_name(model: str) -> str:
    folder = Path(model).expanduser()
    if folder.is_file():
        return model_title(str(folder))  # not of what it may link to: blobs of the Hugging Face cache have no names
    return model_title(str(folder.resolve()) if model != STARTER_MODEL and folder.exists() else model)
