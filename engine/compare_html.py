"""The report of ``compare`` in HTML: one file, no network, no script, light and dark as the reader's system is."""

from __future__ import annotations

from html import escape
from typing import Any

from engine import compare_svg
from engine.comparison import (
    DEFINITIONS,
    EFFICIENCY,
    FIGURES,
    NOT_AVAILABLE,
    WASTE,
    Result,
    charted_figures,
    efficiency_of,
    footnote,
    ids_text,
    median_of,
    ratio_text,
    shown_figures,
    subtitle_of,
    variants_of,
    waste_of,
)
from engine.comparison_words import observations, shortcomings
from engine.variants import knob_rows

# Colours of the window's themes, which are apart with every colour blindness.
STYLE = (
    """
:root { color-scheme: light dark; --text: #1b1f27; --muted: #5f6877; --line: #d9dde3; --card: #ffffff;
  --accent: #0b66d6; --decode: #12946a; --prefill: #1a5fc0; --padding: #a4abb6; --waiting: #b3bac4;
  --preempted: #d8431f; --swapped: #b97a00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8ec; --muted: #9aa1ad; --line: #333842; --card: #1d2026;
  --accent: #4da3ff; --decode: #4fc9a0; --prefill: #4a90f2; --padding: #6b7280; --waiting: #5b6270;
  --preempted: #ff7a59; --swapped: #f2b441; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--card); max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.muted, dt { color: var(--muted); } .watch { max-width: 48rem; } li { max-width: 48rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td span { color: var(--muted); display: inline-block; min-width: 3.6rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); gap: 1.4rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } figcaption .muted { font-weight: 400; }
svg { width: 100%; height: auto; display: block; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; color: var(--muted); margin: 0 0 .4rem; }
.legend svg { width: 26px; height: 12px; display: inline-block; margin-right: .4rem; vertical-align: -1px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; } dd { margin: 0; }
"""
    + compare_svg.STYLE
    + compare_svg.PATTERN_STYLE
)


def html_report(result: Result) -> str:
    """The page of a result of ``compare`` that has at least one run."""
    title = escape(result["title"] or result["runs"][0]["workload"])
    subtitle = escape(subtitle_of(result))
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(run["seed"] for run in result["runs"]))
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="muted">{subtitle} · seed {escape(seeds)}</p>',
        _warnings(result),
        f'<h2>What to watch for</h2><p class="watch">{escape(result["watch"])}</p>' if result["watch"] else "",
        _timelines(result),
        _list("What came of it", observations(result)),
        f'<h2>Figures</h2><div class="wide">{_table(result)}</div><p class="muted">{escape(footnote(result))}</p>',
        f'<h2>Side by side</h2><p class="muted">{escape(_bars_note(result))}</p>'
        f'<div class="charts">{"".join(_charts(result))}</div>',
        _waste(result),
        _knobs(result),
        _facts(result),
        _definitions(),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} · {subtitle}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(p for p in parts if p)
        + "\n</body></html>\n"
    )


def _warnings(result: Result) -> str:
    return "".join(f"<p><strong>{escape(sentence)}</strong></p>" for sentence in shortcomings(result))


def _list(title: str, sentences: list[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<h2>{title}</h2><ul>{items}</ul>" if items else ""


def _timelines(result: Result) -> str:
    drawing = compare_svg.timelines_svg(result)
    if not drawing:
        return ""
    runs = compare_svg.first_runs(result)
    keys = []
    for kind in compare_svg.kinds_of(runs.values()):
        style, words = compare_svg.LOOKS[kind]
        top, height = (4, 4) if kind in compare_svg.THIN else (0, 12)
        swatch = f'<svg viewBox="0 0 26 12"><rect class="{style}" y="{top}" width="26" height="{height}"/></svg>'
        keys.append(f"<span>{swatch}{escape(words)}</span>")
    if any(lane["preempted_at"] for run in runs.values() for lane in run["timeline"]):
        keys.append('<span><svg viewBox="0 0 26 12"><path class="mark" d="M13 10l6 -8h-12z"/></svg>preempted</span>')
    kept = max(len(run["timeline"]) for run in runs.values())
    requests = result["runs"][0]["num_prompts"]
    of_all = f" The first {kept:,} of {requests:,} requests." if kept < requests else ""
    return (
        "<h2>Timelines</h2>"
        f'<p class="muted">A lane for each request in the order of the workload, all variants on one time axis; the '
        f"line at the right is where a variant ends.{of_all}</p>"
        f'<p class="legend">{"".join(keys)}</p>{drawing}'
    )


def _row(cells: list[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _table(result: Result) -> str:
    names = variants_of(result)
    rows = [_row(["", *(escape(name) for name in names)], "th")]
    for figure in shown_figures(result):
        cells = [escape(figure.label)]
        for name in names:
            value = escape(figure.text(median_of(result["runs"], name, figure.key)))
            cells.append(f"{value} <span>{escape(ratio_text(result, name, figure.key))}</span>")
        rows.append(_row(cells))
    rows.append(_row(["ids", *(escape(ids_text(result, name)) for name in names)]))
    return f"<table>{''.join(rows)}</table>"


def _bars_note(result: Result) -> str:
    seeds = len({run["seed"] for run in result["runs"]})
    if seeds == 1:
        return "One seed was run, so there is no spread to show."
    return f"Bars are medians over {seeds} seeds; a whisker goes from the least to the most of them."


def _charts(result: Result) -> list[str]:
    made = []
    for figure in charted_figures(result):
        note = f' <span class="muted">{figure.direction}</span>' if figure.direction else ""
        made.append(
            f"<figure><figcaption>{escape(figure.label)}{note}</figcaption>"
            f"{compare_svg.bars_svg(result, figure)}</figure>"
        )
    return made


def _waste(result: Result) -> str:
    """What was computed or held for nothing, and what static batches were worth."""
    names = variants_of(result)
    rows = [_row(["", *(escape(name) for name in names)], "th")]
    for kind, label in WASTE.items():
        cells = [escape(label)]
        for name in names:
            tokens, seconds = waste_of(result, name, kind)
            text = NOT_AVAILABLE if tokens is None else f"{tokens:,.0f}"
            cells.append(f"{text} <span>{'' if seconds is None else f'{seconds:,.2f} s'}</span>")
        rows.append(_row(cells))
    shares = {name: efficiency_of(result, name) for name in names}
    for key, label in EFFICIENCY.items():
        if any(shares.values()):
            cells = [escape(label)]
            for name in names:
                value = (shares[name] or {}).get(key)
                cells.append(f"{NOT_AVAILABLE if value is None else f'{value:.1%}'} <span></span>")
            rows.append(_row(cells))
    return f'<h2>Waste</h2><div class="wide"><table>{"".join(rows)}</table></div>'


def _knobs(result: Result) -> str:
    """What differs in a table, what does not in a sentence."""
    names, rows = variants_of(result), knob_rows(result)
    differing = [row for row in rows if row.differs]
    table = ""
    if differing:
        lines = [_row(["", *(escape(name) for name in names)], "th")]
        lines += [_row([escape(row.label), *(escape(row.values[name]) for name in names)]) for row in differing]
        table = f'<div class="wide"><table>{"".join(lines)}</table></div>'
    same = ", ".join(f"{row.label} {row.values[names[0]]}" for row in rows if not row.differs)
    return f'<h2>Knobs</h2>{table}<p class="muted">The same for all: {escape(same)}.</p>'


def _facts(result: Result) -> str:
    run = result["runs"][0]
    objectives = run["goodput_objectives_ms"]
    facts: dict[str, Any] = {
        "model": f"{run['model_id']}, weights SHA-256 {run['weights_sha256']}",
        "backend": f"{run['backend']}: {run['backend_reason']}",
        "device": f"{run['device']}, {run['threads']} threads, {run['dtype']}",
        "workload": f"{run['num_prompts']:,} requests, rate {_rate(run['request_rate'])}, latencies from "
        f"{run['latency_from']}",
        "objectives": ", ".join(f"{name} {limit:,g} ms" for name, limit in objectives.items())
        if objectives
        else "none",
        "date": run["date"],
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f"<h2>What ran</h2><dl>{items}</dl>"


def _rate(rate: float | str | None) -> str:
    if rate is None:
        return "as the workload's times have it"
    return "unlimited (all at once)" if isinstance(rate, str) else f"{rate:g}/s"


def _definitions() -> str:
    definitions = {figure.label: figure.meaning for figure in FIGURES} | DEFINITIONS
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in definitions.items())
    return f"<h2>Definitions</h2><dl>{items}</dl>"
