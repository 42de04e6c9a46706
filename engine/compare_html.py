"""The report of ``compare`` in HTML: one file, no network, no script, light and dark as the reader's system is."""

from __future__ import annotations

from html import escape
from typing import Any

from engine.compare_report import (
    FIGURES,
    Figure,
    disciplines_of,
    footnote,
    ids_text,
    median_of,
    ratio_text,
    shown_figures,
    title_of,
)
from engine.workload import Scenario

STYLE = """
:root { color-scheme: light dark; --text: #1c2330; --muted: #5b6576; --line: #d7dce4; --page: #ffffff; --bar: #3f6fb5;
  --base: #9aa5b5; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ef; --muted: #98a2b3; --line: #343c4a; --page: #171b22;
  --bar: #7aa5e0; --base: #626d7e; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.muted, caption, dt { color: var(--muted); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td span { color: var(--muted); display: inline-block; min-width: 3.6rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: 1.4rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--text); } .bar { fill: var(--bar); } .base { fill: var(--base); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; } dd { margin: 0; }
"""

CHARTED = (
    "request_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
    "slot_utilisation",
    "steps",
)
ROW, LABEL_WIDTH, WIDTH, VALUE_WIDTH = 22, 118, 360, 84
"""Pixels of the charts: height of a bar's row, and where the bars begin and end."""


def html_report(result: dict[str, Any], scenario: Scenario | None) -> str:
    """``result`` is that of ``compare``; ``scenario`` where one was run."""
    title = escape(title_of(result))
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(run["seed"] for run in result["runs"]))
    parts = [
        f"<h1>{escape(scenario.title if scenario else result['runs'][0]['workload'])}</h1>",
        f'<p class="muted">{title} · seed {escape(seeds)}</p>',
        f"<p>{escape(scenario.watch.strip())}</p>" if scenario else "",
        "<p><strong>Interrupted: only the runs that were complete are shown.</strong></p>"
        if result["interrupted"]
        else "",
        f'<div class="wide">{_table(result)}</div>',
        f'<p class="muted">{escape(footnote(result))}</p>',
        f'<h2>Side by side</h2><div class="charts">{"".join(_chart(result, f) for f in _charted(result))}</div>',
        _waste(result),
        _facts(result),
        _definitions(),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(p for p in parts if p)
        + "\n</body></html>\n"
    )


def _row(cells: list[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _table(result: dict[str, Any]) -> str:
    names = disciplines_of(result)
    rows = [_row(["", *(escape(name) for name in names)], "th")]
    for figure in shown_figures(result):
        cells = [escape(figure.label)]
        for name in names:
            value = escape(figure.text(median_of(result["runs"], name, figure.key)))
            cells.append(f"{value} <span>{escape(ratio_text(result, name, figure.key))}</span>")
        rows.append(_row(cells))
    rows.append(_row(["ids", *(escape(ids_text(result, name)) for name in names)]))
    return f"<table>{''.join(rows)}</table>"


def _charted(result: dict[str, Any]) -> list[Figure]:
    return [figure for figure in shown_figures(result) if figure.key in CHARTED]


def _chart(result: dict[str, Any], figure: Figure) -> str:
    """A bar for each discipline, from 0."""
    names = disciplines_of(result)
    values = [median_of(result["runs"], name, figure.key) for name in names]
    largest = max((value for value in values if value is not None), default=0) or 1
    room = WIDTH - LABEL_WIDTH - VALUE_WIDTH
    bars = []
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        top = index * ROW
        length = 0 if value is None else room * value / largest
        style = "base" if name == result["baseline"] else "bar"
        bars.append(
            f'<text x="0" y="{top + 15}">{escape(name)}</text>'
            f'<rect class="{style}" x="{LABEL_WIDTH}" y="{top + 4}" width="{length:.1f}" height="{ROW - 8}" rx="2"/>'
            f'<text x="{LABEL_WIDTH + length + 6:.1f}" y="{top + 15}">{escape(figure.text(value))}</text>'
        )
    better = {True: "higher is better", False: "lower is better", None: ""}[figure.higher_is_better]
    note = f' <span class="muted">{better}</span>' if better else ""
    label = escape(figure.label)
    return (
        f"<figure><figcaption>{label}{note}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {ROW * len(names)}" role="img" aria-label="{label}">{"".join(bars)}</svg></figure>'
    )


def _waste(result: dict[str, Any]) -> str:
    """Waste of the first seed's runs, and what static batches were worth."""
    first: dict[str, dict[str, Any]] = {}
    for run in result["runs"]:
        first.setdefault(run["discipline"], run)
    kinds = {
        "padding": "padding, tokens computed",
        "recomputed": "recomputed, tokens",
        "rejected_drafts": "rejected drafts, tokens",
        "reserved": "reserved but unused, KV slots",
        "tail": "tail of the last block, KV slots",
    }
    rows = [_row(["", *(escape(name) for name in first)], "th")]
    for kind, label in kinds.items():
        cells = [escape(label)]
        for run in first.values():
            waste = run["waste"][kind]
            tokens = "n/a" if waste["tokens"] is None else f"{waste['tokens']:,.0f}"
            seconds = "" if waste["seconds"] is None else f"{waste['seconds']:,.2f} s"
            cells.append(f"{tokens} <span>{seconds}</span>")
        rows.append(_row(cells))
    text = f'<h2>Waste</h2><div class="wide"><table>{"".join(rows)}</table></div>'
    for run in first.values():
        if totals := run["static_totals"]:
            text += (
                f"<p>Static batching: η {totals['eta']:.1%} (the literature's efficiency), useful share of what was "
                f"computed {totals['measured_useful']:.1%}, predicted {totals['predicted_useful']:.1%}, over "
                f"{totals['batches']} batches.</p>"
            )
    return text


def _facts(result: dict[str, Any]) -> str:
    run = result["runs"][0]
    facts = {
        "model": f"{run['model_id']}, weights SHA-256 {run['weights_sha256']}",
        "backend": f"{run['backend']}: {run['backend_reason']}",
        "device": f"{run['device']}, {run['threads']} threads, {run['dtype']}",
        "engine": f"order {run['order']}, preemption {run['preemption']}, {run['max_num_seqs']} slots, "
        f"{run['kv_blocks_total']:,} KV blocks of {run['block_size']} tokens, prefix cache "
        f"{'on' if run['prefix_cache'] else 'off'}, chunked prefill {'on' if run['chunked_prefill'] else 'off'}, "
        f"speculation {run['speculative']}",
        "workload": f"{run['num_prompts']} requests, rate {run['request_rate']}, latencies from {run['latency_from']}",
        "date": run["date"],
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f"<h2>What ran</h2><dl>{items}</dl>"


def _definitions() -> str:
    definitions = {figure.label: figure.meaning for figure in FIGURES} | {
        "padding, recomputed, rejected drafts": "Tokens that were computed; their seconds are each step's time times "
        "their share of the tokens it computed.",
        "reserved, tail": "The mean of empty KV slots that running requests hold, weighted by time; their seconds are "
        "pool-seconds, step time times slots divided by the slots of the pool.",
        "η": "Σ(prompt + output) / (B · max(prompt + output)) of a static batch of B requests.",
        "useful share": "Σ(p + o - 1) / (B · (max p + max o - 1)) predicted from p prompt and o output tokens; "
        "measured: tokens computed for the requests themselves / all that were computed.",
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in definitions.items())
    return f"<h2>Definitions</h2><dl>{items}</dl>"
