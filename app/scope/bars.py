"""Steps as bars: which steps share one, and where its pixels are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PySide6.QtCore import QRect

from app.scope.steps import LAYERS, StepHistory

BAR = 3
"""Logical pixels of a bar, the gap of one device pixel included."""
LINES = ("running", "waiting", "swapped")
"""Counts of requests."""


@dataclass(frozen=True, slots=True)
class Bars:
    """What the bars show, oldest first; arrays [bars] except ``stacks``."""

    stacks: np.ndarray
    """Tokens by layer, of several steps the mean: float [layers, bars]."""
    most: np.ndarray
    """Tokens of a bar's fullest step."""
    first_step: np.ndarray
    last_step: np.ndarray
    steps: np.ndarray
    """How many each sums up."""
    lines: dict[str, np.ndarray]
    """Requests after the step, of several the most."""

    def __len__(self) -> int:
        return len(self.most)


def make_bars(history: StepHistory, bars: int, together: int, last_step: int | None = None) -> Bars:
    """The newest ``bars`` bars of ``together`` steps each, up to ``last_step``. Which steps share a bar does not change
    when further ones come, so the newest bar may be of fewer."""
    number = history.number(last_step)
    oldest = number - history.count(last_step)
    begin = max(oldest, (-(-number // together) - bars) * together)
    starts = np.arange(begin // together * together, number, together)
    starts = np.maximum(starts, begin) - begin
    if not len(starts):
        nothing = np.zeros(0, dtype=np.int64)
        return Bars(np.zeros((len(LAYERS), 0)), nothing, nothing, nothing, nothing, dict.fromkeys(LINES, nothing))

    def column(name: str) -> np.ndarray:
        return history.last(name, number - begin, last_step)

    tokens = np.stack([column(layer) for layer in LAYERS])
    steps, ends = column("step"), np.append(starts[1:], number - begin)
    return Bars(
        np.add.reduceat(tokens, starts, axis=1) / (ends - starts),
        np.maximum.reduceat(tokens.sum(axis=0), starts),
        steps[starts],
        steps[ends - 1],
        ends - starts,
        {name: np.maximum.reduceat(column(name), starts) for name in LINES},
    )


def step_points(values: np.ndarray, left: float, width: float) -> np.ndarray:
    """The corners of a line that is level over each value and upright between two: float [points, 2]."""
    turns = np.flatnonzero(np.diff(values)) + 1
    starts, ends = np.append(0, turns), np.append(turns, len(values))
    x = np.stack([left + starts * width, left + ends * width], axis=1).reshape(-1)
    return np.stack([x, np.repeat(values[starts], 2)], axis=1)


def bar_boxes(stacks: np.ndarray, *, top: float, height: int, bar: int) -> list[list[QRect]]:
    """The bars' boxes in device pixels from the lower right corner, one list per layer: tokens [layers, steps].

    ``top`` tokens are ``height`` pixels; a count above 0 is at least one. One of a bar's ``bar`` pixels is its gap.
    """
    steps = stacks.shape[1]
    edges = np.rint(np.cumsum(stacks, axis=0) * (height / top)).astype(np.int64)
    edges = np.where(stacks > 0, np.maximum(edges, 1), edges)
    edges = np.maximum.accumulate(edges, axis=0)
    lower = np.vstack([np.zeros(steps, dtype=np.int64), edges[:-1]])
    left = (np.arange(steps) - steps) * bar
    boxes = []
    for layer in range(len(stacks)):
        seen = np.flatnonzero(edges[layer] > lower[layer])
        columns = zip(left[seen].tolist(), edges[layer][seen].tolist(), lower[layer][seen].tolist(), strict=True)
        boxes.append([QRect(x, -high, bar - 1, high - low) for x, high, low in columns])
    return boxes
