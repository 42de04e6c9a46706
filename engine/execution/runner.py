"""From a schedule to tokens: builds the tensors of a step, runs the backend, tells the rows that failed.

::

    SchedulerOutput ─▶ blocks move ─▶ draft ─▶ HostStep ─▶ upload ─▶ embed, layers, head ─▶ sample ─▶ Flight
                       └───────────────── prepare ────────────────┘└────── forward ──────┘└ sample ┘
    Flight ─▶ wait for the ids ─▶ accept ─▶ ModelRunnerOutput
              └─── forward ───┘└─ sample ┘

Between the two a device computes, and the engine may lay out the next step. Tokens of that step which this one samples
are not known by then: they are :data:`engine.request.PENDING`, and the backend puts in what it sampled.

Drafts live within one call: what of them was accepted is in the result, the rest is gone. Why that changes no answer
is said in :mod:`engine.execution.proposers`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import numpy as np
import torch

from engine.execution.block_tables import BlockTables
from engine.execution.proposers import Proposer, num_accepted
from engine.execution.sampler import sampling_row
from engine.execution.sizing import dtype_name
from engine.models.transformers_spec import ModelSpec
from engine.request import PENDING, Request
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from kernels.backend import Backend
from kernels.sampling import SampledTokens, SamplingBatch, SamplingRow, TokenLogprobs
from kernels.spec import HostStep

NOT_FINITE = "the model's output was not a finite number at token {position}, so the answer ends here; {cause}"
PADDING_TOKEN = 0
"""What padding computes; nothing reads what that gives."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched."""

    plan: SchedulerOutput
    sampled_rows: list[int]
    """Rows of the plan that are sampled, in order."""
    drafts: list[list[int]]
    """One list per row; empty: none anywhere."""
    sampled: SampledTokens | None
    prepare_seconds: float
    forward_seconds: float
    """Until everything was handed to the device; a CPU has then computed it."""
    sample_seconds: float


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
        self._tables = BlockTables()
        self._sampled: SampledTokens | None = None
        """Of the last step that sampled."""
        self._places: dict[Request, int] = {}
        """Where in it a request's token is."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """A whole step."""
        return self.collect(self.launch(output))

    def launch(self, output: SchedulerOutput) -> Flight:
        """Hand a step to the device; where tokens are pending, it comes right behind the step that samples them."""
        begin = self._clock()
        move_blocks(self._backend, output)
        drafts = self._proposer.propose(output) if self._proposer is not None else []
        step = build_step(output, self._block_size, drafts, self._places, self._tables.rows(output))
        sampled_rows = [row for row, samples in enumerate(output.samples) if samples]
        sampling = SamplingBatch(_sampling_rows(output, sampled_rows, drafts))
        previous = None if self._sampled is None else self._sampled.token_ids
        batch = self._backend.upload(step, sampling, previous)
        prepared = self._clock()
        logits = self._backend.forward(batch)
        forwarded = self._clock()
        sampled = self._backend.sample(logits, sampling) if sampled_rows else None
        if sampled is not None:
            self._sampled = sampled
            self._places = {} if drafts else {output.requests[row]: i for i, row in enumerate(sampled_rows)}
        return Flight(
            plan=output,
            sampled_rows=sampled_rows,
            drafts=drafts,
            sampled=sampled,
            prepare_seconds=prepared - begin,
            forward_seconds=forwarded - prepared,
            sample_seconds=self._clock() - forwarded,
        )

    def collect(self, flight: Flight) -> ModelRunnerOutput:
        """Wait for a step and take what it gave."""
        output, drafts = flight.plan, flight.drafts
        begin = self._clock()
        drawn = [] if flight.sampled is None else flight.sampled.on_host().tolist()
        arrived = self._clock()
        result = ModelRunnerOutput(
            token_ids=[[] for _ in output.requests],
            logprobs=[[] for _ in output.requests],
            drafts=[len(drafted) for drafted in drafts],
            prepare_seconds=flight.prepare_seconds,
            forward_seconds=flight.forward_seconds + (arrived - begin),
            sample_seconds=flight.sample_seconds,
        )
        if flight.sampled is not None:
            self._accept(flight, drawn, flight.sampled.logprobs, result)
        if drafts and self._proposer is not None:
            self._proposer.settle(output, drafts, result.token_ids)
        return result

    def _accept(
        self, flight: Flight, drawn: list[int], logprobs: list[TokenLogprobs | None], result: ModelRunnerOutput
    ) -> None:
        """What the sampled rows keep of the tokens ``drawn``, into the lists of ``result``."""
        output, drafts, end = flight.plan, flight.drafts, 0
        for row in flight.sampled_rows:
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
                result.errors[row] = NOT_FINITE.format(position=position, cause=not_finite_cause(self._spec.dtype))
                continue
            result.token_ids[row] = drawn[begin : begin + kept]
            if logprobs:
                reports = logprobs[begin : begin + kept]
                result.logprobs[row] = [report for report in reports if report is not None]


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


def build_step(
    output: SchedulerOutput,
    block_size: int,
    drafts: Sequence[Sequence[int]] = (),
    places: Mapping[Request, int] = MappingProxyType({}),
    tables: Sequence[np.ndarray] = (),
) -> HostStep:
    """A plan laid out. A row computes its new tokens, then its drafts or its padding; a sampled one has logits of its
    last new token and of each draft behind it. ``drafts``: one list per row, or none at all. ``places``: where among
    the ids of the step before a request's pending token will be. ``tables``: the plan's block tables where they are
    arrays already."""
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
    step = host_step(tokens, output.starts, tables or output.block_tables, new_tokens - 1, num_logits, block_size)
    pending = np.flatnonzero(step.token_ids == PENDING)
    if pending.size == 0:
        return step
    rows = np.searchsorted(step.query_start, pending, side="right") - 1
    source = np.full(step.token_ids.shape, -1, dtype=np.int32)
    source[pending] = [places[output.requests[row]] for row in rows]
    step.token_ids[pending] = 0
    return dataclasses.replace(step, token_source=source)


def host_step(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    block_tables: Sequence[Sequence[int] | np.ndarray],
    first_logits: np.ndarray,
    num_logits: np.ndarray,
    block_size: int,
) -> HostStep:
    """Rows of ``tokens`` from positions ``starts`` on, laid end to end. Row i has ``num_logits[i]`` rows of logits,
    from its token ``first_logits[i]`` on."""
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

    return HostStep(token_ids, positions, slots, query_start, seq_lens, tables, logits_rows)
