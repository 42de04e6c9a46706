"""What ``compare`` shows on a terminal."""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine.comparison import (
    EFFICIENCY,
    NOT_AVAILABLE,
    efficiency_of,
    footnote,
    ids_text,
    median_of,
    ratio_text,
    shown_figures,
    subtitle_of,
    variants_of,
)


def print_comparison(result: dict[str, Any], stream: TextIO) -> None:
    """The figures most people look for, a variant a column; the JSON has them all."""
    names = variants_of(result)
    console = Console(file=stream, width=None if stream.isatty() else 28 + 26 * len(names))
    console.print(escape(subtitle_of(result)), style="bold", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(escape(name), justify="right")
    for figure in shown_figures(result):
        cells = []
        for name in names:
            value = figure.text(median_of(result["runs"], name, figure.key))
            ratio = ratio_text(result, name, figure.key)
            cells.append(f"{value}  [dim]{ratio:>6}[/dim]" if len(names) > 1 else value)
        table.add_row(figure.label, *cells)
    for key, label in EFFICIENCY.items():
        shares = [(efficiency_of(result, name) or {}).get(key) for name in names]
        if any(share is not None for share in shares):
            table.add_row(label, *(NOT_AVAILABLE if share is None else f"{share:.1%}" for share in shares))
    table.add_row("ids", *(ids_text(result, name) for name in names))
    console.print(table)
    console.print(f"\n{escape(footnote(result))}", style="dim", soft_wrap=True)
