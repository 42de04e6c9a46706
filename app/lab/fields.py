"""The fields that the forms of the lab are made of."""

from __future__ import annotations

from typing import TypeVar

from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QAbstractSpinBox,
    QDoubleSpinBox,
    QFormLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QSizePolicy,
    QSpinBox,
    QWidget,
)

from app.theme import SPACING
from app.translation import tr
from app.widgets import label

LEAST_PX = 64
"""Of a field: enough for what is usual, where its largest value would force the panel wide."""

Box = TypeVar("Box", bound=QAbstractSpinBox)


def whole(
    name: str, low: int, high: int, value: int, *, prefix: str = "", suffix: str = "", lowest: str = ""
) -> QSpinBox:
    """A field for whole numbers; ``lowest`` stands in place of the lowest value."""
    box = QSpinBox()
    box.setRange(low, high)
    box.setValue(value)
    box.setGroupSeparatorShown(True)
    return _plain(box, name, prefix, suffix, lowest)


def decimal(
    name: str, low: float, high: float, value: float, *, prefix: str = "", suffix: str = "", lowest: str = ""
) -> QDoubleSpinBox:
    box = QDoubleSpinBox()
    box.setRange(low, high)
    box.setDecimals(2)
    box.setValue(value)
    return _plain(box, name, prefix, suffix, lowest)


def _plain(box: Box, name: str, prefix: str, suffix: str, lowest: str) -> Box:
    """As wide as there is room. The style sheet hides the buttons: keys, the wheel and typing change it."""
    box.setPrefix(prefix)
    box.setSuffix(suffix)
    box.setSpecialValueText(lowest)
    box.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
    box.setMinimumWidth(LEAST_PX)
    box.lineEdit().setTextMargins(SPACING, 0, SPACING, 0)  # without buttons Qt forgets the style sheet's padding
    box.setAccessibleName(name)
    box.setKeyboardTracking(False)  # a number half typed is no value yet
    return box


def text(name: str, placeholder: str = "") -> QLineEdit:
    field = QLineEdit()
    field.setAccessibleName(name)
    field.setPlaceholderText(placeholder)
    field.setMinimumWidth(LEAST_PX)
    return field


def sentence(role: str) -> QLabel:
    """Text of any length, which can be copied."""
    result = label("", role)
    result.setWordWrap(True)
    result.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return result


def pair(low: QWidget, high: QWidget, between: str = tr("to")) -> QWidget:
    """Two fields with a word between them."""
    result = QWidget()
    row = QHBoxLayout(result)
    row.setContentsMargins(0, 0, 0, 0)
    row.setSpacing(SPACING)
    row.addWidget(low, 1)
    if between:
        row.addWidget(label(between, "muted"))
    row.addWidget(high, 1)
    return result


def form_layout(parent: QWidget) -> QFormLayout:
    """Names at the left, fields as wide as there is room."""
    form = QFormLayout(parent)
    form.setContentsMargins(0, 0, 0, 0)
    form.setHorizontalSpacing(SPACING)
    form.setVerticalSpacing(SPACING // 2)
    form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.ExpandingFieldsGrow)
    form.setLabelAlignment(Qt.AlignmentFlag.AlignLeft)
    return form
