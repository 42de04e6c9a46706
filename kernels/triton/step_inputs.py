"""The inputs of one step in one run of memory, so that they reach the device in one copy.

::

    int64     token_ids [T]   positions [T]   slot_mapping [T]   logits_rows [R]   seed [R]   position [R]
    int32     query_start [S + 1]   seq_lens [S]   token_source [T]   table_stride [1]   top_k [R]
    float32   temperature [R]   min_p [R]   top_p [R]
    int32     block_tables [S, width]                                      width: blocks of the longest request

Every part begins at a multiple of 16 bytes. Where depends on T, S and R alone: steps of the same sizes find their
inputs at the same addresses, which is what a recorded step needs. The block tables come last, so that only the width
that is used is copied; the width differs from step to step at the same address, and is an input too (``table_stride``).

The device's memory is overwritten by each step: whatever reads it comes earlier on the same stream than the next copy.
The host's is new for each step: torch's allocator of page-locked memory hands it out again once the copy is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from kernels.spec import HostStep, StepBatch, StepLimits

ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    dtype: torch.dtype
    count: Literal["tokens", "requests", "bounds", "logits", "one"]


_PARTS = (
    _Part("token_ids", torch.int64, "tokens"),
    _Part("positions", torch.int64, "tokens"),
    _Part("slot_mapping", torch.int64, "tokens"),
    _Part("logits_rows", torch.int64, "logits"),
    _Part("seed", torch.int64, "logits"),
    _Part("position", torch.int64, "logits"),
    _Part("query_start", torch.int32, "bounds"),
    _Part("seq_lens", torch.int32, "requests"),
    _Part("token_source", torch.int32, "tokens"),
    _Part("table_stride", torch.int32, "one"),
    _Part("top_k", torch.int32, "logits"),
    _Part("temperature", torch.float32, "logits"),
    _Part("min_p", torch.float32, "logits"),
    _Part("top_p", torch.float32, "logits"),
)
SAMPLING_COLUMNS = ("seed", "position", "top_k", "temperature", "min_p", "top_p")


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that say where each part is."""

    num_tokens: int
    num_requests: int
    num_logits: int

    def counts(self) -> dict[str, int]:
        return {
            "tokens": self.num_tokens,
            "requests": self.num_requests,
            "bounds": self.num_requests + 1,
            "logits": self.num_logits,
            "one": 1,
        }


@dataclass(frozen=True, slots=True)
class StepLayout:
    parts: Mapping[str, slice]
    """Where each part is in the memory, counted in numbers of its own type."""
    tables: int
    """Where the block tables begin, in numbers of 4 bytes."""

    def num_bytes(self, num_requests: int, width: int) -> int:
        return _aligned((self.tables + num_requests * width) * torch.int32.itemsize)


@lru_cache(maxsize=1024)
def step_layout(shape: StepShape) -> StepLayout:
    counts = shape.counts()
    parts: dict[str, slice] = {}
    begin = 0
    for part in _PARTS:
        first, count = begin // part.dtype.itemsize, counts[part.count]
        parts[part.name] = slice(first, first + count)
        begin = _aligned(begin + count * part.dtype.itemsize)
    return StepLayout(parts, begin // torch.int32.itemsize)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step's inputs on the device, until the next one is uploaded."""

    batch: StepBatch
    token_source: torch.Tensor
    """int32 [T]: as :attr:`kernels.spec.HostStep.token_source`; all -1 where that is None."""
    columns: Mapping[str, torch.Tensor]
    """The sampling parameters, each [R], by the names of :data:`SAMPLING_COLUMNS`; what they hold is undefined where
    none travelled along."""


class StepInputs:
    """Takes steps to ``device``; under the interpreter, where that is the CPU, the same way in ordinary memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        # A decode step is often followed by one of the same shape, and many small tensors take the host long to make.
        self._decode_views: dict[tuple[StepShape, StepShape], dict[str, torch.Tensor]] = {}

    @property
    def memory(self) -> torch.Tensor:
        """uint8: the device's memory that steps within the limits share."""
        return self._memory

    def reserve(self, limits: StepLimits) -> None:
        """Make room at a fixed address for steps within ``limits``. A larger one gets memory of its own."""
        shape = StepShape(max(limits.max_tokens, limits.max_requests), limits.max_requests, limits.max_requests)
        size = step_layout(shape).num_bytes(limits.max_requests, limits.max_blocks)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._decode_views.clear()

    def fits(self, shape: StepShape, width: int) -> bool:
        """Whether the step will be at the fixed address."""
        return step_layout(shape).num_bytes(shape.num_requests, width) <= self._memory.shape[0]

    def upload(
        self, step: HostStep, columns: Mapping[str, np.ndarray] | None = None, *, shape: StepShape | None = None
    ) -> DeviceStep:
        """Begin the copy of ``step``, and of the sampling parameters of its rows of logits, to the device.

        ``shape``, where given, is that of a larger step of one token a request: the requests behind those of ``step``
        have no context (``seq_lens`` 0) and write to slot 0, in the null block.
        """
        own = StepShape(step.token_ids.shape[0], step.seq_lens.shape[0], step.logits_rows.shape[0])
        shape = own if shape is None else shape
        layout = step_layout(shape)
        width = step.block_tables.shape[1]
        size = layout.num_bytes(shape.num_requests, width)
        staging = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        _fill(staging.numpy(), layout, shape, step, columns)
        at_home = self.fits(shape, width)
        memory = self._memory if at_home else torch.empty(size, dtype=torch.uint8, device=self._device)
        memory[:size].copy_(staging, non_blocking=True)
        views = self._home_views(shape, own) if at_home else _views(memory, shape, own)
        return _device_step(memory, views, step_layout(shape).tables, step)

    def _home_views(self, shape: StepShape, shown: StepShape) -> dict[str, torch.Tensor]:
        if shown.num_tokens != shown.num_requests:
            return _views(self._memory, shape, shown)
        views = self._decode_views.get((shape, shown))
        if views is None:
            views = self._decode_views[shape, shown] = _views(self._memory, shape, shown)
        return views


def padding_step(num_requests: int) -> HostStep:
    """Nothing but padding: requests with one token each that have no context and write to the null block."""
    return HostStep(
        token_ids=np.zeros(num_requests, np.int64),
        positions=np.zeros(num_requests, np.int64),
        slot_mapping=np.zeros(num_requests, np.int64),
        query_start=np.arange(num_requests + 1, dtype=np.int32),
        seq_lens=np.zeros(num_requests, np.int32),
        block_tables=np.zeros((num_requests, 1), np.int32),
        logits_rows=np.arange(num_requests),
    )


def _device_step(memory: torch.Tensor, views: dict[str, torch.Tensor], tables: int, step: HostStep) -> DeviceStep:
    """``views`` of what ``step`` says, in ``memory``; ``tables``: as :attr:`StepLayout.tables`."""
    num_requests, width = step.block_tables.shape
    batch = StepBatch(
        token_ids=views["token_ids"],
        positions=views["positions"],
        slot_mapping=views["slot_mapping"],
        query_start=views["query_start"],
        seq_lens=views["seq_lens"],
        block_tables=memory.view(torch.int32)[tables : tables + num_requests * width].view(num_requests, width),
        logits_rows=views["logits_rows"],
        query_lens_list=np.diff(step.query_start).tolist(),
        seq_lens_list=step.seq_lens.tolist(),
        table_stride=views["table_stride"],
    )
    return DeviceStep(batch, views["token_source"], {name: views[name] for name in SAMPLING_COLUMNS})


def _fill(
    memory: np.ndarray, layout: StepLayout, shape: StepShape, step: HostStep, columns: Mapping[str, np.ndarray] | None
) -> None:
    """Write ``step``, padded to ``shape``, into ``memory``, uint8."""
    num_tokens, num_requests = step.token_ids.shape[0], step.seq_lens.shape[0]
    width = step.block_tables.shape[1]
    typed: dict[torch.dtype, np.ndarray] = {
        torch.int64: memory.view(np.int64),
        torch.int32: memory.view(np.int32),
        torch.float32: memory.view(np.float32),
    }
    views = {part.name: typed[part.dtype][layout.parts[part.name]] for part in _PARTS}
    tables = typed[torch.int32][layout.tables :][: shape.num_requests * width].reshape(shape.num_requests, width)
    for name in ("token_ids", "positions", "slot_mapping"):
        views[name][:num_tokens] = getattr(step, name)
        views[name][num_tokens:] = 0
    views["token_source"][:num_tokens] = -1 if step.token_source is None else step.token_source
    views["token_source"][num_tokens:] = -1
    views["query_start"][: num_requests + 1] = step.query_start
    views["query_start"][num_requests + 1 :] = np.arange(num_tokens + 1, shape.num_tokens + 1)
    views["seq_lens"][:num_requests] = step.seq_lens
    views["seq_lens"][num_requests:] = 0
    views["logits_rows"][: step.logits_rows.shape[0]] = step.logits_rows
    views["table_stride"][0] = width
    for name, values in (columns or {}).items():
        views[name][: values.shape[0]] = values
    tables[:num_requests] = step.block_tables
    tables[num_requests:] = 0


def _views(memory: torch.Tensor, shape: StepShape, shown: StepShape) -> dict[str, torch.Tensor]:
    """The first ``shown`` of each part in ``memory``, which is laid out for ``shape``."""
    layout, counts = step_layout(shape), shown.counts()
    typed = {dtype: memory.view(dtype) for dtype in (torch.int64, torch.int32, torch.float32)}
    views = {}
    for part in _PARTS:
        begin = layout.parts[part.name].start
        views[part.name] = typed[part.dtype][begin : begin + counts[part.count]]
    return views
