"""A comparison as the window shows it: rows of cells with ratios to any of its variants. Qt-free.

What the figures are and how they are made of the runs is :mod:`engine.comparison`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.translation import ntr, tr
from app.words import seconds_label
from engine.comparison import (
    DEFINITIONS,
    NOT_AVAILABLE,
    WASTE,
    Figure,
    Result,
    Run,
    charted_figures,
    footnote,
    ids_text,
    ratios_to,
    runs_of,
    shown_figures,
    spread_of,
    subtitle_of,
    variants_of,
    waste_of,
)
from engine.comparison_words import observations, shortcomings
from engine.recorded_run import VARIANT as RECORDED

ALIKE = 0.02
"""A ratio this close to 1 is neither better nor worse."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one variant."""

    variant: str
    text: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    """The least and the most over the seeds."""
    spread: str = ""
    """Those two in words; empty with one seed."""
    ratio: str = ""
    better: int = 0
    """Than the baseline: 1; worse: -1; alike, or neither is: 0."""

    @property
    def missing(self) -> bool:
        return self.text == NOT_AVAILABLE


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    meaning: str
    cells: list[Cell]


class ComparedResult:
    """One result against one baseline; None: the recorded run where there is one, else the one it was made with."""

    def __init__(self, result: Result, baseline: str | None = None) -> None:
        self.plain = result
        """As ``compare --json`` writes it."""
        self.variants = variants_of(result)
        self.seeds: list[int | None] = list(dict.fromkeys(run["seed"] for run in result["runs"]))
        made_with = RECORDED if RECORDED in self.variants else result["baseline"]
        self.baseline: str = baseline or made_with
        own = self.baseline == result["baseline"]
        self.ratios = result["ratios"] if own else ratios_to(result["runs"], self.baseline)

    @property
    def title(self) -> str:
        return self.plain["title"] or self.plain["runs"][0]["workload"]

    @property
    def watch(self) -> str:
        return self.plain["watch"].strip()

    @property
    def about(self) -> str:
        seeds = [f"{seed}" for seed in self.seeds if seed is not None]
        named = ntr(" · seed {seeds}", " · seeds {seeds}", len(seeds), seeds=", ".join(seeds)) if seeds else ""
        return subtitle_of(self.plain) + named

    @property
    def footnote(self) -> str:
        made = footnote(self.plain)
        if self.baseline == self.plain["baseline"]:
            return made
        return tr(
            "The ratios are to {baseline}; the ids were compared with those of {plain}.",
            baseline=self.baseline,
            plain=self.plain["baseline"],
        )

    @property
    def reported(self) -> Result:
        """As the report shows it: against this baseline. Ids are known only beside the one it was made with."""
        if self.baseline == self.plain["baseline"]:
            return self.plain
        return {**self.plain, "baseline": self.baseline, "ratios": self.ratios, "same_ids": {}}

    @property
    def own_runs(self) -> list[Run]:
        """Those that the comparison made."""
        return [run for run in self.plain["runs"] if run["variant"] != RECORDED]

    def against(self, baseline: str) -> ComparedResult:
        """The same runs with their ratios to another variant."""
        return ComparedResult(self.plain, baseline)

    def with_recorded(self, run: Run) -> ComparedResult:
        """The recorded run beside the others, as their baseline: it stands for every seed."""
        recorded = [{**run, "variant": RECORDED, "seed": seed} for seed in self.seeds]
        plain = {
            **self.plain,
            "variants": [{"name": RECORDED, "options": {}}, *self.plain["variants"]],
            "runs": [*self.plain["runs"], *recorded],
        }
        return ComparedResult(plain)

    def faults(self) -> list[str]:
        """What keeps this result from being whole, a sentence each."""
        return shortcomings({**self.plain, "runs": self.own_runs})

    def runs_of_seed(self, seed: int | None) -> list[Run]:
        """A run of each variant that has this seed."""
        return [run for name in self.variants for run in runs_of(self.plain, name) if run["seed"] == seed]

    def seed_name(self, seed: int | None) -> str:
        return tr("the workload's own") if seed is None else f"{seed}"

    # Figures -----------------------------------------------------------------------------------------------------

    def figures(self) -> list[Figure]:
        return shown_figures(self.plain)

    def charted(self) -> list[Figure]:
        return charted_figures(self.plain)

    def cells(self, figure: Figure) -> list[Cell]:
        return [self._cell(figure, name) for name in self.variants]

    def _cell(self, figure: Figure, variant: str) -> Cell:
        spread = spread_of(self.plain["runs"], variant, figure.key)
        if spread is None:
            return Cell(variant, NOT_AVAILABLE)
        words = ""
        if spread.seeds > 1:
            words = tr(
                "{least} to {most} over {seeds} seeds",
                least=figure.text(spread.least),
                most=figure.text(spread.most),
                seeds=spread.seeds,
            )
        cell = Cell(variant, figure.text(spread.median), spread.median, spread.least, spread.most, words)
        ratio = self.ratios.get(variant, {}).get(figure.key)
        if ratio is None or variant == self.baseline:
            return cell
        return replace(cell, ratio=f"{ratio:.2f}×", better=_better(ratio, figure.higher_is_better))

    def rows(self) -> list[Row]:
        """The figures, and whether the answers are the same."""
        rows = [Row(figure.label, _meaning(figure), self.cells(figure)) for figure in self.figures()]
        ids = [Cell(name, ids_text(self.plain, name)) for name in self.variants]
        return [
            *rows,
            Row(tr("same ids"), tr("Whether the answers are those of {plain}.", plain=self.plain["baseline"]), ids),
        ]

    def waste_rows(self) -> list[Row]:
        """Tokens or KV slots of each kind of waste, and their seconds; kinds that nobody has are left out."""
        rows = []
        for kind, text in WASTE.items():
            found = [waste_of(self.plain, name, kind) for name in self.variants]
            if any(tokens for tokens, _ in found):
                cells = [self._waste_cell(name, *each) for name, each in zip(self.variants, found, strict=True)]
                rows.append(Row(text, DEFINITIONS[_definition_of(kind)], cells))
        return rows

    def _waste_cell(self, variant: str, tokens: float | None, seconds: float | None) -> Cell:
        if tokens is None:
            return Cell(variant, NOT_AVAILABLE)
        took = f" · {seconds_label(seconds)}" if seconds else ""
        return Cell(variant, f"{tokens:,.0f}{took}", tokens)

    def sentences(self) -> list[str]:
        """What the figures say, η of static batches predicted and measured included; the most telling first."""
        return observations(self.plain)

    def table_text(self) -> str:
        """The figures in columns that are apart by tabs: a figure, and its ratio where there is one."""
        lines = [["", *self.variants]]
        for row in [*self.rows(), *self.waste_rows()]:
            lines.append(
                [row.label, *(f"{cell.text} ({cell.ratio})" if cell.ratio else cell.text for cell in row.cells)]
            )
        return "\n".join("\t".join(line) for line in lines) + "\n"


def _better(ratio: float, higher_is_better: bool | None) -> int:
    if higher_is_better is None or abs(ratio - 1) <= ALIKE:
        return 0
    return 1 if (ratio > 1) == higher_is_better else -1


def _meaning(figure: Figure) -> str:
    return f"{figure.meaning} {figure.direction.capitalize()}.".strip() if figure.direction else figure.meaning


def _definition_of(kind: str) -> str:
    return tr("reserved, tail") if kind in ("reserved", "tail") else tr("padding, recomputed, rejected drafts")


def efficiency_formulas() -> str:
    return "\n".join(f"{name}: {DEFINITIONS[name]}" for name in ("η", "useful share"))
