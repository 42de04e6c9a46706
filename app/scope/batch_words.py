"""The columns of a step in words: what its batch computed, what it left, what took its time. Qt-free."""

from __future__ import annotations

from collections.abc import Iterator

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
        rowed = f" in {count(rows, 'row')} whose answer is complete" if rows else ""
        parts.append(f"{count(padding, 'token')} of padding{rowed}")
    if not parts:
        return "Computes nothing."
    used = sum(record.num_tokens) + padding
    text = f"Computes {and_list(parts)}"
    if not record.token_budget:
        return f"{text}."
    if used > record.token_budget:
        return f"{text}: {count(used, 'token')}, more than the budget of {record.token_budget:,}."
    return f"{text} of a budget of {record.token_budget:,}; {record.token_budget - used:,} left."


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
    yield f"{count(len(rows), 'decode')} with {count(drafts, 'draft')}, {accepted:,} of them accepted,"


def _chunks(record: StepRecord, kind: RowKind) -> Iterator[str]:
    tokens = [n for k, n in zip(record.kinds, record.num_tokens, strict=True) if k == kind]
    if not tokens:
        return
    what = "prefill" if kind == RowKind.PREFILL else "recomputation"
    if len(tokens) <= MOST_SIZES:
        sizes = " + ".join(f"{n:,}" for n in tokens)
        yield f"{count(len(tokens), 'chunk')} of {what} ({sizes} token{'' if tokens == [1] else 's'})"
    else:
        total = count(sum(tokens), "token")
        least, most = min(tokens), max(tokens)
        each = f"{least:,} each" if least == most else f"{least:,} to {most:,} each"
        yield f"{len(tokens):,} chunks of {what} ({total}, {each})"


def left_sentence(record: StepRecord) -> str:
    """Who runs and waits after the step, and what the pool has left."""
    swapped = f" ({record.num_swapped:,} swapped)" if record.num_swapped else ""
    cached = f", {record.cached_blocks:,} of them cached" if record.cached_blocks else ""
    return (
        f"Then {record.num_running:,} run and {record.num_waiting:,} wait{swapped}; "
        f"{count(record.takeable_blocks, 'block')} can be taken{cached}."
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
    return f"It took {seconds_label(timings.total)}{detail}."
