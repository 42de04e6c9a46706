"""The demo: the driver in a window on a scripted engine, and the command itself on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtGui import QImage

from app.demo_driver import DemoDriver
from app.demo_plan import DemoPlan, LoadingReport
from engine.config import EngineConfig
from engine.workload import load_scenario
from tests.app.conftest import Rig
from tests.process.tiny_model import make_tiny_model

KEYS = {"tokens", "steps", "preemptions", "frames", "frame_ms_p50", "frame_ms_p99", "screenshot"}


def driver(rig: Rig, **given: object) -> DemoDriver:
    plan = DemoPlan(load_scenario("bus-and-metro"), EngineConfig(), 60.0, None)
    plan = replace(plan, **given)
    stretches: list[float] = []
    made = DemoDriver(rig.window, plan, LoadingReport(), stretches.append)
    rig.bridge.ready.connect(lambda _: stretches[-1] == plan.seconds or pytest.fail("the watchdog was not armed anew"))
    rig.window.load_panel.clock = lambda: rig.client.runner.now
    made.begin()
    rig.client.loading("Reading the model")
    return made


def test_it_chats_and_repeats_the_scenario_until_the_time_is_up(rig: Rig, tmp_path: Path) -> None:
    picture = tmp_path / "shot.png"
    demo = driver(rig, seconds=600.0, screenshot=picture)
    passes: list[dict] = []
    rig.window.load_panel.finished.connect(passes.append)
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    while not passes:
        rig.step(4)
    rig.wait_for(lambda: rig.window.load_panel.run.active)  # it began again by itself
    demo.ask()
    rig.step(4)
    demo.time_is_up()
    assert demo.ended and demo.outcome.error == ""
    result = demo.outcome.result
    assert result.keys() >= KEYS
    assert result["chats"] == 2 and result["scenario_passes"] == 1
    assert 0 < result["frames"] <= result["steps"] and result["tokens"] > 280
    assert 0 < result["frame_ms_p50"] <= result["frame_ms_p99"]
    assert result["screenshot"] == str(picture)
    assert QImage(str(picture)).size() == rig.window.size() * rig.window.devicePixelRatio()
    json.dumps(result, allow_nan=False)


def test_a_death_ends_it_with_what_there_is(rig: Rig) -> None:
    demo = driver(rig)
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    rig.step(5)
    rig.client.kill()
    rig.wait_for(lambda: demo.ended)
    assert "the engine died" in demo.outcome.error and "SIGKILL" in demo.outcome.error
    assert demo.outcome.result["steps"] == 5


def test_a_model_that_does_not_load_ends_it_without_figures(rig: Rig) -> None:
    demo = driver(rig)
    rig.client.fail_to_load("The package index cannot be reached.", "offline")
    rig.wait_for(lambda: demo.ended)
    assert demo.outcome.error == "The package index cannot be reached." and demo.outcome.result == {}


def test_a_scenario_that_cannot_run_is_not_repeated_for_ever(make_rig) -> None:
    rig = make_rig(num_blocks=2)
    demo = driver(rig)
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    for _ in range(50):
        rig.step()
    rig.wait_for(lambda: demo.ended)
    assert "the scenario cannot run: " in demo.outcome.error
    assert any(figure in demo.outcome.error for figure in ("2 blocks", "32 tokens"))


def test_a_picture_that_cannot_be_saved_is_said(rig: Rig, tmp_path: Path) -> None:
    demo = driver(rig, screenshot=tmp_path / "nowhere" / "shot.png", seconds=0.05)
    rig.client.ready()
    rig.wait_for(lambda: demo.ended)
    assert "nowhere" in demo.outcome.error and demo.outcome.result["screenshot"] is None


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def demo_command(home: Path, *arguments: str, model: Path | None = None) -> subprocess.CompletedProcess[str]:
    before = ["--model", str(model), "--threads", "1", "--dtype", "float32"] if model else []
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "QT_QPA_PLATFORM")}
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        environment[name] = str(home / name)
    return subprocess.run(
        [sys.executable, "-m", "app.cli", *before, "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )


def test_the_command_runs_the_real_window_on_a_real_engine(model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "shot.png"
    done = demo_command(
        tmp_path / "home", "--offscreen", "--seconds", "4", "--screenshot", str(picture), "--json", "-", model=model
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["scenario"] == "kv-crunch" and result["tokens"] > 0 and result["steps"] > 0 and result["frames"] > 0
    assert not QImage(str(picture)).isNull() and result["screenshot"] == str(picture)
    # A model of random weights writes in any script, and Qt says which of them a font does not shape.
    assert [line for line in done.stderr.splitlines() if not line.startswith("qt.text.font")] == []
    left = [p for kind in ("CONFIG", "DATA", "STATE") for p in (tmp_path / "home" / f"XDG_{kind}_HOME").rglob("*")]
    assert left == [], "the demo leaves nothing among the user's chats and settings"


def test_the_command_says_why_a_model_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = demo_command(tmp_path / "home", "--offscreen", "--json", "-", model=tmp_path / "empty")
    assert done.returncode == 1
    assert str(tmp_path / "empty") in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_wrong_usage_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    done = demo_command(tmp_path / "home", "--offscreen", "--scenario", "rushhour")
    assert done.returncode == 2 and "rush-hour" in done.stderr
    done = demo_command(tmp_path / "home", "--offscreen", "--screenshot", str(tmp_path / "nowhere" / "shot.png"))
    assert done.returncode == 2 and f"there is no folder {tmp_path / 'nowhere'}" in done.stderr
    for option, target, words in (
        ("--screenshot", tmp_path / "shot.jpg", "give a path that ends in .png"),
        ("--screenshot", tmp_path, "this is a folder"),
        ("--json", tmp_path, "this is a folder"),
    ):
        done = demo_command(tmp_path / "home", "--offscreen", option, str(target))
        assert done.returncode == 2 and done.stderr.startswith(f"batchscope demo: {option} {target}: ")
        assert words in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "shot.jpg").exists()
