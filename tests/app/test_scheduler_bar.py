"""The scheduler's knobs in the top bar: what they show, what they change, and what becomes of a refusal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from PySide6.QtCore import QPoint, Qt, QTimer
from PySide6.QtWidgets import QApplication, QWidget

from app.knob_words import KNOBS, MEANINGS, meaning
from app.scheduler_bar import KnobButton
from engine.config import DISCIPLINES, SchedulerConfig
from engine.messages import ConfigRefused, Reconfigure
from tests.app.conftest import Rig

MakeRig = Callable[..., Rig]
LONG_MODEL = "an-organisation/a-model-with-a-very-long-name-indeed-70B-Instruct-v0.3"


def button(rig: Rig, knob: str) -> KnobButton:
    return rig.window.top_bar.scheduler.buttons[knob]


def choose(rig: Rig, knob: str, value: str) -> None:
    """As a click in the menu would."""
    button(rig, knob).actions_by_value[value].trigger()


def turn(rig: Rig) -> None:
    """A step that tells of changed knobs, with nothing to compute."""
    rig.step(1)
    rig.settle(20)


def test_without_an_engine_the_knobs_rest(rig: Rig) -> None:
    bar = rig.window.top_bar.scheduler
    assert not bar.isEnabled() and button(rig, "discipline").text() == "vllm ▾"
    rig.load()
    assert bar.isEnabled()
    rig.client.kill()
    rig.wait_for(lambda: rig.bridge.state == "dead")
    assert not bar.isEnabled()


def test_the_knobs_show_what_the_engine_says(make_rig: MakeRig) -> None:
    rig = make_rig(scheduler=SchedulerConfig(discipline="orca", order="fair", preemption="auto"))
    rig.load()
    for knob, value in (("discipline", "orca"), ("order", "fair"), ("preemption", "auto")):
        shown = button(rig, knob)
        assert shown.text() == f"{value} ▾"
        assert [v for v, action in shown.actions_by_value.items() if action.isChecked()] == [value]
        assert MEANINGS[knob][value] in shown.toolTip() and MEANINGS[knob][value] in shown.accessibleDescription()


def test_a_discipline_changes_when_the_batch_has_drained(rig: Rig) -> None:
    rig.load()
    rig.add(20, 12)
    rig.step(2)
    choose(rig, "discipline", "static")
    assert button(rig, "discipline").text() == "vllm ▾"  # nothing is in force before the engine says so
    turn(rig)
    assert button(rig, "discipline").text() == "vllm → static ▾"
    assert rig.window.top_bar.pending.text() == "→ static when the batch has drained"
    assert rig.window.top_bar.pending.isVisible()
    assert "static: a batch" in button(rig, "discipline").toolTip()
    waiting = rig.add(20, 12)
    turn(rig)
    rig.window.arrange("monitor")
    rig.wait_for(lambda: rig.window.panels["queue"].model.place_of(waiting) is not None)
    row = rig.window.panels["queue"].model.rows[-1]
    assert row.request_id == waiting and "changes to static when the batch has drained; 1 request is" in row.why
    rig.step(10_000)
    rig.settle(20)
    assert rig.state.discipline == "static" and rig.state.batches
    assert button(rig, "discipline").text() == "static ▾"
    assert rig.window.top_bar.pending.text() == ""
    assert "100 % useful" in rig.window.panels["occupancy"]._batch.text()


def test_a_pending_change_is_taken_back_by_the_one_in_force(rig: Rig) -> None:
    rig.load()
    rig.add(20, 12)
    rig.step(2)
    choose(rig, "discipline", "static")
    turn(rig)
    choose(rig, "discipline", "vllm")
    turn(rig)
    assert rig.state.pending_discipline == "" and button(rig, "discipline").text() == "vllm ▾"


def test_orders_and_preemption_change_at_once_and_one_after_the_other(rig: Rig) -> None:
    rig.load()
    choose(rig, "order", "priority")
    choose(rig, "preemption", "swap")  # before the first is answered
    sent = [command.scheduler for command in rig.client.sent if isinstance(command, Reconfigure)]
    assert [(s.order, s.preemption) for s in sent] == [("priority", "recompute"), ("priority", "swap")]
    turn(rig)
    assert (rig.state.order, rig.state.preemption) == ("priority", "swap")
    assert button(rig, "order").text() == "priority ▾" and button(rig, "preemption").text() == "swap ▾"
    assert rig.window.source.scheduler.order == "priority"
    count = len(rig.client.sent)
    choose(rig, "order", "priority")  # nothing new
    assert len(rig.client.sent) == count


def test_a_change_survives_a_restart(rig: Rig) -> None:
    rig.load()
    choose(rig, "discipline", "orca")
    choose(rig, "order", "fair")
    turn(rig)
    rig.client.kill()
    rig.wait_for(lambda: rig.bridge.state == "dead")
    assert button(rig, "discipline").text() == "orca ▾"  # what the next engine starts with
    rig.bridge.restart()
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    assert rig.client.loaded[-1].scheduler.discipline == "orca"
    assert (rig.state.discipline, rig.state.order) == ("orca", "fair")
    rig.window.open_model("/models/other")
    assert rig.client.loaded[-1].scheduler.order == "fair"


def test_a_refusal_is_a_sentence_and_changes_nothing(rig: Rig) -> None:
    rig.load()
    choose(rig, "order", "priority")
    turn(rig)
    rig.bridge.reconfigure(SchedulerConfig(discipline="static", speculative="draft:/models/small"))
    rig.wait_for(lambda: rig.window.notice.text != "")
    assert "The scheduler stays as it is: speculative is 'draft:/models/small'" in rig.window.notice.text
    assert rig.bridge.config.scheduler == SchedulerConfig(order="priority")
    assert rig.window.source.scheduler == rig.bridge.config.scheduler
    rig.qtbot.mouseClick(rig.window.notice.button, Qt.MouseButton.LeftButton)
    assert rig.window.notice.text == ""
    rig.client.deliver(ConfigRefused("no"))
    rig.wait_for(lambda: rig.window.notice.text != "")
    choose(rig, "order", "fair")
    assert rig.window.notice.text == ""


def test_the_keyboard_opens_a_menu_and_chooses(rig: Rig) -> None:
    rig.load()
    order = button(rig, "order")
    assert order.focusPolicy() & Qt.FocusPolicy.TabFocus
    order.setFocus()

    def pick() -> None:
        menu = QApplication.activePopupWidget()
        assert menu is order.menu()
        assert menu.activeAction() is order.actions_by_value["fcfs"]  # the one in force
        for key in (Qt.Key.Key_Down, Qt.Key.Key_Return):
            rig.qtbot.keyClick(menu, key)

    QTimer.singleShot(50, pick)
    rig.qtbot.keyClick(order, Qt.Key.Key_Space)
    turn(rig)
    assert rig.state.order == list(KNOBS["order"][1])[1]


def test_every_value_has_words_and_one_without_shows_its_name() -> None:
    for knob, (_, values) in KNOBS.items():
        for value in values:
            assert meaning(knob, value).startswith(f"{value}: "), value
    assert meaning("discipline", "a-seventh") == "a-seventh"
    assert KNOBS["discipline"][1] == DISCIPLINES


@pytest.mark.parametrize("width", [900, 1100, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_top_bar_fits_with_the_longest_values(make_rig: MakeRig, width: int, scheme: str) -> None:
    longest = max(DISCIPLINES, key=len)
    rig = make_rig(width=width, height=700, scheduler=SchedulerConfig(discipline=longest, order="priority"))
    rig.theme.set_scheme(scheme)
    rig.load()
    rig.add(400, 900)
    rig.step(30)
    other = sorted(DISCIPLINES, key=len)[-2]
    choose(rig, "discipline", other)
    turn(rig)
    bar = rig.window.top_bar
    bar.model_button.setText(f"{bar._elided(LONG_MODEL)} · bfloat16 · CUDA ▾")
    rig.settle(50)
    assert rig.window.width() == width and bar.width() <= width
    shown = [w for w in (*bar.findChildren(QWidget),) if w.isVisible() and w.parent() in (bar, bar.gauges)]
    boxes = [(w, w.mapTo(bar, QPoint(0, 0)).x(), w.width()) for w in shown if w is not bar.gauges]
    boxes.sort(key=lambda box: box[1])
    for (left, x, wide), (right, after, _) in pairwise(boxes):
        assert x + wide <= after, (left, right)
    assert boxes[-1][1] + boxes[-1][2] <= bar.width()
    for each in bar.scheduler.buttons.values():
        assert each.width() >= each.sizeHint().width()
    if width >= 1100:
        assert bar.running.isVisible() and bar.waiting.isVisible()


def test_the_load_panel_follows_a_change(rig: Rig) -> None:
    rig.load()
    rig.window.arrange("lab")
    panel = rig.window.load_panel
    panel.select_scenario("kv-crunch")
    before = panel._wanted
    assert before is not None and before.scheduler.order == "fcfs"
    choose(rig, "order", "fair")
    assert panel._wanted is not None and panel._wanted.scheduler.order == "fair"
