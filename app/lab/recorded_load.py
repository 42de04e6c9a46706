"""The requests of a run file, to be run again beside what was recorded. Reading goes through the whole file, so it
happens on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import QRunnable

from app.lab.compare_model import CompareLoad
from app.translation import tr
from engine.comparison import NOT_AVAILABLE, Run
from engine.recorded_run import recorded_result, recorded_workload
from engine.recording import RecordingError, RunReader
from engine.workload import EngineOptions

FACTS = ("model_id", "weights_sha256", "backend", "backend_reason", "device", "dtype")
"""What a result says of the engine; a run file need not know it."""


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    key: str
    """The same for the same run from the same step."""
    load: CompareLoad
    run: Run
    """What was recorded, in the figures of a comparison's run."""

    @property
    def model(self) -> str:
        return str(self.run["model_id"])


def read_recorded(path: str, from_step: int | None = None) -> RecordedLoad:
    """Raises :class:`RecordingError`."""
    reader = RunReader(path)
    try:
        workload, run = recorded_workload(reader, from_step), recorded_result(reader, from_step)
        title = reader.header.workload or Path(path).name
    finally:
        reader.close()
    run |= {name: run[name] or NOT_AVAILABLE for name in FACTS} | {"threads": run["threads"] or 0}
    since = "" if from_step is None else tr(" from step {from_step:,} on", from_step=from_step)
    watch = tr(
        "The requests of a recorded run{since}, as they came, run again beside it. What is recorded is there as "
        "a variant of its own.",
        since=since,
    )
    options = EngineOptions(**{name: value for name, value in run["knobs"].items() if value is not None})
    load = CompareLoad(
        tr("Recorded: {title}{since}", title=title, since=since), lambda _seed: workload, watch, options, seeded=False
    )
    return RecordedLoad(f"{path} {from_step}", load, run)


class RecordedReading(QRunnable):
    """Reads a run file on a thread; ``told`` gets the load, or a sentence where it cannot be run again."""

    def __init__(self, path: str, from_step: int | None, told: Callable[[Any], None]) -> None:
        super().__init__()
        self._path, self._from_step, self._told = path, from_step, told

    def run(self) -> None:
        try:
            self._told(read_recorded(self._path, self._from_step))
        except (RecordingError, OSError) as error:
            self._told(f"{str(error).rstrip('.')}.")
