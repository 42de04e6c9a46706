"""The timeline: pixels of lanes, groups, the window of time, the shown step; and the widget under hands."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QApplication

from app.scope.lane_painter import LaneContent, lane_codes, lane_image
from app.scope.timeline_view import TimelineView, arrange_rows, busy_place, time_label
from app.theme import Theme
from engine.config import SchedulerConfig
from engine.lanes import Lane, Lanes, Span, SpanKind
from tests.app.conftest import Rig
from tests.app.runs import Run

MakeRig = Callable[..., Rig]
WAIT, PREFILL, DECODE, STALL = (
    int(kind) + 1 for kind in (SpanKind.WAITING, SpanKind.PREFILL, SpanKind.DECODE, SpanKind.STALLED)
)
ACCEPTED, REJECTED, FAILED = 8, 9, 10


def lane_of(*spans: Span, **given: object) -> Lane:
    return Lane(1, spans[0].begin, list(spans), **given)


def codes_of(*lanes: Lane, columns: int = 20, begin: float = 0.0, per_second: float = 1.0, scale: float = 1.0):
    return lane_codes(LaneContent.of(lanes), len(lanes), columns, begin, per_second, scale).tolist()


# Pixels --------------------------------------------------------------------------------------------------------------


def test_spans_are_whole_pixels_without_a_gap() -> None:
    lane = lane_of(Span(SpanKind.WAITING, 0.0, 3.4), Span(SpanKind.DECODE, 3.4, 9.6), Span(SpanKind.WAITING, 9.6, 30))
    assert codes_of(lane) == [[WAIT] * 3 + [DECODE] * 7 + [WAIT] * 10]
    later = codes_of(lane, begin=5.0, columns=8)
    assert later == [[DECODE] * 5 + [WAIT] * 3]
    assert codes_of(lane, begin=40.0) == [[0] * 20]


def test_a_chunk_ends_with_an_edge_where_it_is_wide_enough() -> None:
    chunks = [Span(SpanKind.PREFILL, 5.0 * i, 5.0 * (i + 1), 16) for i in range(3)]
    assert codes_of(lane_of(*chunks), columns=15) == [([PREFILL] * 4 + [0]) * 3]
    assert codes_of(lane_of(*chunks), columns=6, per_second=0.4) == [[PREFILL] * 6]


def test_drafts_are_told_apart_by_their_share() -> None:
    lane = lane_of(Span(SpanKind.DECODE, 0.0, 5.0, 5), Span(SpanKind.DECODE, 5.0, 15.0, 40, drafts=20, accepted=6))
    assert codes_of(lane, columns=15) == [[DECODE] * 5 + [ACCEPTED] * 3 + [REJECTED] * 7]
    short = [Span(SpanKind.DECODE, 0.25 * i, 0.25 * (i + 1), 4, drafts=4, accepted=3) for i in range(40)]
    assert codes_of(lane_of(*short), columns=10) == [[ACCEPTED] * 10]


def test_a_pixel_shows_what_fills_most_of_it() -> None:
    spans, time = [], 0.0
    for _ in range(50):
        spans += [Span(SpanKind.DECODE, time, time + 0.3, 1), Span(SpanKind.STALLED, time + 0.3, time + 0.4)]
        time += 0.4
    [row] = codes_of(lane_of(*spans))
    assert row == [DECODE] * 20
    spans, time = [], 0.0
    for _ in range(50):
        spans += [Span(SpanKind.DECODE, time, time + 0.1, 1), Span(SpanKind.STALLED, time + 0.1, time + 0.4)]
        time += 0.4
    [row] = codes_of(lane_of(*spans))
    assert row.count(STALL) >= 18  # mostly left out, and that is seen


def test_work_shorter_than_a_pixel_is_seen_and_a_wait_is_not() -> None:
    def between(kind: SpanKind, tokens: int) -> list[int]:
        spans = [Span(SpanKind.WAITING, 0, 10), Span(kind, 10, 10.2, tokens), Span(SpanKind.DECODE, 10.2, 20, 1)]
        return codes_of(lane_of(*spans))[0]

    assert between(SpanKind.PREFILL, 8) == [WAIT] * 10 + [PREFILL] + [DECODE] * 9
    assert between(SpanKind.STALLED, 0) == [WAIT] * 10 + [DECODE] * 10


def test_an_abort_is_marked_at_its_end() -> None:
    lane = lane_of(Span(SpanKind.DECODE, 0.0, 10.0, 9), finished_at=10.0, finish_reason="abort")
    assert codes_of(lane) == [[DECODE] * 9 + [FAILED] * 3 + [0] * 8]


def test_scrolling_moves_the_pixels_and_changes_none(theme: Theme) -> None:
    rng = random.Random(4)
    spans, time = [], 0.0
    while time < 40:
        end = time + rng.expovariate(4.0)
        spans.append(Span(rng.choice([SpanKind.DECODE, SpanKind.PREFILL, SpanKind.PADDING]), time, end, 1))
        time = end
    content = LaneContent.of([lane_of(*spans)])

    def picture(begin: float) -> np.ndarray:
        image = lane_image(theme, content, 1, 200, (begin, begin + 20.0), 12, 1.0)
        return np.frombuffer(image.constBits(), dtype=np.uint32).reshape(image.height(), -1).copy()

    before, after = picture(10.0), picture(11.04)  # 10.4 pixels on
    assert len(np.unique(before)) > 4
    assert (before[:, 10:] == after[:, :-10]).all()


@pytest.mark.parametrize("scale", [1.0, 1.5, 2.0])
def test_lanes_are_as_high_as_they_are_said_to_be(theme: Theme, scale: float) -> None:
    content = LaneContent.of([lane_of(Span(SpanKind.DECODE, 0.0, 5.0, 1)) for _ in range(7)])
    image = lane_image(theme, content, 7, 50, (0.0, 5.0), 5.0, scale)
    assert (image.width(), image.height()) == (round(50 * scale), round(35 * scale + 0.4))
    column = np.frombuffer(image.constBits(), dtype=np.uint32).reshape(image.height(), -1)[:, 10]
    filled = column == theme.decode.rgba()
    assert np.count_nonzero(np.diff(filled.astype(int)) == 1) + int(filled[0]) == 7  # none melts into the next


def test_rows_can_be_chosen_and_left_empty() -> None:
    lanes = [lane_of(Span(SpanKind.DECODE, 0.0, 5.0 * n, n), preempted_at=[1.0 * n]) for n in range(1, 5)]
    content = LaneContent.of(lanes).take(np.array([3, -1, 0]))
    assert dict(zip(content.spans.row.tolist(), content.spans.tokens.tolist(), strict=True)) == {0: 4, 2: 1}
    assert sorted(zip(content.preempted_rows.tolist(), content.preempted_at.tolist(), strict=True)) == [
        (0, 4.0),
        (2, 1.0),
    ]
    codes = lane_codes(content, 3, 20, 0.0, 1.0, 1.0)
    assert [np.count_nonzero(row) for row in codes] == [20, 0, 5]


# Rows and the window of time -----------------------------------------------------------------------------------------


def test_lanes_are_grouped_by_user_and_priority_and_folded() -> None:
    run = Run(num_blocks=60)
    for request_id, (user, priority) in enumerate([("bo", 2), ("al", 0), ("", 0), ("bo", 1), ("al", 2)], 1):
        run.add(request_id, 20, 30, user=user, priority=priority)
    run.step(5)
    lanes = run.history.lanes
    rows = lanes.between()

    def shown(listed) -> list:
        ids = rows.request_id
        return [int(ids[r]) if r >= 0 else listed.group_at(i).title for i, r in enumerate(listed.lanes.tolist())]

    assert shown(arrange_rows(rows, lanes.users, "", set())) == [1, 2, 3, 4, 5]
    by_user = arrange_rows(rows, lanes.users, "user", set())
    assert shown(by_user) == ["al", 2, 5, "bo", 1, 4, "no user", 3]
    assert by_user.groups[0].sentence == "al: 2 requests, 2 running"
    folded = arrange_rows(rows, lanes.users, "user", {by_user.groups[1].key}, heading=2)
    assert shown(folded) == ["al", "al", 2, 5, "bo", "bo", "no user", "no user", 3]
    assert shown(arrange_rows(rows, lanes.users, "priority", set())) == [
        "priority 0", 2, 3, "priority 1", 4, "priority 2", 1, 5,
    ]  # fmt: skip
    assert len(arrange_rows(rows.take(np.zeros(0, dtype=int)), lanes.users, "user", set())) == 0


def test_the_window_shows_holds_and_returns() -> None:
    lanes = Lanes()
    lanes.begin, lanes.end = 100.0, 150.0
    view = TimelineView(lanes)
    assert view.window().begin == 100.0 and view.live
    view.show(110.0, 112.0)
    assert view.window().seconds == pytest.approx(2.0) and not view.live
    view.reveal(111.0)
    assert view.window().begin == pytest.approx(110.0)  # in sight already
    view.reveal(140.0)
    assert view.window().begin < 140.0 < view.window().end and view.window().seconds == pytest.approx(2.0)
    lanes.end = 160.0
    assert view.window().end < 150.0  # it holds still
    view.release()
    assert view.live and view.window().seconds == pytest.approx(2.0) and view.window().end == 160.0
    view.show_all()
    assert view.live and view.window().begin == 100.0
    view.show(120.0, 120.0)
    assert view.window().seconds > 0


def test_the_newest_running_lane_is_found_then_and_now() -> None:
    run = Run(num_blocks=60, scheduler=SchedulerConfig(max_num_seqs=2))
    for request_id in range(1, 6):
        run.add(request_id, 10, 10)
    run.step(2)
    early = run.history.lanes.end
    lanes = run.history.lanes
    assert busy_place(lanes.between(), lanes, None) == 1
    run.step(10_000)
    assert busy_place(lanes.between(), lanes, None) is None
    assert busy_place(lanes.between(), lanes, early) == 1


def test_labels_of_the_time_axis() -> None:
    assert time_label(0.0, 1.0, "now") == "now"
    assert time_label(-0.05, 0.05, "now") == "−0.05 s"
    assert time_label(2.0, 1.0, "step 9") == "+2 s"
    assert time_label(-120.0, 60.0, "now") == "−2 min"


# Under hands ---------------------------------------------------------------------------------------------------------


def settled(rig: Rig) -> None:
    """Waits until the timeline shows the newest."""
    panel = rig.window.panels["timeline"]
    rig.wait_for(lambda: not panel.pages.is_empty and panel.plot.x_range[1] == rig.window.history.lanes.end)


@pytest.fixture
def crowd(make_rig: MakeRig) -> Rig:
    """Forty requests of three users, some finished, some running, some waiting."""
    rig = make_rig(num_blocks=80, token_budget=64, scheduler=SchedulerConfig(max_num_seqs=8))
    rig.window.arrange("monitor")
    rig.load()
    for number in range(40):
        rig.add(20 + number, 20, user=("ann", "ben", "cleo")[number % 3], priority=number % 2)
    rig.step(60)
    settled(rig)
    return rig


def test_groups_fold_under_the_pointer_and_the_keys(crowd: Rig) -> None:
    panel = crowd.window.panels["timeline"]
    plot = panel.plot
    plot.setFocus()
    crowd.qtbot.keyClick(plot, Qt.Key.Key_G)
    assert plot.grouping == "user" == panel.grouping.value
    plot._scroll.setValue(0)
    everybody = len(plot._list)
    heading = QPoint(plot.area.left() + 40, plot.area.top() + 3)
    assert plot._list.group_at(0).title == "ann" and "ann: 14 requests" in plot.tip_at(heading)
    crowd.qtbot.mouseClick(plot, Qt.MouseButton.LeftButton, pos=heading)
    assert plot._list.groups[0].folded and len(plot._list) == everybody - 14
    crowd.qtbot.keyClick(plot, Qt.Key.Key_F, Qt.KeyboardModifier.ShiftModifier)
    assert not any(group.folded for group in plot._list.groups)
    crowd.qtbot.keyClick(plot, Qt.Key.Key_F, Qt.KeyboardModifier.ShiftModifier)
    assert all(group.folded for group in plot._list.groups) and plot.shown_requests() == []
    panel.grouping.set_value("priority")
    assert [group.title for group in plot._list.groups] == ["priority 0", "priority 1"]
    crowd.qtbot.keyClick(plot, Qt.Key.Key_G)
    assert plot.grouping == "" == panel.grouping.value


def test_a_drag_with_shift_zooms_to_what_it_spans(crowd: Rig) -> None:
    plot = crowd.window.panels["timeline"].plot
    a = plot.area.center()
    b = a + QPoint(100, 0)
    wanted = (plot.x_value(a.x()), plot.x_value(b.x()))
    crowd.qtbot.mousePress(plot, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.ShiftModifier, a)
    crowd.qtbot.mouseMove(plot, b)
    crowd.qtbot.mouseRelease(plot, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.ShiftModifier, b)
    assert plot.x_range == pytest.approx(wanted)
    crowd.qtbot.keyClick(plot, Qt.Key.Key_End)
    assert plot.view.live and plot.x_range[1] == crowd.window.history.lanes.end


def test_the_wheel_zooms_on_the_axis_and_scrolls_on_the_lanes(crowd: Rig) -> None:
    plot = crowd.window.panels["timeline"].plot

    def turn(pos: QPoint, delta: QPoint, modifiers=Qt.KeyboardModifier.NoModifier) -> None:
        args = (Qt.MouseButton.NoButton, modifiers, Qt.ScrollPhase.NoScrollPhase, False)
        event = QWheelEvent(QPointF(pos), QPointF(plot.mapToGlobal(pos)), QPoint(), delta, *args)
        QApplication.sendEvent(plot, event)

    crowd.qtbot.keyClick(plot, Qt.Key.Key_Up, Qt.KeyboardModifier.ControlModifier)
    for _ in range(4):
        crowd.qtbot.keyClick(plot, Qt.Key.Key_Up, Qt.KeyboardModifier.ControlModifier)
    assert plot._pitch == 24 and plot._scroll.isVisible()
    lanes, axis = plot.area.center(), QPoint(plot.area.center().x(), plot.area.bottom() + 8)
    first = plot._scroll.value()
    seconds = plot.view.window().seconds
    turn(lanes, QPoint(0, 120))
    assert plot._scroll.value() < first and plot.view.window().seconds == seconds
    turn(axis, QPoint(0, 120))
    assert plot.view.window().seconds == pytest.approx(0.8 * seconds)
    turn(lanes, QPoint(0, -120), Qt.KeyboardModifier.ControlModifier)
    assert plot.view.window().seconds == pytest.approx(seconds)
    turn(lanes, QPoint(120, 0))
    assert not plot.view.live
    turn(lanes, QPoint(0, -120), Qt.KeyboardModifier.AltModifier)
    assert plot._pitch == 18


def test_the_axis_is_for_looking_back(crowd: Rig) -> None:
    window = crowd.window
    panel = window.panels["timeline"]
    plot = panel.plot
    axis = QPoint(plot.area.left() + plot.area.width() // 2, plot.area.bottom() + 8)
    wanted = plot.x_value(axis.x())
    with crowd.qtbot.waitSignal(panel.moment_wanted) as asked:
        crowd.qtbot.mouseClick(plot, Qt.MouseButton.LeftButton, pos=axis)
    assert asked.args == [pytest.approx(wanted)]
    moment = window.source.moment
    assert moment is not None and moment.time <= wanted and moment.step < window.source.live_state.step
    crowd.wait_for(lambda: plot._moment == moment.time)
    assert plot.x_range[0] <= moment.time <= plot.x_range[1]
    assert f"step {moment.step:,}" in [tick.label for tick in plot.x_ticks]
    held = plot.view.window()
    crowd.step(5)
    crowd.settle(600)
    assert plot.view.window() == held  # live goes on behind
    plot.view.show(moment.time + 100, moment.time + 101)
    plot._moved_by_hand()
    assert panel.live_button.isVisible() and panel.live_button.text() == "Shown step"
    crowd.qtbot.mouseClick(panel.live_button, Qt.MouseButton.LeftButton)
    assert plot.x_range[0] <= moment.time <= plot.x_range[1] and not panel.live_button.isVisible()
    window.travel.show_newest()
    crowd.wait_for(lambda: plot._moment is None)
    assert plot.view.live


def test_what_comes_after_the_shown_step_is_faded(crowd: Rig) -> None:
    window = crowd.window
    plot = window.panels["timeline"].plot
    window.travel.show_step(20)
    crowd.wait_for(lambda: plot._moment is not None)

    def strength(picture: np.ndarray, left: int, right: int) -> float:
        """How far the colours are from the card's."""
        card = np.array([plot.theme.card.red(), plot.theme.card.green(), plot.theme.card.blue()])
        return float(np.abs(picture[:, left:right] - card).max())

    image = plot.grab().toImage().convertToFormat(plot.grab().toImage().Format.Format_RGB32)
    raw = np.frombuffer(image.constBits(), dtype=np.uint8).reshape(image.height(), -1, 4)[:, : image.width(), 2::-1]
    inside = raw[plot.area.top() + 20 : plot.area.bottom()].astype(int)
    x = round(plot.x_pixel(plot._moment))
    assert plot.area.left() + 10 < x < plot.area.right() - 10
    assert strength(inside, x + 3, plot.area.right() - 2) < 0.6 * strength(inside, plot.area.left() + 2, x - 3)


def test_a_moment_out_of_sight_is_brought_into_it(crowd: Rig) -> None:
    panel = crowd.window.panels["timeline"]
    plot = panel.plot
    newest = crowd.window.history.lanes.end
    plot.view.show(newest - 0.2, newest)
    plot.refresh()
    early = crowd.window.history.lanes.begin + 0.5
    panel.show_time(early)
    assert plot.x_range[0] <= early <= plot.x_range[1]
    assert plot.x_range[1] - plot.x_range[0] == pytest.approx(0.2)


def test_hovering_says_what_the_request_and_the_step_did(crowd: Rig) -> None:
    plot = crowd.window.panels["timeline"].plot
    request_id = 1
    lane = crowd.window.history.lanes.lane(request_id)
    decode = next(span for span in lane.spans if span.kind == SpanKind.DECODE)
    plot.view.show(decode.begin - 0.1, decode.end + 0.1)
    plot._scroll.setValue(0)
    plot.refresh()
    row = plot.row_of(request_id)
    assert row is not None
    tip = plot.tip_at(QPoint(round(plot.x_pixel((decode.begin + decode.end) / 2)), row.center().y()))
    assert tip.startswith(f"Request {request_id} of ann") and "decode for" in tip
    assert "\nstep " in tip and "running" in tip


def test_a_change_of_knobs_is_a_labelled_line(crowd: Rig) -> None:
    crowd.bridge.reconfigure(SchedulerConfig(max_num_seqs=4))
    crowd.step(3)
    settled(crowd)
    plot = crowd.window.panels["timeline"].plot
    assert [label for _, label in plot.marks] == ["max sequences 8 → 4"]
    x = plot.x_pixel(plot.marks[0][0])
    assert plot.area.left() < x <= plot.area.right()
    assert plot.tip_at(QPoint(round(x), 2)) == "max sequences 8 → 4"
    assert plot.area.top() >= plot.metrics.height()


def test_keys_go_from_lane_to_lane_and_bring_them_into_sight(crowd: Rig) -> None:
    plot = crowd.window.panels["timeline"].plot
    plot.follow()
    last = plot.shown_requests()[-1]
    crowd.window.selection.select(last)
    for _ in range(3):
        crowd.qtbot.keyClick(plot, Qt.Key.Key_Up)
    assert crowd.window.selection.request_id == last - 3
    crowd.qtbot.keyClick(plot, Qt.Key.Key_Home)
    for _ in range(45):
        crowd.qtbot.keyClick(plot, Qt.Key.Key_Down)
    assert crowd.window.selection.request_id == 40 and 40 in plot.shown_requests()


def test_five_hundred_requests_of_a_scripted_run(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=2000, token_budget=512, scheduler=SchedulerConfig(max_num_seqs=500))
    rig.window.arrange("monitor")
    rig.load()
    for number in range(500):
        rig.add(8 + number % 5, 24, user=f"user {number % 7}")
    rig.step(20)
    settled(rig)
    plot = rig.window.panels["timeline"].plot
    lanes = rig.window.history.lanes
    assert len(lanes) == 500 and len(lanes.open) == 500
    assert 10 < len(plot.shown_requests()) < 500 and plot._scroll.isVisible()
    for pitch in (2, 8):
        plot._height_chosen = pitch
        for begin in (lanes.begin, lanes.end - 0.05):
            plot.view.show(begin, lanes.end)
            plot._scroll.setValue(0)
            plot.refresh()
            image = plot._image
            pixels = np.frombuffer(image.constBits(), dtype=np.uint32).reshape(image.height(), -1)
            assert (pixels == plot.theme.decode.rgba()).any()
    rig.step(10_000)
    assert not lanes.open and len(lanes.between()) == 500
