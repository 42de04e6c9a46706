"""The program's icon: drawn once as SVG, and as pictures for those who want these. ``python -m app.icons`` renders them
anew."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QIcon, QImage, QPainter

ASSETS = Path(__file__).parent.parent / "assets"
SVG = ASSETS / "icon.svg"
PICTURES = ASSETS / "icons"
SIZES = (16, 22, 24, 32, 48, 64, 128, 256)
"""Pixels, as the icon theme specification has its folders."""


def picture(size: int) -> Path:
    return PICTURES / f"{size}.png"


def window_icon() -> QIcon:
    """Of the pictures: Qt's plugin for SVG need not be there."""
    icon = QIcon()
    for size in SIZES:
        icon.addFile(str(picture(size)))
    return icon


def render(size: int) -> QImage:
    """The drawing at ``size`` × ``size`` pixels."""
    from PySide6.QtSvg import QSvgRenderer  # the window itself never needs it

    image = QImage(size, size, QImage.Format.Format_ARGB32)
    image.fill(Qt.GlobalColor.transparent)
    painter = QPainter(image)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    QSvgRenderer(str(SVG)).render(painter)
    painter.end()
    return image


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for size in SIZES:
        render(size).save(str(picture(size)))


if __name__ == "__main__":
    main()
