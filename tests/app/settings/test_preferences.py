"""Preferences on disk: every change is there at once, whole, and nothing that a file holds can keep a window shut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.settings.preferences import Preferences, PreferenceStore
from engine.config import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "preferences.json"


def test_a_change_is_in_force_told_and_written_at_once(qtbot, path: Path) -> None:
    store = PreferenceStore(path)
    with qtbot.waitSignal(store.changed, timeout=100):
        store.change(threads=2, model_folders=("/a", "/b"), shortcuts={"chat.new": "Ctrl+T"})
    again = PreferenceStore(path)
    assert (
        again.values
        == store.values
        == Preferences(threads=2, model_folders=("/a", "/b"), shortcuts={"chat.new": "Ctrl+T"})
    )
    assert again.notice == ""
    with qtbot.assertNotEmitted(store.changed):
        store.change(threads=2)


@pytest.mark.parametrize(
    "field",
    [
        {"threads": 0},
        {"font_px": 9},
        {"font_px": 23},
        {"theme": "pink"},
        {"dtype": "int4"},
        {"kv_dtype": "int4"},
        {"memory_limit_mb": 1},
        {"nonsense": 1},
    ],
)
def test_an_impossible_value_is_refused_by_name_and_changes_nothing(path: Path, field: dict[str, object]) -> None:
    store = PreferenceStore(path)
    with pytest.raises(ConfigError, match=next(iter(field))):
        store.change(device="cpu", **field)
    assert store.values == Preferences()
    assert not path.exists()


def test_what_makes_no_sense_in_the_file_costs_itself_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({"threads": -3, "font_px": 16, "theme": 7, "of_a_newer_version": [1]}))
    store = PreferenceStore(path)
    assert store.values == Preferences(font_px=16)
    assert "threads" in store.notice and "theme" in store.notice and "font_px" not in store.notice
    store.change(theme="dark")
    kept = json.loads(path.read_text())
    assert kept["of_a_newer_version"] == [1]
    assert kept["theme"] == "dark"


@pytest.mark.parametrize("text", ["{", "[]", "\x00\xff", ""])
def test_a_damaged_file_is_set_aside_and_said(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    store = PreferenceStore(path)
    assert store.values == Preferences()
    [aside] = path.parent.glob("preferences.json.damaged-*")
    assert str(aside) in store.notice
    assert aside.read_bytes() == text.encode("latin-1")
    store.change(font_px=15)
    assert PreferenceStore(path).values.font_px == 15


def test_two_windows_do_not_take_back_each_others_changes(path: Path) -> None:
    first, second = PreferenceStore(path), PreferenceStore(path)
    first.change(font_px=17)
    second.change(theme="light")
    assert PreferenceStore(path).values == Preferences(font_px=17, theme="light")
    assert second.values.font_px == 17


def test_a_disk_that_takes_nothing_is_said_and_the_change_holds(qtbot, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = PreferenceStore(tmp_path / "file" / "preferences.json")
    with qtbot.waitSignal(store.save_problem, timeout=100) as said:
        store.change(theme="dark")
    assert "until the window closes" in said.args[0]
    assert store.values.theme == "dark"


def test_preferences_make_the_engines_configuration() -> None:
    values = Preferences(
        device="cpu", threads=3, dtype="float32", kv_dtype="fp8", max_model_len=512, memory_limit_mb=1024
    )
    config = values.engine_config("starter")
    assert (config.device, config.threads, config.dtype, config.max_model_len) == ("cpu", 3, "float32", 512)
    assert config.memory_limit == 1 << 30 and config.kv_dtype == "fp8"
    assert config.model == "starter"
