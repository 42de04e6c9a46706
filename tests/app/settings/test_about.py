"""What the program is made of, and under which licences."""

from __future__ import annotations

from PySide6.QtWidgets import QApplication

from app.about import AboutDialog, components
from engine.environment import version


def test_all_parts_are_there_with_version_and_licence() -> None:
    parts = {each.name.casefold(): each for each in components()}
    assert parts["batchscope"].version == version()
    assert all(each.licence for each in parts.values())
    starter = next(each for name, each in parts.items() if "smollm2" in name)
    assert starter.licence == "Apache-2.0" and "Apache License" in starter.text
    for name in ("pyside6-essentials", "torch", "numpy", "msgspec", "huggingface-hub", "python"):
        found = parts.get(name) or parts[name.replace("-", "_")]
        assert found.version and len(found.licence) < 200
    with_text = sum(bool(each.text) for each in parts.values())
    assert with_text >= len(parts) - 3
    assert "Apache License" in parts["batchscope"].text


def test_the_box_shows_the_licence_of_what_is_chosen(rig) -> None:
    rig.window.commands["about"].action.trigger()
    box = rig.window.settings_control.about
    assert isinstance(box, AboutDialog) and box.isVisible()
    assert "Apache License" in box.text.toPlainText()
    row = next(number for number, each in enumerate(box.components) if each.name == "numpy")
    box.table.selectRow(row)
    assert "NumPy" in box.text.toPlainText()
    assert f"Batchscope {version()}" in box.versions()
    box.reject()
    QApplication.processEvents()
