"""Batch occupancy: the tokens of each of the last steps, stacked by kind, against the step's token budget."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.scope.occupancy_plot import ALWAYS_NAMED, LEGEND, OccupancyPlot
from app.scope.panel import START_SOMETHING, ScopePanel, ScopeSource
from app.selection import Selection
from app.theme import Theme
from app.widgets import Legend
from app.words import count
from engine.events import BatchEnded


def batch_figure(batch: BatchEnded) -> str:
    """Of what a static batch computed, the share that was of use, for the title line."""
    return f"{100 * batch.measured_useful:.0f} % useful"


def batch_sentence(batch: BatchEnded) -> str:
    """What a static batch computed, and the two shares that its lengths alone predict."""
    total = batch.useful_tokens + batch.padding_tokens
    return (
        f"Batch {batch.batch}: {count(batch.size, 'answer')} in {count(batch.steps, 'step')}\n"
        f"{batch.useful_tokens:,} of {count(total, 'computed token')} were of use: {batch.measured_useful:.1%}; "
        f"{batch.padding_tokens:,} were padding\n"
        f"predicted from its lengths: {batch.predicted_useful:.1%}; the literature's efficiency η is {batch.eta:.2f}"
    )


class OccupancyPanel(ScopePanel):
    empty_text = f"No step yet. {START_SOMETHING}: each step becomes a bar here."
    step_wanted = Signal(int)
    """A step that is to be shown everywhere."""

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.plot = OccupancyPlot(source, theme)
        super().__init__("Batch occupancy", source, theme, selection, self.plot, parent)
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
