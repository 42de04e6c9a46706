"""The report in HTML: complete in itself, everything escaped, the timelines true to scale and of a reasonable size."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from engine.compare_html import html_report
from engine.compare_svg import LEFT, LOOKS, RIGHT, WIDTH, merged, nice_step, timelines_svg
from engine.lanes import SpanKind
from tests.load.comparisons import result_of, run_result


class Tags(HTMLParser):
    """Everything in a page that would fetch something or run, and whether its tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.found += [name for name, _ in attrs if name in ("src", "href", "style") or name.startswith("on")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "tags are balanced"


def boxes(page: str, kind: SpanKind) -> list[tuple[float, float]]:
    """(left, width) of every span of a state in the page, in order."""
    paths = re.findall(rf'<path class="{LOOKS[kind][0]}" d="([^"]*)"', page)
    return [(float(x), float(w)) for path in paths for x, w in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", path)]


def test_the_page_needs_nothing_and_escapes_everything() -> None:
    hostile = "<script>x</script>"
    runs = [run_result(hostile, steps=1), run_result("vllm", steps=2)]
    runs[0]["timeline"][0]["user"] = hostile
    page = html_report(
        result_of(runs, title=hostile, watch="a & b <img src=x>", failures={hostile: hostile}, interrupted=True)
    )
    tags = Tags()
    tags.feed(page)
    assert tags.found == [] and tags.open == []
    assert "&lt;script&gt;" in page and "&lt;img" in page and "&lt;x&gt;" in page and "could not run" in page
    assert "Interrupted" in page
    assert "http" not in page and not re.findall(r"url\((?!#)", page) and "prefers-color-scheme: dark" in page
    for name in re.findall(r"url\(#(\w+)\)", page):
        assert f'<pattern id="{name}"' in page
    for name in re.findall(r"var\(--([\w-]+)\)", page):
        assert page.count(f"--{name}: ") == 2, "in light and in dark"


def test_bars_are_true_and_whiskers_show_the_spread() -> None:
    runs = [run_result("static", s, request_throughput=v) for s, v in ((1, 1.0), (2, 2.0), (3, 4.0))]
    runs += [run_result("vllm", s, request_throughput=4.0) for s in (1, 2, 3)]
    page = html_report(result_of(runs))
    widths = [float(w) for w in re.findall(r'rect class="ba\w+" [^>]*width="([\d.]+)"', page)]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    least, most = map(float, re.findall(r'class="whisker" d="M([\d.]+) [\d.]+H([\d.]+)', page)[0])
    left = float(re.findall(r'rect class="base" x="([\d.]+)"', page)[0])
    assert most - left == pytest.approx(4 * (least - left), rel=0.02)
    assert "2.00 /s, 1.00 /s to 4.00 /s over 3 seeds" in page
    one_seed = html_report(result_of([run_result("static", request_throughput=1.0)]))
    assert '<path class="whisker"' not in one_seed and "no spread to show" in one_seed


def test_all_variants_share_one_time_axis() -> None:
    static = [(SpanKind.WAITING, 0.0, 2.0, 0), (SpanKind.DECODE, 2.0, 6.0, 9), (SpanKind.PADDING, 6.0, 10.0, 9)]
    runs = [run_result("static", lanes=[static]), run_result("vllm", lanes=[[(SpanKind.DECODE, 0.0, 5.0, 9)]])]
    page = html_report(result_of(runs))
    scale = (WIDTH - LEFT - RIGHT) / 10
    assert boxes(page, SpanKind.WAITING) == [(LEFT, pytest.approx(2 * scale, abs=0.01))]
    assert boxes(page, SpanKind.DECODE) == [
        (pytest.approx(LEFT + 2 * scale, abs=0.01), pytest.approx(4 * scale, abs=0.01)),
        (LEFT, pytest.approx(5 * scale, abs=0.01)),
    ]
    assert boxes(page, SpanKind.PADDING) == [(pytest.approx(LEFT + 6 * scale, abs=0.01), pytest.approx(4 * scale))]
    assert "padding of a static batch" in page and "swapped to host memory" not in page, "the legend has what there is"
    assert ">10 s<" in page and ">5.00 s<" in page


def test_preemptions_and_failures_are_marked() -> None:
    run = run_result("vllm", lanes=[[(SpanKind.RECOMPUTE, 0.0, 1.0, 3)], [(SpanKind.DECODE, 0.0, 1.0, 3)]])
    run["timeline"][0]["preempted_at"] = [0.25, 0.5]
    run["timeline"][1]["reason"] = "error"
    page = timelines_svg(result_of([run]))
    assert len(re.findall("M", re.findall(r'class="mark" d="([^"]*)"', page)[0])) == 2
    assert 'class="failed"' in page and "preempted 2 times" in page


def test_spans_below_a_pixel_become_one_of_the_state_that_takes_most() -> None:
    tiny = [(kind, i / 10, (i + 1) / 10, 1) for i, kind in enumerate([0, 6, 0] * 10)]
    found = merged(tiny, scale=1.0)
    assert [kind for kind, _, _ in found] == [SpanKind.DECODE] * 3
    assert found[0][1] == 0.0 and found[-1][2] == pytest.approx(3.0)
    for (_, _, before), (_, after, _) in itertools.pairwise(found):
        assert before == after
    long = [(0, 0.0, 5.0, 1), (3, 5.0, 5.1, 1), (0, 5.1, 9.0, 1)]
    assert merged(long, 1.0) == [(0, 0.0, 5.0), (3, 5.0, 5.1), (0, 5.1, 9.0)], "what stands alone stays to be seen"
    assert merged([], 1.0) == []
    assert merged([(4, 2.0, 2.0, 0)], 10.0) == [(SpanKind.WAITING, 2.0, 2.1)]


@pytest.mark.parametrize(
    ("extent", "step"), [(13.0, 2.0), (10.0, 1.0), (0.004, 0.0005), (101.0, 20.0), (1e6, 100_000.0), (49.0, 5.0)]
)
def test_the_axis_has_round_steps(extent: float, step: float) -> None:
    assert nice_step(extent) == pytest.approx(step)


def test_500_lanes_and_20000_spans_stay_a_reasonable_file() -> None:
    def lanes(width: float) -> list[list[tuple[int, float, float, int]]]:
        return [[((i + j) % 7, (i + j) * width, (i + j + 1) * width, 3) for j in range(40)] for i in range(500)]

    runs = [run_result(name, lanes=lanes(width)) for name, width in (("static", 0.1), ("orca", 0.07), ("vllm", 0.05))]
    page = html_report(result_of(runs))
    assert len(page) < 2_500_000
    tags = Tags()
    tags.feed(page)
    assert tags.open == []


def test_a_result_without_timelines_or_figures_is_a_page_all_the_same() -> None:
    run: dict[str, Any] = run_result("a") | {"timeline": []}
    page = html_report(result_of([run]))
    assert "Timelines" not in page and "Waste" in page and "n/a" in page
