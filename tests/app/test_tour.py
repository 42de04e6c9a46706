"""The tour: offered once, walks through its stops on the real load panel, gives the engine back as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QSettings

from app.main_window import MainWindow
from app.tour import STOPS
from engine.messages import ComparePlan, Variant
from engine.workload import EngineOptions, Workload, load_scenario
from tests.app.conftest import Rig


def test_its_stops_are_scenarios_that_there_are() -> None:
    assert len({stop.scenario for stop in STOPS}) == 3
    for stop in STOPS:
        assert load_scenario(stop.scenario).name == stop.scenario
        assert 80 < len(stop.text) < 320


def test_it_is_offered_once(rig: Rig, tmp_path: Path) -> None:
    settings = QSettings(str(tmp_path / "w.ini"), QSettings.Format.IniFormat)
    rig.load()
    assert "tour" not in rig.window.notice.text  # without settings nobody could remember
    for times in range(2):
        window = MainWindow(rig.bridge, rig.theme, tmp_path / f"{times}.sqlite3", settings=settings)
        window.tour.offer()
        assert ("tour" in window.notice.text) == (times == 0)
        window.notice.expire()
        window.chat.shutdown()
        window.recording.close()
        window.deleteLater()


@pytest.fixture
def touring(rig: Rig) -> Rig:
    rig.window.load_panel.clock = lambda: rig.client.runner.now
    rig.load()
    rig.window.tour.begin()
    return rig


def run_out(rig: Rig) -> None:
    for _ in range(200):
        rig.client.step(20)
        rig.settle(5)
        run = rig.window.load_panel.run
        if run is not None and not run.active:
            return
    raise AssertionError("the load did not end")


def test_a_bus_then_a_metro(touring: Rig) -> None:
    tour, panel = touring.window.tour, touring.window.load_panel
    assert "1 of 4" in tour.bar.title.text() and panel.scenario.name == "bus-and-metro"
    assert not tour.bar.back.isEnabled()
    touring.client.step(2)
    touring.wait_for(lambda: touring.state.discipline == "static")
    run_out(touring)
    assert "done" in tour.bar.state.text()
    tour.bar.next.click()
    assert "2 of 4" in tour.bar.title.text() and tour.bar.back.isEnabled()
    touring.client.step(2)
    touring.wait_for(lambda: touring.state.discipline == "vllm")


def test_ending_it_in_mid_run_stops_the_load_and_restores_the_knobs(touring: Rig) -> None:
    touring.client.step(2)
    touring.wait_for(lambda: touring.state.discipline == "static")
    touring.window.tour.bar.end.click()
    assert touring.window.tour.bar.isHidden() and not touring.window.tour.is_running
    assert touring.bridge.config.scheduler.discipline == "vllm"
    touring.client.step(50)
    touring.wait_for(lambda: touring.state.discipline == "vllm")
    assert not touring.state.requests


def test_a_stop_with_memory_of_its_own_starts_another_engine(touring: Rig) -> None:
    tour = touring.window.tour
    for _ in range(3):
        tour.bar.next.click()
        touring.client.step(400)
        touring.settle(20)
    assert "4 of 4" in tour.bar.title.text() and tour.bar.next.text() == "Finish"
    touring.wait_for(lambda: touring.client.loaded[-1].cache.num_blocks == 32)
    touring.client.ready()
    touring.wait_for(lambda: touring.bridge.state == "ready" and touring.window.load_panel.run is not None)
    touring.wait_for(lambda: touring.window.load_panel.run.active)
    assert touring.window.load_panel.scenario.name == "kv-crunch"
    tour.bar.next.click()
    assert not tour.is_running
    assert touring.client.loaded[-1].cache.num_blocks is None  # the engine as it was is on its way back


def test_it_ends_with_the_engine(touring: Rig) -> None:
    touring.client.die("gone")
    touring.wait_for(lambda: not touring.window.tour.is_running)
    assert touring.window.tour.bar.isHidden()


def test_ending_it_while_an_engine_starts_for_a_stop_restores_the_engine_too(touring: Rig) -> None:
    for _ in range(3):
        touring.window.tour.bar.next.click()
        touring.client.step(400)
        touring.settle(20)
    touring.wait_for(lambda: touring.bridge.state == "loading" and touring.bridge.config.cache.num_blocks == 32)
    touring.window.tour.bar.end.click()
    assert touring.bridge.config.cache.num_blocks is touring.client.loaded[-1].cache.num_blocks is None


def test_it_waits_for_a_comparison(rig: Rig) -> None:
    rig.load()
    variants = [Variant("vllm", EngineOptions())]
    rig.bridge.compare(ComparePlan("t", "", EngineOptions(), variants, "vllm", [Workload("w", [])], [None]))
    rig.wait_for(lambda: rig.bridge.comparing)
    tour, panel = rig.window.tour, rig.window.load_panel
    tour.begin()
    assert "until the comparison is over" in tour.bar.state.text() and panel.run is None
    rig.client.end_comparison(b"{}")
    rig.wait_for(lambda: panel.run is not None and panel.run.active)
    assert tour.bar.state.text() == "running"
