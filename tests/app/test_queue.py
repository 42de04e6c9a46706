"""The queue and the ledger: reasons, waits, priorities, what preemptions cost; the models first, then the panels."""

from __future__ import annotations

import inspect
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from PySide6.QtCore import QModelIndex, Qt

from app.scope.ledger import cell_text
from app.scope.ledger_history import LedgerHistory
from app.scope.panel import Moment
from app.scope.priorities import Standing, priority_between
from app.scope.queue_model import PRIORITY, WAIT
from app.scope.reasons import WAITING_PHASES, QueueRow, deferred_sentence, ledger_sentence, queue_of
from app.scope.waits import LineHistory, LineRates, Wait, head_wait, round_seconds, wait_at, wait_cell, wait_words
from app.words import seconds_label
from engine.config import SchedulerConfig
from engine.events import (
    Admitted,
    BatchStarted,
    BlocksAllocated,
    Deferred,
    Finished,
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
from tests.app.conftest import Rig
from tests.app.runs import Run, record_of
from tests.app.test_window import crunch

MakeRig = Callable[..., Rig]


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


# What can be looked back at ------------------------------------------------------------------------------------------


def test_an_entry_knows_nothing_of_what_came_after_the_step_looked_at() -> None:
    ledger = LedgerHistory()
    events = {
        2: Preempted(4, 9, "", "swap", 51, 3, 3),
        3: SwapDropped(4, [1, 2, 3], "it alone fills the pool"),
        5: Recovered(4, 1.25, 51),
        6: Preempted(4, 4, "", "recompute", 60, 4),
        7: Preempted(4, 9, "", "recompute", 20, 4),
        8: Finished(4, "abort", 12),
        9: Preempted(5, 9, "", "recompute", 20, 4),
    }
    for step in range(2, 10):
        event = events.get(step)
        ledger.apply(record_of(step, time=step * 0.1, seconds=0.1, events=[event] if event else []))
    assert not ledger.any_until(1) and ledger.any_until(2)
    assert [entry.step for entry in ledger.until(6)] == [2, 6]
    first, second, third, _ = ledger.until(None)
    assert first.time == pytest.approx(0.3)  # the end of its step
    assert [first.as_of(step).dropped != "" for step in (2, 3, None)] == [False, True, True]
    assert [first.as_of(step).recovered is not None for step in (4, 5, None)] == [False, True, True]
    assert [ledger.seconds_lost(step) for step in (4, 5, None)] == [0.0, 1.25, 1.25]
    assert [cell_text(second.as_of(step), 4) for step in (6, 7)] == ["…", "again"]
    assert [cell_text(third.as_of(step), 4) for step in (7, 8)] == ["…", "–"]
    assert "Preempted anew" in ledger_sentence(second) and "ended before" in ledger_sentence(third)
    assert ledger.latest_preemptions([4, 5], 6) == {4: events[6]}
    assert ledger.latest_preemptions([4, 5], None) == {4: events[7], 5: events[9]}
    ledger.restore(Keyframe(30, 0.0, 100, 16, 32, 64, [], [], None, RunTotals()))
    assert [entry.outcome for entry in ledger.until(None)] == ["recovered", "again", "ended", "unseen"]
    ledger.restore(Keyframe(0, 0.0, 100, 16, 32, 64, [], [], None, RunTotals()))
    assert not ledger and ledger.seconds_lost(None) == 0.0


def test_the_ledger_is_bounded_and_goes_on_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.scope.ledger_history.ENTRIES_KEPT", 10)
    ledger = LedgerHistory()
    for step in range(1, 41):
        moved = [Preempted(step, 99, "", "recompute", 20, 4), Recovered(step, 0.5, 20)]
        ledger.apply(record_of(step, time=step * 0.1, seconds=0.1, events=moved))
    assert len(ledger.until(None)) == 10 and ledger.seconds_lost(None) == pytest.approx(20.0)
    assert ledger.seconds_lost(35) == pytest.approx(17.5) and ledger.seconds_lost(5) is None


# How long it will take -----------------------------------------------------------------------------------------------


def line_of(steps: int, *, each: float, admitted: int = 0, free: int = 0, decoding: int = 0) -> LineHistory:
    """Steps of ``each`` seconds during which many wait; each admits so many requests, and takes and gives blocks."""
    line = LineHistory()
    taken = 0
    for step in range(1, steps + 1):
        events = [Admitted(100 * step + i, 0, 1.0, False) for i in range(admitted)]
        taken += free - decoding
        blocks = [BlocksAllocated(1, list(range(decoding)))] if decoding else []
        record = record_of(step, time=each * (step - 1), seconds=each, events=[*events, *blocks])
        fields = {name: getattr(record, name) for name in record.__struct_fields__}
        rows = {"request_ids": [1], "num_tokens": [1], "num_computed": [1], "kinds": [0], "new_tokens": [1]}
        line.apply(type(record)(**(fields | rows | {"num_waiting": 5, "free_blocks": 1000 + taken})))
    return line


def test_the_pace_of_the_line_is_measured_over_its_last_minute() -> None:
    line = line_of(900, each=0.1, admitted=2, free=3, decoding=1)
    rates = line.rates(90.0)
    assert rates.admissions == pytest.approx(20.0) and rates.step_seconds == pytest.approx(0.1)
    assert rates.room == pytest.approx(20.0)  # three given back and one taken by an answer, ten times a second
    early = line.rates(10.0)
    assert early.admissions == pytest.approx(20.0) and line.rates(0.05) == LineRates()
    assert line_of(2, each=0.1, admitted=1).rates(1.0).admissions is None  # too few to tell


def test_time_in_which_nobody_waited_does_not_count() -> None:
    line = LineHistory()
    for step in range(1, 1000):
        busy = step > 900
        record = record_of(step, time=0.1 * step, seconds=0.1, events=[Admitted(step, 0, 1.0, False)] if busy else [])
        fields = {name: getattr(record, name) for name in record.__struct_fields__}
        line.apply(type(record)(**(fields | {"num_waiting": 3 if busy else 0})))
    assert line.rates(200.0).admissions == pytest.approx(10.0)


def test_the_pace_is_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.scope.waits.STEPS_KEPT", 50)
    line = line_of(1000, each=0.1, admitted=1)
    assert line.rates(100.0).admissions == pytest.approx(10.0)
    assert line.rates(1.0) == LineRates()  # not known any more
    line.restore(Keyframe(0, 0.0, 100, 16, 32, 64, [], [], None, RunTotals()))
    assert line.rates(100.0) == LineRates()


@pytest.mark.parametrize(
    ("reason", "needed", "words"),
    [
        ("blocks", 90, "about 8 s"),  # 80 missing, 10 a second
        ("blocks", 14, "under 1 s"),
        ("watermark", 1010, "about 1.5 min"),
        ("slots", 1, "under 1 s"),  # four a second
        ("batch", 1, "at most 8 s"),  # 78 tokens to go, 0.1 s each
        ("draining", 1, "at most 8 s"),
        ("joining", 4, "at most 2 s"),
    ],
)
def test_the_head_waits_for_what_binds_it(reason: str, needed: int, words: str) -> None:
    rows = [state_of(1, RequestStatus.RUNNING, blocks=list(range(1, 91))), state_of(2, RequestStatus.WAITING)]
    state = RunState()
    state.restore(Keyframe(1, 0.0, 100, 16, 32, 64, rows, [], Deferred(2, reason, needed, 10), RunTotals()))
    rates = LineRates(admissions=4.0, room=10.0, step_seconds=0.1)
    assert wait_words(head_wait(state, rates, SchedulerConfig())) == words
    assert wait_words(head_wait(state, LineRates(), SchedulerConfig())) == "not known yet"


def test_those_behind_wait_their_place_and_not_less_than_the_head() -> None:
    rates = LineRates(admissions=2.0)
    assert wait_words(wait_at(9, Wait(1.0), rates)) == "about 5 s"
    assert wait_words(wait_at(9, Wait(20.0), rates)) == "about 20 s"
    assert wait_words(wait_at(9, Wait(20.0, at_most=True), rates)) == "about 5 s"
    assert wait_words(wait_at(9, None, LineRates())) == "not known yet" and wait_cell(None) == "?"
    assert wait_cell(Wait(45.0)) == "~ 45 s" and wait_cell(Wait(8.0, at_most=True)) == "≤ 8 s"


@pytest.mark.parametrize(
    ("seconds", "rounded"),
    [(0.4, 0), (1.2, 1), (9.7, 10), (12.4, 10), (13, 15), (58, 60), (100, 90), (299, 300), (1000, 1020), (9000, 7200)],
)
def test_an_expectation_is_never_more_exact_than_it_is(seconds: float, rounded: float) -> None:
    assert round_seconds(seconds) == rounded


def test_expected_waits_of_a_genuine_run_are_about_right() -> None:
    run = Run(num_blocks=60, scheduler=SchedulerConfig(max_num_seqs=4))
    for request_id in range(1, 81):
        run.add(request_id, 20, 20)
    run.step(150)
    now = run.runner.now
    said = {row.request_id: row.wait.seconds for row in queue(run) if row.wait is not None and row.wait.seconds >= 5}
    assert len(said) >= 15
    joined: dict[int, float] = {}
    while (record := run.step()) is not None:
        joined |= {e.request_id: record.time - now for e in record.events if isinstance(e, Admitted)}
    for request_id, seconds in said.items():
        assert seconds == pytest.approx(joined[request_id], rel=0.3, abs=1.5), request_id


# Priorities ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ageing", [None, 4.0])
def test_a_dragged_request_comes_between_its_new_neighbours(ageing: float | None) -> None:
    rng = random.Random(4)

    def key(each: Standing) -> tuple[float, float, int]:
        rank = each.priority if ageing is None else each.arrival + each.priority * ageing
        return rank, each.arrival, each.request_id

    met = 0
    for _ in range(500):
        line = [Standing(rng.randint(-3, 3), rng.randint(0, 20) / 2, i) for i in range(6)]
        line.sort(key=key)
        start = rng.randrange(6)
        moved, rest = line[start], line[:start] + line[start + 1 :]
        place = rng.randint(0, 5)
        above, below = rest[place - 1] if place else None, rest[place] if place < 5 else None
        upwards = place < start
        wanted = replace(moved, priority=priority_between(moved, above, below, ageing, upwards=upwards))
        order = sorted([*rest, wanted], key=key)
        if order.index(wanted) == place:
            met += 1
        elif upwards:  # no number puts it right there: it is at least before the one it was dragged above
            assert below is None or order.index(wanted) < order.index(below)
        else:
            assert above is None or order.index(wanted) > order.index(above)
        if place == start and ageing is None:
            assert wanted.priority == moved.priority
    assert met > 250


def waiting_rig(make_rig: MakeRig, order: str = "priority", requests: int = 8) -> Rig:
    """Two run, the others wait."""
    rig = make_rig(scheduler=SchedulerConfig(order=order, max_num_seqs=2))
    rig.window.arrange("monitor")
    rig.load()
    for number in range(requests):
        rig.add(20, 200, user="ab"[number % 2])
    rig.step(3)
    rig.wait_for(lambda: rig.window.panels["queue"].model.rowCount() == requests)
    return rig


def listed(rig: Rig) -> list[int]:
    return [row.request_id for row in rig.window.panels["queue"].model.rows if row.phase in WAITING_PHASES]


def test_keys_change_a_priority_and_the_next_step_takes_it(make_rig: MakeRig) -> None:
    rig = waiting_rig(make_rig)
    panel, last = rig.window.panels["queue"], listed(rig)[-1]
    rig.window.selection.select(last)
    panel.table.setFocus()
    with rig.qtbot.waitSignal(panel.priority_wanted) as wanted:
        rig.qtbot.keyClick(panel.table, Qt.Key.Key_Minus)
    assert wanted.args == [last, -1]
    rig.qtbot.keyClick(panel.table, Qt.Key.Key_Minus)
    place = panel.model.place_of(last)
    assert panel.model.index(place, PRIORITY).data() == "→ -2" and panel.priority.value() == -2
    rig.step(1)
    rig.wait_for(lambda: panel.model.pending == {} and last not in listed(rig))
    assert rig.state.requests[last].priority == -2  # it outranks the running ones, one of which has made room
    assert panel.model.index(panel.model.place_of(last), PRIORITY).data() == "-2"
    rig.qtbot.keyClick(panel.table, Qt.Key.Key_Plus)
    rig.step(1)
    rig.wait_for(lambda: rig.state.requests[last].priority == -1)


def test_the_field_below_the_table_changes_a_priority(make_rig: MakeRig) -> None:
    rig = waiting_rig(make_rig, order="fcfs")
    panel, chosen = rig.window.panels["queue"], listed(rig)[2]
    assert not panel.priority.isVisible()
    rig.window.selection.select(chosen)
    assert panel.priority.isVisible() and "counts when" not in panel.sentence.text()
    panel.priority.setFocus()
    panel.priority.selectAll()
    rig.qtbot.keyClicks(panel.priority, "7")
    assert not panel.model.pending  # still being typed
    rig.qtbot.keyClick(panel.priority, Qt.Key.Key_Return)
    assert panel.model.pending == {chosen: 7}
    assert "Its priority counts when the order is priority; it is fcfs." in panel.sentence.text()
    rig.step(1)
    rig.wait_for(lambda: rig.state.requests[chosen].priority == 7)


def test_a_row_can_be_dragged_to_the_head_of_the_line(make_rig: MakeRig) -> None:
    rig = waiting_rig(make_rig)
    panel = rig.window.panels["queue"]
    first, *_, last = listed(rig)
    model = panel.model
    running = model.rows[0].request_id
    flags = model.flags(model.index(model.place_of(last), 0))
    assert flags & Qt.ItemFlag.ItemIsDragEnabled
    assert not model.flags(model.index(model.place_of(running), 0)) & Qt.ItemFlag.ItemIsDragEnabled
    data = model.mimeData([model.index(model.place_of(last), 0)])
    place = model.place_of(first)
    assert not model.dropMimeData(data, Qt.DropAction.MoveAction, place, 0, QModelIndex())  # the view removes nothing
    assert model.pending == {last: -1}
    rig.step(1)
    rig.wait_for(lambda: model.pending == {} and last not in listed(rig))
    assert rig.state.requests[last].priority == -1


def test_a_row_dropped_below_another_comes_after_it(make_rig: MakeRig) -> None:
    rig = waiting_rig(make_rig)
    panel = rig.window.panels["queue"]
    first, *_, last = listed(rig)
    model = panel.model
    data = model.mimeData([model.index(model.place_of(first), 0)])
    model.dropMimeData(data, Qt.DropAction.MoveAction, -1, -1, QModelIndex())  # below all rows
    assert model.pending == {first: 1}
    rig.step(1)
    rig.wait_for(lambda: listed(rig)[-1] == first)
    assert listed(rig)[-2] == last


def test_the_past_cannot_be_changed_and_says_so(make_rig: MakeRig) -> None:
    rig = waiting_rig(make_rig)
    panel, chosen = rig.window.panels["queue"], listed(rig)[1]
    rig.window.selection.select(chosen)
    panel.table.setFocus()
    past = RunState()
    past.restore(rig.client.core.keyframe())
    rig.window.source.moment = Moment(past, rig.window.source.now)
    panel.run_moved()
    rig.wait_for(lambda: not panel.priority.isEnabled())
    with rig.qtbot.assertNotEmitted(panel.priority_wanted):
        rig.qtbot.keyClick(panel.table, Qt.Key.Key_Minus)
    reason = "Priorities can be changed when the newest step is shown again."
    assert reason in panel.sentence.text() and panel.priority.toolTip() == reason
    assert not panel.model.flags(panel.model.index(3, 0)) & Qt.ItemFlag.ItemIsDragEnabled


# The panels ----------------------------------------------------------------------------------------------------------


def test_every_wait_is_told_in_the_table_and_in_the_sentence(make_rig: MakeRig) -> None:
    rig = make_rig(scheduler=SchedulerConfig(max_num_seqs=2), num_blocks=64)
    rig.window.arrange("monitor")
    rig.load()
    for _ in range(30):
        rig.add(10, 12)
    panel = rig.window.panels["queue"]
    rig.step(1)
    rig.wait_for(lambda: panel.model.rowCount() > 0)
    last = listed(rig)[-1]
    assert panel.model.index(panel.model.place_of(last), WAIT).data() == "?"
    assert "Expected wait: not known yet." in panel.sentence.text()
    rig.step(80)
    rig.window.selection.select(last)
    rig.wait_for(lambda: "Expected wait: about" in panel.sentence.text())
    assert panel.model.index(panel.model.place_of(last), WAIT).data().startswith("~ ")


def test_the_ledger_of_a_moment_is_kept_by_the_window(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=24, token_budget=48)
    rig.window.arrange("monitor")
    crunch(rig)
    past = RunState()
    past.restore(rig.client.core.keyframe())  # knows nothing of what led there
    now = rig.window.history.lanes.end
    rig.step(120)
    panel, history = rig.window.panels["ledger"], rig.window.history.ledger
    assert len(history.until(None)) > len(history.until(past.step)) >= 1
    rig.window.source.moment = Moment(past, now)
    panel.run_moved()
    rig.wait_for(lambda: panel.model.last_step == past.step)
    assert panel.model.entries == history.until(past.step)[::-1]
    entry = next(entry for entry in panel.model.entries if entry.outcome_step > past.step)
    place = panel.model.entries.index(entry)
    assert panel.model.index(place, 4).data() == "…"
    queue_rows = rig.window.panels["queue"].model
    rig.window.panels["queue"].run_moved()
    rig.wait_for(lambda: {row.request_id for row in queue_rows.rows} == set(past.requests))
    lost = next(row for row in queue_rows.rows if row.phase == "preempted")
    assert lost.why.startswith("Gave ")


def test_a_click_in_the_ledger_asks_for_its_moment(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=24, token_budget=48)
    rig.window.arrange("monitor")
    crunch(rig)
    panel = rig.window.panels["ledger"]
    rig.wait_for(lambda: panel.model.rowCount() > 0)
    entry = panel.model.entries[-1]
    index = panel.model.index(panel.model.rowCount() - 1, 1)
    centre = panel.table.visualRect(index).center()
    with rig.qtbot.waitSignal(panel.moment_wanted) as wanted:
        rig.qtbot.mouseClick(panel.table.viewport(), Qt.MouseButton.LeftButton, pos=centre)
    assert wanted.args == [entry.time] and rig.window.selection.request_id == entry.event.request_id
    assert panel.sentence.text().startswith(f"Request {entry.event.request_id}: Gave ")
    panel.table.setFocus()
    with rig.qtbot.waitSignal(panel.moment_wanted):
        rig.qtbot.keyClick(panel.table, Qt.Key.Key_Return)


def test_the_ledger_adds_up(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=24, token_budget=48)
    rig.window.arrange("monitor")
    crunch(rig)
    rig.step(10_000)
    panel, totals = rig.window.panels["ledger"], rig.state.totals
    rig.wait_for(lambda: f"{totals.recomputed_tokens:,} tokens computed again" in panel.totals.text)
    lost = sum(entry.recovered.seconds for entry in rig.window.history.ledger.until(None) if entry.recovered)
    assert lost > 0 and panel.totals.text.endswith(f"{seconds_label(lost)} lost")
    assert panel.totals.text.startswith(f"{totals.preemptions} preemptions · ")


def test_five_hundred_requests_are_listed_without_delay(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=2000, token_budget=512, scheduler=SchedulerConfig(max_num_seqs=200))
    rig.window.arrange("monitor")
    rig.load()
    for number in range(500):
        rig.add(16, 200, user=f"user {number % 7}", priority=number % 3)
    rig.step(20)
    queue_panel = rig.window.panels["queue"]
    rig.wait_for(lambda: queue_panel.model.rowCount() == 500)
    spent = []
    for _ in range(5):
        rig.client.step(1)
        begun = time.thread_time()
        queue_panel.refresh()
        spent.append(time.thread_time() - begun)
    assert min(spent) < 0.02
