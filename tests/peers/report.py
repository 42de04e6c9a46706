"""What the runs came to, as tables for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.peers.cases import Case
from tests.peers.figures import Figures, Outcome, Ratio, figures, figures_of, medians, ratios
from tests.peers.runs import Subject


@dataclass
class Row:
    """One engine in one case, over the rounds."""

    subject: Subject
    rounds: list[Figures] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def medians(self) -> Figures:
        return medians(self.rounds)

    @property
    def note(self) -> str:
        """What failed, as a sentence."""
        if not self.failures:
            return ""
        runs = len(self.rounds) + len(self.failures)
        return f"{len(self.failures)} of {runs} failed: {'; '.join(dict.fromkeys(self.failures))}"


class Report:
    """Rows of all cases, filled run by run, so that it can be shown and written at any time."""

    def __init__(self, cases: Sequence[Case], subjects: Sequence[Subject]) -> None:
        self._cases = cases
        self._rows = {(case.name, s.label): Row(s) for case in cases for s in subjects}

    def row(self, case: Case, subject: Subject) -> Row:
        return self._rows[case.name, subject.label]

    def rows(self, case: Case) -> list[Row]:
        return [row for (name, _), row in self._rows.items() if name == case.name]

    def add(self, case: Case, subject: Subject, outcome: Outcome) -> None:
        row = self.row(case, subject)
        row.facts |= outcome.facts
        if outcome.failure:
            row.failures.append(outcome.failure)
        else:
            row.rounds.append(figures(case, outcome))

    @property
    def ours_failed(self) -> bool:
        return any(row.failures for row in self._rows.values() if row.subject.ours)

    def ratios(self, case: Case) -> dict[str, dict[str, Ratio]]:
        """By label of ours, by figure."""
        rows = self.rows(case)
        peers = {row.subject.label: row.medians for row in rows if not row.subject.ours}
        return {row.subject.label: ratios(figures_of(case), row.medians, peers) for row in rows if row.subject.ours}

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "case": case.name,
                "requests": len(case.rows),
                "max_concurrency": case.max_concurrency,
                "engines": [
                    {
                        "engine": row.subject.label,
                        "ours": row.subject.ours,
                        "facts": row.facts,
                        "medians": row.medians,
                        "rounds": row.rounds,
                        "failures": row.failures,
                    }
                    for row in self.rows(case)
                ],
                "ratios": {
                    label: {key: {"ratio": ratio.value, "best_peer": ratio.peer} for key, ratio in found.items()}
                    for label, found in self.ratios(case).items()
                },
            }
            for case in self._cases
        ]

    def print(self, console: Console) -> None:
        for case in self._cases:
            console.print(self._table(case))
            for row in self.rows(case):
                if row.note:
                    console.print(f"{row.subject.label}: {row.note}", markup=False)

    def _table(self, case: Case) -> Table:
        rows = self.rows(case)
        tokens = sum(row["output_tokens"] for row in case.rows)
        title = f"{case.name}: {len(case.rows)} requests, {case.max_concurrency} at once, {tokens:,} output tokens; "
        table = Table(title=title + f"medians of {max(len(row.rounds) for row in rows)}", title_justify="left")
        table.add_column("engine")
        for column in figures_of(case):
            table.add_column(f"{column.title} {'↑' if column.more_is_better else '↓'}", justify="right")
        for row in rows:
            found = row.medians
            table.add_row(row.subject.label, *(_cell(found.get(c.key), c.places) for c in figures_of(case)))
        for label, found_ratios in self.ratios(case).items():
            if found_ratios:
                table.add_section()
                cells = (_ratio_cell(found_ratios.get(column.key)) for column in figures_of(case))
                table.add_row(f"{label}\n÷ best peer", *cells)
        return table


def _cell(value: float | None, places: int) -> str:
    return "–" if value is None else f"{value:,.{places}f}"


def _ratio_cell(ratio: Ratio | None) -> str:
    return "–" if ratio is None else f"{ratio.value:.2f}×\n{ratio.peer.split()[0]}"


def short(case: Case, outcome: Outcome) -> str:
    """One run in a line."""
    if outcome.failure:
        return f"failed: {outcome.failure}"
    found = figures(case, outcome)
    return ", ".join(_facts(found, case))


def _facts(found: Figures, case: Case) -> Iterable[str]:
    for column in figures_of(case):
        value = found.get(column.key)
        if value is not None:
            yield f"{column.title} {value:,.{column.places}f}"
