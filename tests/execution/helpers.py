"""A model on the CPU backend without scheduler: sequences with scattered blocks, stepped by hand."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import torch

from engine.execution.draft_model import DraftModel
from engine.execution.proposers import NgramProposer, Proposer
from engine.execution.runner import ModelRunner, build_step
from engine.execution.transformers_backend import TransformersBackend
from engine.models.checkpoint import Checkpoint
from engine.models.transformers_spec import ModelSpec
from engine.request import Request, SamplingParams
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from kernels.cpu.backend import CpuBackend

AnyBackend = CpuBackend | TransformersBackend


class PagedModel:
    """Gives every sequence blocks from a shuffled pool: neighbours in a context are rarely neighbours in memory."""

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype = torch.float32,
        proposer: Proposer | None = None,
        draft_folder: Path | None = None,
    ) -> None:
        """With ``draft_folder`` the model in it drafts; without it ``proposer``, else by n-grams."""
        self.block_size = block_size
        self.spec, self.backend = _load(folder, num_blocks, block_size, dtype)
        self.draft_backend: AnyBackend | None = None
        if draft_folder is not None:
            spec, self.draft_backend = _load(draft_folder, num_blocks, block_size, dtype)
            proposer = DraftModel(self.draft_backend, spec, block_size, f"draft:{draft_folder}")
        self.runner = ModelRunner(self.backend, self.spec, block_size, proposer=proposer or NgramProposer())
        self._free = list(range(1, num_blocks + 1))
        random.Random(5).shuffle(self._free)
        self._tables: dict[int, list[int]] = {}

    def plan(
        self, work: list[tuple[Request, int]], samples: bool = True, draft_limits: list[int] | None = None
    ) -> SchedulerOutput:
        """A step that computes the next ``count`` tokens of each request."""
        for (request, count), limit in zip(work, draft_limits or [0] * len(work), strict=True):
            table = self._tables.setdefault(request.request_id, [])
            while len(table) * self.block_size < request.num_computed_tokens + count + limit:
                table.append(self._free.pop())
        return SchedulerOutput(
            step=0,
            requests=[request for request, _ in work],
            epochs=[request.epoch for request, _ in work],
            starts=[request.num_computed_tokens for request, _ in work],
            num_new_tokens=[count for _, count in work],
            block_tables=[self._tables[request.request_id] for request, _ in work],
            samples=[samples and request.num_computed_tokens + count == request.num_tokens for request, count in work],
            draft_limits=draft_limits or [],
        )

    def logits(self, work: list[tuple[Request, int]]) -> list[torch.Tensor]:
        """Runs one step; for each request the logits of all its new tokens, float32 [count, vocab]."""
        batch = self.backend.upload(build_step(self.plan(work), self.block_size))
        batch = dataclasses.replace(batch, logits_rows=torch.arange(batch.num_tokens))
        logits = self.backend.forward(batch)
        for request, count in work:
            request.num_computed_tokens += count
        return list(logits.split([count for _, count in work]))

    def step(self, work: list[tuple[Request, int]], draft_limits: list[int] | None = None) -> ModelRunnerOutput:
        """Runs one step through the runner and appends what was drawn."""
        result = self.runner.execute(self.plan(work, draft_limits=draft_limits))
        for (request, count), token_ids in zip(work, result.token_ids, strict=True):
            request.num_computed_tokens += count + max(len(token_ids) - 1, 0)
            request.token_ids.extend(token_ids)
        return result

    def table(self, request: Request) -> list[int]:
        return self._tables[request.request_id]

    def free(self, request: Request) -> None:
        self._free.extend(self._tables.pop(request.request_id))


def _load(folder: Path, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[ModelSpec, AnyBackend]:
    checkpoint = Checkpoint.open(folder)
    spec = checkpoint.spec(dtype)
    backend = CpuBackend() if checkpoint.is_native else TransformersBackend("cpu")
    backend.load(spec, checkpoint.tensors(spec))
    backend.allocate_kv(num_blocks + 1, block_size)
    return spec, backend


def make_request(request_id: int, token_ids: list[int], params: SamplingParams | None = None, seed: int = 0) -> Request:
    params = params or SamplingParams()
    stops = frozenset(params.stop_token_ids)
    return Request(request_id, token_ids, params, max_tokens=1000, seed=seed, stop_token_ids=stops)


def random_prompt(length: int, vocab: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{seed}/{length}")
    return [generator.randrange(3, vocab) for _ in range(length)]
