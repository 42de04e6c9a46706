"""Models of the Transformers library on our KV blocks: the library computes, our attention stands in for its own.

::

    step ─▶ row of T tokens, their positions ─▶ library: norms, projections, rotary, experts, head ─▶ logits
                                                      │ queries, keys, values            ▲
                                                      ▼                                  │
                                      keys and values into their slots ─▶ attention per request, by its block table

To the library a step is one text of T tokens without a cache. All that mixes tokens is the attention, and that is ours:
so requests of any length lie side by side, in chunks or token by token.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.failures import describe, is_out_of_memory
from engine.models.errors import ModelLoadError, listed
from engine.models.transformers_model import PAGED, build_config, freeze_rotary, model_class, the_library
from engine.models.transformers_spec import AttentionLayer, TransformersSpec
from kernels.backend import check_swap, known_ids, uploaded
from kernels.cpu.sampling import sample
from kernels.plain_attention import paged_attention, write_kv
from kernels.sampling import SampledTokens, SamplingBatch
from kernels.spec import DecoderSpec, HostStep, StepBatch, StepLimits
from kernels.triton.step_inputs import DeviceStep, StepInputs

_HOOK = "batchscope_attention"
"""Attribute of an attention module that holds our attention for it."""


class TransformersBackend:
    """Implements :class:`kernels.backend.Backend` for a :class:`TransformersSpec`. Not for two threads at once."""

    name = "transformers"

    def __init__(self, device: torch.device | str, *, fused: bool | None = None) -> None:
        """``fused``: whether the GPU's kernel attends where it can; None: on a GPU."""
        self.device = torch.device(device)
        self._uses_fused = self.device.type != "cpu" if fused is None else fused
        self._spec: TransformersSpec | None = None
        self._model: Any = None
        self._keys: list[torch.Tensor] = []
        """Of each layer [blocks, kv_heads, block_size, head_dim], as ``_values``."""
        self._values: list[torch.Tensor] = []
        self._host_blocks: list[torch.Tensor] = []
        """Of each layer the keys, then of each the values."""
        self._step: StepBatch | None = None
        self._inputs = StepInputs(self.device)
        self._uploaded: DeviceStep | None = None
        self._sampling: SamplingBatch | None = None
        """Whose parameters came with ``_uploaded``."""

    @property
    def spec(self) -> TransformersSpec:
        if self._spec is None:
            raise RuntimeError("load a model first")
        return self._spec

    def load(self, spec: DecoderSpec | TransformersSpec, weights: Mapping[str, torch.Tensor]) -> None:
        """``weights``: all of the checkpoint's, by the names the library knows. Raises :class:`ModelLoadError` that
        names what is missing, misshapen or not used, and ValueError for a :class:`DecoderSpec`."""
        if not isinstance(spec, TransformersSpec):
            raise ValueError("the Transformers backend takes models of the Transformers library only")
        the_library().AttentionInterface.register(PAGED, _attention)
        model = _loaded(spec, weights).to(self.device).requires_grad_(False).eval()
        freeze_rotary(model)
        for index, layer in enumerate(spec.layers):
            setattr(model.get_submodule(layer.module), _HOOK, partial(self._attend, index))
        self._spec, self._model = spec, model

    def kv_bytes_per_block(self, block_size: int) -> int:
        return self.spec.kv_bytes_per_token() * block_size

    def preparation(self) -> str:
        return "Running the first step" if self.device.type == "cpu" else "Loading the kernels of the GPU"

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._keys, self._values = [], []  # the old storage goes before the new one comes
        self._keys = [self._blocks(layer, num_blocks, block_size, layer.key_dim) for layer in self.spec.layers]
        self._values = [self._blocks(layer, num_blocks, block_size, layer.value_dim) for layer in self.spec.layers]

    def allocate_host_kv(self, num_blocks: int) -> None:
        self._host_blocks = []
        self._host_blocks = [
            _host_zeros((num_blocks, *storage.shape[1:]), storage.dtype) for storage in self._storages()
        ]

    def make_ready(self, limits: StepLimits) -> None:
        """Nothing: memory is taken as steps come."""

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        storages = self._storages()
        _move(storages, storages, pairs)

    @torch.inference_mode()
    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        storages, host = self._storages(), self._host()
        check_swap(pairs, storages[0].shape[0], host[0].shape[0])
        _move(storages, host, pairs)

    @torch.inference_mode()
    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        storages, host = self._storages(), self._host()
        check_swap(pairs, host[0].shape[0], storages[0].shape[0])
        _move(host, storages, pairs)

    @torch.inference_mode()
    def upload(
        self, step: HostStep, sampling: SamplingBatch | None = None, previous: torch.Tensor | None = None
    ) -> StepBatch:
        """On a GPU in one copy that does not wait for the step before."""
        if not self._uses_fused:
            return uploaded(step, self.device, previous)
        # Only where a GPU is: triton is not installed everywhere.
        from kernels.triton.sampling import host_columns

        self._uploaded = self._inputs.upload(step, None if sampling is None else host_columns(sampling))
        self._sampling = sampling
        batch, source = self._uploaded.batch, self._uploaded.token_source
        if step.token_source is None:
            return batch
        return dataclasses.replace(batch, token_ids=known_ids(batch.token_ids, source, previous))

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._storages()
        self._step = batch
        try:
            output = self._model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logits_rows,
            )
        finally:
            self._step = None
        logits: torch.Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
        if self.device.type == "cpu":
            return sample(logits, sampling)
        # Only where a GPU is: triton is not installed everywhere.
        from kernels.triton.host_memory import arrival
        from kernels.triton.sampling import sample_on_device

        travelled = self._uploaded is not None and sampling is self._sampling
        columns = self._uploaded.columns if self._uploaded is not None and travelled else None
        sampled = sample_on_device(logits, sampling, columns)
        return SampledTokens(sampled.token_ids, sampled.logprobs, arrival(sampled.token_ids))

    def _attend(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Of layer ``index``: queries [1, heads, T, head_dim], keys and values the same with kv_heads; returns [1, T,
        heads, head_dim of the values]."""
        layer, batch = self.spec.layers[index], self._step
        if batch is None:
            raise RuntimeError("attention outside a step")
        keys, values = self._keys[index], self._values[index]
        q, k, v = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))
        write_kv(keys, values, batch.slot_mapping, k, v)
        scale = layer.key_dim**-0.5 if scale is None else scale
        fused = self._fused(layer)
        attend = paged_attention if fused is None else fused
        q = q if fused is None else q.to(keys.dtype)
        attended = attend(q, keys, values, batch, scale=scale, window=layer.window, softcap=softcap)
        return attended.to(query.dtype)[None]

    def _fused(self, layer: AttentionLayer) -> Callable[..., Any] | None:
        """The GPU's own kernel, where it computes such a layer."""
        if not self._uses_fused or layer.key_dim != layer.value_dim:
            return None
        # Only where a GPU is: triton is not installed everywhere.
        from kernels.triton.attention_tiles import has_tile
        from kernels.triton.paged_attention import paged_attention as kernel

        return kernel if has_tile(self.spec.dtype, layer.key_dim) else None

    def _blocks(self, layer: AttentionLayer, num_blocks: int, block_size: int, head_dim: int) -> torch.Tensor:
        shape = (num_blocks, layer.num_kv_heads, block_size, head_dim)
        if self.device.type == "cpu":
            return _host_zeros(shape, self.spec.dtype)
        return torch.zeros(shape, dtype=self.spec.dtype, device=self.device)

    def _storages(self) -> list[torch.Tensor]:
        if not self._keys:
            raise RuntimeError("allocate the KV storage first")
        return [*self._keys, *self._values]

    def _host(self) -> list[torch.Tensor]:
        if not self._host_blocks:
            raise RuntimeError("allocate the host's KV storage first")
        return self._host_blocks


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What the library calls in place of its own attention."""
    return getattr(module, _HOOK)(query, key, value, scaling, softcap), None


class _Stored:
    """A weight that is read when the library takes it, which it does with ``[...]`` and from several threads."""

    def __init__(self, weights: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype, lock: threading.Lock):
        self._weights = weights
        self._name = name
        self._dtype = dtype
        self._lock = lock

    def __getitem__(self, _: Any) -> torch.Tensor:
        with self._lock:
            tensor = self._weights[self._name]
        # Of the wanted type already, the library would keep what is only a view of the file.
        return tensor.clone() if tensor.dtype == self._dtype else tensor


def _loaded(spec: TransformersSpec, weights: Mapping[str, torch.Tensor]) -> Any:
    lock = threading.Lock()
    try:
        model, report = model_class(spec.architecture).from_pretrained(
            None,
            config=build_config(spec.architecture, spec.config, PAGED),
            state_dict={name: _Stored(weights, name, spec.dtype, lock) for name in weights},
            dtype=spec.dtype,
            output_loading_info=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except ModelLoadError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelLoadError(
            f"The weights do not fit {spec.architecture} as config.json describes it ({describe(error)}).", "damaged"
        ) from error
    _check(spec, report)
    return model


def _check(spec: TransformersSpec, report: Mapping[str, Any]) -> None:
    missing, unused = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing:
        raise ModelLoadError(f"The checkpoint lacks {listed(missing)}, which {spec.architecture} needs.", "damaged")
    if unused:
        raise ModelLoadError(
            f"The checkpoint has {listed(unused)}, which {spec.architecture} with this config.json does not use; the "
            "answers would be wrong.",
            "unsupported",
        )


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # numpy asks the system for zeroed pages, which take no memory until they are written; torch would write them.
    memory = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
    return memory.view(dtype).view(shape)


def _move(sources: list[torch.Tensor], destinations: list[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copies blocks (source, destination) between storages [blocks, …]; of each all are read before any is written."""
    table = torch.tensor(pairs, dtype=torch.int64)
    for source, destination in zip(sources, destinations, strict=True):
        moved = source.index_select(0, table[:, 0].to(source.device))
        destination.index_copy_(0, table[:, 1].to(destination.device), moved.to(destination.device))
