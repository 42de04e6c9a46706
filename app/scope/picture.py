"""Pictures of a panel or a plot, as it is seen: PNG at twice the size, SVG with its lines and words, the clipboard.

A panel in a dock has lent its title line to the dock; the picture puts it back on top.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from PySide6.QtCore import QBuffer, QIODevice, QPoint, QRectF, QSize, Qt
from PySide6.QtGui import QGuiApplication, QPainter, QPixmap
from PySide6.QtWidgets import QFileDialog, QMenu, QWidget

from app.scope.panel import ScopePanel
from app.translation import tr
from app.widgets import Card

SCALE = 2
"""Pixels of a PNG for each of the screen's logical ones."""
FORMATS = {".png": tr("PNG picture (*.png)"), ".svg": tr("SVG drawing (*.svg)")}
"""Ending -> what a file dialog calls it."""
Say = Callable[[str, bool], None]
"""Tells the user something: a sentence, and whether it is of a fault."""


def save_picture(widget: QWidget, path: Path) -> None:
    """Writes the widget as PNG or SVG, by the ending of ``path``. OSError with a sentence where it cannot."""
    make = {".png": _png, ".svg": _svg}.get(path.suffix.lower())
    if make is None:
        raise OSError(tr("{name} ends neither in .png nor in .svg", name=path.name))
    try:
        path.write_bytes(make(widget))
    except OSError as error:
        raise OSError(tr("{path} could not be written: {reason}", path=path, reason=error.strerror or error)) from error


def copy_picture(widget: QWidget) -> None:
    """The widget's picture, on the clipboard."""
    QGuiApplication.clipboard().setPixmap(_pixmap(widget))


def add_picture_menu(menu: QMenu, widget: QWidget, say: Say) -> None:
    """Two entries at the end of ``menu``: to save the widget's picture in a file, and to copy it."""
    menu.addAction(tr("Save picture…")).triggered.connect(lambda: ask_and_save(widget, say))
    menu.addAction(tr("Copy picture")).triggered.connect(lambda: _copy_and_say(widget, say))


def ask_and_save(widget: QWidget, say: Say) -> None:
    """Asks where, saves there, and tells how that went; nothing where no file was chosen."""
    suggested = Path.home() / f"{picture_name(widget)}.png"
    chosen, kind = QFileDialog.getSaveFileName(
        widget.window(), tr("Save picture"), str(suggested), ";;".join(FORMATS.values())
    )
    if not chosen:
        return
    path = Path(chosen)
    if path.suffix.lower() not in FORMATS:
        path = path.with_name(path.name + next((e for e, name in FORMATS.items() if name == kind), ".png"))
    try:
        save_picture(widget, path)
    except OSError as error:
        say(tr("The picture was not saved: {error}", error=error), True)
    else:
        say(tr("The picture is in {path}", path=path), False)


def _copy_and_say(widget: QWidget, say: Say) -> None:
    copy_picture(widget)
    say(tr("The picture is on the clipboard."), False)


def picture_name(widget: QWidget) -> str:
    """``batch-occupancy-step-1204-2026-03-01-14-30-05``: what it is of, the step that it shows, when it was made."""
    title = widget.title if isinstance(widget, Card) else widget.accessibleName() or "picture"
    step = [f"step-{widget.source.state.step}"] if isinstance(widget, ScopePanel) else []
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "picture"
    return "-".join([words, *step, datetime.now().strftime("%Y-%m-%d-%H-%M-%S")])


def _parts(widget: QWidget) -> list[QWidget]:
    """From top to bottom: what the picture is put together from."""
    if isinstance(widget, Card) and not widget.isAncestorOf(widget.header):
        return [widget.header, widget]
    return [widget]


def _size(parts: list[QWidget]) -> QSize:
    return QSize(max(part.width() for part in parts), sum(part.height() for part in parts))


def _paint(painter: QPainter, parts: list[QWidget]) -> None:
    """On the card's colour: what is seen through a widget is its card."""
    painter.fillRect(QRectF(0, 0, _size(parts).width(), _size(parts).height()), parts[-1].palette().base())
    top = 0
    for part in parts:
        part.render(painter, QPoint(0, top), renderFlags=QWidget.RenderFlag.DrawChildren)
        top += part.height()


def _pixmap(widget: QWidget) -> QPixmap:
    parts = _parts(widget)
    pixmap = QPixmap(_size(parts) * SCALE)
    pixmap.setDevicePixelRatio(SCALE)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    _paint(painter, parts)
    painter.end()
    return pixmap


def _png(widget: QWidget) -> bytes:
    buffer = QBuffer()
    buffer.open(QIODevice.OpenModeFlag.WriteOnly)
    _pixmap(widget).save(buffer, "PNG")
    return buffer.data().data()


def _svg(widget: QWidget) -> bytes:
    from PySide6.QtSvg import QSvgGenerator  # seldom wanted, and a library of its own

    parts = _parts(widget)
    size = _size(parts)
    buffer = QBuffer()
    # The older profile of the format cuts nothing off at the edges of a plot.
    generator = QSvgGenerator(QSvgGenerator.SvgVersion.Svg11)
    generator.setOutputDevice(buffer)
    generator.setSize(size)
    generator.setViewBox(QRectF(0, 0, size.width(), size.height()))
    generator.setTitle(widget.title if isinstance(widget, Card) else widget.accessibleName())
    generator.setResolution(96)
    painter = QPainter(generator)
    _paint(painter, parts)
    painter.end()
    return buffer.data().data()
