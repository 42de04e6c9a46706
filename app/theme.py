"""The look in one place: colours as named tokens, the palette and the style sheet made from them, light and dark.

The theme follows the system's colour scheme and changes while the program runs; everything that paints with these
colours listens to :attr:`Theme.changed`. A request's hue is derived from its number alone, so all views agree.
"""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QColor, QFont, QGuiApplication, QPalette
from PySide6.QtWidgets import QApplication

if TYPE_CHECKING:
    from app.settings.preferences import PreferenceStore

Scheme = Literal["system", "light", "dark"]

ASSETS = Path(__file__).parent.parent / "assets"

SPACING = 8
"""Pixels between cards, and between things in a card."""
PADDING = (12, 8, 12, 8)
"""Left, top, right, bottom inside a card."""
RADIUS = 8
TEXT_PX = 13
"""Of ordinary text as it ships; :meth:`Theme.pixels` tells what becomes of other sizes when the user has it larger."""
AXIS_PX = 11
HEADING_PX = 18

GOLDEN_RATIO = 0.618033988749895
"""Steps of this share of the circle spread any number of hues with no two neighbours alike."""
REQUEST_SATURATION = 0.58
LIGHTNESS_ON_DARK = 0.62
LIGHTNESS_ON_LIGHT = 0.47
READABLE_CONTRAST = 4.5
"""WCAG AA for text of normal size."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Colours of one scheme, as ``#rrggbb``."""

    window: str
    card: str
    raised: str
    line: str
    text: str
    muted: str
    accent: str
    on_accent: str
    """Text on a surface of ``accent``."""
    selection: str
    """Surface behind selected text and rows; carries ``text``."""
    error: str
    decode: str
    prefill: str
    draft: str
    padding: str
    waiting: str
    preempted: str
    swapped: str


DARK = Tokens(
    window="#16181d",
    card="#1d2026",
    raised="#262a32",
    line="#333842",
    text="#e6e8ec",
    muted="#9aa1ad",
    accent="#4da3ff",
    on_accent="#0b1420",
    selection="#2b3a50",
    error="#ff7a70",
    # Apart in lightness too: decode, prefill and preempted differ by 20 in CIELAB with every colour blindness.
    decode="#4fc9a0",
    prefill="#4a90f2",
    draft="#c792ea",
    padding="#6b7280",
    waiting="#5b6270",
    preempted="#ff7a59",
    swapped="#f2b441",
)
LIGHT = Tokens(
    window="#eef0f3",
    card="#ffffff",
    raised="#f5f6f8",
    line="#d9dde3",
    text="#1b1f27",
    muted="#5f6877",
    accent="#0b66d6",
    on_accent="#ffffff",
    selection="#d8e6fb",
    error="#c22f24",
    decode="#12946a",
    prefill="#1a5fc0",
    draft="#8a4fc7",
    padding="#a4abb6",
    waiting="#b3bac4",
    preempted="#d8431f",
    swapped="#b97a00",
)


class Theme(QObject):
    """Applies palette, style sheet and font to the application and hands out the colours of the scheme in force."""

    changed = Signal()
    """Colours or the size of text are others."""

    window: QColor
    card: QColor
    raised: QColor
    line: QColor
    text: QColor
    muted: QColor
    accent: QColor
    on_accent: QColor
    selection: QColor
    error: QColor
    decode: QColor
    prefill: QColor
    draft: QColor
    padding: QColor
    waiting: QColor
    preempted: QColor
    swapped: QColor

    def __init__(self, app: QApplication, scheme: Scheme = "system", parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._app = app
        self._scheme: Scheme = scheme
        self._preferences: PreferenceStore | None = None
        self.font_px = TEXT_PX
        """Logical pixels of ordinary text."""
        self.dark = False
        app.setStyle("Fusion")
        self._load(self._wants_dark())
        QGuiApplication.styleHints().colorSchemeChanged.connect(self._system_changed)

    @property
    def scheme(self) -> Scheme:
        """What was asked for: ``system`` follows the desktop."""
        return self._scheme

    def set_scheme(self, scheme: Scheme) -> None:
        if self._preferences is not None:
            self._preferences.change(theme=scheme)  # which takes it into force
        else:
            self._take(scheme, self.font_px)

    def set_font_size(self, pixels: int) -> None:
        """Another size of ordinary text; what is larger or smaller stays in proportion."""
        if self._preferences is not None:
            self._preferences.change(font_px=pixels)
        else:
            self._take(self._scheme, pixels)

    def pixels(self, pixels: int) -> int:
        """What a size is for which ``pixels`` go with the text as it ships: of fonts, and of what must hold text."""
        return max(1, round(pixels * self.font_px / TEXT_PX))

    def font(self, pixels: int, *, bold: bool = False) -> QFont:
        """The application's font in a size that is ``pixels`` with the text as it ships. Who paints with it asks anew
        after every :attr:`changed`."""
        font = QFont(self._app.font())
        font.setPixelSize(self.pixels(pixels))
        if bold:
            font.setWeight(QFont.Weight.DemiBold)
        return font

    def follow(self, preferences: PreferenceStore) -> None:
        """Scheme and size of text are the preferences' from here on, and what is set here is written down there."""
        self._preferences = preferences
        preferences.changed.connect(self._take_preferences)
        self._take_preferences()

    def _take_preferences(self) -> None:
        values = self._preferences.values
        self._take(values.theme, values.font_px)

    def _take(self, scheme: Scheme, font_px: int) -> None:
        self._scheme = scheme
        other_size = font_px != self.font_px
        self.font_px = font_px
        self._switch(other_size)

    def _system_changed(self, _scheme: Qt.ColorScheme) -> None:
        self._switch()

    def _switch(self, other_size: bool = False) -> None:
        dark = self._wants_dark()
        if other_size or dark != self.dark:
            self._load(dark)
            self.changed.emit()

    def _wants_dark(self) -> bool:
        if self._scheme != "system":
            return self._scheme == "dark"
        return self._system_is_dark()

    def _system_is_dark(self) -> bool:
        return QGuiApplication.styleHints().colorScheme() == Qt.ColorScheme.Dark

    def _load(self, dark: bool) -> None:
        self.dark = dark
        tokens = DARK if dark else LIGHT
        for name in Tokens.__dataclass_fields__:
            setattr(self, name, QColor(getattr(tokens, name)))
        font = QFont(self._app.font())
        font.setPixelSize(self.font_px)
        _restyle(self._app, font, _palette(self), _style_sheet(tokens, self.pixels(HEADING_PX)))


def _restyle(app: QApplication, font: QFont, palette: QPalette, style_sheet: str) -> None:
    """Of a style sheet that takes the place of another, Qt styles each widget as many times as it has others above it;
    of one that takes the place of none, once. So the old one is taken away first."""
    app.setStyleSheet("")
    app.setFont(font)
    app.setPalette(palette)
    app.setStyleSheet(style_sheet)


def request_color(request_id: int, theme: Theme) -> QColor:
    """The hue of a request, the same wherever it is shown."""
    return QColor(*_request_rgb(request_id, theme.dark))


def request_rgb(request_ids: np.ndarray, dark: bool) -> np.ndarray:
    """Hues of many requests at once: int array [n] -> uint8 array [n, 3]; equal to :func:`request_color`."""
    unique, inverse = np.unique(request_ids, return_inverse=True)
    table = np.array([_request_rgb(int(i), dark) for i in unique], dtype=np.uint8).reshape(-1, 3)
    return table[inverse.reshape(-1)]


@lru_cache(maxsize=4096)
def _request_rgb(request_id: int, dark: bool) -> tuple[int, int, int]:
    hue = (request_id * GOLDEN_RATIO) % 1.0
    lightness = LIGHTNESS_ON_DARK if dark else LIGHTNESS_ON_LIGHT
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, REQUEST_SATURATION)
    return round(red * 255), round(green * 255), round(blue * 255)


def mix(first: QColor, second: QColor, share: float) -> QColor:
    """``share`` of the second colour in the first, 0 to 1."""
    keep = 1.0 - share
    return QColor(
        round(first.red() * keep + second.red() * share),
        round(first.green() * keep + second.green() * share),
        round(first.blue() * keep + second.blue() * share),
    )


def contrast(first: QColor, second: QColor) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2, relative luminance of sRGB)."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def readable(color: QColor, theme: Theme, surface: QColor | None = None) -> QColor:
    """The colour, moved towards the theme's text colour just as far as text on ``surface`` (a card) needs."""
    surface = theme.card if surface is None else surface
    for share in np.linspace(0.0, 1.0, 21):
        candidate = mix(color, theme.text, float(share))
        if contrast(candidate, surface) >= READABLE_CONTRAST:
            return candidate
    return theme.text


def _luminance(color: QColor) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    return 0.2126 * linear(color.redF()) + 0.7152 * linear(color.greenF()) + 0.0722 * linear(color.blueF())


def _palette(theme: Theme) -> QPalette:
    """A style sheet alone leaves item views and menus with the desktop's colours: the palette carries them too."""
    role = QPalette.ColorRole
    palette = QPalette()
    for name, color in {
        role.Window: theme.window,
        role.WindowText: theme.text,
        role.Base: theme.card,
        role.AlternateBase: theme.raised,
        role.Text: theme.text,
        role.PlaceholderText: theme.muted,
        role.Button: theme.raised,
        role.ButtonText: theme.text,
        role.BrightText: theme.error,
        role.ToolTipBase: theme.raised,
        role.ToolTipText: theme.text,
        role.Highlight: theme.selection,
        role.HighlightedText: theme.text,
        role.Link: theme.accent,
        role.LinkVisited: theme.accent,
        role.Accent: theme.accent,
        role.Light: theme.raised,
        role.Midlight: theme.line,
        role.Mid: theme.line,
        role.Dark: theme.line,
        role.Shadow: theme.window,
    }.items():
        palette.setColor(name, color)
    for name in (role.WindowText, role.Text, role.PlaceholderText, role.ButtonText, role.HighlightedText):
        palette.setColor(QPalette.ColorGroup.Disabled, name, mix(theme.muted, theme.card, 0.35))
    return palette


def _style_sheet(t: Tokens, heading_px: int) -> str:
    return f"""
QMainWindow, QDialog {{ background: {t.window}; }}
QMainWindow::separator {{ background: transparent; width: {SPACING}px; height: {SPACING}px; }}
QToolTip {{ background: {t.raised}; color: {t.text}; border: 1px solid {t.line}; padding: 4px 6px; }}
QMenuBar {{ background: {t.window}; }}
QMenuBar::item {{ padding: 4px 8px; border-radius: 4px; background: transparent; }}
QMenuBar::item:selected {{ background: {t.selection}; }}
QMenu {{ background: {t.card}; border: 1px solid {t.line}; padding: 4px; }}
QMenu::item {{ padding: 5px 20px 5px 22px; border-radius: 4px; }}
QMenu::indicator {{ width: 12px; height: 12px; left: 6px; }}
QMenu::item:selected {{ background: {t.selection}; color: {t.text}; }}
QMenu::separator {{ height: 1px; background: {t.line}; margin: 4px 6px; }}
QLabel {{ background: transparent; }}
QLabel[role="muted"] {{ color: {t.muted}; }}
QLabel[role="title"], QLabel[role="number"] {{ font-weight: 600; }}
QLabel[role="heading"] {{ font-size: {heading_px}px; font-weight: 600; }}
QLabel[role="error"] {{ color: {t.error}; }}
QPushButton, QToolButton {{ background: {t.raised}; border: 1px solid {t.line}; border-radius: 6px;
    padding: 5px 12px; }}
QToolButton {{ padding: 4px 8px; }} QPushButton:hover, QToolButton:hover {{ border-color: {t.accent}; }}
QPushButton:pressed, QToolButton:pressed, QToolButton:checked {{ background: {t.selection}; }}
QPushButton:focus, QToolButton:focus {{ border-color: {t.accent}; }}
QPushButton:disabled, QToolButton:disabled {{ color: {t.muted}; border-color: {t.line}; background: {t.card}; }}
QPushButton[role="primary"] {{ background: {t.accent}; border-color: {t.accent}; color: {t.on_accent};
    font-weight: 600; }}
QPushButton[role="primary"]:focus, QPushButton[role="danger"]:focus {{ border-color: {t.text}; }}
QPushButton[role="primary"]:disabled {{ background: {t.raised}; border-color: {t.line}; color: {t.muted}; }}
QPushButton[role="danger"] {{ background: {t.error}; border-color: {t.error}; color: {t.card}; font-weight: 600; }}
QToolButton[role="flat"], QPushButton[role="flat"] {{ background: transparent; border-color: transparent;
    padding: 3px 8px; }}
QToolButton[role="flat"]:hover, QPushButton[role="flat"]:hover {{ background: {t.raised}; border-color: {t.line}; }}
QToolButton[role="flat"]:focus, QPushButton[role="flat"]:focus {{ border-color: {t.accent}; }}
QToolButton::menu-indicator {{ image: none; }}
QLineEdit, QPlainTextEdit, QTextEdit, QSpinBox, QDoubleSpinBox, QComboBox {{
    background: {t.raised}; border: 1px solid {t.line}; border-radius: 6px; padding: 4px 8px;
    selection-background-color: {t.selection}; selection-color: {t.text}; }}
QLineEdit:focus, QPlainTextEdit:focus, QTextEdit:focus, QSpinBox:focus, QDoubleSpinBox:focus, QComboBox:focus {{
    border-color: {t.accent}; }}
QComboBox::drop-down {{ border: none; width: 20px; }}
QCheckBox {{ spacing: 8px; }}
QCheckBox::indicator {{ width: 14px; height: 14px; background: {t.raised}; border: 1px solid {t.muted};
    border-radius: 3px; }}
QCheckBox::indicator:hover, QCheckBox:focus::indicator {{ border-color: {t.accent}; }}
QCheckBox::indicator:disabled {{ border-color: {t.line}; }}
QCheckBox::indicator:checked {{ background: {t.accent}; border-color: {t.accent};
    image: url("{ASSETS.as_posix()}/check-{t.on_accent[1:]}.svg"); }}
QCheckBox::indicator:checked:disabled {{ background: {t.muted}; border-color: {t.muted}; }}
QAbstractSpinBox::up-button, QAbstractSpinBox::down-button {{ width: 0; border: none; }}
QComboBox QAbstractItemView {{ background: {t.card}; border: 1px solid {t.line}; outline: none; }}
QAbstractItemView {{ background: transparent; border: none; outline: none; }}
QAbstractItemView::item:selected {{ background: {t.selection}; color: {t.text}; }}
QHeaderView, QHeaderView::section {{ background: transparent; border: none; color: {t.muted}; }}
QHeaderView::section {{ padding: 2px 3px; }}
QTableView {{ gridline-color: transparent; background: {t.card}; }}
QScrollArea {{ background: transparent; border: none; }}
QScrollBar:vertical {{ background: transparent; width: 10px; margin: 0; }}
QScrollBar:horizontal {{ background: transparent; height: 10px; margin: 0; }}
QScrollBar::handle {{ background: {t.line}; border-radius: 3px; margin: 2px; min-height: 24px; min-width: 24px; }}
QScrollBar::handle:hover {{ background: {t.muted}; }}
QScrollBar::handle:disabled {{ background: transparent; }}
QScrollBar::add-line, QScrollBar::sub-line, QScrollBar::add-page, QScrollBar::sub-page {{
    background: none; border: none; width: 0; height: 0; }}
QRadioButton::indicator {{ width: 12px; height: 12px; border: 1px solid {t.muted}; border-radius: 7px;
    background: {t.raised}; }}
QRadioButton::indicator:checked {{ width: 6px; height: 6px; border: 4px solid {t.accent}; background: {t.card}; }}
QRadioButton::indicator:focus {{ border-color: {t.text}; }}
QProgressBar {{ background: {t.raised}; border: none; border-radius: 3px; max-height: 6px; min-height: 6px; }}
QProgressBar::chunk {{ background: {t.accent}; border-radius: 3px; }}
QSlider::groove:horizontal {{ background: {t.line}; height: 4px; border-radius: 2px; }}
QSlider::sub-page:horizontal {{ background: {t.accent}; border-radius: 2px; }}
QSlider::sub-page:horizontal:disabled {{ background: {t.line}; }}
QSlider::handle:horizontal {{ background: {t.accent}; border: 2px solid {t.card}; width: 12px; height: 12px;
    margin: -6px 0; border-radius: 8px; }}
QSlider::handle:horizontal:focus {{ border-color: {t.text}; }}
QSlider::handle:horizontal:disabled {{ background: {t.line}; }}
QTabBar::tab {{ background: transparent; color: {t.muted}; padding: 5px 10px; border: none;
    border-bottom: 2px solid transparent; }}
QTabBar::tab:selected {{ color: {t.text}; border-bottom-color: {t.accent}; }}
QTabBar::tab:hover {{ color: {t.text}; }}
QSplitter::handle {{ background: transparent; }}
QGroupBox {{ border: none; margin-top: 18px; font-weight: 600; }}
QGroupBox::title {{ subcontrol-origin: margin; left: 0; }}
"""
