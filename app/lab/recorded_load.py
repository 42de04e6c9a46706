"""The requests of a run file, to be run again beside what was recorded."""

from __future__ import annotations

from dataclasses import dataclass

from app.lab.compare_model import CompareLoad
from engine.comparison import Run


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    key: str
    load: CompareLoad
    run: Run
    """The recorded run in the figures of a comparison's."""
