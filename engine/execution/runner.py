"""From a schedule to tokens: builds the tensors of a step, runs the backend, tells the rows that failed.

::

    SchedulerOutput ─▶ blocks move ─▶ draft ─▶ StepBatch ─▶ embed, layers, head ─▶ sample, accept ─▶ ModelRunnerOutput
                       └───────────── prepare ───────────┘└────── forward ──────┘└──── sample ───┘      timings

Drafts live within one call: what of them was accepted is in the result, the rest is gone. Why that changes no answer
is said in :mod:`engine.execution.proposers`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from engine.execution.proposers import Proposer, num_accepted
from engine.execution.sampler import sampling_row
from engine.execution.sizing import dtype_name
from engine.models.transformers_spec import ModelSpec
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from kernels.backend import Backend
from kernels.sampling import SampledTokens, SamplingBatch, SamplingRow, TokenLogprobs
from kernels.spec import StepBatch

NOT_FINITE = "the model's output was not a finite number at token {position}, so the answer ends here; {cause}"
PADDING_TOKEN = 0
"""What padding computes; nothing reads what that gives."""


class ModelRunner:
    """Executes what a scheduler planned on one backend whose model is loaded and whose KV storage is allocated."""

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        block_size: int,
        clock: Callable[[], float] = time.perf_counter,
        proposer: Proposer | None = None,
    ) -> None:
        """``proposer`` drafts where the plan lets rows draft; None: plans let none."""
        self._backend = backend
        self._spec = spec
        self._block_size = block_size
        self._clock = clock
        self._proposer = proposer

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        begin = self._clock()
        move_blocks(self._backend, output)
        drafts = self._proposer.propose(output) if self._proposer is not None else []
        batch = build_step_batch(output, self._block_size, self._backend.device, drafts)
        sampled_rows = [row for row, samples in enumerate(output.samples) if samples]
        sampling = SamplingBatch(_sampling_rows(output, sampled_rows, drafts))
        prepared = self._clock()
        logits = self._backend.forward(batch)
        forwarded = self._clock()
        token_ids: list[list[int]] = [[] for _ in output.requests]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in output.requests]
        errors: dict[int, str] = {}
        if sampled_rows:
            sampled = self._backend.sample(logits, sampling)
            self._collect(output, sampled_rows, drafts, sampled, token_ids, logprobs, errors)
        sampled_at = self._clock()
        if drafts and self._proposer is not None:
            self._proposer.settle(output, drafts, token_ids)
        return ModelRunnerOutput(
            token_ids=token_ids,
            logprobs=logprobs,
            drafts=[len(drafted) for drafted in drafts],
            errors=errors,
            prepare_seconds=prepared - begin,
            forward_seconds=forwarded - prepared,
            sample_seconds=sampled_at - forwarded,
        )

    def _collect(
        self,
        output: SchedulerOutput,
        sampled_rows: list[int],
        drafts: list[list[int]],
        sampled: SampledTokens,
        token_ids: list[list[int]],
        logprobs: list[list[TokenLogprobs]],
        errors: dict[int, str],
    ) -> None:
        drawn, end = sampled.token_ids.tolist(), 0
        for row in sampled_rows:
            begin = end
            kept = 1
            if drafts and drafts[row]:
                end = begin + 1 + len(drafts[row])
                kept += num_accepted(drafts[row], drawn[begin:end])
            else:
                end = begin + 1
            if drawn[begin + kept - 1] < 0:
                # Only the last one can be no token: none before it would equal a draft. Behind accepted drafts the
                # answer just stops short of it, and the next step meets it first.
                kept -= 1
            if kept == 0:
                position = output.starts[row] + output.num_new_tokens[row]
                errors[row] = NOT_FINITE.format(position=position, cause=not_finite_cause(self._spec.dtype))
                continue
            token_ids[row] = drawn[begin : begin + kept]
            if sampled.logprobs:
                reports = sampled.logprobs[begin : begin + kept]
                logprobs[row] = [report for report in reports if report is not None]


def _sampling_rows(output: SchedulerOutput, sampled_rows: list[int], drafts: list[list[int]]) -> list[SamplingRow]:
    """One for each row of logits of the step, in their order."""
    if not drafts:
        return [sampling_row(output.requests[row]) for row in sampled_rows]
    return [
        sampling_row(output.requests[row], drafts[row][:count])
        for row in sampled_rows
        for count in range(len(drafts[row]) + 1)
    ]


def move_blocks(backend: Backend, output: SchedulerOutput) -> None:
    """The plan's moves of memory. In this order a block may be swapped out, copied over and filled from the host in
    one step."""
    if output.swap_out:
        backend.swap_out(output.swap_out)
    if output.block_copies:
        backend.copy_blocks(output.block_copies)
    if output.swap_in:
        backend.swap_in(output.swap_in)


def not_finite_cause(dtype: torch.dtype) -> str:
    """Why a model gives infinity or NaN, and the way out where there is one: only float16 has a small range."""
    if dtype == torch.float16:
        return "its weights are damaged or too large for float16: try --dtype float32"
    return f"its weights are damaged: they give no finite numbers in {dtype_name(dtype)}"


def build_step_batch(
    output: SchedulerOutput, block_size: int, device: torch.device, drafts: Sequence[Sequence[int]] = ()
) -> StepBatch:
    """The tensors of a plan. A row computes its new tokens, then its drafts or its padding; a sampled one has logits of
    its last new token and of each draft behind it. ``drafts``: one list per row, or none at all."""
    tokens = [
        request.token_ids[start : start + count]
        for request, start, count in zip(output.requests, output.starts, output.num_new_tokens, strict=True)
    ]
    new_tokens = np.array(output.num_new_tokens, dtype=np.int64)
    num_logits = np.array(output.samples, dtype=np.int64)
    if output.padding:
        for row, padding in zip(tokens, output.padding, strict=True):
            row += [PADDING_TOKEN] * padding
    if drafts:
        for row, drafted in zip(tokens, drafts, strict=True):
            row += drafted
        num_logits += [len(drafted) for drafted in drafts]
    return step_batch(tokens, output.starts, output.block_tables, new_tokens - 1, num_logits, block_size, device)


def step_batch(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    first_logits: np.ndarray,
    num_logits: np.ndarray,
    block_size: int,
    device: torch.device,
) -> StepBatch:
    """The tensors of rows of ``tokens`` from positions ``starts`` on; numpy on the host, one copy each to the device.
    Row i has ``num_logits[i]`` rows of logits, from its token ``first_logits[i]`` on."""
    query_lens = [len(row) for row in tokens]
    lengths = np.array(query_lens, dtype=np.int64)
    first_positions = np.array(starts, dtype=np.int64)
    query_start = np.zeros(len(tokens) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_start[1:])
    num_tokens = int(query_start[-1])
    seq_lens = (first_positions + lengths).astype(np.int32)

    widest = max((len(table) for table in block_tables), default=0)
    tables = np.zeros((len(tokens), max(widest, 1)), dtype=np.int32)
    for row, table in enumerate(block_tables):
        tables[row, : len(table)] = table

    token_ids = np.fromiter(chain.from_iterable(tokens), dtype=np.int64, count=num_tokens)
    positions = np.arange(num_tokens) - np.repeat(query_start[:-1] - first_positions, lengths)
    blocks = tables[np.repeat(np.arange(len(tokens)), lengths), positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    logits_before = np.cumsum(num_logits) - num_logits
    logits_rows = np.repeat(query_start[:-1] + first_logits - logits_before, num_logits)
    logits_rows += np.arange(logits_rows.shape[0])

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return StepBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slot_mapping=tensor(slots),
        query_start=tensor(query_start),
        seq_lens=tensor(seq_lens),
        block_tables=tensor(tables),
        logits_rows=tensor(logits_rows),
        query_lens_list=query_lens,
        seq_lens_list=seq_lens.tolist(),
    )
