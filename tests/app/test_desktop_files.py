"""The icon, the menu entry, and what puts them there."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest
from PySide6.QtGui import QImage

from app.cli import main
from app.desktop_files import exec_line, install, remove
from app.icons import SIZES, picture, render, window_icon


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def entry(data: Path) -> configparser.SectionProxy:
    parser = configparser.RawConfigParser()
    parser.optionxform = str
    parser.read(data / "applications" / "batchscope.desktop", encoding="utf-8")
    return parser["Desktop Entry"]


def test_installing_twice_is_installing_once_and_removing_leaves_nothing(tmp_path: Path) -> None:
    install(tmp_path, ["/opt/bin/batchscope"])
    once = files(tmp_path)
    install(tmp_path, ["/opt/bin/batchscope"])
    assert files(tmp_path) == once
    assert "icons/hicolor/scalable/apps/batchscope.svg" in once
    assert {f"icons/hicolor/{size}x{size}/apps/batchscope.png" for size in SIZES} < once.keys()
    mine = tmp_path / "applications" / "mine.desktop"
    mine.write_text("")
    remove(tmp_path)
    assert list(files(tmp_path)) == ["applications/mine.desktop"]
    remove(tmp_path)


def test_the_command_is_written_so_that_any_path_survives(tmp_path: Path) -> None:
    command = '/home/a b/$x`"\\100%/bin/batchscope'
    install(tmp_path, [command])
    values = entry(tmp_path)
    # First the string's escapes, then the argument's quotes, then the field codes.
    argument = values["Exec"].replace("\\\\", "\\")
    assert argument[0] == argument[-1] == '"'
    assert re.sub(r"\\(.)", r"\1", argument[1:-1]).replace("%%", "%") == command
    assert values["TryExec"].replace("\\\\", "\\") == command
    assert values["Icon"] == "batchscope" == values["StartupWMClass"]
    assert exec_line(["/usr/bin/batchscope"]) == "/usr/bin/batchscope"


def test_the_command_line_installs_and_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert main(["desktop", "--install"]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert Path(shlex.split(entry(tmp_path)["Exec"])[0]).is_file()
    assert main(["desktop", "--remove"]) == 0
    assert main(["desktop", "--remove"]) == 0
    assert "not in the menu" in capsys.readouterr().out
    with pytest.raises(SystemExit) as wrong:
        main(["desktop"])
    assert wrong.value.code == 2


def test_a_folder_that_takes_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert main(["desktop", "--install"]) == 1
    assert "file" in capsys.readouterr().err


@pytest.mark.parametrize("size", SIZES)
def test_the_pictures_are_those_of_the_drawing(qapp, size: int) -> None:
    drawn, kept = render(size), QImage(str(picture(size))).convertToFormat(QImage.Format.Format_ARGB32)
    assert kept.size() == drawn.size()
    for y in range(0, size, max(1, size // 32)):
        for x in range(0, size, max(1, size // 32)):
            ours, theirs = drawn.pixelColor(x, y), kept.pixelColor(x, y)
            assert abs(ours.alpha() - theirs.alpha()) <= 3
            assert max(abs(a - b) for a, b in zip(ours.getRgb(), theirs.getRgb(), strict=True)) * ours.alphaF() <= 6


def test_the_smallest_picture_shows_three_lanes_and_the_line(qapp) -> None:
    image = QImage(str(picture(16)))
    column = [image.pixelColor(8, y) for y in range(16)]
    lanes = [y for y, color in enumerate(column) if color.green() > 120 or color.red() > 200]
    assert lanes == [3, 4, 7, 8, 11, 12]
    assert all(image.pixelColor(10, y).lightness() > 200 for y in range(3, 13))


def test_the_window_has_the_icon(qapp) -> None:
    assert {size.width() for size in window_icon().availableSizes()} == set(SIZES)
