"""The engine as the sections run it: EngineCore, ModelRunner, TritonBackend, and a load of requests through them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.events import AnyEvent, StepRecord
from engine.execution.runner import ModelRunner
from engine.request import SamplingParams
from kernels.spec import DecoderSpec, StepLimits
from kernels.triton.backend import TritonBackend
from kernels.triton.graphs import Capture, Recording
from tests.gpu.card import Card


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one engine's memory and steps."""

    num_blocks: int
    """The null block not counted."""
    block_size: int
    max_num_seqs: int
    token_budget: int
    max_model_len: int
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    prompts: Sequence[Sequence[int]]
    output_tokens: Sequence[int]
    """Of each answer; nothing ends one earlier."""

    @property
    def total(self) -> int:
        return sum(self.output_tokens)


@dataclass
class Answered:
    token_ids: list[list[int]]
    seconds: float
    """From the first request handed in to the last token handed out."""
    records: list[StepRecord] = field(default_factory=list)

    def events(self, kind: type[AnyEvent]) -> list[AnyEvent]:
        return [event for record in self.records for event in record.events if isinstance(event, kind)]


class _Rehearsed:
    """A :class:`kernels.triton.graphs.Capture` where there are no graphs: a replay runs what would be replayed."""

    def record(self, run: Callable[[], torch.Tensor], beside: Recording | None) -> Recording:
        return _Rerun(run, run())


@dataclass(frozen=True, slots=True)
class _Rerun:
    run: Callable[[], torch.Tensor]
    output: torch.Tensor

    def replay(self) -> None:
        self.output.copy_(self.run())


def loaded_backend(
    card: Card,
    spec: DecoderSpec,
    weights: Mapping[str, torch.Tensor],
    sizes: Sizes,
    *,
    graphs: bool,
) -> TritonBackend:
    """RuntimeError where decode steps were to be recorded and could not be."""
    capture: Capture | None = None
    if card.rehearsal and graphs:
        capture = _Rehearsed()
    backend = TritonBackend(card.device, cuda_graphs=graphs, capture=capture)
    backend.load(spec, weights)
    backend.allocate_kv(sizes.num_blocks + 1, sizes.block_size)
    if sizes.num_host_blocks:
        backend.allocate_host_kv(sizes.num_host_blocks + 1)
    blocks = -(-sizes.max_model_len // sizes.block_size)
    backend.make_ready(StepLimits(sizes.max_num_seqs, sizes.token_budget, blocks))
    if backend.graphs_problem:
        raise RuntimeError(backend.graphs_problem)
    return backend


def answered(
    backend: TritonBackend,
    sizes: Sizes,
    load: Load,
    *,
    overlap: bool,
    discipline: str = "vllm",
    preemption: str = "recompute",
) -> Answered:
    """All requests at once, greedy. RuntimeError for an answer that ends otherwise than by its length."""
    core = EngineCore(
        ModelRunner(backend, backend.spec, sizes.block_size),
        scheduler=SchedulerConfig(
            discipline=discipline,
            preemption=preemption,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.token_budget,
        ),
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        prefix_cache=False,
        max_model_len=sizes.max_model_len,
        vocab_size=backend.spec.vocab_size,
        token_budget=sizes.token_budget,
        num_host_blocks=sizes.num_host_blocks,
        overlap=overlap,
    )
    token_ids: list[list[int]] = [[] for _ in load.prompts]
    records: list[StepRecord] = []
    begin = time.perf_counter()
    for index, (prompt, length) in enumerate(zip(load.prompts, load.output_tokens, strict=True)):
        core.add_request(index, list(prompt), SamplingParams(max_tokens=length, ignore_eos=True))
    while core.has_work:
        result = core.step()
        if result.record is not None:
            records.append(result.record)
        for output in result.outputs:
            token_ids[output.request_id] += output.token_ids
            if output.finish_reason not in (None, "length"):
                raise RuntimeError(f"request {output.request_id} ended by {output.finish_reason}: {output.error}")
    seconds = time.perf_counter() - begin
    if [len(ids) for ids in token_ids] != list(load.output_tokens):
        raise RuntimeError("an answer has another length than was asked for")
    return Answered(token_ids, seconds, records)
