"""The one seam between the engine and what runs on a device: a protocol at the level of a step.

It is not at the level of a layer or an operator, so that each side may fuse what it likes, compile or capture a whole
step, and keep activations in whatever form suits it; none of that shows here. The engine calls, once a step::

    batch = backend.upload(step, sampling, previous)      # to the device
    logits = backend.forward(batch)                       # [R, vocab]
    sampled = backend.sample(logits, sampling)            # ids and, on request, log-probabilities
    ids = sampled.on_host()                               # waits for the device

Nothing before the last line waits for the device, so that the engine can lay out the next step while this one is
computed: what that step needs of this one, the sampled ids, it takes on the device (``previous``).

A backend instance serves one model: ``load`` packs its weights, ``allocate_kv`` gives it its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from kernels.sampling import SampledTokens, SamplingBatch
from kernels.spec import DecoderSpec, HostStep, StepBatch, StepLimits


class Backend(Protocol):
    name: str
    """``cpu``, ``triton`` or ``transformers``: what ``doctor`` and the run's result show."""
    device: torch.device

    def load(self, spec: DecoderSpec, weights: Mapping[str, torch.Tensor]) -> None:
        """Pack a checkpoint's tensors, named as Transformers names them (``model.layers.0.self_attn.q_proj.weight`` …).

        The tensors may be memory-mapped and of another type: packing converts to what the spec says. Every tensor that
        the spec asks for is there (the engine has checked); nothing else is passed. ValueError for a
        ``spec.weight_dtype`` that the backend does not compute in and a ``spec.kv_dtype`` that it does not keep.
        """

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one block of ``block_size`` tokens occupies over all layers, padding of the layout included."""

    def preparation(self) -> str:
        """What the first step has to do before it computes, as a stage for people, where that can take long; empty
        where it does not."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Allocate zeroed storage for the block ids 0 … ``num_blocks`` - 1; block 0, the null block, is never read for
        a live position."""

    def make_ready(self, limits: StepLimits) -> None:
        """Make what steps of this size want made beforehand: buffers, graphs. Comes after each ``allocate_kv``; a
        larger step is computed too."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers, before the step that writes the destinations."""

    def allocate_host_kv(self, num_blocks: int) -> None:
        """Room in host memory for the host block ids 1 … ``num_blocks`` - 1, in place of what was there; 0 is no block,
        as on the device. Comes after ``allocate_kv``. The memory itself may be taken only once it is written."""

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (block, host block) of all layers into host memory; ready for the next ``swap_in``.
        ValueError for ids that do not exist and for a destination named twice."""

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (host block, block) of all layers back, before the step that reads them. ValueError as in
        :meth:`swap_out`."""

    def upload(
        self, step: HostStep, sampling: SamplingBatch | None = None, previous: torch.Tensor | None = None
    ) -> StepBatch:
        """``step`` on the device, its unknown ids taken from ``previous``, the ``token_ids`` of the step before.
        ``sampling``: what :meth:`sample` will be asked for these logits, so that it may travel along. The result, and
        the logits computed from it, hold until the next upload."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Logits [R, vocab_size] of ``batch.logits_rows``, in float32 or the model's type; writes the keys and values
        of all T tokens.

        Embedding, then a layer after the other on the residual stream: norm, q/k/v, optional q/k norm, rotary, write of
        the new keys and values, attention over the context (causal, within the layer's window), output projection,
        added; norm, SiLU(gate) · up, down projection, added. Final norm and language-model head of the wanted rows
        only: R may be 0, where a step is run for its keys and values alone. RuntimeError before ``load`` and
        ``allocate_kv``.
        """

    def sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
        """One token for each row of ``logits``. Its ``token_ids`` hold until the next call."""


def uploaded(step: HostStep, device: torch.device, previous: torch.Tensor | None) -> StepBatch:
    """:meth:`Backend.upload` with a copy for each tensor."""

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    token_ids = on_device(step.token_ids)
    if step.token_source is not None:
        token_ids = known_ids(token_ids, on_device(step.token_source), previous)
    return StepBatch(
        token_ids=token_ids,
        positions=on_device(step.positions),
        slot_mapping=on_device(step.slot_mapping),
        query_start=on_device(step.query_start),
        seq_lens=on_device(step.seq_lens),
        block_tables=on_device(step.block_tables),
        logits_rows=on_device(step.logits_rows),
        query_lens_list=np.diff(step.query_start).tolist(),
        seq_lens_list=step.seq_lens.tolist(),
    )


def known_ids(token_ids: torch.Tensor, token_source: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    """``token_ids`` int64 [T] with those in place that ``token_source`` takes from ``previous``, as
    :attr:`kernels.spec.HostStep.token_source` says; ValueError without a step before."""
    if previous is None:
        raise ValueError("tokens are to come from the step before, but there was none")
    return torch.where(token_source >= 0, previous[token_source.clamp(min=0)].clamp(min=0), token_ids)


def check_swap(pairs: Sequence[tuple[int, int]], num_sources: int, num_destinations: int) -> None:
    """Raise ValueError unless every pair (source, destination) names two blocks that exist, 0 not among them, and no
    destination is named twice: a block lost in memory would only show as a wrong answer."""
    for source, destination in pairs:
        if not (0 < source < num_sources and 0 < destination < num_destinations):
            raise ValueError(
                f"block {source} cannot be moved to block {destination}: there are the blocks 1 to {num_sources - 1} "
                f"to move from and 1 to {num_destinations - 1} to move to"
            )
    if len({destination for _, destination in pairs}) < len(pairs):
        raise ValueError(f"blocks are moved to the same place: {sorted(destination for _, destination in pairs)}")
