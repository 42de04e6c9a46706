"""What a frame of the busy window costs: ``python -m tests.frame_cost [--steps 600] [--jumps 40] [--json]``.

500 requests, 16,384 blocks, every dock visible at once, offscreen at 1920 × 1200. A core with a stand-in for the model
makes the records beforehand; they come to the real window at the pace it takes them, at most 30 frames a second.
Prints, for frames in which a new step was drawn, the median and the 99th percentile of folding and painting together,
the longest time between two turns of the event loop, and what a jump into the past takes until all of it is painted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

import numpy as np
from PySide6.QtCore import QEventLoop, QTimer
from PySide6.QtWidgets import QApplication

from app.docks import Arrangement, Column, Group, arrange
from app.engine_bridge import EngineBridge
from app.main_window import MainWindow
from app.scope.panel import RunHistory
from app.start import delete_in_order, make_application
from app.theme import Theme
from engine.config import EngineConfig
from engine.events import Keyframe, StepRecord
from engine.messages import AckFrame, Command, Frame, Hello, Ready
from engine.recording import RunHeader, RunWriter
from tests.app.scripted import ScriptedClient
from tests.busy_engine import BusyEngine

EVERYTHING = Arrangement(
    columns=(
        Column((Group(("chat",)), Group(("load",))), 0.2),
        Column((Group(("occupancy",)), Group(("throughput",)), Group(("latency",)), Group(("steptime",))), 0.25),
        Column((Group(("blocks",), 2), Group(("decisions",)), Group(("knobs",))), 0.25),
        Column((Group(("queue",), 1.4), Group(("ledger",)), Group(("compare",))), 0.3),
    ),
    bottom=("timeline",),
    bottom_share=0.3,
)
WARM_UP_FRAMES = 10
BEAT_MS = 5
SETTLE_SECONDS = 1.5
"""The window is laid out and shows the first state."""


class Tape(ScriptedClient):
    """Plays records that were made before; the next one comes when the frame before it was taken."""

    def __init__(self, keyframe: Keyframe, records: list[StepRecord], engine: BusyEngine) -> None:
        super().__init__(num_blocks=engine.num_blocks)
        self._keyframe, self._tape = keyframe, records
        self.played = 0

    def load(self, config: EngineConfig) -> None:
        self.core = self  # type: ignore[assignment]
        self.deliver(Hello(3, 0))
        self.deliver(Ready(self.info(), self._keyframe))

    def send(self, command: Command) -> None:
        if isinstance(command, AckFrame):
            QTimer.singleShot(0, self.play)

    def play(self) -> None:
        if self.played < len(self._tape):
            self.played += 1
            self.deliver(Frame(self.played, [self._tape[self.played - 1]]))


def record_busy(steps: int, path: Path) -> tuple[Keyframe, list[StepRecord], BusyEngine]:
    """The records of ``steps`` steps once the batch is full, and the same as a run file."""
    engine = BusyEngine()
    source = engine.records()
    for _ in range(100):
        next(source)
    first = engine.keyframe()
    records = []
    writer = RunWriter(path, RunHeader(), limit_bytes=1 << 32)
    for _ in range(steps):
        records.append(next(source))
        writer.add(records[-1], engine.keyframe)
    writer.close()
    return first, records, engine


def measure(steps: int, jumps: int) -> dict[str, Any]:
    application = make_application()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.batchscope"
        keyframe, records, engine = record_busy(steps, run)
        tape = Tape(keyframe, records, engine)
        bridge = EngineBridge(client=tape)
        window = MainWindow(bridge, Theme(application), Path(folder) / "chats.sqlite3")
        window.resize(1920, 1200)
        window.show()
        arrange(window, window.docks, EVERYTHING)
        bridge.start(EngineConfig())
        settled = time.perf_counter() + SETTLE_SECONDS
        _beat_until(lambda: time.perf_counter() > settled)
        QTimer.singleShot(0, tape.play)
        gaps = _beat_until(lambda: bridge.run_state.step >= records[-1].step)
        frames = list(window.frame_stats.milliseconds)[WARM_UP_FRAMES:]
        window.travel.follow(run)
        window.travel.reader()
        fold_ms = fold_cost(keyframe, records)
        places = np.linspace(keyframe.step + 2, records[-1].step - 2, jumps)
        records.clear()  # the window itself holds none: the garbage collector is not to go through them
        gc.collect()
        jumped = [_jump(window, application, int(step)) for step in places]
        window.close()
        delete_in_order(window, bridge)
    return {
        "requests": engine.requests,
        "blocks": engine.num_blocks,
        "steps": steps,
        "frames": len(frames),
        "frame_ms_p50": float(np.percentile(frames, 50)),
        "frame_ms_p99": float(np.percentile(frames, 99)),
        "longest_gap_ms": 1000 * max(gaps),
        "jump_ms_p50": statistics.median(jumped),
        "jump_ms_max": max(jumped),
        "fold_ms": fold_ms,
    }


def _beat_until(done: Callable[[], bool]) -> list[float]:
    """Runs the event loop until ``done``; gives the seconds between each two beats of a timer."""
    loop, timer, beats = QEventLoop(), QTimer(), [time.perf_counter()]

    def beat() -> None:
        beats.append(time.perf_counter())
        if done():
            loop.quit()

    timer.timeout.connect(beat)
    timer.start(BEAT_MS)
    loop.exec()
    timer.stop()
    return np.diff(beats).tolist()


def _jump(window: MainWindow, application: QApplication, step: int) -> float:
    """Milliseconds until the step is on the screen."""
    begun = time.perf_counter()
    window.travel.show_step(step)
    application.processEvents()
    assert window.source.state.step == step
    return 1000 * (time.perf_counter() - begun)


def fold_cost(keyframe: Keyframe, records: list[StepRecord]) -> float:
    """Milliseconds that the histories' folds take for a step, without painting."""
    history = RunHistory()
    history.restore(keyframe)
    begun = time.perf_counter()
    for record in records:
        history.apply(record)
    return 1000 * (time.perf_counter() - begun) / len(records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--jumps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.steps, arguments.jumps)
    if arguments.json:
        json.dump(result, sys.stdout, indent=2)
    else:
        for name, value in result.items():
            print(
                f"{name.replace('_', ' '):>16}  {value:,.1f}" if isinstance(value, float) else f"{name:>16}  {value:,}"
            )


if __name__ == "__main__":
    main()
