"""What a step decided, as sentences in order: its batch, every change it made, what it left. Qt-free.

Between two turning points (a preemption, a static batch that begins or ends, a change of the knobs, the computation
itself) what happened alike to several requests is one sentence, so that a step of 200 block events stays readable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.scope.batch_words import batch_sentence, left_sentence, timing_sentence
from app.scope.reasons import deferred_sentence, preempted_sentence, preemption_details, recovered_sentence
from app.translation import tr
from app.words import and_list, are, bytes_label, count, lowered, seconds_label
from engine.events import (
    Admitted,
    AnyEvent,
    Arrived,
    BatchEnded,
    BatchStarted,
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
    Deferred,
    Ended,
    Finished,
    PoolShrunk,
    Preempted,
    Reconfigured,
    Recovered,
    Rejected,
    Reprioritised,
    SwapDropped,
    SwappedIn,
    SwappedOut,
)
from engine.request import request_name
from engine.run_state import RunState

APART = 3
"""So many requests to which the same happened have a sentence each; more share one."""
MOST_NAMED = 8
Look = Literal["plan", "change", "preempted", "swapped", "refused", "end", "figures"]


@dataclass(frozen=True, slots=True)
class Decision:
    text: str
    requests: tuple[int, ...] = ()
    """Whom it is about."""
    look: Look = "change"


@dataclass(frozen=True, slots=True)
class _Step:
    """What sentences need beside the events."""

    state: RunState
    block_bytes: int

    def size(self, blocks: int) -> str:
        """``3 blocks (1.1 MiB)``."""
        return count(blocks, "block") + (f" ({bytes_label(blocks * self.block_bytes)})" if self.block_bytes else "")


def decisions(state: RunState, block_bytes: int = 0) -> list[Decision]:
    """The last step of ``state``, told in order; nothing where its record was not seen. block_bytes: of one KV block;
    0: not known."""
    record = state.last_record
    if record is None:
        return []
    step = _Step(state, block_bytes)
    before, after = _sides(record.events)
    told = [*_told(before, step), Decision(batch_sentence(record), look="plan"), *_told(after, step)]
    return [*told, Decision(left_sentence(record), look="figures"), Decision(timing_sentence(record), look="figures")]


_AFTERWARDS = (Recovered, Ended, Finished, BatchEnded)


def _sides(events: Sequence[AnyEvent]) -> tuple[Sequence[AnyEvent], Sequence[AnyEvent]]:
    """What was decided before the batch was computed, and what came of that: from the last change to those who run on,
    up to the first that follows from the results."""
    last = max((i for i, event in enumerate(events) if not isinstance(event, _RESULTS)), default=-1)
    return events[: last + 1], events[last + 1 :]


_RESULTS = (*_AFTERWARDS, BlocksCached, BlocksFreed)


def _told(events: Iterable[AnyEvent], step: _Step) -> Iterator[Decision]:
    alike: dict[type, list[Any]] = {}
    for event in events:
        if isinstance(event, _TURNING_POINTS):
            yield from _gathered(alike, step)
            alike = {}
            yield _SINGLE[type(event)](event, step)
        else:
            alike.setdefault(type(event), []).append(event)
    yield from _gathered(alike, step)


def _gathered(alike: dict[type, list[Any]], step: _Step) -> Iterator[Decision]:
    for kind, events in alike.items():
        if kind in _BLOCK_WORDS:
            yield from _blocks_told(kind, events, step)
        elif len(events) <= APART or kind not in _MANY:
            for event in events:
                yield _SINGLE[kind](event, step)
        else:
            yield _MANY[kind](events, step)


def _blocks_told(kind: type, events: list[Any], step: _Step) -> Iterator[Decision]:
    """Block events of one kind, those of a request added up."""
    numbers: dict[int, int] = {}
    for event in events:
        numbers[event.request_id] = numbers.get(event.request_id, 0) + len(event.blocks)
    one, many, look = _BLOCK_WORDS[kind]
    left = tr(" ({left} left)", left=_left(step)) if kind is BlocksAllocated else ""
    if len(numbers) > APART:
        yield Decision(many(_names(numbers), sum(numbers.values()), step) + left + ".", tuple(numbers), look)
        return
    for place, (request_id, number) in enumerate(numbers.items(), 1):
        end = f"{left}." if place == len(numbers) else "."
        yield Decision(one(request_name(request_id), number, step) + end, (request_id,), look)


def _arrived(event: Arrived, step: _Step) -> Decision:
    prompt = count(event.prompt_tokens, "prompt token")
    shares = (
        tr(" It shares the prompt of request {request_name}.", request_name=request_name(event.parent))
        if event.parent
        else ""
    )
    user = f" of {event.user}" if event.user else ""
    priority = tr(", priority {priority}", priority=event.priority) if event.priority else ""
    name = request_name(event.request_id)
    text = tr(
        "Request {name}{user} arrived: {prompt}, at most {max_tokens:,} to answer{priority}.{shares}",
        name=name,
        user=user,
        prompt=prompt,
        max_tokens=event.max_tokens,
        priority=priority,
        shares=shares,
    )
    return Decision(text, (event.request_id,))


def _many_arrived(events: list[Arrived], step: _Step) -> Decision:
    tokens = count(sum(event.prompt_tokens for event in events), "prompt token")
    return _about(events, tr("{{names}} arrived with {tokens} in all.", tokens=tokens))


def _reprioritised(event: Reprioritised, step: _Step) -> Decision:
    text = tr(
        "Request {request_name} has priority {priority} from this step on.",
        request_name=request_name(event.request_id),
        priority=event.priority,
    )
    return Decision(text, (event.request_id,))


def _admitted(event: Admitted, step: _Step) -> Decision:
    joined = tr("rejoined the batch") if event.resumed else tr("joined the batch")
    since = tr(" since its preemption") if event.resumed else ""
    cached = (
        tr("; {tokens} need not be computed", tokens=count(event.cached_tokens, "token")) if event.cached_tokens else ""
    )
    name = request_name(event.request_id)
    text = tr(
        "Request {name} {joined} {after}{since}{cached}.",
        name=name,
        joined=joined,
        after=_after(event.waited),
        since=since,
        cached=cached,
    )
    return Decision(text, (event.request_id,))


def _many_admitted(events: list[Admitted], step: _Step) -> Decision:
    least, most = (_after(pick(event.waited for event in events)) for pick in (min, max))
    after = least if least == most else f"{least} to {most.removeprefix('after ')}"
    cached = sum(event.cached_tokens for event in events)
    saved = tr("; {tokens} need not be computed", tokens=count(cached, "token")) if cached else ""
    return _about(events, tr("{{names}} joined the batch {after}{saved}.", after=after, saved=saved))


def _deferred(event: Deferred, step: _Step) -> Decision:
    text = tr("Request {request_name}, the head of the queue, waits. ", request_name=request_name(event.request_id))
    return Decision(text + deferred_sentence(event, step.state), (event.request_id,))


def _preempted(event: Preempted, step: _Step) -> Decision:
    gave = preempted_sentence(event, step.block_bytes)
    text = " ".join([lowered(gave), *preemption_details(event)])
    who = dict.fromkeys((event.request_id, event.beneficiary))
    return Decision(
        tr("Request {request_name} was preempted: it {text}", request_name=request_name(event.request_id), text=text),
        tuple(who),
        "preempted",
    )


def _swapped_out(event: SwappedOut, step: _Step) -> Decision:
    text = tr(
        "{size} of request {request_name} moved to host memory.",
        size=step.size(len(event.blocks)),
        request_name=request_name(event.request_id),
    )
    return Decision(text, (event.request_id,), "swapped")


def _swapped_in(event: SwappedIn, step: _Step) -> Decision:
    text = tr(
        "{size} of request {request_name} came back from host memory.",
        size=step.size(len(event.blocks)),
        request_name=request_name(event.request_id),
    )
    return Decision(text, (event.request_id,), "swapped")


def _swap_dropped(event: SwapDropped, step: _Step) -> Decision:
    gone = step.size(len(event.host_blocks))
    reason = f": {event.reason.rstrip('.')}" if event.reason else ""
    name = request_name(event.request_id)
    text = tr(
        "Request {name} gave up {gone} in host memory and is computed again{reason}.",
        name=name,
        gone=gone,
        reason=reason,
    )
    return Decision(text, (event.request_id,), "preempted")


def _recovered(event: Recovered, step: _Step) -> Decision:
    text = recovered_sentence(event)
    return Decision(
        tr("Request {request_name}: {what}", request_name=request_name(event.request_id), what=lowered(text)),
        (event.request_id,),
    )


def _ended(event: Ended, step: _Step) -> Decision:
    name, tokens = request_name(event.request_id), count(event.output_tokens, "token")
    text = tr(
        "The answer of request {name} is complete ({reason}, {tokens}); its row stays until its batch ends.",
        name=name,
        reason=event.reason,
        tokens=tokens,
    )
    return Decision(text, (event.request_id,), "end")


def _many_ended(events: list[Ended], step: _Step) -> Decision:
    return _about(events, tr("{names} have complete answers; their rows stay until their batch ends."), "end")


def _finished(event: Finished, step: _Step) -> Decision:
    name, tokens = request_name(event.request_id), count(event.output_tokens, "token")
    return Decision(
        tr("Request {name} finished ({reason}) with {tokens}.", name=name, reason=event.reason, tokens=tokens),
        (event.request_id,),
        "end",
    )


def _many_finished(events: list[Finished], step: _Step) -> Decision:
    tokens = count(sum(event.output_tokens for event in events), "token")
    return _about(events, tr("{{names}} finished with {tokens} in all.", tokens=tokens), "end")


def _rejected(event: Rejected, step: _Step) -> Decision:
    text = tr(
        "Request {request_name} was refused: {reason}.",
        request_name=request_name(event.request_id),
        reason=event.message.rstrip("."),
    )
    return Decision(text, (event.request_id,), "refused")


def _many_rejected(events: list[Rejected], step: _Step) -> Decision:
    reason = events[0].message.rstrip(".")
    alike = all(event.message == events[0].message for event in events)
    return _about(
        events,
        tr(
            "{{names}} were refused: {reason}.",
            reason=reason if alike else tr("the first since {reason}", reason=reason),
        ),
        "refused",
    )


def _block_copied(event: BlockCopied, step: _Step) -> Decision:
    text = tr(
        "Request {request_name} writes to block {source:,}, which others share: it goes on in "
        "a copy of its own, block {destination:,}.",
        request_name=request_name(event.request_id),
        source=event.source,
        destination=event.destination,
    )
    return Decision(text, (event.request_id,))


def _batch_started(event: BatchStarted, step: _Step) -> Decision:
    text = tr(
        "Static batch {batch:,} of {requests} began; prompts are padded to {tokens}.",
        batch=event.batch,
        requests=count(len(event.request_ids), "request"),
        tokens=count(event.padded_prompt, "token"),
    )
    return Decision(text, tuple(event.request_ids), "plan")


def _batch_ended(event: BatchEnded, step: _Step) -> Decision:
    text = tr(
        "Static batch {batch:,} of {requests} ended after {steps}: "
        "{measured_useful:.0f} % of what was computed was of use ({predicted_useful:.0f} % "
        "predicted, η = {eta:.2f}); {tokens} of padding.",
        batch=event.batch,
        requests=count(event.size, "request"),
        steps=count(event.steps, "step"),
        measured_useful=100 * event.measured_useful,
        predicted_useful=100 * event.predicted_useful,
        eta=event.eta,
        tokens=count(event.padding_tokens, "token"),
    )
    return Decision(text, look="end")


def _reconfigured(event: Reconfigured, step: _Step) -> Decision:
    parts = [
        tr("discipline {discipline}", discipline=event.discipline),
        tr("order {order}", order=event.order),
        tr("preemption by {preemption}", preemption=event.preemption),
    ]
    if event.max_num_seqs:
        parts.append(f"{count(event.max_num_seqs, 'running place')}")
    knobs = event.scheduler
    if knobs is not None:
        if knobs.max_num_batched_tokens:
            parts.append(tr("a budget of {tokens}", tokens=count(knobs.max_num_batched_tokens, "token")))
        if knobs.chunk_size:
            parts.append(tr("chunks of at most {tokens}", tokens=count(knobs.chunk_size, "token")))
        if knobs.watermark:
            parts.append(tr("a watermark of {watermark:.0f} %", watermark=100 * knobs.watermark))
    after = (
        tr(" {pending_discipline} takes over when the batch has drained.", pending_discipline=event.pending_discipline)
        if event.pending_discipline
        else ""
    )
    return Decision(
        tr("The knobs were changed: {and_list}.{after}", and_list=and_list(parts), after=after), look="plan"
    )


def _pool_shrunk(event: PoolShrunk, step: _Step) -> Decision:
    text = tr(
        "Memory ran out in the step: the pool was made anew with {num_blocks:,} blocks, {before:,} before ({cause}).",
        num_blocks=event.num_blocks,
        before=event.before,
        cause=event.cause,
    )
    return Decision(text, look="preempted")


_SINGLE: dict[type, Callable[[Any, _Step], Decision]] = {
    Arrived: _arrived,
    Reprioritised: _reprioritised,
    Admitted: _admitted,
    Deferred: _deferred,
    Preempted: _preempted,
    SwappedOut: _swapped_out,
    SwappedIn: _swapped_in,
    SwapDropped: _swap_dropped,
    Recovered: _recovered,
    Ended: _ended,
    BatchStarted: _batch_started,
    BatchEnded: _batch_ended,
    Reconfigured: _reconfigured,
    PoolShrunk: _pool_shrunk,
    BlockCopied: _block_copied,
    Rejected: _rejected,
    Finished: _finished,
}
_MANY: dict[type, Callable[[list[Any], _Step], Decision]] = {
    Arrived: _many_arrived,
    Admitted: _many_admitted,
    Ended: _many_ended,
    Finished: _many_finished,
    Rejected: _many_rejected,
}
_TURNING_POINTS = (Preempted, SwapDropped, BatchStarted, BatchEnded, Reconfigured, PoolShrunk)
_BlockWords = Callable[[str, int, _Step], str]
_BLOCK_WORDS: dict[type, tuple[_BlockWords, _BlockWords, Look]] = {
    BlocksAllocated: (
        lambda who, n, step: tr("Request {who} got {blocks}", who=who, blocks=count(n, "block")),
        lambda who, n, step: tr("{who} got {blocks} in all", who=who, blocks=count(n, "block")),
        "change",
    ),
    BlocksShared: (
        lambda who, n, step: tr("Request {who} shares {cached}", who=who, cached=_cached(n, step)),
        lambda who, n, step: tr("{who} share {cached}", who=who, cached=_cached(n, step)),
        "change",
    ),
    BlocksCached: (
        lambda who, n, step: tr(
            "{blocks} of request {who} {are} full and can be shared from now on",
            blocks=count(n, "block"),
            who=who,
            are=are(n),
        ),
        lambda who, n, step: tr(
            "{blocks} of {who} are full and can be shared from now on",
            blocks=count(n, "block"),
            who=lowered(who),
        ),
        "change",
    ),
    BlocksEvicted: (
        lambda who, n, step: tr(
            "{blocks} {are} forgotten: request {who} needs room", blocks=count(n, "cached block"), are=are(n), who=who
        ),
        lambda who, n, step: tr(
            "{blocks} are forgotten: {who} need room", blocks=count(n, "cached block"), who=lowered(who)
        ),
        "change",
    ),
    BlocksFreed: (
        lambda who, n, step: tr("Request {who} gave back {blocks}", who=who, blocks=count(n, "block")),
        lambda who, n, step: tr("{who} gave back {blocks} in all", who=who, blocks=count(n, "block")),
        "change",
    ),
}
"""For one request and for many, without the full stop."""


def _after(seconds: float) -> str:
    return tr("after {seconds}", seconds=seconds_label(seconds)) if seconds >= 0.0005 else tr("at once")


def _left(step: _Step) -> str:
    """Blocks that can be taken after the step."""
    record = step.state.last_record
    return f"{record.takeable_blocks:,}" if record is not None else "?"


def _cached(blocks: int, step: _Step) -> str:
    tokens = count(blocks * step.state.block_size, "token")
    return tr("{blocks} of the prefix cache ({tokens})", blocks=count(blocks, "block"), tokens=tokens)


def _about(events: Sequence[Any], text: str, look: Look = "change") -> Decision:
    requests = tuple(event.request_id for event in events)
    return Decision(text.replace("{names}", _names(requests)), requests, look)


def _names(requests: Iterable[int]) -> str:
    """``Requests 3, 4, 5, 6 and 28 more``."""
    names = [request_name(request_id) for request_id in requests]
    if len(names) > MOST_NAMED:
        return tr(
            "Requests {named} and {more:,} more",
            named=", ".join(names[: MOST_NAMED - 1]),
            more=len(names) - MOST_NAMED + 1,
        )
    return tr("Requests {and_list}", and_list=and_list(names))
