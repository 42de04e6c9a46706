"""The bundle for a bug report: whole, shown before it is saved, and without a word of any chat."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest
from PySide6.QtCore import QSettings

from app.diagnostics import Doctor, Part, collect, save
from app.engine_bridge import EngineBridge
from app.frame_pacer import FramePacer
from app.log_file import EngineLog, LogFile, log_failure
from app.main_window import MainWindow
from app.settings.preferences import Preferences, PreferenceStore
from engine.output_files import OutputFailure
from engine.request import SamplingParams
from tests.app.scripted import ScriptedClient

CANARY = "zebra9canary"


@pytest.fixture
def window(qtbot, theme, tmp_path: Path):
    state = tmp_path / "state"
    log = LogFile(state)
    log.catch_faults()
    bridge = EngineBridge(client=ScriptedClient(), pacer=FramePacer(cores=64))
    engine_log = EngineLog(bridge)
    made = MainWindow(
        bridge,
        theme,
        tmp_path / "chats.sqlite3",
        settings=QSettings(str(tmp_path / "window.ini"), QSettings.Format.IniFormat),
        preferences=PreferenceStore(tmp_path / "preferences.json"),
        state_folder=state,
        runs_folder=tmp_path / "runs",
        log=log,
    )
    made.client = bridge._client
    made.show()
    yield made
    made.close()
    log.close()
    for each in (made, engine_log, bridge):
        each.deleteLater()


def collected(window: MainWindow, qtbot) -> list[Part]:
    """As the button does, with a doctor that answers at once."""
    section = window.settings_control.diagnostics
    answer = json.dumps({"device": "cpu", "folder": str(Path.home() / "x")})
    section.doctor.ask([sys.executable, "-c", f"print({answer!r})"])
    qtbot.waitUntil(lambda: section.dialog is not None, timeout=20_000)
    return section.dialog.parts


def test_no_word_of_a_chat_is_in_it(window: MainWindow, qtbot, tmp_path: Path) -> None:
    client = window.client
    window.bridge.start(Preferences().engine_config("starter"))
    client.ready()
    qtbot.waitUntil(lambda: window.bridge.state == "ready", timeout=5000)
    chat = window.chat
    chat.send(f"{CANARY} prompt")
    chat.session.set_options(chat.current, f"{CANARY} system", SamplingParams(max_tokens=8, stop=[f"{CANARY}stop"]))
    chat.session.rename(chat.current, f"{CANARY} title")
    chat.session.set_folder(chat.current, f"{CANARY} folder")
    client.step(4)
    qtbot.wait(60)
    assert chat.current.path[-1].text, "there is an answer"
    answer = chat.current.path[-1].text.split()[0]
    chat.composer.set_text(f"{CANARY} draft")
    chat.list_panel.search.setText(f"{CANARY} search")
    window.settings_control.show_page()
    window.settings_control.page.search.setText(f"{CANARY} setting")
    qtbot.wait(300)
    # A fault in the middle of it, here and in the engine.
    log_failure("test", ValueError(f"{CANARY} in an exception"))
    client.die(f"A step failed (KeyError: '{CANARY}')", (f"jinja2.UndefinedError: {CANARY}", f"  {CANARY}", CANARY))
    qtbot.waitUntil(lambda: window.bridge.state == "dead", timeout=5000)
    window.save_layout()
    chat.session.flush()
    assert CANARY.encode() in b"".join(path.read_bytes() for path in tmp_path.glob("chats.sqlite3*")), "it was there"

    parts = collected(window, qtbot)
    target = tmp_path / "bundle.zip"
    window.settings_control.diagnostics.dialog.save(target)
    with zipfile.ZipFile(target) as bundle:
        texts = {name: bundle.read(name).decode() for name in bundle.namelist()}
    assert texts == {part.name: part.text for part in parts}, "what was shown is what was saved"
    whole = "\n".join([*texts, *texts.values()])
    assert CANARY not in whole and "zebra9" not in whole.lower()
    if len(answer) > 4:
        assert answer not in whole
    assert chat.current.id not in whole
    assert not any(each.id in whole for each in chat.current.path)
    assert "The engine died" in whole and "jinja2.UndefinedError" in whole
    assert "saved as" in window.notice.text


def test_it_has_what_a_report_needs_and_no_names(window: MainWindow, qtbot) -> None:
    window.preferences.change(model_folders=(str(Path.home() / "models"), "/home/somebody/models"), font_px=14)
    window.save_layout()
    parts = {part.name: part for part in collected(window, qtbot)}
    assert {"doctor.json", "versions.json", "preferences.json", "window.json", "engine.txt", "batchscope.log"} <= set(
        parts
    )
    assert json.loads(parts["doctor.json"].text)["folder"] == "~/x"
    assert json.loads(parts["preferences.json"].text) == {"font_px": 14, "model_folders": ["~/models", "~/models"]}
    versions = json.loads(parts["versions.json"].text)
    assert versions["qt"].startswith("6.") and versions["packages"]["numpy"]
    assert set(json.loads(parts["window.json"].text)) == {"geometry", "layout", "arrangement"}
    dialog = window.settings_control.diagnostics.dialog
    assert [dialog.list.item(row).text().split("  ")[0] for row in range(dialog.list.count())] == list(parts)
    dialog.list.setCurrentRow(1)
    assert dialog.text.toPlainText() == parts["versions.json"].text
    dialog.save(Path("/nowhere/at/all.zip"))
    assert "/nowhere/at/all.zip" in dialog.problem.text()
    dialog.reject()
    window.preferences.change(font_px=13)


def test_a_doctor_that_fails_hangs_or_is_missing_costs_its_part_alone(qtbot, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = Doctor()
    for command, words in (
        ([sys.executable, "-c", "import sys; sys.exit(3)"], "code 3"),
        (["/there/is/no/doctor"], ""),
    ):
        with qtbot.waitSignal(doctor.answered, timeout=20_000) as answered:
            doctor.ask(command)
        assert words in json.loads(answered.args[0])["error"]
    monkeypatch.setattr("app.diagnostics.DOCTOR_SECONDS", 0.2)
    with qtbot.waitSignal(doctor.answered, timeout=20_000) as answered:
        doctor.ask([sys.executable, "-c", "import time; time.sleep(60)"])
    assert "0.2 s" in json.loads(answered.args[0])["error"]
    with qtbot.assertNotEmitted(doctor.answered, wait=50):
        doctor.ask([sys.executable, "-c", "import time; time.sleep(60)"])
        doctor.cancel()


def test_a_disk_that_takes_nothing_leaves_what_was_there(qapp, tmp_path: Path) -> None:
    target = tmp_path / "bundle.zip"
    target.write_text("before")
    with pytest.raises(OutputFailure):
        save(tmp_path / "none" / "bundle.zip", [])
    save(target, [Part("a.txt", "", "text")])
    assert zipfile.ZipFile(target).namelist() == ["a.txt"]
    assert list(tmp_path.iterdir()) == [target]


def test_without_log_and_layout_there_is_a_bundle_all_the_same(qapp) -> None:
    bridge = EngineBridge(client=ScriptedClient())
    names = [part.name for part in collect("{}", None, Preferences(), None, bridge)]
    assert names == ["doctor.json", "versions.json", "preferences.json", "window.json", "engine.txt"]
    bridge.deleteLater()
