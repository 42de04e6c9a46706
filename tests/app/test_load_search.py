"""The search for the saturation rate in the window: probes one after the other through the scripted engine."""

from __future__ import annotations

import json

import pytest
from PySide6.QtWidgets import QApplication

from app.lab.load_panel import LoadPanel
from app.lab.rate_view import RateView
from app.theme import Theme
from engine.messages import AddRequest
from engine.saturation import Probe, SaturationSearch
from tests.app.conftest import Rig

IDLE_SECONDS = 0.01


@pytest.fixture
def panel(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> LoadPanel:
    rig.window.arrange("lab")
    rig.load()
    panel = rig.window.load_panel
    panel.clock = lambda: rig.client.runner.now
    panel.select_ranges()
    for lengths, tokens in ((panel.form.prompt, 20), (panel.form.output, 6)):
        lengths.choose("constant")
        lengths.value.setValue(tokens)
    panel.rates.probe_requests.setValue(24)
    monkeypatch.setattr(rig.bridge.pacer, "interval", lambda **_: 0.0)  # the scripted clock does not wait for frames
    return panel


def advance(rig: Rig, panel: LoadPanel, until) -> None:
    """Steps, and lets the scripted clock run on where there is nothing to step."""
    for turn in range(20_000):
        if until():
            return
        if not rig.client.step(1):
            rig.client.runner.now += IDLE_SECONDS
            panel.control._pump()
        if turn % 4 == 0:
            QApplication.processEvents()
    search = panel.control.search
    raise AssertionError(f"it never came: {search and search.probes}, {panel.run and panel.run.phase}")


def test_probes_run_until_the_rate_is_found(rig: Rig, panel: LoadPanel, qtbot) -> None:
    found: list[dict] = []
    finished: list[dict] = []
    panel.searched.connect(found.append)
    panel.finished.connect(finished.append)
    panel.search_fold.open()
    panel.rates.search_button.click()
    assert panel.control.searching and not panel.start_button.isEnabled() and panel.stop_button.isEnabled()
    assert panel.rates.sentence.text() == "Probe 1: 1 requests/s …"
    advance(rig, panel, lambda: found)
    result = found[0]
    # A step takes 20 ms and 1 ms a token: 26 tokens a request, and 32 slots that share the 20 ms.
    assert 10 < result["saturation_rate"] < 35
    assert result["grew_rate"] / result["held_rate"] <= 1.05 and not finished, "a probe is no load that has finished"
    assert len(panel.rates.table.rows) == len(result["probes"]) > 4
    assert f"{result['saturation_rate']:.3g} requests/s" in panel.rates.sentence.text()
    assert panel.search_fold.summary.text() == panel.rates.sentence.text()
    assert panel.start_button.isEnabled() and not panel.control.searching
    assert json.loads(panel.result_json())["probes"] == result["probes"]
    prompts = {(c.prompt_tokens, c.synthetic_seed) for c in rig.client.sent if isinstance(c, AddRequest)}
    assert len(prompts) == 24 * len(result["probes"]), "no probe finds the prompts of another in the cache"
    panel.start()
    assert panel.control.search is None
    advance(rig, panel, lambda: finished)
    assert "completed" in json.loads(panel.result_json())


def test_a_search_can_be_stopped_and_keeps_what_it_knows(rig: Rig, panel: LoadPanel) -> None:
    found: list[dict] = []
    panel.searched.connect(found.append)
    panel.find_rate()
    assert panel.search_fold.is_open
    advance(rig, panel, lambda: panel.control.search and len(panel.control.search.probes) == 2)
    panel.stop()
    advance(rig, panel, lambda: found)
    assert found[0]["cancelled"] and len(found[0]["probes"]) == 2 and found[0]["saturation_rate"] is None
    assert panel.rates.sentence.text() == "Up to 2 requests/s the queue did not grow (cancelled)."
    assert panel.start_button.isEnabled() and rig.client.core.keyframe().requests == []


def test_the_warm_up_goes_before_the_first_probe_only(rig: Rig, panel: LoadPanel) -> None:
    panel.measure.warm_up_field.setValue(3)
    panel.find_rate()
    assert len([c for c in rig.client.sent if isinstance(c, AddRequest)]) == 3
    advance(rig, panel, lambda: panel.control.search and len(panel.control.search.probes) == 2)
    assert len([c for c in rig.client.sent if isinstance(c, AddRequest)]) <= 3 + 2 * 24 + 1
    panel.stop()
    advance(rig, panel, lambda: not panel.control.active)


def test_a_death_in_the_middle_ends_the_search(rig: Rig, panel: LoadPanel) -> None:
    found: list[dict] = []
    panel.searched.connect(found.append)
    panel.find_rate()
    advance(rig, panel, lambda: panel.control.search and len(panel.control.search.probes) == 1)
    rig.client.kill()
    rig.wait_for(lambda: bool(found))
    assert found[0]["cancelled"] and "SIGKILL" in panel.faults.text() and not panel.control.active


def test_a_load_that_is_refused_ends_the_search_at_once(rig: Rig, panel: LoadPanel) -> None:
    found: list[dict] = []
    panel.searched.connect(found.append)
    panel.form.prompt.value.setValue(1_500)  # more than the pool
    panel.find_rate()
    advance(rig, panel, lambda: found)
    assert len(found[0]["probes"]) == 1 and "0 of 24 requests completed" in panel.rates.sentence.text()


def test_the_plot_takes_whatever_a_probe_measured(qtbot, theme: Theme) -> None:
    view = RateView(theme)
    qtbot.addWidget(view)
    view.resize(280, 500)
    view.show()
    search = SaturationSearch(1.0)
    view.show_search(search, running=True)
    assert not view.plot.isVisibleTo(view)
    for rate, achieved, grew in ((1.0, None, False), (2.0, float("inf"), False), (4.0, 3.0, True), (1e300, 2.0, True)):
        search.note(Probe(rate, rate, achieved, None, None, None, 24, 24, grew))
    view.show_search(search, running=False)
    assert view.plot.isVisibleTo(view) and not view.grab().isNull()
    assert [row.cells[1] for row in view.table.rows] == ["n/a"] * 4
