"""A model on the CPU backend without scheduler: sequences with scattered blocks, stepped by hand."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import torch

from engine.execution.runner import ModelRunner, build_step_batch
from engine.models.checkpoint import Checkpoint
from engine.request import Request, SamplingParams
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from kernels.cpu.backend import CpuBackend
from kernels.spec import DecoderSpec


class PagedModel:
    """Gives every sequence blocks from a shuffled pool: neighbours in a context are rarely neighbours in memory."""

    def __init__(self, folder: Path, *, block_size: int, num_blocks: int, dtype: torch.dtype = torch.float32) -> None:
        checkpoint = Checkpoint.open(folder)
        self.spec: DecoderSpec = checkpoint.spec(dtype)
        self.block_size = block_size
        self.backend = CpuBackend()
        self.backend.load(self.spec, checkpoint.tensors(self.spec))
        self.backend.allocate_kv(num_blocks + 1, block_size)
        self.runner = ModelRunner(self.backend, self.spec, block_size)
        self._free = list(range(1, num_blocks + 1))
        random.Random(5).shuffle(self._free)
        self._tables: dict[int, list[int]] = {}

    def plan(self, work: list[tuple[Request, int]], samples: bool = True) -> SchedulerOutput:
        """A step that computes the next ``count`` tokens of each request."""
        for request, count in work:
            table = self._tables.setdefault(request.request_id, [])
            while len(table) * self.block_size < request.num_computed_tokens + count:
                table.append(self._free.pop())
        return SchedulerOutput(
            step=0,
            requests=[request for request, _ in work],
            epochs=[request.epoch for request, _ in work],
            starts=[request.num_computed_tokens for request, _ in work],
            num_new_tokens=[count for _, count in work],
            block_tables=[self._tables[request.request_id] for request, _ in work],
            samples=[samples and request.num_computed_tokens + count == request.num_tokens for request, count in work],
        )

    def logits(self, work: list[tuple[Request, int]]) -> list[torch.Tensor]:
        """Runs one step; for each request the logits of all its new tokens, float32 [count, vocab]."""
        batch = build_step_batch(self.plan(work), self.block_size, self.backend.device)
        batch = dataclasses.replace(batch, logits_rows=torch.arange(batch.num_tokens))
        logits = self.runner.forward(batch)
        for request, count in work:
            request.num_computed_tokens += count
        return list(logits.split([count for _, count in work]))

    def step(self, work: list[tuple[Request, int]]) -> ModelRunnerOutput:
        """Runs one step through the runner and appends what was drawn."""
        result = self.runner.execute(self.plan(work))
        for (request, count), token_ids in zip(work, result.token_ids, strict=True):
            request.num_computed_tokens += count
            request.token_ids.extend(token_ids)
        return result

    def free(self, request: Request) -> None:
        self._free.extend(self._tables.pop(request.request_id))


def make_request(request_id: int, token_ids: list[int], params: SamplingParams | None = None, seed: int = 0) -> Request:
    params = params or SamplingParams()
    stops = frozenset(params.stop_token_ids)
    return Request(request_id, token_ids, params, max_tokens=1000, seed=seed, stop_token_ids=stops)


def random_prompt(length: int, vocab: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{seed}/{length}")
    return [generator.randrange(3, vocab) for _ in range(length)]
