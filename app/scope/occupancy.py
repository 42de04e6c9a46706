"""Batch occupancy: the tokens of each of the last steps, stacked by kind, against the step's token budget."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.scope.occupancy_plot import ALWAYS_NAMED, LEGEND, OccupancyPlot
from app.scope.panel import START_SOMETHING, ScopePanel, ScopeSource
from app.selection import Selection
from app.theme import Theme
from app.translation import tr
from app.widgets import Legend
from app.words import count
from engine.events import BatchEnded


def batch_figure(batch: BatchEnded) -> str:
    """Of what a static batch computed, the share that was of use, for the title line."""
    return tr("{measured_useful:.0f} % useful", measured_useful=100 * batch.measured_useful)


def batch_sentence(batch: BatchEnded) -> str:
    """What a static batch computed, and the two shares that its lengths alone predict."""
    total = batch.useful_tokens + batch.padding_tokens
    return tr(
        "Batch {batch}: {answers} in {steps}\n"
        "{useful_tokens:,} of {tokens} were of use: {measured_useful:.1%}; "
        "{padding_tokens:,} were padding\n"
        "predicted from its lengths: {predicted_useful:.1%}; the literature's efficiency η is {eta:.2f}",
        batch=batch.batch,
        answers=count(batch.size, "answer"),
        steps=count(batch.steps, "step"),
        useful_tokens=batch.useful_tokens,
        tokens=count(total, "computed token"),
        measured_useful=batch.measured_useful,
        padding_tokens=batch.padding_tokens,
        predicted_useful=batch.predicted_useful,
        eta=batch.eta,
    )


class OccupancyPanel(ScopePanel):
    empty_text = tr("No step yet. {start_something}: each step becomes a bar here.", start_something=START_SOMETHING)
    step_wanted = Signal(int)
    """A step that is to be shown everywhere."""

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.plot = OccupancyPlot(source, theme)
        super().__init__(tr("Batch occupancy"), source, theme, selection, self.plot, parent)
        self._legend = Legend(theme, [LEGEND[layer] for layer in ALWAYS_NAMED])
        self.add_trailing(self._legend)
        self._batch = self.add_figure()
        self.plot.step_wanted.connect(self.step_wanted)
        self.plot.zoomed.connect(self._name_layers)

    def has_content(self) -> bool:
        return self.source.history.steps.count(self.source.last_step) > 0

    def refresh(self) -> None:
        self.plot.refresh()
        self._name_layers()
        batches = self.source.state.batches
        self._batch.say(batch_figure(batches[-1]) if batches else "")
        self._batch.setToolTip(batch_sentence(batches[-1]) if batches else "")

    def _name_layers(self) -> None:
        self._legend.set_entries([LEGEND[layer] for layer in self.plot.layers])
