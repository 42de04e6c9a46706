"""From a configuration to an engine that runs: model, device, memory, token budget, each chosen with a reason.

::

    resolve ─▶ headers ─▶ device and type ─▶ memory estimate ─▶ weights ─▶ pool ─▶ measure a step ─▶ core
                               ▲                                               │
                               └────────── the GPU failed, device auto ────────┘
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.config import SPECULATION_NGRAM, SPECULATION_OFF, STARTER_MODEL, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.environment import usable_cores
from engine.execution.device import choose_device
from engine.execution.loaded_model import LoadedModel, StorageSize
from engine.execution.preparation import ReadyModel, Source, prepare
from engine.execution.sizing import (
    dtype_name,
    kv_type_name,
    type_name,
)
from engine.messages import ModelInfo
from engine.model_catalog import model_title
from engine.models.checkpoint import Checkpoint, Progress, resolve_model
from engine.models.errors import ModelLoadError
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
            tokens = size.num_blocks * size.block_size
            kv_blocks = min(tokens, self.model.most_tokens or tokens) // wanted
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
        source = Source(config, checkpoint, draft, coming.result)
        ready = prepare(source, choice, progress)
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
        overlap=config.overlap and ready.choice.is_gpu,
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
    model: LoadedModel,
    seconds_per_token: float,
    *,
    scheduler: SchedulerConfig,
    drafts: str,
    overlap: bool,
    **given: Any,
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
        overlap=overlap and proposer.name == SPECULATION_NGRAM,  # a draft model reads tokens on the host
        resize_pool=model.shrink,
        **given,
    )


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
    ready: ReadyModel,
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
