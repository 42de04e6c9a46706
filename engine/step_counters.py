"""What the steps of a run add up to: work, waste, places, preemptions. Fed with one :class:`StepRecord` after another.

Where the memory and the work go that serve nobody::

    a step's tokens   | useful | recomputed | rejected drafts | padding |    counted in tokens computed
    a request's blocks  [computed tokens ······|· tail ·][ reserved ][ reserved ]   held in KV slots

The counters run after every step of a benchmark, so a step costs its events and a dozen additions, never its rows.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from engine.events import (
    AnyEvent,
    BatchEnded,
    BlockCopied,
    BlocksAllocated,
    BlocksFreed,
    BlocksShared,
    PoolShrunk,
    Preempted,
    Recovered,
    RunTotals,
    StepRecord,
    SwapDropped,
    SwappedIn,
    SwappedOut,
)

COMPUTED_WASTE = ("padding", "recomputed", "rejected_drafts")
HELD_WASTE = ("reserved", "tail")


def ratio(part: float, whole: float) -> float | None:
    """None where there is no whole."""
    return part / whole if whole else None


class _BlocksInUse:
    """Blocks that requests refer to, followed through the events from where counting begins. Most are in use in the
    middle of a step: at its end those that finished have given theirs back."""

    def __init__(self) -> None:
        self._references: defaultdict[int, int] = defaultdict(int)
        self._now = 0
        self.peak = 0

    def take(self, blocks: list[int]) -> None:
        for block in blocks:
            self._references[block] += 1
            self._now += self._references[block] == 1
        self.peak = max(self.peak, self._now)

    def give(self, blocks: list[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            self._now -= self._references[block] == 0


class _ComputedWaste:
    """Tokens that were computed and serve nobody, and the time they took: each step's, by their share of its tokens."""

    def __init__(self) -> None:
        self.tokens = dict.fromkeys(COMPUTED_WASTE, 0)
        self.seconds = dict.fromkeys(COMPUTED_WASTE, 0.0)

    def add(self, before: RunTotals, now: RunTotals, seconds: float) -> None:
        padding = now.padding_tokens - before.padding_tokens
        computed = now.computed_tokens - before.computed_tokens + padding
        if not computed:
            return
        recomputed = now.recomputed_tokens - before.recomputed_tokens
        rejected = now.draft_tokens - before.draft_tokens - (now.accepted_tokens - before.accepted_tokens)
        for name, tokens in zip(COMPUTED_WASTE, (padding, recomputed, rejected), strict=True):
            if tokens:
                self.tokens[name] += tokens
                self.seconds[name] += seconds * tokens / computed

    def summary(self) -> dict[str, dict[str, float]]:
        return {name: {"tokens": self.tokens[name], "seconds": self.seconds[name]} for name in COMPUTED_WASTE}


class _HeldWaste:
    """Empty KV slots that running requests hold, weighted by time."""

    def __init__(self, pool_slots: int, bytes_per_slot: float) -> None:
        self._pool_slots = pool_slots
        self._bytes_per_slot = bytes_per_slot
        self._elapsed = 0.0
        self._slot_seconds = dict.fromkeys(HELD_WASTE, 0.0)
        self._peak = dict.fromkeys(HELD_WASTE, 0)

    def add(self, record: StepRecord, seconds: float) -> None:
        self._elapsed += seconds
        for name, slots in zip(HELD_WASTE, (record.reserved_tokens, record.tail_tokens), strict=True):
            if slots:
                self._slot_seconds[name] += seconds * slots
                self._peak[name] = max(self._peak[name], slots)

    def summary(self) -> dict[str, dict[str, float | None]]:
        result: dict[str, dict[str, float | None]] = {}
        for name in HELD_WASTE:
            mean = ratio(self._slot_seconds[name], self._elapsed)
            peak = self._peak[name]
            result[name] = {
                "tokens": mean,
                "peak_tokens": peak,
                "seconds": ratio(self._slot_seconds[name], self._pool_slots),
                "bytes": None if mean is None else mean * self._bytes_per_slot,
                "peak_bytes": peak * self._bytes_per_slot,
            }
        return result


class _PreemptionLedger:
    """One entry per preemption, completed by what happens to its victim later."""

    def __init__(self, bytes_per_block: int) -> None:
        self.entries: list[dict[str, Any]] = []
        self._last: dict[int, dict[str, Any]] = {}
        """A victim's latest preemption, until it is again where it was."""
        self._bytes_per_block = bytes_per_block

    def preempted(self, event: Preempted, step: int, time: float) -> None:
        entry = {
            "step": step,
            "time": time,
            "victim": event.request_id,
            "beneficiary": event.beneficiary,
            "rule": event.rule,
            "mode": event.mode,
            "tokens": event.tokens,
            "blocks": event.blocks,
            "swapped_blocks": event.swapped_blocks,
            "bytes_moved": event.swapped_blocks * self._bytes_per_block,
            "recompute_seconds": event.recompute_seconds,
            "swap_seconds": event.swap_seconds,
            "fallback": event.fallback,
            "recomputed_tokens": None,
            "lost_seconds": None,
        }
        self.entries.append(entry)
        self._last[event.request_id] = entry

    def swapped_in(self, event: SwappedIn) -> None:
        if (entry := self._last.get(event.request_id)) is not None:
            entry["bytes_moved"] += len(event.host_blocks) * self._bytes_per_block

    def dropped(self, event: SwapDropped, step: int) -> None:
        entry = self._last.get(event.request_id)
        if entry is not None and entry["step"] == step:  # before its blocks had left
            entry["swapped_blocks"] = entry["bytes_moved"] = 0

    def recovered(self, event: Recovered) -> None:
        if (entry := self._last.pop(event.request_id, None)) is not None:
            entry["lost_seconds"] = event.seconds
            entry["recomputed_tokens"] = event.recomputed_tokens


class StepCounters:
    """Counts start at ``baseline``, the engine's totals at the start of the run; ``start`` is the run's zero on the
    engine's clock."""

    def __init__(
        self,
        baseline: RunTotals,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        kv_bytes_per_block: int = 0,
        start: float = 0.0,
    ) -> None:
        self._baseline = baseline
        self._totals = baseline
        self._num_blocks = num_blocks
        self._max_num_seqs = max_num_seqs
        self.start = start
        self._steps = 0
        self._slots = 0
        self._peak_slots = 0
        self._steps_waiting = 0
        self._slots_waiting = 0
        self._blocks = _BlocksInUse()
        self._computed = _ComputedWaste()
        self._held = _HeldWaste(num_blocks * block_size, kv_bytes_per_block / block_size)
        self._ledger = _PreemptionLedger(kv_bytes_per_block)
        self._batches: list[BatchEnded] = []
        self._shrinks: list[PoolShrunk] = []

    def hold(self, blocks: list[int]) -> None:
        """References that requests have where counting begins."""
        self._blocks.take(blocks)

    def add(self, record: StepRecord) -> None:
        before, self._totals = self._totals, record.totals
        if record.request_ids:
            seconds, slots = record.timings.total, record.num_slots
            self._steps += 1
            self._slots += slots
            self._peak_slots = max(self._peak_slots, slots)
            if record.num_waiting:
                self._steps_waiting += 1
                self._slots_waiting += slots
            self._computed.add(before, record.totals, seconds)
            self._held.add(record, seconds)
        for event in record.events:
            self._follow(event, record)

    def _follow(self, event: AnyEvent, record: StepRecord) -> None:
        match event:
            case BlocksAllocated(blocks=blocks) | BlocksShared(blocks=blocks):
                self._blocks.take(blocks)
            case BlocksFreed(blocks=blocks) | SwappedOut(blocks=blocks):
                self._blocks.give(blocks)
            case BlockCopied(source=source, destination=destination):
                self._blocks.take([destination])
                self._blocks.give([source])
            case SwappedIn(blocks=blocks):
                self._blocks.take(blocks)
                self._ledger.swapped_in(event)
            case SwapDropped():
                self._ledger.dropped(event, record.step)
            case Preempted():
                self._ledger.preempted(event, record.step, record.time - self.start)
            case Recovered():
                self._ledger.recovered(event)
            case BatchEnded():
                self._batches.append(event)
            case PoolShrunk():
                self._shrinks.append(event)

    def summary(self) -> dict[str, Any]:
        """The figures of the run so far.

        ``steps`` are those that computed something; the following are over them.
        ``slot_utilisation``: Σ places taken by requests without a complete answer / Σ ``max_num_seqs``, over the steps
        during which a request was waiting; ``slot_utilisation_run`` over all steps; None without such a step.
        ``running_peak`` and ``running_mean``: those places, the most and the mean per step: requests running at once.
        ``kv_blocks_total``: where the run began; ``pool_shrinks``: each time that memory ran out in a step
        (:class:`engine.events.PoolShrunk`).
        ``kv_blocks_peak``: the most blocks that requests referred to at one moment.
        ``swapped_blocks``: blocks moved to host memory, ``swapped_in_blocks`` back from it.
        ``acceptance_rate``: ``accepted_tokens`` / ``draft_tokens``; None without drafts.

        ``static_batches``: every static batch that ended, with the literature's η, the predicted and the measured share
        of useful work (:class:`engine.events.BatchEnded`); ``static_totals``: the same over all of them, the shares
        weighted by the tokens that each batch computed; None without a batch.

        ``preemption_ledger``: one entry per preemption; ``time`` in seconds after the start of the run, ``bytes_moved``
        out of the device and back, ``recompute_seconds`` and ``swap_seconds`` the estimates of the moment,
        ``lost_seconds`` and ``recomputed_tokens`` what it cost until the victim was again where it was. Both are None
        if it never was, or was preempted again before: then the entry of that preemption counts from the first on.

        ``waste``: for ``padding``, ``recomputed`` and ``rejected_drafts``, ``tokens`` is how many were computed and
        ``seconds`` the sum of each step's time times their share of the tokens the step computed, padding and drafts
        included. For ``reserved`` (KV slots in blocks that requests hold and have not begun to fill) and ``tail``
        (empty slots of the blocks they have begun), ``tokens`` is the mean of empty slots held, weighted by the time of
        the steps, ``peak_tokens`` the most, ``seconds`` is pool-seconds, Σ step time · slots / slots of the pool, and
        ``bytes`` what the mean takes.
        """
        now, before = self._totals, self._baseline

        def risen(name: str) -> int:
            return int(getattr(now, name) - getattr(before, name))

        return {
            "steps": self._steps,
            "preemptions": risen("preemptions"),
            "swapped_blocks": risen("swapped_out_blocks"),
            "swapped_in_blocks": risen("swapped_in_blocks"),
            "recomputed_tokens": risen("recomputed_tokens"),
            "prefix_query_tokens": risen("prefix_query_tokens"),
            "prefix_hit_tokens": risen("prefix_hit_tokens"),
            "computed_tokens": risen("computed_tokens"),
            "padding_tokens": risen("padding_tokens"),
            "draft_tokens": risen("draft_tokens"),
            "accepted_tokens": risen("accepted_tokens"),
            "acceptance_rate": ratio(risen("accepted_tokens"), risen("draft_tokens")),
            "slot_utilisation": ratio(self._slots_waiting, self._steps_waiting * self._max_num_seqs),
            "slot_utilisation_run": ratio(self._slots, self._steps * self._max_num_seqs),
            "running_peak": self._peak_slots,
            "running_mean": ratio(self._slots, self._steps),
            "kv_blocks_total": self._num_blocks,
            "kv_blocks_peak": self._blocks.peak,
            "pool_shrinks": [msgspec.structs.asdict(shrink) for shrink in self._shrinks],
            "waste": {**self._computed.summary(), **self._held.summary()},
            "static_batches": [msgspec.structs.asdict(batch) for batch in self._batches],
            "static_totals": _static_totals(self._batches),
            "preemption_ledger": self._ledger.entries,
        }


def _static_totals(batches: list[BatchEnded]) -> dict[str, Any] | None:
    if not batches:
        return None
    useful, padding = sum(b.useful_tokens for b in batches), sum(b.padding_tokens for b in batches)

    def weighted(name: str) -> float | None:
        parts = (getattr(b, name) * (b.useful_tokens + b.padding_tokens) for b in batches)
        return ratio(sum(parts), useful + padding)

    return {
        "batches": len(batches),
        "useful_tokens": useful,
        "padding_tokens": padding,
        "eta": weighted("eta"),
        "predicted_useful": weighted("predicted_useful"),
        "measured_useful": ratio(useful, useful + padding),
    }
