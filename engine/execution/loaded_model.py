"""A model on its device, with its draft model where it has one, and the KV blocks of both.

The weights stay as long as the process does. How many blocks there are, and of how many tokens, may change between two
cores: all cores write to one storage, so the next takes the place of those before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.execution.draft_model import DraftModel
from engine.execution.host import available_memory
from engine.execution.proposers import NgramProposer, Proposer
from engine.execution.runner import ModelRunner
from engine.execution.sizing import Room, block_move_seconds, fit_blocks, room_for_blocks
from engine.failures import describe, is_out_of_memory
from engine.models.errors import ModelLoadError
from engine.models.footprint import WORKING_BYTES
from engine.models.transformers_spec import ModelSpec
from kernels.backend import Backend
from kernels.spec import HostStep


@dataclass(frozen=True, slots=True)
class StorageSize:
    block_size: int
    """Tokens of a block."""
    num_blocks: int
    """On the device, the null block not counted."""
    num_host_blocks: int
    """For swapped requests."""


class LoadedModel:
    """``backends`` and ``specs``: the model's own and, where drafts come from a model, that one's, which
    ``draft_name`` names as :attr:`engine.config.SchedulerConfig.speculative` does. ``most_block_bytes``: what KV blocks
    may take at most; None: what is free."""

    def __init__(
        self,
        backends: Sequence[Backend],
        specs: Sequence[ModelSpec],
        draft_name: str | None,
        most_block_bytes: int | None = None,
    ) -> None:
        self.spec = specs[0]
        self.backend = backends[0]
        self.draft_name = draft_name
        self._backends = list(backends)
        self._specs = list(specs)
        self._most_block_bytes = most_block_bytes
        self.size = StorageSize(1, 0, 0)
        """Of the storage as it is."""
        self.move_seconds = 0.0
        """What one block takes out to the host and back in, over all layers of all models."""

    def forward(self, step: HostStep) -> torch.Tensor:
        """Of every model, the model's own last: logits of it, as :meth:`kernels.backend.Backend.forward` gives them."""
        for drafting in self._backends[1:]:
            drafting.forward(drafting.upload(step))
        return self.backend.forward(self.backend.upload(step))

    def proposer(self, speculative: str) -> Proposer:
        """Who drafts: the draft model where ``speculative`` names it, else n-grams, which cost nothing unasked."""
        if speculative == self.draft_name:
            return DraftModel(self._backends[1], self._specs[1], self.size.block_size, speculative)
        return NgramProposer()

    def runner(self, proposer: Proposer) -> ModelRunner:
        """What runs a core over the storage as it is."""
        return ModelRunner(self.backend, self.spec, self.size.block_size, proposer=proposer)

    def block_bytes(self) -> int:
        """Of one block, over all layers of all models."""
        return sum(backend.kv_bytes_per_block(self.size.block_size) for backend in self._backends)

    def allocate(self, block_size: int, num_blocks: int) -> None:
        """Blocks on the device, in place of those there were; there are none on the host then."""
        self.size = StorageSize(block_size, num_blocks, 0)
        for backend in self._backends:
            backend.allocate_kv(num_blocks + 1, block_size)

    def allocate_host(self, num_host_blocks: int) -> None:
        """Measure what moving a block takes, then make room for so many on the host."""
        size = self.size
        self.move_seconds = sum(
            block_move_seconds(backend, size.num_blocks, time.perf_counter) for backend in self._backends
        )
        for backend in self._backends:
            backend.allocate_host_kv(num_host_blocks + 1)
        self.size = StorageSize(size.block_size, size.num_blocks, num_host_blocks)

    def resize(self, size: StorageSize) -> None:
        """Blocks of the size and number they had before: not looked at whether they fit."""
        if size == self.size:
            return
        self._release(size.block_size)
        self.allocate(size.block_size, size.num_blocks)
        self.allocate_host(size.num_host_blocks)

    def resize_to_fit(self, block_size: int, num_blocks: int, swap_blocks: int | None) -> None:
        """Other blocks, the old ones freed before. ``swap_blocks`` None: as many as on the device, as far as memory
        goes. Raises :class:`ModelLoadError` where they do not fit; the storage is then as it was before."""
        before = self.size
        if (block_size, num_blocks) == (before.block_size, before.num_blocks) and swap_blocks in (
            None,
            before.num_host_blocks,
        ):
            return
        self._release(block_size)
        try:
            room, host_bytes = self._room()
            num_host_blocks = fit_blocks(block_size, num_blocks, swap_blocks, self.block_bytes(), room, host_bytes)
            self.allocate(block_size, num_blocks)
            self.allocate_host(num_host_blocks)
        except Exception as error:
            self.resize(before)
            if not is_out_of_memory(error):
                raise
            raise ModelLoadError(
                f"{num_blocks:,} KV blocks of {block_size} tokens do not fit into memory ({describe(error)}); take "
                "fewer.",
                "memory",
            ) from error

    def _release(self, block_size: int) -> None:
        """Keep the null block alone."""
        self.allocate(block_size, 0)
        for backend in self._backends:
            backend.allocate_host_kv(1)
        if self.backend.device.type == "cuda":
            torch.cuda.empty_cache()

    def _room(self) -> tuple[Room, int | None]:
        """For blocks on the device and, where that is a GPU, the bytes free on its host."""
        on_gpu = self.backend.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.backend.device)[0] if on_gpu else available_memory()
        room = room_for_blocks(free - WORKING_BYTES, self._most_block_bytes)
        return room, available_memory() if on_gpu else None
