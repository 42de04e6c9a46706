"""Whether the window's memory grows: ``python -m tests.soak [--minutes 30] [--json]``.

A half hour of a busy engine, accelerated: a core with a stand-in for the model makes 20 steps for each second that is
played, with 100 requests at once. The real window, offscreen, takes them as fast as it can, with jumps into the past
now and then. Prints its resident memory after a tenth of the time, when buffers have their sizes, and at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

import psutil
from PySide6.QtWidgets import QApplication

from app.engine_bridge import EngineBridge
from app.main_window import MainWindow
from app.start import delete_in_order, make_application
from app.theme import Theme
from engine.config import EngineConfig
from engine.messages import AckFrame, Command, Frame, Hello, Ready
from engine.recording import RunHeader, RunWriter
from tests.app.scripted import ScriptedClient
from tests.busy_engine import BusyEngine

STEPS_PER_SECOND = 20
STEPS_A_FRAME = 4
RUN_BYTES = 64 << 20


class Stream(ScriptedClient):
    """Records as they are made, a few to a frame, each also written to a run file."""

    def __init__(self, path: Path) -> None:
        self.engine = BusyEngine(requests=100, num_blocks=4096)
        super().__init__(num_blocks=self.engine.num_blocks)
        self._source = self.engine.records()
        self._writer = RunWriter(path, RunHeader(), limit_bytes=RUN_BYTES)
        self._number = 0

    def load(self, config: EngineConfig) -> None:
        self.core = self.engine.core
        self.deliver(Hello(3, 0))
        self.deliver(Ready(self.info(), self.engine.keyframe()))

    def send(self, command: Command) -> None:
        assert not isinstance(command, AckFrame) or command.number <= self._number

    def play(self) -> None:
        records = []
        for _ in range(STEPS_A_FRAME):
            records.append(next(self._source))
            self._writer.add(records[-1], self.engine.keyframe)
        self._number += 1
        self.deliver(Frame(self._number, records))

    def close(self, timeout: float = 0.0) -> int | None:
        self._writer.close()
        return super().close(timeout)


def soak(minutes: float) -> dict[str, Any]:
    application = make_application()
    steps = int(minutes * 60 * STEPS_PER_SECOND)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.batchscope"
        stream = Stream(run)
        bridge = EngineBridge(client=stream)
        bridge.pacer.FASTEST = bridge.pacer.SHARE = 0.0  # as fast as it can
        window = MainWindow(bridge, Theme(application), Path(folder) / "chats.sqlite3")
        window.arrange("monitor")
        window.show()
        bridge.start(EngineConfig())
        _turn(application, lambda: bridge.state == "ready")
        window.travel.follow(run)
        early = 0
        while bridge.run_state.step < steps:
            before = bridge.run_state.step
            stream.play()
            _turn(application, lambda before=before: bridge.run_state.step > before)
            if bridge.run_state.step % 1000 < STEPS_A_FRAME:
                window.travel.show_step(bridge.run_state.step - 300)
                application.processEvents()
                window.travel.show_newest()
            if not early and bridge.run_state.step >= steps / 10:
                early = _resident()
        late = _resident()
        window.close()
        delete_in_order(window, bridge)
    mib = 2**20
    return {"steps": steps, "early_mib": early / mib, "late_mib": late / mib, "growth_mib": (late - early) / mib}


def _turn(application: QApplication, done: Any) -> None:
    while not done():
        application.processEvents()


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of a run at 20 steps a second (30)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = soak(arguments.minutes)
    if arguments.json:
        json.dump(result, sys.stdout, indent=2)
    else:
        early, late = result["early_mib"], result["late_mib"]
        print(f"{result['steps']:,} steps: {early:.0f} MiB after a tenth, {late:.0f} MiB at the end")
        print(f"{late - early:+.1f} MiB")


if __name__ == "__main__":
    main()
