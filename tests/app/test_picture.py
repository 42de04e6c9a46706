"""Pictures of panels: what is in them, where they go, and what is said when they cannot."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PySide6.QtGui import QGuiApplication, QImage
from PySide6.QtWidgets import QFileDialog, QMenu

from app.scope.picture import SCALE, add_picture_menu, ask_and_save, copy_picture, picture_name, save_picture
from tests.app.conftest import Rig

SVG = "{http://www.w3.org/2000/svg}"
PANELS = ("throughput", "latency", "occupancy", "timeline", "queue", "blocks", "ledger")


@pytest.fixture
def busy(rig: Rig) -> Rig:
    rig.window.arrange("monitor")
    rig.load()
    for _ in range(3):
        rig.add(40, 60)
    rig.step(40)
    rig.wait_for(lambda: not any(rig.window.panels[name].pages.is_empty for name in ("throughput", "occupancy")))
    rig.settle()
    return rig


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_drawing_has_lines_and_words_on_the_cards_colour(busy: Rig, tmp_path: Path, scheme: str) -> None:
    busy.theme.set_scheme(scheme)
    busy.settle()
    for name in PANELS:
        panel = busy.window.panels[name]
        path = tmp_path / f"{name}.svg"
        save_picture(panel, path)
        root = ElementTree.parse(path).getroot()
        assert root.tag == f"{SVG}svg" and root.find(f"{SVG}title").text == panel.title
        words = [element.text for element in root.iter(f"{SVG}text")]
        assert panel.title in words, name
        shapes = [*root.iter(f"{SVG}path"), *root.iter(f"{SVG}rect"), *root.iter(f"{SVG}polyline")]
        assert len(shapes) > 3, name
        first = next(g for g in root.iter(f"{SVG}g") if g.find(f"{SVG}rect") is not None)
        assert first.get("fill") == busy.theme.card.name()


def test_a_plots_axis_and_curves_are_in_its_drawing(busy: Rig, tmp_path: Path) -> None:
    plot = busy.window.panels["throughput"].plot
    save_picture(plot, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert "now" in words and all(tick.label in words for tick in plot.y_ticks)
    assert busy.theme.decode.name() in text and "clip-path" in text
    assert list(root.iter(f"{SVG}image")) == []


def test_a_picture_is_twice_the_size_and_has_the_title_line_of_the_dock(busy: Rig, tmp_path: Path) -> None:
    panel = busy.window.panels["occupancy"]
    assert not panel.isAncestorOf(panel.header)  # the dock has it
    save_picture(panel, tmp_path / "a.png")
    image = QImage(str(tmp_path / "a.png"))
    assert image.width() == SCALE * max(panel.width(), panel.header.width())
    assert image.height() == SCALE * (panel.height() + panel.header.height())
    assert image.pixelColor(2, 2) == busy.theme.card and image.pixelColor(2, 2).alpha() == 255
    title = {image.pixelColor(x, y).name() for x in range(20, 200) for y in range(0, 2 * panel.header.height(), 3)}
    assert busy.theme.text.name() in title
    below = image.copy(0, 2 * panel.header.height(), image.width(), 2 * panel.height())
    found = {below.pixelColor(x, y).name() for x in range(0, below.width(), 2) for y in range(0, below.height(), 3)}
    assert busy.theme.decode.name() in found


def test_the_clipboard_gets_the_same_picture(busy: Rig) -> None:
    panel = busy.window.panels["throughput"]
    copy_picture(panel)
    image = QGuiApplication.clipboard().image()
    assert image.height() == SCALE * (panel.height() + panel.header.height())


def test_the_menu_saves_and_says_where(busy: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = busy.window.panels["throughput"]
    said: list[tuple[str, bool]] = []
    asked: list[str] = []

    def choose(_parent, _title, suggested: str, _kinds: str) -> tuple[str, str]:
        asked.append(suggested)
        return str(tmp_path / "mine"), "SVG drawing (*.svg)"

    monkeypatch.setattr(QFileDialog, "getSaveFileName", choose)
    menu = QMenu()
    add_picture_menu(menu, panel, lambda text, is_error: said.append((text, is_error)))
    save, copy = menu.actions()
    save.trigger()
    assert (tmp_path / "mine.svg").exists()
    assert said == [(f"The picture is in {tmp_path / 'mine.svg'}", False)]
    step = busy.state.step
    assert Path(asked[0]).name.startswith(f"throughput-step-{step}-20") and asked[0].endswith(".png")
    copy.trigger()
    assert said[-1] == ("The picture is on the clipboard.", False)
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: ("", ""))
    ask_and_save(panel, lambda text, is_error: said.append((text, is_error)))
    assert len(said) == 2


@pytest.mark.parametrize("name", ["gone/a.png", "gone/a.svg", "a.gif"])
def test_what_cannot_be_saved_is_said_in_a_sentence(
    busy: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    panel = busy.window.panels["throughput"]
    said: list[tuple[str, bool]] = []
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: (str(tmp_path / name), "PNG picture (*.png)"))
    if name == "a.gif":
        with pytest.raises(OSError, match="neither in"):
            save_picture(panel, tmp_path / name)
        return
    ask_and_save(panel, lambda text, is_error: said.append((text, is_error)))
    [(text, is_error)] = said
    assert is_error and text.startswith("The picture was not saved: ") and "could not be written" in text


def test_a_name_tells_panel_step_and_date(busy: Rig) -> None:
    assert picture_name(busy.window.panels["occupancy"]).startswith(f"batch-occupancy-step-{busy.state.step}-20")
    assert picture_name(busy.window.load_panel).startswith("load-20")
