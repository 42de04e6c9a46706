"""How lanes of spans look, in every timeline. Painted by the pixel, so that the cost does not grow with the spans.

::

    spans of the shown lanes ─▶ a code per lane and device pixel ─▶ codes × textures ─▶ picture
                                (what fills most of the pixel)      (colour, pattern, share of the lane's height)

Whole device pixels; what is shorter than one is drawn as one, where that is not a wait. The pixels lie on a grid that
moves with time, so nothing shimmers while the picture scrolls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PySide6.QtCore import QPointF, QRect, QRectF, Qt
from PySide6.QtGui import QImage, QPainter, QPixmap

from app.theme import Theme
from app.translation import tr
from app.widgets import LegendEntry, Pattern, paint_swatch
from engine.lanes import Lane, SpanKind, SpanRows
from engine.spans import RowIndex, span_rows

NAMES = {
    SpanKind.WAITING: "waiting",
    SpanKind.PREFILL: "prefill",
    SpanKind.DECODE: "decode",
    SpanKind.RECOMPUTE: tr("computing again"),
    SpanKind.PADDING: tr("padding of its static batch"),
    SpanKind.SWAPPED: tr("swapped to host memory"),
    SpanKind.STALLED: tr("running, left out by the budget"),
}
LEGEND = {
    SpanKind.WAITING: LegendEntry(tr("waiting"), "waiting", "line"),
    SpanKind.PREFILL: LegendEntry(tr("prefill"), "prefill"),
    SpanKind.DECODE: LegendEntry(tr("decode"), "decode"),
    SpanKind.RECOMPUTE: LegendEntry(tr("recomputed"), "preempted", "hatch"),
    SpanKind.PADDING: LegendEntry(tr("padding"), "padding", "weave"),
    SpanKind.SWAPPED: LegendEntry(tr("swapped"), "swapped", "checker"),
}
PREEMPTED = LegendEntry(tr("preempted"), "preempted", "triangle")
DRAFTS = (LegendEntry(tr("accepted drafts"), "draft"), LegendEntry(tr("rejected drafts"), "draft", "hatch"))
_NAMED_WHEN_SEEN = frozenset({SpanKind.PADDING, SpanKind.SWAPPED})
"""They take room in the legend only in runs that have them."""
_LOOKS: dict[SpanKind, tuple[str, Pattern]] = {
    **{kind: (entry.token, entry.pattern) for kind, entry in LEGEND.items()},
    SpanKind.STALLED: ("muted", "line"),
}
EDGE_FROM = 4
"""Logical pixels of a chunk from which its end is marked."""
MARK = 9
"""Logical pixels of a preemption's mark, as far as the lane is high enough."""

# Codes of pixels: 0 is nothing, kind + 1 a span, and these.
_ACCEPTED, _REJECTED, _FAILED, _CODES = 8, 9, 10, 11
_BEHIND = np.array([SpanKind.WAITING + 1, SpanKind.SWAPPED + 1, SpanKind.STALLED + 1])
"""What no pixel is widened for."""
_PERIOD = 12
"""Pixels after which every pattern repeats."""


def legend_entries(seen: set[SpanKind], drafted: bool) -> list[LegendEntry]:
    """What a legend is to name in a run that has had these."""
    named = [LEGEND[kind] for kind in LEGEND if kind not in _NAMED_WHEN_SEEN or kind in seen]
    return [*named, *(DRAFTS if drafted else ()), PREEMPTED]


@dataclass(frozen=True, slots=True)
class LaneContent:
    """What is in some lanes: arrays of row numbers and times, seconds."""

    spans: SpanRows
    preempted_rows: np.ndarray
    preempted_at: np.ndarray
    failed_rows: np.ndarray
    failed_at: np.ndarray

    @classmethod
    def of(cls, lanes: Sequence[Lane]) -> LaneContent:
        """Of lanes that are written out; the first is row 0."""
        marks = [(row, time) for row, lane in enumerate(lanes) for time in lane.preempted_at]
        ends = [
            (row, lane.finished_at)
            for row, lane in enumerate(lanes)
            if lane.finished_at is not None and lane.finish_reason in ("abort", "error")
        ]
        return cls(span_rows(lanes), *_columns(marks), *_columns(ends))

    def take(self, rows: np.ndarray) -> LaneContent:
        """Only these rows, counted anew in this order; -1: a row that stays empty."""
        kept = np.flatnonzero(rows >= 0)
        place = RowIndex(rows[kept])

        def moved(old: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            places = place(old)
            seen = np.flatnonzero(places >= 0)
            return seen, kept[places[seen]] if len(seen) else np.zeros(0, dtype=np.intp)

        seen, row = moved(self.spans.row)
        spans = SpanRows(row, *(getattr(self.spans, name)[seen] for name in SpanRows.__slots__[1:]))
        marks, mark_rows = moved(self.preempted_rows)
        ends, end_rows = moved(self.failed_rows)
        return LaneContent(spans, mark_rows, self.preempted_at[marks], end_rows, self.failed_at[ends])


def _columns(pairs: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    rows, times = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(rows, dtype=np.intp), np.array(times, dtype=np.float64)


def paint_lanes(
    painter: QPainter,
    theme: Theme,
    content: LaneContent,
    rows: int,
    area: QRect,
    x_range: tuple[float, float],
    pitch: float,
) -> None:
    """Paints ``rows`` lanes, ``pitch`` logical pixels each, from the top of ``area``, which shows ``x_range`` in s."""
    scale = painter.device().devicePixelRatioF()
    painter.drawImage(area.topLeft(), lane_image(theme, content, rows, area.width(), x_range, pitch, scale))
    paint_preemptions(painter, theme, content, area, x_range, pitch)


def lane_image(
    theme: Theme,
    content: LaneContent,
    rows: int,
    width: int,
    x_range: tuple[float, float],
    pitch: float,
    scale: float,
) -> QImage:
    """The lanes without their marks; ``width`` and ``pitch`` in logical pixels, ``scale`` device pixels in one."""
    columns = max(1, round(width * scale))
    per_second = columns / max(x_range[1] - x_range[0], 1e-9)
    first = math.floor(x_range[0] * per_second)
    codes = lane_codes(content, rows, columns, first / per_second, per_second, scale)
    height = max(1, int(pitch * scale + 1e-6))
    texture = _texture(_colors(theme), height, max(1, round(scale)))
    period = texture.shape[1] // _CODES
    index = codes.astype(np.intp) * period + (np.arange(columns) + first) % period
    image = QImage(columns, max(1, math.ceil(rows * pitch * scale - 1e-6)), QImage.Format.Format_ARGB32_Premultiplied)
    if image.height() != rows * height:  # else no pixel is left out below
        image.fill(0)
    pixels = np.frombuffer(image.bits(), dtype=np.uint32).reshape(image.height(), columns)
    if image.height() == rows * height and height < rows // 16:  # few lines of many lanes: line by line
        for y in range(height):
            pixels[y::height] = texture[y].take(index)
    else:
        for row in range(rows):
            top = round(row * pitch * scale)
            target = pixels[top : top + height]
            np.take(texture[: len(target)], index[row], axis=1, out=target, mode="clip")
    image.setDevicePixelRatio(scale)
    return image


def lane_codes(
    content: LaneContent, rows: int, columns: int, begin: float, per_second: float, scale: float
) -> np.ndarray:
    """What is at each device pixel of each lane: uint8 [rows, columns]."""
    spans = content.spans
    flat = np.zeros(rows * columns, dtype=np.uint8)
    x0, x1 = (spans.begin - begin) * per_second, (spans.end - begin) * per_second
    left, right = (np.floor(np.clip(x, -1.0, columns + 1.0) + 0.5).astype(np.intp) for x in (x0, x1))
    drafted = spans.drafts > 0
    code = spans.kind.astype(np.uint8) + 1
    code[drafted] = np.where(2 * spans.accepted[drafted] >= spans.drafts[drafted], _ACCEPTED, _REJECTED)
    wide = x1 - x0 >= 1.0
    shown = wide & (right > 0) & (left < columns)
    _fill(flat, columns, spans.row[shown], left[shown], right[shown], code[shown])
    if drafted.any():
        chosen = shown & drafted
        share = spans.accepted[chosen] / spans.drafts[chosen]
        middle = left[chosen] + np.rint(share * (right - left)[chosen]).astype(np.intp)
        _fill(flat, columns, spans.row[chosen], left[chosen], middle, _ACCEPTED)
        _fill(flat, columns, spans.row[chosen], middle, right[chosen], _REJECTED)
    thin = np.flatnonzero(~wide & (x1 > 0) & (x0 < columns))
    _fill_thin(flat, columns, spans.row[thin], (x0[thin] + x1[thin]) / 2, code[thin], (x1 - x0)[thin])
    chunk = (spans.kind == SpanKind.PREFILL) | (spans.kind == SpanKind.RECOMPUTE)
    edged = shown & chunk & (x1 - x0 >= EDGE_FROM * scale) & (right <= columns)
    edge = max(1, round(scale))
    _fill(flat, columns, spans.row[edged], right[edged] - edge, right[edged], 0)
    ends = np.rint((content.failed_at - begin) * per_second)
    seen = (ends >= -edge) & (ends <= columns)
    at = ends[seen].astype(np.intp)
    _fill(flat, columns, content.failed_rows[seen], at - edge, at + 2 * edge, _FAILED)
    return flat.reshape(rows, columns)


def _fill(
    flat: np.ndarray,
    columns: int,
    rows: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    code: np.ndarray | int,
) -> None:
    """Sets the pixels from ``left`` to before ``right`` of a row each, as far as there are such."""
    left, right = np.clip(left, 0, columns), np.clip(right, 0, columns)
    lengths = np.maximum(right - left, 0)
    total = int(lengths.sum())
    if total:
        starts = rows * columns + left - (np.cumsum(lengths) - lengths)
        flat[np.repeat(starts, lengths) + np.arange(total)] = (
            np.repeat(code, lengths) if isinstance(code, np.ndarray) else code
        )


def _fill_thin(
    flat: np.ndarray, columns: int, rows: np.ndarray, middle: np.ndarray, code: np.ndarray, extent: np.ndarray
) -> None:
    """What is shorter than a pixel: each pixel shows that code whose parts in it are the longest together."""
    at = np.floor(middle).astype(np.intp)
    inside = (at >= 0) & (at < columns)
    place, code, extent = (rows * columns + at)[inside], code[inside], extent[inside]
    if not len(place):
        return
    # Counted by the pixels that have any, which may be few of all.
    has = np.zeros(len(flat), dtype=bool)
    has[place] = True
    pixels = np.flatnonzero(has)
    number = np.cumsum(has, dtype=np.int32)[place] - 1
    most = np.zeros(len(pixels))
    winner = np.zeros(len(pixels), dtype=np.uint8)
    for each in np.flatnonzero(np.bincount(code, minlength=_CODES)):
        chosen = code == each
        # A part without any extent, of a step that took no time, counts a little.
        sums = np.bincount(number[chosen], weights=extent[chosen] + 1e-9, minlength=len(pixels))
        better = sums > most
        winner[better], most[better] = each, sums[better]
    seen = (flat[pixels] == 0) | ~np.isin(winner, _BEHIND)
    flat[pixels[seen]] = winner[seen]


# Looks ---------------------------------------------------------------------------------------------------------------


def _colors(theme: Theme) -> tuple[int, ...]:
    """Of the codes, then of what is drawn onto them: 0xAARRGGBB, opaque."""
    tokens = [_LOOKS[kind][0] for kind in SpanKind]
    return tuple(getattr(theme, token).rgba() for token in (*tokens, "decode", "draft", "error", "card"))


@lru_cache(maxsize=32)
def _texture(colors: tuple[int, ...], height: int, unit: int) -> np.ndarray:
    """uint32 [height, codes × period]: a lane's pixels, its margins included; ``unit``: pixels of a pattern's dot."""
    period = _PERIOD * unit
    texture = np.zeros((height, _CODES, period), dtype=np.uint32)
    *kinds, decode, draft, error, card = colors
    above, below = _margins(height, unit)
    lane = texture[above : height - below]
    inner = len(lane)
    for kind, color in zip(SpanKind, kinds, strict=True):
        thickness = _thickness(kind, inner, unit)
        top = (inner - thickness) // 2
        _paint_area(lane[top : top + thickness, kind + 1], color, _LOOKS[kind][1], card, unit)
    strip = max(unit, round(inner / 3))
    for code, pattern in ((_ACCEPTED, "solid"), (_REJECTED, "hatch")):
        lane[:, code] = decode
        _paint_area(lane[inner - strip :, code], draft, pattern, card, unit)
    lane[:, _FAILED] = error
    return texture.reshape(height, -1)


def _margins(height: int, unit: int) -> tuple[int, int]:
    """Pixels that are left free above and below in a lane: the lower, the fewer."""
    if height < 5:
        return 0, int(height > 2)
    margin = min(unit, (height - 2) // 3)
    return margin, margin


def _thickness(kind: SpanKind, inner: int, unit: int) -> int:
    """Waiting is a line in the middle of the lane, a thick one where swapped; a stall a thin one."""
    if kind == SpanKind.SWAPPED:
        return min(inner, max(3 * unit, inner // 2))
    if kind == SpanKind.WAITING:
        return min(inner, (3 if inner >= 8 * unit else 2) * unit)
    return min(inner, unit) if kind == SpanKind.STALLED else inner


def _paint_area(area: np.ndarray, color: int, pattern: Pattern, mark: int, unit: int) -> None:
    area[...] = color
    height, width = area.shape
    y, x = np.indices((height, width)) // unit
    if pattern == "hatch":
        area[(x + y) % 4 == 0] = mark
    elif pattern == "weave":
        area[((x + y) % 6 == 0) | ((x - y) % 6 == 0)] = mark
    elif pattern == "checker":
        area[(x % 4 == 2 * (y // 2 % 2)) & (y % 2 == 0)] = mark


def paint_preemptions(
    painter: QPainter, theme: Theme, content: LaneContent, area: QRect, x_range: tuple[float, float], pitch: float
) -> None:
    """A mark where a request was preempted; of several on one place, one."""
    size = min(MARK, max(3, int(pitch) - 1))
    per_second = area.width() / max(x_range[1] - x_range[0], 1e-9)
    x = (content.preempted_at - x_range[0]) * per_second
    seen = (x >= 0) & (x <= area.width())
    places = np.unique(np.stack([content.preempted_rows[seen], (x[seen] // 3).astype(np.intp)]), axis=1)
    if not places.shape[1]:
        return
    scale = painter.device().devicePixelRatioF()
    mark = QPixmap(round((size + 2) * scale), round((size + 2) * scale))
    mark.setDevicePixelRatio(scale)
    mark.fill(Qt.GlobalColor.transparent)
    brush = QPainter(mark)
    paint_swatch(brush, QRectF(0, 0, size + 2, size + 2), theme.card, "triangle", theme.card)
    paint_swatch(brush, QRectF(1, 1, size, size), theme.preempted, "triangle", theme.card)
    brush.end()
    for row, column in places.T.tolist():
        top = area.top() + row * pitch + (pitch - size - 2) / 2
        painter.drawPixmap(QPointF(area.left() + 3 * column + 1.5 - (size + 2) / 2, top), mark)
