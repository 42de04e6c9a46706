"""Steps of every kind that a model will be asked for, run once at the load: a kernel is compiled, or loaded, when it is
first launched, and that shall not be in somebody's answer. The largest of them also tell how much memory a step takes.

What they compute means nothing: all tokens are 0, and tables go round through the few blocks that there are, so that a
context may be longer than the pool. Only sizes matter::

    one decode            S = 1   a short context; a long one, which attention splits over more programs
    all decode            S = max_requests   short; long
    a prompt              T = max_tokens, S = 1
    prompts and decodes   T = max_tokens, S = max_requests, the last of them with all that is left
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.execution.runner import host_step
from kernels.backend import Backend
from kernels.sampling import SamplingBatch, SamplingRow
from kernels.spec import HostStep

LONG_CONTEXT = 4096
"""Tokens; beyond them attention launches nothing else."""
SHORT_CONTEXT = 16

ON_DEVICE = {
    "greedy": SamplingRow(),
    "drawn": SamplingRow(temperature=1.0, min_p=0.01, seed=1),
    "truncated": SamplingRow(temperature=1.0, top_k=40, top_p=0.9, seed=1),
    "truncated by their sum alone": SamplingRow(temperature=1.0, top_p=0.9, seed=1),
}
"""The ways in which a GPU chooses tokens by itself."""
SAMPLINGS = {**ON_DEVICE, "reported": SamplingRow(temperature=1.0, seed=1, logprobs=2)}


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How large steps get."""

    max_requests: int
    max_tokens: int
    max_model_len: int
    """Longest context of a request."""
    logits_per_request: int = 1
    """More than one where drafts are checked."""


def steps_of_all_kinds(sizes: StepSizes, block_size: int, num_blocks: int) -> dict[str, HostStep]:
    """By name, over the blocks 1 … ``num_blocks``; ordered so that the largest come last."""
    long, many = min(LONG_CONTEXT, sizes.max_model_len), min(sizes.max_requests, sizes.max_tokens)
    short, prompt = min(SHORT_CONTEXT, long), min(sizes.max_tokens, sizes.max_model_len)
    rows: dict[str, tuple[list[int], list[int]]] = {
        "one decode": ([1], [short]),
        "one decode on a long context": ([1], [long]),
        "all decode": ([1] * many, [short] * many),
        "all decode on long contexts": ([1] * many, [long] * many),
        "a prompt": ([prompt], [prompt]),
        "prompts and decodes": largest_step(sizes, long),
    }
    return {name: laid_out(new, contexts, block_size, num_blocks) for name, (new, contexts) in rows.items()}


def largest_step(sizes: StepSizes, context: int) -> tuple[list[int], list[int]]:
    """(new tokens, contexts) of as many requests as run at once, each decoding on a context of so many tokens, but the
    last ones, which have prompts that fill the step."""
    requests = min(sizes.max_requests, sizes.max_tokens)
    decode = min(sizes.logits_per_request, sizes.max_tokens // requests, context)
    new, contexts, left = [decode] * requests, [context] * requests, sizes.max_tokens - decode * requests
    for row in reversed(range(requests)):
        more = min(left, sizes.max_model_len - decode)
        new[row] += more
        contexts[row] = max(contexts[row], new[row])
        left -= more
    return new, contexts


def laid_out(
    new: Sequence[int], contexts: Sequence[int], block_size: int, num_blocks: int, most_logits: int = 1
) -> HostStep:
    """Row i computes the last ``new[i]`` of ``contexts[i]`` tokens, with logits of at most so many at its end."""
    counts, ends = np.array(new, dtype=np.int64), np.array(contexts, dtype=np.int64)
    tables = [[1 + block % num_blocks for block in range(-(-int(end) // block_size))] for end in ends]
    tokens = [[0] * count for count in new]
    num_logits = np.minimum(counts, most_logits)
    return host_step(tokens, (ends - counts).tolist(), tables, counts - num_logits, num_logits, block_size)


def warm_up(backend: Backend, sizes: StepSizes, block_size: int, num_blocks: int) -> None:
    """Launch all that ``backend`` may launch later. Its storage has ``num_blocks`` blocks beside the null block; what
    they hold is lost, and it has room for one block on the host afterwards."""
    previous: torch.Tensor | None = None
    sampled_rows = set[int]()
    for step in steps_of_all_kinds(sizes, block_size, num_blocks).values():
        rows = len(step.logits_rows)
        logits = backend.forward(backend.upload(step))
        if rows in sampled_rows:
            continue
        sampled_rows.add(rows)
        for row in (SAMPLINGS if rows == 1 else ON_DEVICE).values():
            previous = backend.sample(logits, SamplingBatch([row] * rows)).token_ids
    # As in a run: the parameters travel with the step, and only the device knows its token.
    step = dataclasses.replace(laid_out([1], [2], block_size, num_blocks), token_source=np.zeros(1, np.int32))
    for row in ON_DEVICE.values():
        sampling = SamplingBatch([row])
        sampled = backend.sample(backend.forward(backend.upload(step, sampling, previous)), sampling)
        previous = sampled.token_ids
        sampled.on_host()
    backend.allocate_host_kv(2)
    backend.swap_out([(1, 1)])
    backend.swap_in([(1, 1)])
    backend.copy_blocks([(1, min(2, num_blocks))])


def heaviest(backend: Backend, sizes: StepSizes, block_size: int, num_blocks: int) -> None:
    """The steps that need most memory: the one with most tokens, the one with most of the longest contexts, each with
    as many logits as there can be and every one of them truncated."""
    long, many = min(LONG_CONTEXT, sizes.max_model_len), min(sizes.max_requests, sizes.max_tokens)
    for new, contexts in (([1] * many, [long] * many), largest_step(sizes, long)):
        step = laid_out(new, contexts, block_size, num_blocks, sizes.logits_per_request)
        sampling = SamplingBatch([ON_DEVICE["truncated by their sum alone"]] * len(step.logits_rows))
        backend.sample(backend.forward(backend.upload(step, sampling)), sampling).on_host()
