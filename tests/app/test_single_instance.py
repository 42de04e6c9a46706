"""One window for each user and data folder, whatever became of the one before."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt

from app.single_instance import ANSWER_SECONDS, Outcome, SingleInstance, Summons
from app.window_run import answer
from engine.environment import PACKAGE_ROOT

Make = Callable[..., SingleInstance]

HOLDER = """
import sys, time
from pathlib import Path
from PySide6.QtCore import QCoreApplication
from app.single_instance import SingleInstance, Summons
application = QCoreApplication([])
instance = SingleInstance(Path(sys.argv[1]))
print(instance.begin(Summons()).name, flush=True)
application.exec()
"""
STARTER = """
import sys
from pathlib import Path
from PySide6.QtCore import QCoreApplication
from app.single_instance import SingleInstance, Summons
application = QCoreApplication([])
print(SingleInstance(Path(sys.argv[1])).begin(Summons(*sys.argv[2:])).name)
"""


@pytest.fixture
def make(qapp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(_private(tmp_path / "run")))
    made: list[SingleInstance] = []

    def one(folder: str = "data") -> SingleInstance:
        made.append(SingleInstance(tmp_path / folder))
        return made[-1]

    yield one
    for each in made:
        each.close()


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def holder(make: Make, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that is the first."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "data")]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "FIRST\n"
        yield process
        process.kill()


def begin_elsewhere(folder: Path, summons: Summons, qtbot) -> str:
    """Another process starts; what became of it."""
    command = [sys.executable, "-c", STARTER, str(folder), summons.model, summons.activation_token]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}, stdout=subprocess.PIPE, text=True
    ) as process:
        qtbot.waitUntil(lambda: process.poll() is not None, timeout=6000)
        return process.stdout.read().strip()


def test_the_second_hands_over_what_it_was_asked_for(make: Make, qtbot, tmp_path: Path) -> None:
    first = make()
    heard: list[Summons] = []
    first.summoned.connect(heard.append)
    assert first.begin(Summons()) is Outcome.FIRST
    wanted = Summons("/models/mine", "token")
    assert begin_elsewhere(tmp_path / "data", wanted, qtbot) == "HANDED_OVER"
    assert heard == [wanted]


def test_another_data_folder_has_a_window_of_its_own(make: Make) -> None:
    assert make("data").begin(Summons()) is Outcome.FIRST
    assert make("other").begin(Summons()) is Outcome.FIRST


def test_a_window_that_was_killed_is_no_obstacle(make: Make, holder: subprocess.Popen[str]) -> None:
    instance = make()
    holder.kill()
    holder.wait()
    assert Path(instance.address).exists(), "the socket of the killed one lies there"
    begun = time.monotonic()
    assert instance.begin(Summons()) is Outcome.FIRST
    assert time.monotonic() - begun < ANSWER_SECONDS, "nobody was waited for"


def test_a_window_that_hangs_is_waited_for_two_seconds(make: Make, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    begun = time.monotonic()
    assert make().begin(Summons()) is Outcome.SILENT
    assert time.monotonic() - begun < ANSWER_SECONDS + 5
    os.kill(holder.pid, signal.SIGCONT)


def test_what_is_no_summons_is_dropped(make: Make, qtbot, tmp_path: Path) -> None:
    first = make()
    first.begin(Summons())
    for words in (b"GET / HTTP/1.1\n", b'{"model": 7}\n', b"\xff\xfe\n"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(first.address)
            stranger.sendall(words)
            stranger.setblocking(False)
            qtbot.wait(30)
            assert stranger.recv(100) == b""
    heard: list[Summons] = []
    first.summoned.connect(heard.append)
    assert begin_elsewhere(tmp_path / "data", Summons("starter"), qtbot) == "HANDED_OVER"
    assert heard == [Summons("starter")]


def test_only_this_user_reaches_the_socket(make: Make) -> None:
    first = make()
    first.begin(Summons())
    assert Path(first.address).stat().st_mode & 0o077 == 0


def test_the_window_comes_forward_with_the_model_that_was_named(rig) -> None:
    rig.load()
    rig.window.showMinimized()
    answer(rig.window, Summons(model="/models/mine"))
    assert not rig.window.windowState() & Qt.WindowState.WindowMinimized
    assert rig.client.loaded[-1].model == "/models/mine"


def test_answers_are_not_ended_for_a_model_unasked(rig) -> None:
    rig.load()
    rig.add()
    rig.step()
    answer(rig.window, Summons(model="/models/mine"))
    assert rig.client.loaded[-1].model == "starter"
    assert "mine" in rig.window.notice.text
    rig.window.notice.button.click()
    assert rig.client.loaded[-1].model == "/models/mine"


def test_without_a_model_nothing_is_loaded(rig) -> None:
    rig.load()
    answer(rig.window, Summons())
    assert len(rig.client.loaded) == 1


def test_the_real_program_hands_over_and_says_so(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(PACKAGE_ROOT),
        "QT_QPA_PLATFORM": "offscreen",
        "DISPLAY": ":0",
        "XDG_RUNTIME_DIR": str(_private(tmp_path / "run")),
        **{f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("DATA", "CONFIG", "STATE", "CACHE")},
    }
    command = [sys.executable, "-P", "-m", "app.cli", "--model", str(tmp_path / "none")]
    log = tmp_path / "state" / "batchscope" / "batchscope.log"
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as first:
        try:
            deadline = time.monotonic() + 60
            while "Not loaded" not in (log.read_text() if log.exists() else ""):
                assert time.monotonic() < deadline and first.poll() is None
                time.sleep(0.1)
            second = subprocess.run(command[:-2], env=environment, capture_output=True, text=True, timeout=60)
            assert second.returncode == 0
            assert second.stdout == "Batchscope is open already: its window has come forward.\n"
            assert first.poll() is None
            first.send_signal(signal.SIGTERM)
            assert first.wait(20) == 0
        finally:
            first.kill()
    assert "Batchscope ends" in log.read_text()
    assert not list((tmp_path / "run").glob("*.sock"))
