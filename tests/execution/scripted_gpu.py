"""A GPU that is nothing but numbers, and a backend on it: memory runs out exactly where it would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from kernels.backend import Backend
from kernels.sampling import SampledTokens, SamplingBatch
from kernels.spec import HostStep, StepLimits

MIB = 2**20


class ScriptedGpu:
    """A :class:`engine.execution.device_memory.DeviceMemory`. torch's allocator is in it: what a step took stays taken
    until it is released, or needed for something else."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken: dict[str, int] = {}
        self._cached = 0
        self._watched_from = self._peak = 0

    def take(self, name: str, count: int) -> None:
        """In place of what had the name before."""
        self.taken.pop(name, None)
        self._refuse(count)
        self.taken[name] = count
        self._cached = min(self._cached, self.total - sum(self.taken.values()))

    def work(self, count: int) -> None:
        """Take so much for a moment."""
        self._refuse(count)
        self._cached = max(self._cached, count)
        self._peak = max(self._peak, self._cached)

    def _refuse(self, count: int) -> None:
        left = self.total - sum(self.taken.values())
        if count > left:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {count} bytes, {left} are free")

    def release(self) -> None:
        self._cached = 0

    def free_bytes(self) -> int:
        return self.total - sum(self.taken.values()) - self._cached

    def total_bytes(self) -> int:
        return self.total

    def watch(self) -> None:
        self._watched_from = self._peak = self._cached

    def peak_bytes(self) -> int:
        return self._peak - self._watched_from


class ScriptedBackend:
    """A step takes ``token_bytes`` a token and ``logit_bytes`` a row of logits; recorded steps take ``graph_bytes``."""

    name = "scripted"
    device = torch.device("cpu")

    def __init__(
        self,
        gpu: ScriptedGpu,
        *,
        token_bytes: int = 100_000,
        logit_bytes: int = MIB,
        graph_bytes: int = 64 * MIB,
        block_bytes: int = MIB,
    ) -> None:
        self.gpu = gpu
        self.token_bytes, self.logit_bytes = token_bytes, logit_bytes
        self.graph_bytes, self.block_bytes = graph_bytes, block_bytes
        self.graphs_problem = ""
        self.num_blocks = 0
        self.limits: StepLimits | None = None
        """What it is ready for; None: nothing, or blocks came since."""
        self.steps: list[tuple[int, int]] = []
        """(tokens, rows of logits) of each."""
        self.samplings: list[SamplingBatch] = []
        self.moved: list[str] = []

    def kv_bytes_per_block(self, block_size: int) -> int:
        return self.block_bytes

    def preparation(self) -> str:
        return "Loading the kernels"

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self.gpu.taken.pop("graphs", None)
        self.limits = None
        self.num_blocks = 0
        self.gpu.take("blocks", num_blocks * self.block_bytes)
        self.num_blocks = num_blocks

    def make_ready(self, limits: StepLimits) -> None:
        self.limits, self.graphs_problem = limits, ""
        try:
            self.gpu.take("graphs", self.graph_bytes)
        except torch.OutOfMemoryError as error:
            self.graphs_problem = f"decode steps could not be recorded (OutOfMemoryError: {error})"

    def upload(
        self, step: HostStep, sampling: SamplingBatch | None = None, previous: torch.Tensor | None = None
    ) -> HostStep:
        assert step.block_tables.max() < self.num_blocks, "a block that there is not"
        assert step.slot_mapping.min() > 0
        assert step.token_source is None or previous is not None
        return step

    def forward(self, step: HostStep) -> torch.Tensor:
        rows = len(step.logits_rows)
        self.steps.append((len(step.token_ids), rows))
        self.gpu.work(len(step.token_ids) * self.token_bytes + rows * self.logit_bytes)
        return torch.zeros(rows, 4)

    def sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
        self.samplings.append(sampling)
        return SampledTokens(torch.zeros(len(sampling.rows), dtype=torch.int64), [])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert all(0 < block < self.num_blocks for pair in pairs for block in pair)
        self.moved.append("copy")

    def allocate_host_kv(self, num_blocks: int) -> None:
        self.moved.append(f"host {num_blocks}")

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.moved.append("out")

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.moved.append("in")

    def as_backend(self) -> Backend:
        return cast(Backend, cast(Any, self))
