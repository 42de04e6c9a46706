"""A model on its device, with its draft model where it has one, and the KV blocks of both.

The weights stay as long as the process does. How many blocks there are, and of how many tokens, may change between two
cores: all cores write to one storage, so the next takes the place of those before it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.execution.device_memory import DeviceMemory
from engine.execution.draft_model import DraftModel
from engine.execution.host import available_memory
from engine.execution.proposers import NgramProposer, Proposer
from engine.execution.runner import ModelRunner
from engine.execution.sizing import Room, block_move_seconds, fit_blocks, room_for_blocks
from engine.execution.warm_up import StepSizes, heaviest, warm_up
from engine.failures import describe, is_out_of_memory
from engine.models.errors import ModelLoadError
from engine.models.footprint import WORKING_BYTES
from engine.models.transformers_spec import ModelSpec
from engine.recovery import KEPT_SHARE
from kernels.backend import Backend
from kernels.spec import HostStep, StepLimits

ALLOCATIONS_TRIED = 4
"""Each but the first with at most :data:`engine.recovery.KEPT_SHARE` of the blocks of the one before."""


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
    may take at most; None: what is free. ``memory``: of the GPU that has the weights; None: they are on the host."""

    def __init__(
        self,
        backends: Sequence[Backend],
        specs: Sequence[ModelSpec],
        draft_name: str | None,
        most_block_bytes: int | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.spec = specs[0]
        self.backend = backends[0]
        self.draft_name = draft_name
        self._backends = list(backends)
        self._specs = list(specs)
        self._most_block_bytes = most_block_bytes
        self._memory = memory
        self._sizes: StepSizes | None = None
        """What the backends were made ready for."""
        self.most_tokens: int | None = None
        """What the blocks may hold since memory ran out; None: it never did."""
        self.working_bytes = WORKING_BYTES
        """What must stay free beside weights and blocks."""
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
        """Blocks of the size and number they had before, or as many as memory had room for since: not looked at whether
        they fit."""
        if self.most_tokens is not None:
            size = dataclasses.replace(
                size, num_blocks=max(1, min(size.num_blocks, self.most_tokens // size.block_size))
            )
        if size == self.size:
            return
        self.release(size.block_size)
        self.allocate(size.block_size, size.num_blocks)
        self.make_ready()
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
        self.release(block_size)
        try:
            room, host_bytes = self.room(), self.host_bytes()
            num_host_blocks = fit_blocks(block_size, num_blocks, swap_blocks, self.block_bytes(), room, host_bytes)
            self.allocate(block_size, num_blocks)
            self.make_ready()
            self.allocate_host(num_host_blocks)
            return
        except Exception as error:
            failure = error
            if is_out_of_memory(error):
                failure = ModelLoadError(
                    f"{num_blocks:,} KV blocks of {block_size} tokens do not fit into memory ({describe(error)}); take "
                    "fewer.",
                    "memory",
                )
        self.resize(before)
        raise failure

    def shrink(self, num_blocks: int) -> int:
        """Memory has run out: make the blocks anew, ``num_blocks`` or, where even they do not fit, fewer. How many
        there are; what those on the host held is lost, too."""
        before = self.size
        self.release(before.block_size)
        made = self.allocate_what_fits(before.block_size, num_blocks)
        for backend in self._backends:
            backend.allocate_host_kv(before.num_host_blocks + 1)
        self.size = StorageSize(before.block_size, made, before.num_host_blocks)
        self.most_tokens = made * before.block_size
        return made

    def allocate_what_fits(self, block_size: int, num_blocks: int) -> int:
        """Blocks on the device, and all made ready for steps: ``num_blocks`` or, where memory runs out meanwhile, a few
        times fewer; how many there are. Raises what the device raises where none of them fit."""
        recorded = not self.graphs_problem
        for _ in range(ALLOCATIONS_TRIED - 1):
            if self._allocated(block_size, num_blocks) and not (recorded and self.graphs_problem):
                return num_blocks
            self.release(block_size)
            num_blocks = max(1, min(int(num_blocks * KEPT_SHARE), self.room().bytes // self.block_bytes() - 1))
        self.allocate(block_size, num_blocks)
        self.make_ready()
        return num_blocks

    def _allocated(self, block_size: int, num_blocks: int) -> bool:
        try:
            self.allocate(block_size, num_blocks)
            self.make_ready()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def release(self, block_size: int) -> None:
        """Keep the null block alone."""
        self.allocate(block_size, 0)
        for backend in self._backends:
            backend.allocate_host_kv(1)
        if self._memory is not None:
            self._memory.release()

    # What steps need ----------------------------------------------------------------------------------------------

    def make_ready(self, sizes: StepSizes | None = None) -> None:
        """Follows each :meth:`allocate`: buffers and recorded steps of these sizes; None: of those before."""
        self._sizes = sizes = sizes or self._sizes
        if sizes is None:
            return
        max_blocks = -(-sizes.max_model_len // self.size.block_size)
        for backend in self._backends:
            backend.make_ready(StepLimits(sizes.max_requests, sizes.max_tokens, max_blocks))

    @property
    def graphs_problem(self) -> str:
        """Why decode steps are launched kernel by kernel although they were to be recorded; empty: nothing is wrong."""
        return next(filter(None, (getattr(backend, "graphs_problem", "") for backend in self._backends)), "")

    def warm_up(self, sizes: StepSizes) -> None:
        """:func:`engine.execution.warm_up.warm_up` of every model, over the blocks that there are."""
        for backend in self._backends:
            warm_up(backend, sizes, self.size.block_size, self.size.num_blocks)

    def run_heaviest(self, sizes: StepSizes) -> None:
        """:func:`engine.execution.warm_up.heaviest` of every model."""
        for backend in self._backends:
            heaviest(backend, sizes, self.size.block_size, self.size.num_blocks)

    # Memory -------------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> DeviceMemory:
        """Of the GPU. RuntimeError where there is none."""
        if self._memory is None:
            raise RuntimeError("the model is on no GPU")
        return self._memory

    def room(self) -> Room:
        """For blocks on the device, while there are none but the null block, which goes for them on a GPU."""
        free = available_memory() if self._memory is None else self._memory.free_bytes() + self.block_bytes()
        return room_for_blocks(free - self.working_bytes, self._most_block_bytes)

    def host_bytes(self) -> int | None:
        """Free on a GPU's host; None: the blocks are there."""
        return None if self._memory is None else available_memory()
