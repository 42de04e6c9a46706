"""Colours: readable, told apart by everybody, the same for a request everywhere, changing while the program runs."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from PySide6.QtCore import QEvent, QObject
from PySide6.QtGui import QColor, QPalette
from PySide6.QtWidgets import QApplication, QWidget

from app.theme import DARK, LIGHT, Theme, contrast, readable, request_color, request_rgb

# Machado, Oliveira and Fernandes 2009, severity 1.0: linear RGB as seen with protanopia, deuteranopia, tritanopia.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(color: QColor) -> np.ndarray:
    srgb = np.array([color.redF(), color.greenF(), color.blueF()])
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Linear sRGB to CIE L*a*b* under D65."""
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.clip(matrix @ np.clip(rgb, 0, 1), 1e-6, None) / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_text_is_readable_on_its_surfaces(theme: Theme, scheme: str) -> None:
    theme.set_scheme(scheme)
    for text, surface in (
        (theme.text, theme.card),
        (theme.text, theme.window),
        (theme.text, theme.selection),
        (theme.muted, theme.card),
        (theme.muted, theme.window),
        (theme.on_accent, theme.accent),
        (theme.error, theme.card),
    ):
        assert contrast(text, surface) >= 4.5, (text.name(), surface.name())
    for state in (theme.decode, theme.prefill, theme.preempted, theme.swapped):
        assert contrast(state, theme.card) >= 3.0, state.name()
        assert contrast(readable(state, theme), theme.card) >= 4.5


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("kind", BLINDNESS)
def test_states_are_told_apart_with_every_colour_blindness(theme: Theme, scheme: str, kind: str) -> None:
    theme.set_scheme(scheme)
    seen = {
        name: lab(np.array(BLINDNESS[kind]) @ linear(getattr(theme, name)))
        for name in ("decode", "prefill", "preempted")
    }
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 20, (one, other)


def test_a_request_has_one_hue(theme: Theme) -> None:
    ids = np.array([7, 1, 7, 500, 123_456])
    for scheme in ("dark", "light"):
        theme.set_scheme(scheme)
        many = request_rgb(ids, theme.dark)
        for request_id, rgb in zip(ids.tolist(), many.tolist(), strict=True):
            color = request_color(request_id, theme)
            assert [color.red(), color.green(), color.blue()] == rgb
    assert request_rgb(np.zeros(0, dtype=np.int64), True).shape == (0, 3)


def test_neighbouring_requests_differ_much(theme: Theme) -> None:
    for first in range(1, 60):
        hues = [request_color(first + i, theme).hslHue() for i in range(4)]
        for one, other in combinations(hues, 2):
            assert min(abs(one - other), 360 - abs(one - other)) > 30


def test_the_palette_follows_the_scheme_and_says_so_once(theme: Theme, qapp, qtbot) -> None:
    heard: list[bool] = []
    theme.changed.connect(lambda: heard.append(theme.dark))
    assert qapp.palette().color(QPalette.ColorRole.Window).name() == DARK.window
    theme.set_scheme("dark")
    assert heard == []
    theme.set_scheme("light")
    assert heard == [False]
    palette = qapp.palette()
    assert palette.color(QPalette.ColorRole.Window).name() == LIGHT.window
    # A style sheet does not set the palette: selected text was once white on white.
    assert contrast(palette.highlightedText().color(), palette.highlight().color()) >= 4.5


def test_the_theme_follows_the_system_only_when_asked(theme: Theme, monkeypatch: pytest.MonkeyPatch) -> None:
    systems_dark = [True]
    monkeypatch.setattr(Theme, "_system_is_dark", lambda self: systems_dark[0])
    theme.set_scheme("light")
    theme._system_changed(None)
    assert not theme.dark
    theme.set_scheme("system")
    assert theme.dark
    systems_dark[0] = False
    theme._system_changed(None)
    assert not theme.dark


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_what_is_disabled_is_fainter_whatever_stands_in_it(theme: Theme, scheme: str, qapp) -> None:
    theme.set_scheme(scheme)
    group, role = QPalette.ColorGroup, QPalette.ColorRole
    for name in (role.Text, role.PlaceholderText, role.ButtonText):
        faint, usual = (qapp.palette().color(each, name) for each in (group.Disabled, group.Active))
        assert contrast(faint, theme.card) < contrast(usual, theme.card), name


class _Stylings(QObject):
    """How often each object was told of another style."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[QObject, int] = {}

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.StyleChange:
            self.counts[watched] = self.counts.get(watched, 0) + 1
        return False


@pytest.mark.parametrize("change", [lambda theme: theme.set_scheme("light"), lambda theme: theme.set_font_size(16)])
def test_a_change_styles_a_widget_no_more_often_the_deeper_it_lies(
    qapp: QApplication, theme: Theme, qtbot, change
) -> None:
    outermost = innermost = QWidget()
    for _ in range(12):
        innermost = QWidget(innermost)
    qtbot.addWidget(outermost)
    outermost.show()
    stylings = _Stylings()
    qapp.installEventFilter(stylings)
    change(theme)
    qapp.removeEventFilter(stylings)
    assert stylings.counts[innermost] <= 2  # the old style sheet goes, the other comes
    assert stylings.counts[innermost] == stylings.counts[outermost]
