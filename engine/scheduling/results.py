"""Taking a step's results in: tokens appended, ends found, blocks registered, everything counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add

from engine.events import RowKind
from engine.memory.kv_cache import KVCacheManager
from engine.request import FinishReason, Request
from engine.scheduling.counters import Counters
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput

_DECODE, _PADDING = int(RowKind.DECODE), int(RowKind.PADDING)


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """What one step gave; rows as in the :class:`SchedulerOutput`."""

    new_tokens: list[list[int]]
    """Output tokens per row, nothing behind the one that ended it."""
    num_computed: list[int]
    """Computed tokens per row after the step."""
    ended: dict[int, FinishReason] = field(default_factory=dict)
    """Row → why its answer is over. The caller hands that to ``settle``, for it may know better: a stop string."""
    first_rows: list[int] = field(default_factory=list)
    """Rows that gave a request its first token."""


def take_results(
    output: SchedulerOutput, result: ModelRunnerOutput, memory: KVCacheManager, counters: Counters
) -> StepUpdate:
    """Bring the requests of ``output`` up to date. Stale rows and rows in error keep nothing."""
    counters.steps += 1
    ends = list(map(add, output.starts, output.num_new_tokens))
    update = StepUpdate(list(result.token_ids), ends)
    kinds = _kinds_that_count(output, result, update)
    rows, drafted = range(len(ends)), bool(result.drafts)
    for row, request, kind, end, sampled in zip(rows, output.requests, kinds, ends, result.token_ids, strict=True):
        if kind != _DECODE:
            if kind == _PADDING:
                ends[row] = request.num_computed_tokens
                continue
            _count_prefill(counters, request, output.starts[row], end)
            if sampled and end == request.num_prompt_tokens:
                update.first_rows.append(row)
        if sampled:
            request.token_ids += sampled
            # The ordinary row gives one token, behind which its answer goes on.
            if drafted or sampled[0] in request.stop_token_ids or end + 1 >= request.length_limit:
                end = ends[row] = _look_closely(request, row, end, update)
        request.num_computed_tokens = end
        if end >= request.cache_edge:
            memory.register_full_blocks(request)
    _count(counters, output, result, update)
    return update


def _look_closely(request: Request, row: int, end: int, update: StepUpdate) -> int:
    """Cut the tokens just appended behind position ``end`` where the answer is over: its computed tokens."""
    tokens, sampled = request.token_ids, update.new_tokens[row]
    # Accepted drafts have been computed too; the token behind the last of them has not.
    computed = end + len(sampled) - 1
    for length, token in enumerate(sampled, start=end + 1):
        if token in request.stop_token_ids and length >= request.min_length:
            update.ended[row] = FinishReason.STOP
        elif length >= request.length_limit:
            update.ended[row] = FinishReason.LENGTH
        else:
            continue
        update.new_tokens[row] = sampled[: length - end]
        del tokens[length:]
        break
    return min(computed, len(tokens))


def _kinds_that_count(output: SchedulerOutput, result: ModelRunnerOutput, update: StepUpdate) -> list[int]:
    """The rows' kinds. Those that give nothing are as good as padding: stale ones, and those in error, which end their
    request."""
    epochs = [request.epoch for request in output.requests]
    if epochs == output.epochs and not result.errors:
        return output.kinds
    kinds = output.kinds.copy()
    for row, epoch in enumerate(output.epochs):
        stale = epoch != epochs[row]
        if row in result.errors and not stale and kinds[row] != _PADDING:  # trouble with padding is nobody's
            update.ended[row] = FinishReason.ERROR
        if stale or row in result.errors:
            update.new_tokens[row] = []
            kinds[row] = _PADDING
    return kinds


def _count_prefill(counters: Counters, request: Request, start: int, end: int) -> None:
    """Tell the prompt tokens computed for the first time from those computed again."""
    again = max(min(end, request.lost_tokens) - start, 0)
    counters.recomputed_tokens += again
    request.recomputed_tokens += again
    counters.prompt_tokens += max(min(end, request.num_prompt_tokens) - start - again, 0)


def _count(counters: Counters, output: SchedulerOutput, result: ModelRunnerOutput, update: StepUpdate) -> None:
    counters.output_tokens += sum(map(len, update.new_tokens))
    counters.computed_tokens += sum(output.num_new_tokens)
    if output.padding:
        counters.padding_tokens += sum(output.padding)
        for request, count, padding in zip(output.requests, output.num_new_tokens, output.padding, strict=True):
            request.padded = padding if count else request.padded + padding
    if result.drafts:
        drafted = sum(result.drafts)
        counters.computed_tokens += drafted
        counters.draft_tokens += drafted
        counters.accepted_tokens += sum(max(len(tokens) - 1, 0) for tokens in result.token_ids)
