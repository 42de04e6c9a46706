"""The Models page, the first run, and switching between models, on the real window with a scripted engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLabel, QWidget

from app.models.catalogue import key_of
from app.models.figures import Wanted, need_of, parameters_label, verdict
from app.models.kept import KeptModels
from app.models.table import STATE
from app.settings.preferences import PreferenceStore
from engine.client import EngineDied
from engine.config import EngineConfig
from engine.fetch_events import FetchDone
from engine.model_catalog import Machine, ModelEntry
from tests.app.conftest import Rig
from tests.models.fake_hub import COMMIT, FakeHub, Repository
from tests.models.test_fetch import CONFIG, NAME, weights

MakeRig = Callable[..., Rig]
GIB = 1 << 30
MACHINE = Machine(16 * GIB, 8 * GIB)


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def entry(key: str, parameters: int = 1_000_000_000, **given: Any) -> ModelEntry:
    types = {"int8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
    fields: dict[str, Any] = {
        "model": key, "name": key, "source": "hub", "path": f"/cache/{key}", "state": "ready", "revision": "main",
        "architecture": "LlamaForCausalLM", "runner": "native", "parameters": parameters, "dtype": "bfloat16",
        "max_position": 8192, "kv_values": 100_000, "disk_bytes": 2 * parameters, "working_bytes": 200 << 20,
        "weight_bytes": {dtype: size * parameters for dtype, size in types.items()},
    }  # fmt: skip
    return ModelEntry(**{**fields, **given})


def texts(widget: QWidget) -> str:
    return "\n".join(label.text() for label in widget.findChildren(QLabel) if label.isVisibleTo(widget))


def fill(rig: Rig, *entries: ModelEntry, machine: Machine = MACHINE) -> None:
    """The page with these entries, no search running."""
    models = rig.window.models
    rig.window.models.search = lambda **_: None  # type: ignore[method-assign]
    models.show_page()
    models.catalogue.entries = {key_of(each): each for each in entries}
    models.catalogue.machine = machine
    models.page.refresh()


def shown(rig: Rig) -> list[str]:
    shown = rig.window.models.page.filter
    return [shown.index(row, 0).data() for row in range(shown.rowCount())]


def state_of(rig: Rig, name: str) -> str:
    return str(rig.window.models.page.filter.index(shown(rig).index(name), STATE).data())


# What fits -----------------------------------------------------------------------------------------------------------


def test_whether_it_fits_is_said_with_the_numbers_before_loading() -> None:
    model = entry("big", 7_000_000_000)
    fits = need_of(model, Wanted(), MACHINE)
    assert fits is not None and fits.dtype == "int8" and fits.loads and fits.fits
    tight = need_of(model, Wanted(context=8192, chats=64), MACHINE)
    assert tight is not None and tight.loads and not tight.fits
    assert f"{tight.fitting_tokens:,} tokens" in verdict(tight, Wanted())
    never = need_of(model, Wanted(dtype="float32"), MACHINE)
    assert never is not None and not never.loads
    assert "26 GiB in float32" in verdict(never, Wanted()) and "8.0 GiB are free" in verdict(never, Wanted())


def test_on_a_gpu_automatic_is_int8_where_16_bits_leave_no_room_for_a_pool() -> None:
    machine = Machine(64 * GIB, 60 * GIB, gpu_name="A GPU", gpu_bytes=16 * GIB, gpu_free_bytes=15 * GIB)
    found = [need_of(entry("m", size), Wanted(), machine) for size in (7_000_000_000, 7_900_000_000, 20_000_000_000)]
    assert [need is not None and (need.dtype, need.loads) for need in found] == [
        ("bfloat16", True),
        ("int8", True),  # 14.7 GiB of weights would fit, and 0.2 GiB of working memory, but no pool
        ("int8", False),
    ]
    asked = need_of(entry("m", 7_900_000_000), Wanted(dtype="bfloat16"), machine)
    assert asked is not None and asked.dtype == "bfloat16"


def test_the_memory_limit_of_the_preferences_counts() -> None:
    wanted = Wanted(limit_bytes=GIB // 2)
    need = need_of(entry("m"), wanted, MACHINE)
    assert need is not None and not need.loads and "memory limit" in verdict(need, wanted)


def test_what_the_running_engine_holds_counts_as_free() -> None:
    need = need_of(entry("m"), Wanted(), Machine(16 * GIB, 2 * GIB, engine_bytes=3 * GIB))
    assert need is not None and need.room == 5 * GIB


def test_on_a_gpu_its_own_memory_counts() -> None:
    need = need_of(entry("m"), Wanted(), Machine(16 * GIB, 8 * GIB, 0, "GPU", 24 * GIB, 20 * GIB))
    assert need is not None and (need.dtype, need.room) == ("bfloat16", 20 * GIB)


def test_keys_and_values_of_8_bits_take_half() -> None:
    machine = Machine(16 * GIB, 8 * GIB, 0, "GPU", 24 * GIB, 20 * GIB)
    halves, eights = (need_of(entry("m"), Wanted(kv_dtype=kind), machine) for kind in ("auto", "fp8"))
    assert halves is not None and eights is not None
    assert (2 * eights.kv, eights.weights, eights.dtype) == (halves.kv, halves.weights, "bfloat16")
    assert eights.fitting_tokens // 2 == halves.fitting_tokens


@pytest.mark.parametrize(
    ("count", "label"),
    [(0, ""), (999, "999"), (134_515_008, "135 M"), (1_711_376_384, "1.7 B"), (70_553_706_496, "71 B")],
)
def test_parameters_are_said_as_people_do(count: int, label: str) -> None:
    assert parameters_label(count) == label


# The page ------------------------------------------------------------------------------------------------------------


def test_the_key_opens_the_page_and_escape_closes_it(rig: Rig) -> None:
    rig.load()
    rig.window.models.search = lambda **_: None  # type: ignore[method-assign]
    page = rig.window.models.page
    rig.qtbot.keyClick(rig.window, Qt.Key.Key_M, Qt.KeyboardModifier.ControlModifier)
    rig.wait_for(page.isVisible)
    assert page.search.hasFocus() or not rig.window.isActiveWindow()
    rig.qtbot.keyClick(page.search, Qt.Key.Key_Escape)
    assert not page.isVisible()


def test_models_are_searched_sorted_and_told_apart(rig: Rig) -> None:
    broken = entry("broken", state="damaged", reason="It was cut short.", weight_bytes={}, source="folder")
    fill(rig, entry("org/zebra"), entry("org/ape", 2_000_000_000), broken, entry("org/huge", 99_000_000_000))
    page = rig.window.models.page
    assert shown(rig) == ["org/ape", "org/huge", "org/zebra", "broken"]
    page.list.sortByColumn(2, Qt.SortOrder.DescendingOrder)
    assert shown(rig) == ["org/huge", "org/ape", "org/zebra", "broken"]
    page.choose("/cache/broken")
    assert "It was cut short." in texts(page.details) and not page.details.load_button.isVisible()
    page.choose("org/huge")
    assert "Does not fit" in page.details.verdict.text()
    rig.qtbot.keyClicks(page.search, "ZEB")
    assert shown(rig) == ["org/zebra"]
    page.search.clear()
    page.only_loadable.setChecked(True)
    assert shown(rig) == ["org/huge", "org/ape", "org/zebra"]
    page.search.setText("nothing like it")
    assert page.pages.is_empty and "Clear the search" in page.empty.text


def test_the_fields_change_the_figures(rig: Rig) -> None:
    fill(rig, entry("org/m"))
    details = rig.window.models.page.details
    details.chats.setValue(1)
    details.context.setValue(2048)
    one = details.bar._need
    details.chats.setValue(4)
    assert one is not None and details.bar._need is not None and details.bar._need.kv == 4 * one.kv
    details.slider.setValue(12)
    assert details.context.value() == 4096
    details.dtype.setCurrentIndex(details.dtype.findData("float32"))
    assert details.bar._need.weights == 4_000_000_000


def test_automatic_is_the_type_that_this_model_would_have(rig: Rig) -> None:
    no_int8 = {"bfloat16": 2_000_000, "float16": 2_000_000, "float32": 4_000_000}
    fill(rig, entry("org/a"), entry("org/b", weight_bytes=no_int8, runner="transformers"))
    page = rig.window.models.page
    page.choose("org/a")
    assert page.details.dtype.currentText() == "auto: int8"
    page.choose("org/b")
    assert page.details.dtype.currentText() == "auto: float32"


def test_home_and_end_and_larger_text_in_the_table(rig: Rig) -> None:
    fill(rig, *(entry(f"org/m{number}") for number in range(5)))
    models = rig.window.models.page.list
    models.setFocus()
    rig.qtbot.keyClick(models, Qt.Key.Key_End)
    assert models.current().name == "org/m4"
    rig.qtbot.keyClick(models, Qt.Key.Key_Home)
    assert models.current().name == "org/m0"
    width, height = models.columnWidth(STATE), models.rowHeight(0)
    rig.theme.set_font_size(20)
    try:
        assert models.columnWidth(STATE) > width * 1.3 and models.rowHeight(0) > height
    finally:
        rig.theme.set_font_size(13)


def test_a_model_is_loaded_from_the_page_with_its_type(rig: Rig) -> None:
    rig.load()
    fill(rig, entry("org/m"))
    page = rig.window.models.page
    page.choose("org/m")
    page.details.dtype.setCurrentIndex(page.details.dtype.findData("bfloat16"))
    rig.qtbot.mouseClick(page.details.load_button, Qt.MouseButton.LeftButton)
    assert (rig.client.loaded[-1].model, rig.client.loaded[-1].dtype) == ("org/m", "bfloat16")
    assert not page.details.load_button.isEnabled() and state_of(rig, "org/m") == "loading …"
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    assert rig.window.focusWidget() is rig.window.chat.composer.edit
    assert not page.isVisible() and rig.window.models.kept.recent[0] == "org/m"
    titles = [action.text() for action in rig.window.models.recent_menu.actions()]
    assert titles[0] == "org/m" and len(titles) == 2


def test_while_answers_run_it_says_how_many_end_and_asks(rig: Rig) -> None:
    rig.load()
    fill(rig, entry("org/m"))
    for _ in range(3):
        rig.add(20, 100)
    rig.step(3)
    before = len(rig.client.loaded)
    page = rig.window.models.page
    page.choose("org/m")
    rig.qtbot.mouseClick(page.details.load_button, Qt.MouseButton.LeftButton)
    assert len(rig.client.loaded) == before and rig.bridge.state == "ready"
    assert "3 answers" in rig.window.notice.text
    rig.qtbot.mouseClick(rig.window.notice.button, Qt.MouseButton.LeftButton)
    assert rig.client.loaded[-1].model == "org/m"
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    rig.window.models.unload()
    assert rig.bridge.state == "stopped" and rig.client.core is None


def test_the_question_can_be_declined_and_goes_with_the_answers_it_is_about(rig: Rig) -> None:
    rig.load()
    fill(rig, entry("org/m"))
    notice, before = rig.window.notice, len(rig.client.loaded)
    first = rig.add(20, 100)
    rig.step(3)
    rig.window.models.ask_to_open("org/m")
    assert "1 answer" in notice.text
    rig.qtbot.mouseClick(notice.dismiss_button, Qt.MouseButton.LeftButton)
    assert not notice.text and len(rig.client.loaded) == before
    rig.window.models.ask_to_open("org/m")
    rig.bridge.abort(first)
    rig.step(2)
    assert not rig.state.requests and not notice.text and len(rig.client.loaded) == before
    rig.window.say("something else", False)
    assert notice.dismiss_button.isHidden()


def test_a_load_that_failed_can_be_gone_back_from(rig: Rig) -> None:
    rig.load()
    rig.window.models.ask_to_open("org/too-large")
    rig.client.fail_to_load("The model needs about 90.0 GiB in int8, and 8.0 GiB are free.", "memory")
    page = rig.window.model_page
    rig.wait_for(page.isVisible)
    assert "90.0 GiB" in texts(page) and "SmolLM2" in page.back_button.text()
    rig.qtbot.mouseClick(page.back_button, Qt.MouseButton.LeftButton)
    assert rig.client.loaded[-1].model == "starter"
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    assert not page.isVisible()


def test_an_engine_that_dies_while_loading_is_remembered_and_said_with_numbers(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.load()
    fill(rig, entry("org/bomb", 7_000_000_000))
    rig.window.models.open("org/bomb")
    rig.client.loading("Loading the weights", 1, 9)
    rig.wait_for(lambda: rig.bridge.state == "loading")
    rig.client.deliver(EngineDied(-9, "The engine was ended by SIGKILL: memory ran out.", []))
    page = rig.window.model_page
    rig.wait_for(page.isVisible)
    assert "org/bomb needs about 6.7 GiB in int8; 8.0 GiB were free." in texts(page)
    assert page.back_button.isVisible()
    marker = rig.window._guard._file
    assert marker is not None and marker.read_text() == "org/bomb"
    rig.window.close()
    assert marker.read_text() == "org/bomb"  # the next start is told
    rig.window._guard.begin("starter")
    rig.window._guard.end()
    assert not marker.exists()


def test_nothing_is_removed_but_what_we_put_there_and_only_after_a_question(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "XDG_CACHE_HOME" / "batchscope" / "models" / "imported"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    mine = entry(str(folder), name="imported", source="imported", path=str(folder), disk_bytes=100)
    fill(rig, mine, entry("org/theirs"))
    page, models = rig.window.models.page, rig.window.models
    page.choose("org/theirs")
    assert not page.details.remove_button.isVisible()
    page.choose(str(folder))
    rig.qtbot.mouseClick(page.details.remove_button, Qt.MouseButton.LeftButton)
    assert "100 B" in page.details.question.text() and folder.exists()
    rig.qtbot.mouseClick(page.details.no, Qt.MouseButton.LeftButton)
    assert folder.exists() and not page.details.yes.isVisible()
    rig.qtbot.mouseClick(page.details.remove_button, Qt.MouseButton.LeftButton)
    rig.qtbot.mouseClick(page.details.yes, Qt.MouseButton.LeftButton)
    wait_long(rig, lambda: not folder.exists() and not models._removal.is_running)
    assert "Removed imported: 100 B" in rig.window.notice.text


def test_the_search_finds_what_is_in_a_chosen_folder(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "chosen" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").write_bytes(weights(1))
    models = rig.window.models
    models.show_page()
    wait_long(rig, lambda: "starter" in models.catalogue.entries and not models.catalogue.is_searching)
    assert models.catalogue.machine is not None and models.catalogue.machine.free_bytes > 0
    assert models.catalogue.entries["starter"].state == "absent"
    dialog = "app.models.control.QFileDialog.getExistingDirectory"
    monkeypatch.setattr(dialog, lambda *_: str(tmp_path / "chosen"))
    rig.qtbot.mouseClick(models.page.folder_button, Qt.MouseButton.LeftButton)
    wait_long(rig, lambda: str(folder) in models.catalogue.entries)
    assert rig.window.preferences.values.model_folders == (str(tmp_path / "chosen"),)
    wait_long(rig, lambda: not models.catalogue.is_searching)


# The download --------------------------------------------------------------------------------------------------------


def wait_long(rig: Rig, condition: Callable[[], bool]) -> None:
    """A process starts meanwhile, and imports a library."""
    rig.qtbot.waitUntil(condition, timeout=30_000)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    made = FakeHub()
    files = {"model.safetensors": weights(), "config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}"}
    made.repositories[NAME] = Repository(files, config=dict(CONFIG))
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield made
    made.close()


def test_a_model_is_looked_up_fetched_and_remembered_as_ours(rig: Rig, hub: FakeHub) -> None:
    models = rig.window.models
    models.show_page()
    card = models.page.download
    rig.qtbot.mouseClick(models.page.download_button, Qt.MouseButton.LeftButton)
    card.repository.setText(NAME)
    rig.qtbot.keyClick(card.repository, Qt.Key.Key_Return)
    wait_long(rig, card.begin.isVisible)
    assert "3.0 MiB" in card.begin.text() and "apache-2.0" in card.message.text()
    rig.qtbot.mouseClick(card.begin, Qt.MouseButton.LeftButton)
    assert card.cancel.isVisible()
    wait_long(rig, lambda: NAME in models.catalogue.entries and not models.catalogue.is_searching)
    found = models.catalogue.entries[NAME]
    assert models.kept.was_fetched(NAME, COMMIT) and models._is_ours(found)


def test_a_download_is_cancelled_and_says_that_it_goes_on(rig: Rig, hub: FakeHub) -> None:
    hub.break_after = 1 << 20
    models = rig.window.models
    models.show_page()
    card = models.page.download
    card.open_for()
    card.repository.setText(NAME)
    card._begin()
    cache = Path(os.environ["HF_HOME"]) / "hub"
    wait_long(rig, lambda: any(path.stat().st_size for path in cache.rglob("*.incomplete")))
    rig.qtbot.mouseClick(card.cancel, Qt.MouseButton.LeftButton)
    assert not card.is_fetching and "goes on from there" in card.message.text()
    wait_long(rig, lambda: any(each.state == "incomplete" for each in models.catalogue.entries.values()))
    wait_long(rig, lambda: not models.catalogue.is_searching)


def test_what_the_hub_refuses_is_said_on_the_card(rig: Rig, hub: FakeHub) -> None:
    hub.repositories[NAME].gated = True
    card = rig.window.models.page.download
    fill(rig)
    card.open_for(NAME)
    wait_long(rig, lambda: "accept the conditions" in card.message.text())
    wait_long(rig, card.look_up.isVisible)
    assert not card.begin.isVisible()


def test_offline_mode_asks_nobody(rig: Rig, hub: FakeHub) -> None:
    rig.window.preferences.change(offline=True)
    fill(rig)
    rig.window.models.page.download.open_for(NAME)
    assert "Offline mode" in rig.window.models.page.download.message.text() and hub.requests == []
    rig.window.models.open("starter")
    assert rig.client.loaded == [] and "Offline mode" in texts(rig.window.model_page)


# The first run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(make_rig: MakeRig, tmp_path: Path) -> Rig:
    """As on a machine that never saw the program."""
    rig = make_rig(1100, 700)
    rig.window.models._preferences = PreferenceStore(tmp_path / "config" / "preferences.json", rig.window)
    return rig


def test_the_first_start_explains_fetches_and_opens_a_chat(fresh: Rig) -> None:
    window, page = fresh.window, fresh.window.models.first_run
    window.launch(EngineConfig())
    assert page.isVisible() and fresh.client.loaded == []
    said = texts(page)
    assert "89 MiB" in said and "Apache-2.0" in said and "package index" in said
    fresh.qtbot.mouseClick(page.begin_button, Qt.MouseButton.LeftButton)
    assert fresh.client.loaded[-1].model == "starter"
    fresh.client.loading("Downloading the starter model", 34 << 20, 98 << 20)
    fresh.wait_for(lambda: "34 of 98 MiB" in page.message.text())
    assert page.cancel_button.isVisible() and page.bar.value() == 347
    fresh.client.ready()
    fresh.wait_for(lambda: not page.isVisible())
    assert window.chat.current.is_empty and window._arranged == "chat"


def test_the_first_start_without_a_network_says_so_and_offers_ways_on(fresh: Rig) -> None:
    page = fresh.window.models.first_run
    fresh.window.launch(EngineConfig())
    fresh.qtbot.mouseClick(page.begin_button, Qt.MouseButton.LeftButton)
    fresh.client.fail_to_load("The package index cannot be reached.", "offline")
    fresh.wait_for(lambda: "cannot be reached" in page.message.text())
    assert page.isVisible() and not fresh.window.model_page.isVisible()
    assert page.begin_button.text() == "Try again" and page.choose_button.isEnabled()
    fresh.qtbot.mouseClick(page.begin_button, Qt.MouseButton.LeftButton)
    fresh.qtbot.mouseClick(page.cancel_button, Qt.MouseButton.LeftButton)
    assert fresh.bridge.state == "stopped" and "Cancelled" in page.message.text()
    fresh.window.models.search = lambda **_: None  # type: ignore[method-assign]
    fresh.qtbot.mouseClick(page.choose_button, Qt.MouseButton.LeftButton)
    assert fresh.window.models.page.isVisible()


def test_whoever_names_a_model_or_has_preferences_is_not_held_up(fresh: Rig, tmp_path: Path) -> None:
    fresh.window.launch(EngineConfig(model="/models/x"), chosen=True)
    assert fresh.client.loaded[-1].model == "/models/x" and not fresh.window.models.first_run.isVisible()
    fresh.bridge.shutdown()
    fresh.window.models._preferences.change(offline=False, font_px=14)
    fresh.window.launch(EngineConfig(model="/models/y"))
    assert fresh.client.loaded[-1].model == "/models/y" and not fresh.window.models.first_run.isVisible()


# Lists that are kept -------------------------------------------------------------------------------------------------


def test_recent_and_fetched_models_outlive_the_window(tmp_path: Path) -> None:
    kept = KeptModels(tmp_path / "models.json")
    for number in range(9):
        kept.used(f"m{number}")
    kept.used("m5")
    kept.fetched("org/x", COMMIT)
    again = KeptModels(tmp_path / "models.json")
    assert again.recent == ["m5", "m8", "m7", "m6", "m4", "m3"] and again.was_fetched("org/x", COMMIT)
    again.forget("m5")
    assert "m5" not in KeptModels(tmp_path / "models.json").recent
    (tmp_path / "models.json").write_text("{")
    assert KeptModels(tmp_path / "models.json").recent == []


def test_a_download_that_ends_behind_the_closed_page_is_told(rig: Rig) -> None:
    rig.load()
    rig.window.models._fetched(FetchDone("org/x", "main", COMMIT, "/cache/x"))
    assert "org/x is on this machine now." in rig.window.notice.text
    rig.qtbot.mouseClick(rig.window.notice.button, Qt.MouseButton.LeftButton)
    assert rig.client.loaded[-1].model == "org/x"
