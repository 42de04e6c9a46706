"""Drives the real window through a demo: what a user would do, on timers.

::

    load the model ─▶ a chat, and the scenario again and again; a second chat ─▶ picture ─▶ stop ─▶ figures
    │ given up after  │                                                        │
    │ long silence    │ plan.seconds                                           │ ended by force after a grace
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from app.chat.conversation import Conversation
from app.demo_plan import DemoOutcome, DemoPlan, LoadingReport
from app.engine_bridge import EngineBridge
from app.frame_pacer import FramePacer
from app.main_window import MainWindow
from app.start import delete_in_order, make_application, signals_close
from app.theme import Theme
from engine.client import EngineDied
from engine.messages import LoadFailed, Loading, ModelInfo

LONGEST_SILENCE_SECONDS = 300.0
"""A loading that reports nothing for so long is given up."""
GRACE_SECONDS = 60.0
"""How much longer than planned the window may take before the process is ended by force."""
QUESTIONS = (
    "Explain continuous batching to a bus driver.",
    "Why does a paged KV cache waste so little memory?",
)
SECOND_QUESTION_AT = 0.35
"""Share of the time after which the second chat begins."""
SETTLE_SECONDS = 1.0
"""Before the picture: what is shown in it has come to rest by then."""
PAUSE_MS = 200
"""Between two passes of the scenario."""


class ShowPacer(FramePacer):
    """In a demo the picture is the point: drawing may take twice as much of a core as beside somebody's work."""

    SHARE = FramePacer.SHARE / 2


def drive(plan: DemoPlan, report: LoadingReport) -> DemoOutcome:
    """Open the window, run the demo in it, close it. The user's own chats are not touched."""
    application = make_application()
    with tempfile.TemporaryDirectory(prefix="batchscope-demo-") as folder, _ended_by_force() as arm:
        theme = Theme(application)
        bridge = EngineBridge(pacer=ShowPacer())
        window = MainWindow(bridge, theme, Path(folder) / "chats.sqlite3", runs_folder=Path(folder) / "runs")
        driver = DemoDriver(window, plan, report, arm)
        driver.finished.connect(application.exit)
        window.show()
        QTimer.singleShot(0, driver.begin)
        with signals_close(lambda: driver.fail("interrupted")):
            application.exec()
        if not driver.ended:
            driver.fail("the window was closed before the time was up")
        window.close()
        delete_in_order(window, bridge)
    report.stop()
    return driver.outcome


@contextmanager
def _ended_by_force() -> Iterator[Callable[[float], None]]:
    """A window that hangs fires no timer: the interpreter's own watchdog ends the process with code 1 and says where it
    hung. Gives what arms it anew, with the seconds that the next stretch may take. The engine ends with its window."""

    def arm(seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=sys.__stderr__)

    try:
        arm(LONGEST_SILENCE_SECONDS)
        yield arm
    finally:
        faulthandler.cancel_dump_traceback_later()


class DemoDriver(QObject):
    """Does in the window what a user would do, until the time is up, and counts what came of it."""

    finished = Signal()

    def __init__(
        self, window: MainWindow, plan: DemoPlan, report: LoadingReport, arm_watchdog: Callable[[float], None]
    ) -> None:
        super().__init__(window)
        self.outcome = DemoOutcome()
        self.ended = False
        self._window = window
        self._plan = plan
        self._report = report
        self._arm_watchdog = arm_watchdog
        self._ready_at = 0.0
        self._frames_before = 0
        self._info: ModelInfo | None = None
        self._passes = 0
        self._chats: list[Conversation] = []
        self._silence = self._timer(self._silent)
        self._deadline = self._timer(self.time_is_up)
        self._second_question = self._timer(self.ask)
        self._before_picture = self._timer(self._compose)
        self._next_pass = self._timer(self._start_load)
        bridge = window.bridge
        bridge.loading.connect(self._loading)
        bridge.ready.connect(self._ready)
        bridge.load_failed.connect(self._load_failed)
        bridge.died.connect(self._died)
        window.load_panel.finished.connect(self._pass_finished)

    def _timer(self, slot: Any) -> QTimer:
        timer = QTimer(self)
        timer.setSingleShot(True)
        timer.timeout.connect(slot)
        return timer

    def begin(self) -> None:
        self._silence.start(round(LONGEST_SILENCE_SECONDS * 1000))
        self._window.launch(self._plan.config, chosen=True)

    # While it loads ----------------------------------------------------------------------------------------------

    def _loading(self, loading: Loading) -> None:
        self._report.show(loading.stage, loading.done, loading.total)
        self._silence.start(round(LONGEST_SILENCE_SECONDS * 1000))
        self._arm_watchdog(LONGEST_SILENCE_SECONDS)

    def _silent(self) -> None:
        self.fail(f"the model did not load: nothing was heard of it for {LONGEST_SILENCE_SECONDS:.0f} s")

    def _load_failed(self, failure: LoadFailed) -> None:
        self.fail(failure.message)

    # While it runs -----------------------------------------------------------------------------------------------

    def _ready(self, info: ModelInfo) -> None:
        if self.ended or self._info is not None:
            return
        self._report.stop()
        self._silence.stop()
        self._arm_watchdog(self._plan.seconds)
        self._info = info
        self._ready_at = time.perf_counter()
        self._frames_before = self._window.frame_stats.frames
        self._deadline.start(round(self._plan.seconds * 1000))
        self._second_question.start(round(self._plan.seconds * 1000 * SECOND_QUESTION_AT))
        self._before_picture.start(round(max(0.0, self._plan.seconds - SETTLE_SECONDS) * 1000))
        self.ask()
        self._window.load_panel.show_scenario(self._plan.scenario)
        self._start_load()

    def ask(self) -> None:
        """A chat of its own among the load's requests."""
        conversation = self._window.chat.new_conversation()
        if self._window.chat.send(QUESTIONS[len(self._chats)]):
            self._chats.append(conversation)

    def _start_load(self) -> None:
        self._window.load_panel.start()

    def _pass_finished(self, summary: dict[str, Any]) -> None:
        run = self._window.load_panel.run
        if self.ended or run is None or run.phase != "done":
            return  # stopped, or the engine died under it: that is told elsewhere
        self._passes += 1
        if summary["completed"]:
            self._next_pass.start(PAUSE_MS)
        else:  # again would be the same again
            reasons = [error for error in summary["errors"] if error] or ["none of its requests completed"]
            self.fail(f"the scenario cannot run: {reasons[0]}")

    def _died(self, death: EngineDied) -> None:
        self.fail(f"the engine died: {death.reason}")

    # The end -----------------------------------------------------------------------------------------------------

    def _compose(self) -> None:
        """Shows the chat that has most to show, for the picture."""
        if self._chats:
            self._window.chat.open_conversation(max(self._chats, key=lambda c: sum(len(m.text) for m in c.messages)))

    def time_is_up(self) -> None:
        self._end("")

    def fail(self, error: str) -> None:
        """End early; what there is so far is still told."""
        self._end(error)

    def _end(self, error: str) -> None:
        if self.ended:
            return
        self.ended = True
        for timer in (self._silence, self._deadline, self._second_question, self._before_picture, self._next_pass):
            timer.stop()
        self._report.stop()
        self.outcome.error = error
        if self._info is not None:
            self.outcome.result = self._figures(self._info)
        self._window.load_panel.stop()
        self.finished.emit()

    def _picture(self) -> str | None:
        """Saves what the window shows; gives the path."""
        path = self._plan.screenshot
        if path is None:
            return None
        if not self._window.grab().save(str(path), "PNG"):
            self.outcome.error = self.outcome.error or f"--screenshot {path}: the picture cannot be saved there"
            return None
        return str(path.resolve())

    def _figures(self, info: ModelInfo) -> dict[str, Any]:
        seconds = time.perf_counter() - self._ready_at
        totals, stats = self._window.bridge.run_state.totals, self._window.frame_stats
        frames = stats.frames - self._frames_before
        newest = list(stats.milliseconds)[-frames:] if frames else []
        p50, p99 = (float(v) for v in np.percentile(newest, (50, 99))) if newest else (None, None)
        return {
            "scenario": self._plan.scenario.name,
            "model": info.name,
            "dtype": info.dtype,
            "device": info.device,
            "seconds": seconds,
            "tokens": totals.output_tokens,
            "tokens_per_second": totals.output_tokens / seconds,
            "steps": totals.steps,
            "preemptions": totals.preemptions,
            "recomputed_tokens": totals.recomputed_tokens,
            "chats": len(self._chats),
            "scenario_passes": self._passes,
            "frames": frames,
            "frame_ms_p50": p50,
            "frame_ms_p99": p99,
            "screenshot": self._picture(),
        }
