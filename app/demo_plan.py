"""What a demo is to do and what came of it: between the command, which knows no window, and the window's driver."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from engine.config import EngineConfig
from engine.workload import Scenario


@dataclass(frozen=True, slots=True)
class DemoPlan:
    scenario: Scenario
    config: EngineConfig
    seconds: float
    """From the moment the model is ready."""
    screenshot: Path | None


@dataclass(slots=True)
class DemoOutcome:
    result: dict[str, Any] = field(default_factory=dict)
    """The figures, empty where the model never got ready."""
    error: str = ""
    """Why the demo did not run to its end."""


class LoadingReport:
    """What the loading is at, on a terminal; nothing in a pipe."""

    def __init__(self) -> None:
        self._status: Status | None = None
        if sys.stderr.isatty():
            self._status = Console(stderr=True).status("Starting the engine")
            self._status.start()

    def show(self, stage: str, done: int, total: int) -> None:
        if self._status is not None:
            self._status.update(f"{stage} {done / total:.0%}" if total else stage)

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()
