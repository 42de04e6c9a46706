"""A recorded run in a window of its own: read, scrubbed, played; files that are broken, cut or no run at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QEvent
from PySide6.QtGui import QImage
from PySide6.QtWidgets import QApplication

import app.cli as cli
from app.replay_window import ReplayWindow
from app.theme import Theme
from engine.environment import module_environment
from engine.recording import RecordingError, RunHeader, RunWriter
from tests.busy_engine import BusyEngine


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty steps of twelve requests in a pool that is too small for them."""
    path = tmp_path_factory.mktemp("runs") / "busy.batchscope"
    engine = BusyEngine(requests=12, num_blocks=40)
    with_first = engine.keyframe()
    writer = RunWriter(path, RunHeader(workload="busy"), limit_bytes=1 << 30, keyframe=with_first)
    records = engine.records()
    for _ in range(60):
        writer.add(next(records), engine.keyframe)
    writer.close()
    return path


@pytest.fixture
def make_window(qtbot, theme: Theme) -> Iterator[Callable[[Path], ReplayWindow]]:
    windows: list[ReplayWindow] = []

    def make(path: Path) -> ReplayWindow:
        window = ReplayWindow(path, theme)
        windows.append(window)
        window.show()
        with qtbot.waitSignal(window.opened, timeout=10_000):
            window.read()
        return window

    yield make
    for window in windows:
        window.close()
        window.deleteLater()
        QApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


def test_it_opens_at_the_end_and_every_step_can_be_shown(make_window, run_file: Path) -> None:
    window = make_window(run_file)
    assert window.source.state.step == 60
    assert "60 steps" in window.facts.text()
    window.travel.show_step(20)
    assert window.source.state.step == 20
    assert window.panels["queue"].model.rows, "somebody runs at step 20"
    assert "step 20 of 60" in window.time_bar.place.text()


def test_it_plays_to_the_end_and_stops_there(make_window, run_file: Path, qtbot) -> None:
    window = make_window(run_file)
    window.set_speed(16.0)
    window.time_bar.pause_button.click()
    assert not window.travel.is_live
    first = window.source.state.step
    qtbot.waitUntil(lambda: window.source.state.step > first, timeout=5000)
    qtbot.waitUntil(lambda: window.travel.is_live, timeout=20_000)
    assert window.time_bar.pause_button.text() == "▶"


def test_a_file_that_breaks_off_is_shown_up_to_its_last_whole_step(make_window, run_file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.batchscope"
    cut.write_bytes(run_file.read_bytes()[:-3000])
    window = make_window(cut)
    assert 0 < window.source.state.step < 60
    assert f"up to step {window.source.state.step:,}" in window.notice.text


def test_what_is_no_run_is_refused(run_file: Path, tmp_path: Path, theme: Theme) -> None:
    for content in (b"", b"hello", bytes(1000)):
        path = tmp_path / "no.batchscope"
        path.write_bytes(content)
        with pytest.raises(RecordingError):
            ReplayWindow(path, theme)


def test_the_command_draws_a_picture_without_a_display(run_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "replay.png"
    command = [sys.executable, "-m", "app.cli", "replay", str(run_file), "--offscreen", "--step", "30"]
    done = subprocess.run(
        [*command, "--screenshot", str(picture)], env=module_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert QImage(str(picture)).width() > 800


@pytest.mark.parametrize("name", ["gone.batchscope", "text.batchscope"])
def test_the_command_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.batchscope").write_text("not a run")
    command = [sys.executable, "-m", "app.cli", "replay", str(tmp_path / name), "--offscreen"]
    done = subprocess.run(command, env=module_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert name in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("step", ["0", "61", "9" * 20])
def test_a_step_that_the_run_lacks_is_wrong_usage(step: str, run_file: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["replay", str(run_file), "--offscreen", "--step", step]) == 2
    assert f"--step {int(step):,}: {run_file} has the steps 1 to 60" in capsys.readouterr().err


def test_damage_in_the_middle_is_said_with_what_is_lost(make_window, run_file: Path, tmp_path: Path) -> None:
    data = bytearray(run_file.read_bytes())
    data[len(data) // 2] ^= 1
    path = tmp_path / "damaged.batchscope"
    path.write_bytes(data)
    window = make_window(path)
    whole = window.source.state.step
    assert 0 < whole < 60
    assert f"{60 - whole} of 60 steps cannot be read" in window.notice.text
    assert f"{whole} steps" in window.facts.text()


def test_a_file_without_a_whole_step_says_that_there_is_nothing_to_show(make_window, tmp_path: Path) -> None:
    path = tmp_path / "begun.batchscope"
    engine = BusyEngine(requests=2, num_blocks=40)
    RunWriter(path, RunHeader(workload="busy"), limit_bytes=1 << 20, keyframe=engine.keyframe()).close()
    for cut in (0, 30):
        (tmp_path / "cut.batchscope").write_bytes(path.read_bytes()[: -cut or None])
        window = make_window(tmp_path / "cut.batchscope")
        assert "no whole step" in window.notice.text
        assert "0 steps" in window.facts.text() and " ·  · " not in window.facts.text()
