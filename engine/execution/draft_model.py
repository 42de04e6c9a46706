"""Drafts by a smaller model of the same tokenizer, whose KV blocks mirror the model's own.

Its KV storage has as many blocks of as many tokens, and the same block tables address both: block 7 of the one holds
the keys and values of the same tokens as block 7 of the other. What moves in the one moves in the other, and after each
step the draft model has computed every position that the model has::

    model          computes the step's rows: chunks, decodes, decodes with their drafts
    draft model    1  before it: the same rows without drafts, which gives the first drafts      ┐ the same positions
                   2  draft by draft, each the input of the next                                 │ in the same blocks
                   3  after it: the last draft of a row, where all of them were accepted         ┘

So prefix hits, copies, preemption and swaps need nothing of their own here, and a block that others may find is whole
in both. What was computed for a rejected draft is overwritten by the token in its place, as in the model itself.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from engine.execution.runner import host_step, move_blocks
from engine.execution.sampler import sampling_row
from engine.models.transformers_spec import ModelSpec
from engine.scheduling.plan import SchedulerOutput
from kernels.backend import Backend
from kernels.sampling import SamplingBatch
from kernels.spec import StepBatch


class DraftModel:
    """A :class:`engine.execution.proposers.Proposer`. It draws with the request's own parameters and from the same
    (seed, position) as the model, so that where both models agree their tokens do."""

    def __init__(self, backend: Backend, spec: ModelSpec, block_size: int, name: str) -> None:
        """``backend`` has the draft model loaded and as many KV blocks, host blocks too, as the model's own. ``name``:
        as :attr:`engine.config.SchedulerConfig.speculative` has it."""
        self.name = name
        self._backend = backend
        self._spec = spec
        self._block_size = block_size

    def propose(self, output: SchedulerOutput) -> list[list[int]]:
        move_blocks(self._backend, output)
        limits = self._limits(output)
        drafts: list[list[int]] = [[] for _ in limits]
        rows = [row for row, count in enumerate(output.num_new_tokens) if count]
        starts = [output.starts[row] for row in rows]
        tokens = [
            output.requests[row].token_ids[start : start + output.num_new_tokens[row]]
            for row, start in zip(rows, starts, strict=True)
        ]
        if not rows:
            return []
        logits = self._backend.forward(self._batch(output, rows, tokens, starts, [limits[row] > 0 for row in rows]))
        drawing = [row for row in rows if limits[row]]
        while drawing:
            drawing = [row for row in self._draw(output, logits, drawing, drafts) if len(drafts[row]) < limits[row]]
            if drawing:
                logits = self._backend.forward(self._last_drafts(output, drawing, drafts, draws=True))
        return drafts if any(drafts) else []

    def settle(self, output: SchedulerOutput, drafts: list[list[int]], token_ids: list[list[int]]) -> None:
        """Compute the last draft of each row that accepted all of them: the only one that was no input yet."""
        rows = [row for row, drafted in enumerate(drafts) if 0 < len(drafted) < len(token_ids[row])]
        if rows:
            self._backend.forward(self._last_drafts(output, rows, drafts, draws=False))

    def _limits(self, output: SchedulerOutput) -> list[int]:
        """How many tokens to draft for each row: none from positions that the draft model was not made for."""
        if not output.draft_limits:
            return [0] * len(output.requests)
        longest = self._spec.max_position
        return [
            min(limit, max(longest - start, 0)) for limit, start in zip(output.draft_limits, output.starts, strict=True)
        ]

    def _draw(
        self, output: SchedulerOutput, logits: torch.Tensor, rows: list[int], drafts: list[list[int]]
    ) -> list[int]:
        """Append one draft to each of ``rows``; returns those that got one: not where the logits are not finite."""
        sampling = [dataclasses.replace(sampling_row(output.requests[row], drafts[row]), logprobs=None) for row in rows]
        drawn = self._backend.sample(logits, SamplingBatch(sampling)).token_ids.tolist()
        drafted = [row for row, token in zip(rows, drawn, strict=True) if token >= 0]
        for row, token in zip(rows, drawn, strict=True):
            if token >= 0:
                drafts[row].append(token)
        return drafted

    def _last_drafts(
        self, output: SchedulerOutput, rows: list[int], drafts: list[list[int]], *, draws: bool
    ) -> StepBatch:
        tokens = [drafts[row][-1:] for row in rows]
        starts = [output.starts[row] + len(drafts[row]) for row in rows]
        return self._batch(output, rows, tokens, starts, [draws] * len(rows))

    def _batch(
        self,
        output: SchedulerOutput,
        rows: list[int],
        tokens: list[list[int]],
        starts: list[int],
        draws: list[bool],
    ) -> StepBatch:
        """``tokens`` of ``rows`` of the plan, with logits of the last one where the row ``draws``."""
        last = np.array([len(row) for row in tokens], dtype=np.int64) - 1
        tables = [output.block_tables[row] for row in rows]
        num_logits = np.array(draws, dtype=np.int64)
        return self._backend.upload(host_step(tokens, starts, tables, last, num_logits, self._block_size))
