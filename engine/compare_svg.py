"""The drawings of a comparison's report, as SVG: timelines under each other on one time axis, and bars. Light.

Colours are CSS variables of the page; a state differs in its pattern too. Lengths are pixels where the page is as wide
as the drawing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from engine.comparison import Figure, Result, Run, median_of, runs_of, spread_of, variants_of
from engine.comparison_words import times
from engine.lanes import SpanKind

WIDTH = 1100
LEFT, RIGHT, TOP, BOTTOM = 4, 46, 24, 26
"""Around the lanes: room for the labels of the axis, which is told above and below."""
HEADER = 26
"""Above the lanes of a variant."""
VARIANT_HEIGHT = 220
"""That its lanes are fitted into, as far as they do not get too thin or too thick."""
THINNEST, THICKEST = 1.0, 20.0
THIN_SHARE = 0.3
"""Of a lane's height, for states in which nothing is computed."""
TITLED_LANES = 120
"""Where a variant has more, lanes are too thin to be pointed at."""

LOOKS: dict[SpanKind, tuple[str, str]] = {
    SpanKind.WAITING: ("waiting", "waiting to join"),
    SpanKind.PREFILL: ("prefill", "prefill"),
    SpanKind.DECODE: ("decode", "decode"),
    SpanKind.PADDING: ("padding", "padding of a static batch"),
    SpanKind.RECOMPUTE: ("recompute", "computed again after a preemption"),
    SpanKind.SWAPPED: ("swapped", "swapped to host memory"),
    SpanKind.STALLED: ("stalled", "running, left out by the budget"),
}
"""Style class of a state, and what it is."""
THIN = frozenset({SpanKind.WAITING, SpanKind.STALLED})

STYLE = """
.waiting { fill: var(--waiting); } .prefill { fill: var(--prefill); } .decode { fill: var(--decode); }
.padding { fill: url(#weave); } .recompute { fill: url(#hatch); } .swapped { fill: url(#checker); }
.stalled { fill: url(#dashes); } .mark { fill: var(--preempted); } .failed { stroke: var(--preempted); fill: none; }
.grid { stroke: var(--line); fill: none; } .end { stroke: var(--text); fill: none; }
.bar { fill: var(--accent); } .base { fill: var(--waiting); } .whisker { stroke: var(--text); fill: none; }
.over { fill: transparent; } text { font-size: 12px; fill: var(--text); } text.axis { fill: var(--muted); }
text.name { font-weight: 600; }
"""
PATTERNS = """<defs>
<pattern id="weave" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" class="weave-area"/>
<path d="M0 0L6 6M6 0L0 6" class="weave-line"/></pattern>
<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse"><rect width="5" height="5" class="hatch-area"/>
<path d="M-1 1L1 -1M0 5L5 0M4 6L6 4" class="hatch-line"/></pattern>
<pattern id="checker" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" class="check-area"/>
<path d="M0 0h3v3h-3zM3 3h3v3h-3z" class="check-mark"/></pattern>
<pattern id="dashes" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="5" height="8" class="dash"/>
</pattern>
</defs>"""
PATTERN_STYLE = """
.weave-area { fill: var(--padding); } .weave-line { stroke: var(--card); stroke-width: .9; }
.hatch-area { fill: var(--preempted); } .hatch-line { stroke: var(--card); stroke-width: 1.1; }
.check-area { fill: var(--swapped); } .check-mark { fill: var(--card); fill-opacity: .55; }
.dash { fill: var(--muted); }
"""


# Timelines -----------------------------------------------------------------------------------------------------------


def timelines_svg(result: Result) -> str:
    """Of the first seed, a variant under the other; empty where no timeline is kept."""
    runs = first_runs(result)
    longest = max((_end(run) for run in runs.values()), default=0.0)
    if longest <= 0:
        return ""
    lanes = max(len(run["timeline"]) for run in runs.values())
    height = min(THICKEST, max(THINNEST, VARIANT_HEIGHT / lanes))
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts, top = [], float(TOP)
    for name, run in runs.items():
        parts.append(_variant(name, run, top, height, scale))
        top += HEADER + height * len(run["timeline"]) + 6
    return (
        f'<svg viewBox="0 0 {WIDTH} {top + BOTTOM:.0f}" role="img" aria-label="A lane for each request, of every '
        f'variant, on one time axis">{PATTERNS}{_axis(longest, scale, top)}{"".join(parts)}</svg>'
    )


def first_runs(result: Result) -> dict[str, Run]:
    """The run of the first seed of each variant that has it, where its timeline is kept."""
    seed = result["runs"][0]["seed"]
    return {
        name: run
        for name in variants_of(result)
        for run in runs_of(result, name)
        if run["seed"] == seed and run["timeline"]
    }


def kinds_of(runs: Iterable[Run]) -> list[SpanKind]:
    """The states that timelines have, in the order of ``LOOKS``."""
    seen = {span[0] for run in runs for lane in run["timeline"] for span in lane["spans"]}
    return [kind for kind in LOOKS if kind in seen]


def _end(run: Run) -> float:
    return max((lane["spans"][-1][2] for lane in run["timeline"] if lane["spans"]), default=0.0)


def _variant(name: str, run: Run, top: float, height: float, scale: float) -> str:
    lanes, first = run["timeline"], top + HEADER
    gap = 2.0 if height >= 8 else 0.5 if height >= 3 else 0.0
    boxes: dict[SpanKind, list[str]] = {}
    marks, failures, titles = [], [], []
    for row, lane in enumerate(lanes):
        y = first + row * height
        for kind, begin, end in merged(lane["spans"], scale):
            thickness = (height - gap) * (THIN_SHARE if kind in THIN else 1.0)
            x, upper = LEFT + begin * scale, y + (height - gap - thickness) / 2
            width = _number((end - begin) * scale)
            boxes.setdefault(kind, []).append(f"M{_number(x)} {_number(upper)}h{width}v{_number(thickness)}h-{width}z")
        size = max(2.5, min(5.0, height / 2.5))
        for instant in lane["preempted_at"]:
            x = LEFT + instant * scale
            marks.append(f"M{_number(x)} {_number(y)}l{size:g} -{size:g}h-{2 * size:g}z")
        if lane["reason"] in ("error", "abort") and lane["end"] is not None:
            x, middle = LEFT + lane["end"] * scale, y + (height - gap) / 2
            failures.append(
                f"M{_number(x - size)} {_number(middle - size)}l{2 * size:g} {2 * size:g}m0 -{2 * size:g}"
                f"l-{2 * size:g} {2 * size:g}"
            )
        if len(lanes) <= TITLED_LANES:
            titles.append(_title(run, row, lane, y, height))
    end = _end(run)
    x, bottom = LEFT + end * scale, first + height * len(lanes)
    drawn = "".join(f'<path class="{LOOKS[kind][0]}" d="{"".join(paths)}"/>' for kind, paths in boxes.items())
    drawn += f'<path class="mark" d="{"".join(marks)}"/>' if marks else ""
    drawn += f'<path class="failed" d="{"".join(failures)}"/>' if failures else ""
    anchor = "end" if x > WIDTH / 2 else "start"
    return (
        f'<text class="name" x="{LEFT}" y="{top + 18:.0f}">{escape(name)}</text>{drawn}'
        f'<path class="end" d="M{_number(x)} {_number(top + 8)}V{_number(bottom)}"/>'
        f'<text x="{_number(x + (-6 if anchor == "end" else 6))}" y="{top + 18:.0f}" text-anchor="{anchor}">'
        f"{escape(seconds_text(end))}</text>{''.join(titles)}"
    )


def _title(run: Run, row: int, lane: dict[str, Any], y: float, height: float) -> str:
    """A lane's tooltip, over its whole length."""
    words = [f"request {lane['request']}"]
    if lane["user"]:
        words.append(f"user {lane['user']}")
    if lane["priority"]:
        words.append(f"priority {lane['priority']}")
    prompts, outputs, firsts = (run.get(key) or [] for key in ("input_lens", "output_lens", "ttfts"))
    if row < min(len(prompts), len(outputs)):
        words.append(f"{prompts[row]:,} prompt and {outputs[row]:,} output tokens")
    if row < len(firsts) and firsts[row] is not None:
        words.append(f"first token after {seconds_text(firsts[row])}")
    if lane["preempted_at"]:
        words.append(f"preempted {times(len(lane['preempted_at']))}")
    if lane["end"] is not None:
        words.append(f"ended at {seconds_text(lane['end'])} ({lane['reason']})")
    return (
        f'<rect class="over" x="{LEFT}" y="{_number(y)}" width="{WIDTH - LEFT - RIGHT}" height="{_number(height)}">'
        f"<title>{escape(', '.join(words))}</title></rect>"
    )


def merged(spans: Sequence[Sequence[Any]], scale: float) -> list[tuple[SpanKind, float, float]]:
    """(kind, begin, end) of a lane's spans; those of less than a pixel become one of a pixel, of the state that takes
    most of it. ``scale``: pixels per second."""
    made: list[tuple[SpanKind, float, float]] = []
    shares: dict[int, float] = {}
    begin = 0.0

    def close(end: float) -> None:
        if shares:
            made.append((SpanKind(max(shares, key=shares.__getitem__)), begin, end))
            shares.clear()

    for kind, span_begin, span_end, *_ in spans:
        if (span_end - span_begin) * scale >= 1:
            close(span_begin)
            made.append((SpanKind(kind), span_begin, span_end))
            continue
        if not shares:
            begin = span_begin
        shares[kind] = shares.get(kind, 0.0) + span_end - span_begin
        if (span_end - begin) * scale >= 1:
            close(span_end)
    close(max(spans[-1][2], begin + 1 / scale) if spans else 0.0)
    return made


def _axis(longest: float, scale: float, bottom: float) -> str:
    """Lines through all lanes, and their seconds above and below."""
    step = nice_step(longest)
    parts = []
    for index in range(int(longest / step + 1e-9) + 1):
        x, anchor = _number(LEFT + index * step * scale), "middle" if index else "start"
        parts.append(f'<path class="grid" d="M{x} {TOP}V{_number(bottom)}"/>')
        for y in (TOP - 8, bottom + 16):
            parts.append(f'<text class="axis" x="{x}" y="{y:.0f}" text-anchor="{anchor}">{index * step:g} s</text>')
    return "".join(parts)


def nice_step(extent: float, most: int = 10) -> float:
    """The smallest of 1, 2 or 5 × 10^n of which at most ``most`` cover ``extent``; 1 where there is no length."""
    if not math.isfinite(extent) or extent <= 0 or most < 1:
        return 1.0
    rough = extent / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1.0, 2.0, 5.0) if factor * power >= rough * (1 - 1e-9)), 10.0 * power)


def seconds_text(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


def _number(value: float) -> str:
    """Hundredths of a pixel, as short as can be."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


# Bars ----------------------------------------------------------------------------------------------------------------

ROW, BAR_WIDTH, VALUE_WIDTH, LETTER = 22, 400, 92, 7
"""Pixels: height of a bar's row, width of a chart, room for a value, and of a letter of a name."""
LONGEST_NAME = 24
"""Letters of a variant's name; the rest is cut off, and told by the bar's title."""


def bars_svg(result: Result, figure: Figure) -> str:
    """A bar for each variant, from 0 to the median over its seeds, with a whisker from the least to the most."""
    names = variants_of(result)
    spreads = {name: spread_of(result["runs"], name, figure.key) for name in names}
    largest = max((s.most for s in spreads.values() if s is not None), default=0) or 1
    left = LETTER * min(LONGEST_NAME, max(map(len, names))) + 12
    room = BAR_WIDTH - left - VALUE_WIDTH
    bars = []
    for index, (name, spread) in enumerate(spreads.items()):
        top = index * ROW
        short = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
        told = f"{name}: {figure.text(median_of(result['runs'], name, figure.key))}"
        length = farthest = 0.0
        whisker = ""
        if spread is not None:
            length, farthest = room * max(spread.median, 0) / largest, room * max(spread.most, 0) / largest
            if spread.seeds > 1:
                least = left + room * max(spread.least, 0) / largest
                whisker = (
                    f'<path class="whisker" d="M{least:.1f} {top + 11}H{left + farthest:.1f}M{least:.1f} {top + 7}v8'
                    f'M{left + farthest:.1f} {top + 7}v8"/>'
                )
                told += f", {figure.text(spread.least)} to {figure.text(spread.most)} over {spread.seeds} seeds"
        style = "base" if name == result["baseline"] else "bar"
        bars.append(
            f"<g><title>{escape(told)}</title>"
            f'<text x="0" y="{top + 15}">{escape(short)}</text>'
            f'<rect class="{style}" x="{left}" y="{top + 4}" width="{length:.1f}" height="{ROW - 8}" rx="2"/>{whisker}'
            f'<text x="{left + farthest + 6:.1f}" y="{top + 15}">'
            f"{escape(figure.text(None if spread is None else spread.median))}</text></g>"
        )
    label = escape(figure.label)
    return f'<svg viewBox="0 0 {BAR_WIDTH} {ROW * len(names)}" role="img" aria-label="{label}">{"".join(bars)}</svg>'
