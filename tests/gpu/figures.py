"""What a section says: figures, each with its unit and, where it has one, its target. Light: no torch.

A *rate* is anything that was timed. A rehearsal times the processor it runs on, so its rates are checked to be numbers
and then dropped: nothing that it prints could be taken for a GPU's.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a value, the bound itself included."""

    bound: float
    at_most: bool = False

    def met_by(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def text(self, unit: str) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.bound:g} {unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Figure:
    section: str
    name: str
    value: float | str | None
    """None: a rate that a rehearsal does not tell."""
    unit: str
    target: str = ""
    """In words; empty where there is none."""
    met: bool | None = None
    """Whether the target was met, or the check held; None: there is neither."""
    listed: bool = True
    """Whether the summary's table shows it also where it holds; the JSON has every figure."""
    detail: dict[str, Any] = field(default_factory=dict)

    def words(self) -> str:
        if self.value is None:
            return "ran"
        shown = self.value if isinstance(self.value, str) else significant(self.value)
        return f"{shown} {self.unit}".rstrip()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Report:
    """Where a section leaves its figures; each goes out at once."""

    def __init__(self, section: str, send: Callable[[Figure], None], *, rehearsal: bool) -> None:
        self.section = section
        self.rehearsal = rehearsal
        self._send = send

    def fact(self, name: str, value: float | str, unit: str = "", *, listed: bool = True, **detail: Any) -> None:
        """Something that was not timed and has no target."""
        self._send(Figure(self.section, name, value, unit, listed=listed, detail=detail))

    def check(self, name: str, holds: bool, words: str, *, listed: bool = True, **detail: Any) -> None:
        """Something that must hold, on a GPU and in a rehearsal."""
        self._send(Figure(self.section, name, words, "", met=holds, listed=listed, detail=detail))

    def rate(
        self, name: str, value: float, unit: str, target: Target | None = None, *, listed: bool = True, **detail: Any
    ) -> None:
        """Something that was timed, or follows from it. ValueError unless it is a finite number above 0; ValueError or
        TypeError for a ``detail`` that JSON has no word for."""
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} came out as {value} {unit}")
        json.dumps(detail, allow_nan=False)  # here, as a rehearsal sends none
        words = "" if target is None else target.text(unit)
        if self.rehearsal:
            self._send(Figure(self.section, name, None, unit, words, listed=listed))
            return
        met = None if target is None else target.met_by(value)
        self._send(Figure(self.section, name, value, unit, words, met, listed, detail))


def significant(value: float) -> str:
    """Three digits, with separators between thousands."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"
