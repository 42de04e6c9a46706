"""The columns of a step in words: what its batch computed, what it left, what took its time. Qt-free."""

from __future__ import annotations

from collections.abc import Iterator

from app.translation import ntr, tr
from app.words import and_list, count, seconds_label
from engine.events import RowKind, StepRecord

MOST_SIZES = 3
"""Of more chunks the smallest and the largest are told."""


def batch_sentence(record: StepRecord) -> str:
    """What the batch computed: ``Computes 32 decodes and 2 chunks of prefill (48 + 16 tokens) of a budget of 128; 32
    left.``"""
    parts = [*_decodes(record), *_chunks(record, RowKind.PREFILL), *_chunks(record, RowKind.RECOMPUTE)]
    padding = sum(record.padding)
    rows = sum(1 for kind in record.kinds if kind == RowKind.PADDING)
    if rows or padding:
        rowed = tr(" in {rows} whose answer is complete", rows=count(rows, "row")) if rows else ""
        parts.append(tr("{tokens} of padding{rowed}", tokens=count(padding, "token"), rowed=rowed))
    if not parts:
        return tr("Computes nothing.")
    used = sum(record.num_tokens) + padding
    text = tr("Computes {and_list}", and_list=and_list(parts))
    if not record.token_budget:
        return f"{text}."
    if used > record.token_budget:
        return tr(
            "{text}: {tokens}, more than the budget of {token_budget:,}.",
            text=text,
            tokens=count(used, "token"),
            token_budget=record.token_budget,
        )
    return tr(
        "{text} of a budget of {token_budget:,}; {left:,} left.",
        text=text,
        token_budget=record.token_budget,
        left=record.token_budget - used,
    )


def _decodes(record: StepRecord) -> Iterator[str]:
    rows = [i for i, kind in enumerate(record.kinds) if kind == RowKind.DECODE]
    if not rows:
        return
    drafts = sum(record.drafts[i] for i in rows) if record.drafts else 0
    if not drafts:
        yield count(len(rows), "decode")
        return
    each = record.accepted_drafts()
    accepted = sum(each[i] for i in rows)
    yield tr(
        "{decodes} with {drafts}, {accepted:,} of them accepted,",
        decodes=count(len(rows), "decode"),
        drafts=count(drafts, "draft"),
        accepted=accepted,
    )


def _chunks(record: StepRecord, kind: RowKind) -> Iterator[str]:
    tokens = [n for k, n in zip(record.kinds, record.num_tokens, strict=True) if k == kind]
    if not tokens:
        return
    what = tr("prefill") if kind == RowKind.PREFILL else tr("recomputation")
    if len(tokens) <= MOST_SIZES:
        sizes = " + ".join(f"{n:,}" for n in tokens)
        yield tr(
            "{chunks} of {what} ({sizes} {tokens})",
            chunks=count(len(tokens), "chunk"),
            what=what,
            sizes=sizes,
            tokens=ntr("token", "tokens", 1 if tokens == [1] else 2),
        )
    else:
        total = count(sum(tokens), "token")
        least, most = min(tokens), max(tokens)
        each = (
            tr("{least:,} each", least=least)
            if least == most
            else tr("{least:,} to {most:,} each", least=least, most=most)
        )
        yield tr("{tokens:,} chunks of {what} ({total}, {each})", tokens=len(tokens), what=what, total=total, each=each)


def left_sentence(record: StepRecord) -> str:
    """Who runs and waits after the step, and what the pool has left."""
    swapped = tr(" ({num_swapped:,} swapped)", num_swapped=record.num_swapped) if record.num_swapped else ""
    cached = (
        tr(", {cached_blocks:,} of them cached", cached_blocks=record.cached_blocks) if record.cached_blocks else ""
    )
    return tr(
        "Then {num_running:,} run and {num_waiting:,} wait{swapped}; {blocks} can be taken{cached}.",
        num_running=record.num_running,
        num_waiting=record.num_waiting,
        swapped=swapped,
        blocks=count(record.takeable_blocks, "block"),
        cached=cached,
    )


def timing_sentence(record: StepRecord) -> str:
    timings = record.timings
    parts = [
        f"{name} {seconds_label(seconds)}"
        for name, seconds in (
            ("schedule", timings.schedule),
            ("prepare", timings.prepare),
            ("forward", timings.forward),
            ("sample", timings.sample),
            ("detokenise", timings.detokenise),
        )
        if seconds > 0
    ]
    detail = f": {', '.join(parts)}" if parts else ""
    return tr("It took {total}{detail}.", total=seconds_label(timings.total), detail=detail)
