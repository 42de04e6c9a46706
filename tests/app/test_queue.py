"""The queue and the ledger: reasons, waits, priorities, what preemptions cost; the models first, then the panels."""

from __future__ import annotations

import inspect
import re

import pytest

from app.scope.ledger import cell_text
from app.scope.ledger_history import LedgerHistory
from app.scope.reasons import WAITING_PHASES, QueueRow, deferred_sentence, ledger_sentence, queue_of
from app.scope.waits import LineRates
from engine.config import SchedulerConfig
from engine.events import (
    BatchStarted,
    Deferred,
    Keyframe,
    Preempted,
    Recovered,
    RequestState,
    RunTotals,
    SwapDropped,
    SwappedOut,
)
from engine.request import RequestStatus, branch_id
from engine.run_state import RunState
from tests.app.runs import Run, record_of


def queue(run: Run) -> list[QueueRow]:
    rates = run.history.line.rates(run.history.lanes.end)
    return queue_of(run.state, run.scheduler, run.history.ledger, rates).rows


# Queue ---------------------------------------------------------------------------------------------------------------


def test_every_request_is_listed_and_every_wait_has_numbers() -> None:
    run = Run(num_blocks=12, scheduler=SchedulerConfig(max_num_seqs=8))
    for request_id in range(1, 6):
        run.add(request_id, 60, 100)
    seen: set[str] = set()
    while run.step() is not None:
        rows = queue(run)
        assert {row.request_id for row in rows} == set(run.state.requests)
        waiting = [row for row in rows if row.phase in WAITING_PHASES]
        assert len(waiting) == run.state.num_waiting
        for row in rows:
            assert row.why.endswith(".")
            seen.add(row.phase)
        if waiting and run.state.deferred is not None and run.state.deferred.reason == "blocks":
            free = run.state.num_blocks - run.state.referenced_blocks
            shown = min(free, run.state.deferred.available)
            assert (f"{shown} block" if shown else "no block") in waiting[0].why
        if waiting and run.state.deferred is not None:
            assert waiting[0].request_id == run.state.deferred.request_id
            assert any(character.isdigit() for character in waiting[0].why)
        for row in waiting[1:]:
            assert f"request {waiting[0].request_id}" in row.why
    assert {"decode", "prefill", "waiting", "preempted", "recompute"} <= seen


def test_a_preempted_request_says_to_whom_it_gave_what() -> None:
    run = Run(num_blocks=12)
    for request_id in range(1, 4):
        run.add(request_id, 60, 100)
    preemption = None
    while preemption is None:
        record = run.step()
        assert record is not None
        preemption = next((e for e in record.events if isinstance(e, Preempted)), None)
    row = next(r for r in queue(run) if r.request_id == preemption.request_id)
    assert row.phase == "preempted"
    assert f"{preemption.blocks} blocks" in row.why and f"{preemption.tokens} tokens" in row.why
    assert preemption.rule in row.why


def test_the_queue_is_in_the_order_of_the_discipline() -> None:
    run = Run(num_blocks=60, scheduler=SchedulerConfig(order="priority", max_num_seqs=1))
    run.add(1, 20, 100)
    run.step()
    for request_id, priority in ((2, 5), (3, 0), (4, 2)):
        run.add(request_id, 20, 10, priority=priority)
    run.step()
    waiting = [row.request_id for row in queue(run) if row.phase == "waiting"]
    assert waiting == [3, 4, 2]


@pytest.mark.parametrize(
    ("deferred", "words"),
    [
        (Deferred(7, "blocks", 12, 3), ("12 blocks", "3 blocks are free")),
        (Deferred(7, "blocks", 1, 0), ("1 block ", "no block is free")),
        (Deferred(7, "slots", 1, 0), ("32 running places", "max_num_seqs")),
        (Deferred(7, "budget", 40, 1), ("40 tokens", "1 token is left", "64")),
        (Deferred(7, "watermark", 9, 4), ("9 blocks", "watermark", "4 blocks are free")),
        (Deferred(7, "resume", 15, 9), ("15 blocks", "more than it lost", "9 blocks are free")),
        (Deferred(7, "promised", 20, 1), ("20 blocks", "1 of 100 blocks is neither in use nor promised")),
        (Deferred(7, "batch", 1, 0), ("static batch 3", "2 answers of 3 in it are not complete")),
        (Deferred(7, "joining", 4, 1), ("3 running requests", "until 4 wait", "1 waits", "waiting_served_ratio")),
        (Deferred(7, "draining", 3, 0), ("changes to static", "3 requests are still in it")),
        (Deferred(7, "something new", 3, 1), ("something new", "3", "1")),
    ],
)
def test_the_binding_reason_as_a_sentence(deferred: Deferred, words: tuple[str, ...]) -> None:
    rows = [state_of(1, RequestStatus.RUNNING), state_of(2, RequestStatus.RUNNING), state_of(3, RequestStatus.ENDED)]
    state = RunState()
    state.restore(Keyframe(1, 0.0, 100, 16, 32, 64, rows, [], None, RunTotals(), pending_discipline="static"))
    state.batch = BatchStarted(3, [1, 2, 3], 40)
    sentence = deferred_sentence(deferred, state)
    for word in words:
        assert word in sentence
    assert sentence.endswith(".")


def test_every_reason_of_the_events_has_a_sentence_of_its_own() -> None:
    told = set(re.findall(r"(?m)^    ``(\w+)``  +", inspect.getsource(Deferred)))
    assert {"blocks", "batch", "joining", "draining"} <= told
    state = RunState()
    for reason in told:
        assert not deferred_sentence(Deferred(1, reason, 2, 1), state).startswith("Waits for"), reason


def state_of(request_id: int, status: RequestStatus, **given) -> RequestState:
    """A request of 40 prompt tokens that has given 12."""
    more = {"blocks": [], "num_computed": 51, "output_tokens": 12} | given
    return RequestState(request_id, 0.0, 40, 90, 0, "", status, cached_tokens=0, preemptions=1, **more)


def test_what_is_complete_or_swapped_says_so_in_the_queue() -> None:
    branch = branch_id(1, 1)
    rows = [
        state_of(1, RequestStatus.RUNNING),
        state_of(branch, RequestStatus.ENDED, finish_reason="stop"),
        state_of(3, RequestStatus.WAITING),
        state_of(4, RequestStatus.RUNNING, blocks=[4, 5, 6, 7]),
    ]
    state = RunState()
    state.restore(Keyframe(1, 0.0, 100, 16, 32, 64, rows, [], None, RunTotals(), 8))
    moved = Preempted(4, branch, "latest arrival", "swap", 51, 4, 3, recompute_seconds=0.4, swap_seconds=0.02)
    record = record_of(2, time=0.1, seconds=0.1, events=[moved, SwappedOut(4, [5, 6, 7], [1, 2, 3])])
    ledger = LedgerHistory()
    state.apply(record)
    ledger.apply(record)
    running, ended, swapped, waiting = queue_of(state, SchedulerConfig(), ledger, LineRates()).rows
    assert running.request_id == 1
    assert (ended.request_id, ended.phase) == (branch, "ended")
    assert "Complete: 12 tokens (stop)" in ended.why and "1 answer in it is not complete" in ended.why
    assert (swapped.request_id, swapped.phase, swapped.blocks) == (4, "swapped", 1)  # before those that never ran
    assert "to request 1.1 (latest arrival); 51 tokens in 3 blocks of host memory." in swapped.why
    [entry] = ledger.until(None)
    assert "Estimated: computing again 0.4 s, swapping 20 ms." in ledger_sentence(entry)
    assert waiting.phase == "waiting" and "Behind request 4" in waiting.why


def test_the_ledger_counts_bytes_and_time() -> None:
    ledger = LedgerHistory()
    fallback = "the host pool has 2 blocks free, 3 are needed"
    for moment, event in enumerate(
        (
            Preempted(4, 9, "", "swap", 51, 3, 3),
            SwappedOut(4, [], [1, 2, 3]),
            SwapDropped(4, [1, 2, 3], "it alone fills the pool"),
            Recovered(4, 1.25, 51),
            Preempted(4, 4, "", "recompute", 60, 4, fallback=fallback),
        ),
        start=2,
    ):
        ledger.apply(record_of(moment, time=moment * 0.1, seconds=0.1, events=[event]))
    first, second = ledger.until(None)
    assert [cell_text(first, column, 1 << 20) for column in range(6)] == [
        "2", "4", "9", "3.0 MiB swapped", "1.2 s", ""
    ]  # fmt: skip
    assert "51 tokens in 3 blocks (3.0 MiB) of host memory" in ledger_sentence(first, 1 << 20)
    assert "Given up in host memory: it alone fills the pool." in ledger_sentence(first)
    assert "Back where it was after 1.2 s, 51 tokens computed again." in ledger_sentence(first)
    assert cell_text(second, 4) == "…" and cell_text(second, 3) == "60 tokens, 4 blocks"
    assert f"Not swapped: {fallback}." in ledger_sentence(second)
