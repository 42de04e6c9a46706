"""The decisions of a step as sentences, for every type of event; then the panel."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, get_args

import pytest
from PySide6.QtCore import Qt

from app.scope.batch_words import batch_sentence, left_sentence, timing_sentence
from app.scope.decision_words import Decision, decisions
from app.scope.decisions import DecisionsPanel
from app.scope.panel import Moment
from app.scope.request_words import find_request, request_figures, request_status
from engine.config import SchedulerConfig
from engine.events import (
    RULE_OUT_OF_MEMORY,
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
    Keyframe,
    PoolShrunk,
    Preempted,
    Reconfigured,
    Recovered,
    Rejected,
    Reprioritised,
    RowKind,
    RunTotals,
    StepRecord,
    SwapDropped,
    SwappedIn,
    SwappedOut,
)
from engine.request import RequestStatus, branch_id
from engine.run_state import RunState
from tests.app.conftest import Rig
from tests.app.runs import Run, record_of
from tests.app.test_queue import state_of

MakeRig = Callable[..., Rig]

SENTENCES: list[tuple[AnyEvent, str]] = [
    (
        Arrived(12, 40, 30, 2, "alice", 1.0),
        "Request 12 of alice arrived: 40 prompt tokens, at most 30 to answer, priority 2.",
    ),
    (
        Arrived(branch_id(12, 1), 1, 30, 0, "", 1.0, parent=12),
        "Request 12.1 arrived: 1 prompt token, at most 30 to answer. It shares the prompt of request 12.",
    ),
    (Reprioritised(12, -3), "Request 12 has priority -3 from this step on."),
    (Admitted(12, 0, 0.0, False), "Request 12 joined the batch at once."),
    (Admitted(12, 32, 0.21, False), "Request 12 joined the batch after 0.21 s; 32 tokens need not be computed."),
    (Admitted(12, 0, 3.0, True), "Request 12 rejoined the batch after 3.0 s since its preemption."),
    (
        Deferred(12, "slots", 1, 0),
        "Request 12, the head of the queue, waits. All 32 running places are taken (max_num_seqs).",
    ),
    (
        Preempted(12, 9, "latest arrival", "recompute", 60, 4, fallback="no room there", recompute_seconds=0.4),
        "Request 12 was preempted: it gave 4 blocks to request 9 (latest arrival); 60 tokens to compute again. "
        "Not swapped: no room there. Estimated: computing again 0.4 s.",
    ),
    (SwappedOut(12, [1, 2, 3], [4, 5, 6]), "3 blocks (3.0 MiB) of request 12 moved to host memory."),
    (SwappedIn(12, [1], [4]), "1 block (1.0 MiB) of request 12 came back from host memory."),
    (
        SwapDropped(12, [4, 5], "it alone fills the pool."),
        "Request 12 gave up 2 blocks (2.0 MiB) in host memory and is computed again: it alone fills the pool.",
    ),
    (Recovered(12, 1.25, 51), "Request 12: back where it was after 1.2 s, 51 tokens computed again."),
    (
        Ended(12, "stop", 9),
        "The answer of request 12 is complete (stop, 9 tokens); its row stays until its batch ends.",
    ),
    (
        BatchStarted(3, [12, 13], 40),
        "Static batch 3 of 2 requests began; prompts are padded to 40 tokens.",
    ),
    (
        BatchEnded(3, 2, 50, 90, 30, 0.71, 0.74, 0.75),
        "Static batch 3 of 2 requests ended after 50 steps: 75 % of what was computed was of use (74 % predicted, "
        "η = 0.71); 30 tokens of padding.",
    ),
    (
        Reconfigured("vllm", "fcfs", "swap", "static", 16, SchedulerConfig(chunk_size=64, watermark=0.1)),
        "The knobs were changed: discipline vllm, order fcfs, preemption by swap, 16 running places, chunks of at most "
        "64 tokens and a watermark of 10 %. static takes over when the batch has drained.",
    ),
    (
        Preempted(12, 12, RULE_OUT_OF_MEMORY, "recompute", 60, 4),
        "Request 12 was preempted: it lost 4 blocks (memory ran out in the step); 60 tokens to compute again.",
    ),
    (
        PoolShrunk(80, 100, "OutOfMemoryError: CUDA out of memory"),
        "Memory ran out in the step: the pool was made anew with 80 blocks, 100 before (OutOfMemoryError: CUDA out of "
        "memory).",
    ),
    (BlocksAllocated(12, [1, 2, 3]), "Request 12 got 3 blocks (41 left)."),
    (BlocksShared(12, [1, 2]), "Request 12 shares 2 blocks of the prefix cache (32 tokens)."),
    (BlocksCached(12, [1]), "1 block of request 12 is full and can be shared from now on."),
    (BlocksEvicted(12, [7, 8]), "2 cached blocks are forgotten: request 12 needs room."),
    (
        BlockCopied(12, 7, 9),
        "Request 12 writes to block 7, which others share: it goes on in a copy of its own, block 9.",
    ),
    (BlocksFreed(12, [1, 2]), "Request 12 gave back 2 blocks."),
    (Rejected(12, "its prompt has 9,000 tokens."), "Request 12 was refused: its prompt has 9,000 tokens."),
    (Finished(12, "length", 30), "Request 12 finished (length) with 30 tokens."),
]


def step_of(*events: AnyEvent, **columns: Any) -> RunState:
    """A state right after a step with these events; 41 blocks can be taken, of 16 tokens and 1 MiB each."""
    rows = [state_of(each, RequestStatus.RUNNING) for each in (9, 12)]
    state = RunState()
    state.restore(Keyframe(1, 0.0, 100, 16, 32, 64, rows, [], None, RunTotals(), 8))
    record = record_of(2, time=0.1, seconds=0.1, events=events)
    fields = {name: getattr(record, name) for name in StepRecord.__struct_fields__}
    state.last_record = StepRecord(**(fields | {"free_blocks": 30, "cached_blocks": 11} | columns))
    return state


def told(*events: AnyEvent) -> list[Decision]:
    """Without the sentences of the columns."""
    return [each for each in decisions(step_of(*events), 1 << 20) if each.look not in ("plan", "figures")]


@pytest.mark.parametrize(("event", "sentence"), SENTENCES, ids=lambda value: type(value).__name__)
def test_every_event_has_its_sentence(event: AnyEvent, sentence: str) -> None:
    found = decisions(step_of(event), 1 << 20)
    assert sentence in [each.text for each in found]
    about = next(each for each in found if each.text == sentence).requests
    if isinstance(event, BatchEnded | Reconfigured | PoolShrunk):
        assert about == ()
    elif isinstance(event, BatchStarted):
        assert about == (12, 13)
    else:
        assert about[0] == event.request_id


def test_no_event_type_is_left_out() -> None:
    assert {type(event) for event, _ in SENTENCES} == set(get_args(AnyEvent))


def test_what_happens_to_many_is_one_sentence() -> None:
    arrived = [Arrived(i, 10, 5, 0, "", 0.0) for i in range(1, 41)]
    allocated = [BlocksAllocated(i, [i, i + 100]) for i in range(1, 41)]
    admitted = [Admitted(i, 2, 0.1 * i, False) for i in range(1, 41)]
    freed = [BlocksFreed(i, [i]) for i in range(1, 41)]
    rejected = [Rejected(i, "too long") for i in range(1, 5)]
    cached = [BlocksCached(i, [i]) for i in range(1, 41)]
    finished = [Finished(i, "stop", 3) for i in range(1, 41)]
    interleaved = list(chain.from_iterable(zip(allocated, admitted, strict=True)))
    texts = [each.text for each in told(*arrived, *rejected, *interleaved, *cached, *freed, *finished)]
    forty = "1, 2, 3, 4, 5, 6, 7 and 33 more"
    assert texts == [
        f"Requests {forty} arrived with 400 prompt tokens in all.",
        "Requests 1, 2, 3 and 4 were refused: too long.",
        f"Requests {forty} got 80 blocks in all (41 left).",
        f"Requests {forty} joined the batch after 0.1 s to 4.0 s; 80 tokens need not be computed.",
        f"40 blocks of requests {forty} are full and can be shared from now on.",
        f"Requests {forty} gave back 40 blocks in all.",
        f"Requests {forty} finished with 120 tokens in all.",
    ]


def test_a_preemption_keeps_its_place_between_what_came_before_and_after() -> None:
    texts = [
        each.text
        for each in told(
            BlocksAllocated(3, [1]),
            BlocksAllocated(3, [2]),
            Preempted(5, 3, "latest arrival", "recompute", 60, 4),
            BlocksFreed(5, [6, 7]),
            BlocksAllocated(3, [6]),
            BlocksAllocated(4, [7]),
        )
    ]
    assert texts[0] == "Request 3 got 2 blocks (41 left)."
    assert texts[1].startswith("Request 5 was preempted: it gave 4 blocks to request 3")
    assert texts[2:] == ["Request 5 gave back 2 blocks.", "Request 3 got 1 block.", "Request 4 got 1 block (41 left)."]


def test_the_batch_comes_between_the_plan_and_its_results() -> None:
    found = decisions(step_of(Arrived(12, 40, 30, 0, "", 0.0), Finished(9, "stop", 4)))
    assert [each.look for each in found] == ["change", "plan", "end", "figures", "figures"]


def rows(*entries: tuple[RowKind, int, int, int, int], budget: int = 128) -> StepRecord:
    """(kind, tokens, new, padding, drafts)"""
    record = record_of(2, time=0.0, seconds=0.1, rows=[(i, *entry) for i, entry in enumerate(entries, 1)])
    fields = {name: getattr(record, name) for name in StepRecord.__struct_fields__}
    return StepRecord(**(fields | {"token_budget": budget}))


def test_the_columns_in_words() -> None:
    decode, prefill = (RowKind.DECODE, 1, 1, 0, 0), (RowKind.PREFILL, 16, 0, 0, 0)
    assert batch_sentence(rows(*[decode] * 32, (RowKind.PREFILL, 48, 1, 0, 0), prefill)) == (
        "Computes 32 decodes and 2 chunks of prefill (48 + 16 tokens) of a budget of 128; 32 left."
    )
    assert batch_sentence(rows()) == "Computes nothing."
    drafted = (RowKind.DECODE, 5, 3, 0, 4)
    assert batch_sentence(rows(decode, drafted)) == (
        "Computes 2 decodes with 4 drafts, 2 of them accepted, of a budget of 128; 122 left."
    )
    assert batch_sentence(rows(*[prefill] * 5, (RowKind.RECOMPUTE, 1, 0, 0, 0), budget=81)) == (
        "Computes 5 chunks of prefill (80 tokens, 16 each) and 1 chunk of recomputation (1 token) "
        "of a budget of 81; 0 left."
    )
    padded = rows(decode, (RowKind.PREFILL, 10, 0, 20, 0), (RowKind.PADDING, 0, 0, 1, 0), budget=16)
    assert batch_sentence(padded) == (
        "Computes 1 decode, 1 chunk of prefill (10 tokens) and 21 tokens of padding in 1 row whose answer is complete: "
        "32 tokens, more than the budget of 16."
    )
    record = step_of(num_running=3, num_waiting=2, num_swapped=1).last_record
    assert record is not None
    assert left_sentence(record) == "Then 3 run and 2 wait (1 swapped); 41 blocks can be taken, 11 of them cached."
    assert timing_sentence(record) == "It took 0.1 s: forward 0.1 s."


def test_every_step_of_a_genuine_run_is_told() -> None:
    run = Run(num_blocks=12, scheduler=SchedulerConfig(order="priority"))
    for request_id in range(1, 7):
        run.add(request_id, 40 + request_id, 60, priority=request_id % 2)
    seen: set[type] = set()
    while (record := run.step()) is not None:
        seen |= {type(event) for event in record.events}
        found = decisions(run.state, 1024)
        named = {i for each in found for i in each.requests}
        about = {event.request_id for event in record.events if hasattr(event, "request_id")}
        assert about <= named
        for each in found:
            assert each.text.endswith(".") and each.text[0].isupper() | each.text[0].isdigit()
    assert {Preempted, Recovered, Admitted, Finished, BlocksAllocated, BlocksFreed} <= seen


def test_a_step_without_its_record_tells_nothing() -> None:
    state = RunState()
    state.restore(Keyframe(7, 0.0, 100, 16, 32, 64, [], [], None, RunTotals()))
    assert decisions(state) == []


# A request's figures -------------------------------------------------------------------------------------------------


def test_the_figures_of_a_request_at_any_time() -> None:
    run = Run(num_blocks=40)
    run.add(1, 40, 5, user="ann")
    begin = run.runner.now
    run.step(1)
    request = find_request(run.state, 1)
    assert request is not None and request_status(run.state, request) == "prefill"
    now = run.history.lanes.end
    figures = dict(request_figures(request, now, begin))
    assert figures["prompt"] == "40 tokens" and figures["answer"] == "1 of 5" and figures["preempted"] == "never"
    assert figures["user"] == "ann" and "E2EL" not in figures
    run.step(100)
    request = find_request(run.state, 1)
    assert request is not None and request_status(run.state, request) == "finished (length)"
    assert "E2EL" in dict(request_figures(request, now, begin)) and find_request(run.state, 99) is None
    waiting = state_of(2, RequestStatus.WAITING, num_computed=0, output_tokens=0)
    assert dict(request_figures(waiting, 3.0, 0.0))["TTFT"] == "3.0 s so far"


# The panel -----------------------------------------------------------------------------------------------------------


def shown(rig: Rig) -> DecisionsPanel:
    """The panel in a window of its own."""
    panel = DecisionsPanel(rig.window.source, rig.theme, rig.window.selection)
    panel.resize(420, 500)
    rig.qtbot.addWidget(panel)
    rig.bridge.stepped.connect(panel.run_moved)
    panel.show()
    rig.qtbot.waitExposed(panel)
    return panel


def texts(panel: DecisionsPanel) -> list[str]:
    return [panel.model.index(row, 1).data() for row in range(panel.model.rowCount())]


def test_the_panel_tells_the_newest_step_and_selects(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=24)
    panel = shown(rig)
    assert panel.pages.is_empty
    rig.load()
    first = rig.add(40, 30, user="ann")
    second = rig.add(40, 30)
    rig.step(1)
    rig.wait_for(lambda: not panel.pages.is_empty)
    assert texts(panel)[0].startswith(f"Request {first} of ann arrived")
    assert panel._step.text().startswith("step 1 · ")
    assert not panel.details.isVisible()
    place = next(i for i, text in enumerate(texts(panel)) if text.startswith(f"Request {second} arrived"))
    index = panel.model.index(place, 1)
    centre = panel.table.visualRect(index).center()
    rig.qtbot.mouseClick(panel.table.viewport(), Qt.MouseButton.LeftButton, pos=centre)
    assert rig.window.selection.request_id == second and panel.details.isVisible()
    assert panel.details._title.text() == f"Request {second}: prefill"
    rig.window.selection.select(first)
    assert first in panel.model.rows[panel.table.currentIndex().row()].requests
    rig.window.selection.select(None)
    assert not panel.details.isVisible() and not panel.table.currentIndex().isValid()
    rig.window.selection.select(9_999)
    assert panel.details._missing.isVisible()


def test_keys_choose_one_after_the_other_of_those_who_share_a_sentence(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=64)
    panel = shown(rig)
    rig.load()
    ids = [rig.add(8, 30) for _ in range(5)]
    rig.step(1)
    rig.wait_for(lambda: panel.model.rowCount() > 0)
    panel.table.setCurrentIndex(panel.model.index(0, 1))
    assert panel.model.rows[0].requests == tuple(ids)
    for wanted in (*ids, ids[0]):
        panel.table.activated.emit(panel.table.currentIndex())
        assert rig.window.selection.request_id == wanted and panel.table.currentIndex().row() == 0


def test_at_a_moment_the_panel_tells_that_step(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=64)
    panel = shown(rig)
    rig.load()
    request = rig.add(40, 30)
    rig.step(5)
    rig.wait_for(lambda: panel._step.text().startswith("step 5"))
    past = step_of(Preempted(request, request, "latest arrival", "recompute", 60, 4))
    rig.window.source.moment = Moment(past, 0.2)
    panel.run_moved()
    rig.wait_for(lambda: panel._step.text().startswith("step 2"))
    assert any(text.startswith(f"Request {request} was preempted") for text in texts(panel))
    rig.window.source.moment = None
    panel.run_moved()
    rig.wait_for(lambda: panel._step.text().startswith("step 5"))


def test_texts_are_shown_where_the_source_has_them(make_rig: MakeRig) -> None:
    class WithTexts:
        """The window's source, with the texts of a recording."""

        def __init__(self, source) -> None:
            self._source = source
            self.texts = {1: ("Why is the sky <b>blue</b>?", "x" * 9_000), 2: None}.get

        def __getattr__(self, name: str) -> Any:
            return getattr(self._source, name)

    rig = make_rig(num_blocks=64)
    rig.load()
    rig.add(40, 30)
    rig.add(40, 30)
    rig.step(2)
    panel = DecisionsPanel(WithTexts(rig.window.source), rig.theme, rig.window.selection)
    rig.qtbot.addWidget(panel)
    panel.show()
    rig.window.selection.select(1)
    text = panel.details.texts.toPlainText()
    assert text.startswith("Prompt: Why is the sky <b>blue</b>?\n\nAnswer: xxx") and "5,000 characters" in text
    rig.window.selection.select(2)
    assert not panel.details.texts.isVisible()
