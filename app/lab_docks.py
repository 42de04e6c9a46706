"""The lab's panels, made when they are first seen or asked for: they are half of all widgets, and a chat needs none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtWidgets import QWidget

from app.translation import tr

if TYPE_CHECKING:
    from app.lab.compare_panel import ComparePanel
    from app.lab.knobs_panel import KnobsPanel
    from app.lab.load_panel import LoadPanel
    from app.main_window import MainWindow


def lab_contents(window: MainWindow) -> dict[str, tuple[str, Callable[[], QWidget]]]:
    """By the name of its dock: the title, and what makes the panel."""
    return {
        "load": (tr("Load"), lambda: _load_panel(window)),
        "compare": (tr("Compare"), lambda: _compare_panel(window)),
        "knobs": (tr("Knobs"), lambda: _knobs_panel(window)),
    }


def _load_panel(window: MainWindow) -> LoadPanel:
    from app.lab.load_panel import LoadPanel

    panel = LoadPanel(window.bridge, window.theme, window.selection, window)
    panel.source.changed.connect(lambda: window.docks["compare"].is_made and window.compare_panel.refresh_source())
    return panel


def _compare_panel(window: MainWindow) -> ComparePanel:
    from app.lab.compare_panel import ComparePanel

    panel = ComparePanel(window.bridge, window.theme, window)
    # A load panel that nobody has seen has nothing of its own to offer.
    panel.workload_source = lambda: window.load_panel.own_load() if window.docks["load"].is_made else None
    panel.refresh_source()
    return panel


def _knobs_panel(window: MainWindow) -> KnobsPanel:
    from app.lab.knobs_panel import KnobsPanel

    panel = KnobsPanel(window.source, window.theme, window)
    panel.wanted.connect(window.bridge.reconfigure)
    window.panels["knobs"] = panel
    return panel
