"""Backup, restore and wipe: one file in the place of another, and nothing lost by accident or left on purpose."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from app.chat import backup, schema
from app.chat.files import RESTORING, WIPING
from app.chat.preset import Preset
from app.chat.store import ChatStore, StoreError
from tests.app.chat.test_store import exchange, fill, load, save
from tests.app.chat.version_1 import make_version_1

pytestmark = pytest.mark.usefixtures("qapp")


@pytest.fixture
def store(store_path):
    opened = ChatStore.open(store_path)
    yield opened
    opened.close()


def titles(store: ChatStore) -> list[str]:
    return sorted(each.title for each in store.conversations())


def test_a_backup_restored_elsewhere_is_what_was_backed_up(store, tmp_path):
    kept = exchange("one")
    save(store, kept)
    store.save_preset(Preset("Pirate", "system", text="Arr."))
    target = tmp_path / "backup.sqlite3"
    backup.write(store, target)
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob("backup.sqlite3-*"))
    other = ChatStore.open(tmp_path / "elsewhere" / "chats.sqlite3")
    save(other, exchange("was here before"))
    summary = backup.restore(other, target)
    assert (summary.conversations, summary.messages) == (1, 2)
    assert load(other) == [kept] and [each.name for each in other.presets("system")] == ["Pirate"]
    assert "because" in [other.text_of(hit.message_id) for hit in other.find_texts("caus").values()]
    save(other, exchange("written afterwards"))
    other.close()
    assert titles(ChatStore.open(other.path)) == ["one", "written afterwards"]
    assert titles(ChatStore.open(summary.kept)) == ["was here before"]


def test_a_backup_of_an_older_version_is_brought_forward(store, tmp_path):
    old = tmp_path / "old"
    make_version_1(old, chats=2, turns=3)
    before = old.read_bytes()
    assert backup.restore(store, old).messages == 12
    assert [len(each.path) for each in load(store)] == [6, 6] and old.read_bytes() == before


def test_what_is_no_backup_is_refused_and_changes_nothing(store, store_path, tmp_path):
    save(store, exchange("mine"))
    foreign, newer, text = tmp_path / "foreign", tmp_path / "newer", tmp_path / "text"
    with sqlite3.connect(foreign) as raw:
        raw.execute("CREATE TABLE places (id)")
        raw.execute("PRAGMA user_version = 1")
    raw.close()
    fill(newer, 1)
    with sqlite3.connect(newer) as raw:
        raw.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}")
    raw.close()
    text.write_text("no database at all " * 100)
    (tmp_path / "empty").touch()
    for path, sentence in (
        (foreign, "holds no chats"),
        (newer, "newer Batchscope"),
        (text, "holds no chats"),
        (tmp_path / "empty", "holds no chats"),
        (tmp_path / "nowhere", "holds no chats"),
        (store_path, "chat file itself"),
    ):
        with pytest.raises(StoreError, match=sentence):
            backup.restore(store, path)
        assert titles(store) == ["mine"]
    with pytest.raises(StoreError, match="chat file itself"):
        backup.write(store, store_path)
    assert titles(store) == ["mine"] and not list(tmp_path.glob("*before-restore*"))


def test_a_backup_that_cannot_be_written_leaves_the_older_one(store, tmp_path):
    save(store, exchange("one"))
    folder = tmp_path / "folder"
    with pytest.raises(StoreError, match="not written"):
        backup.write(store, folder / "missing" / "backup")
    folder.mkdir()
    target = folder / "backup"
    backup.write(store, target)
    before = target.read_bytes()
    (folder / "backup.part").mkdir()  # in the way
    with pytest.raises(StoreError, match="not written"):
        backup.write(store, target)
    assert target.read_bytes() == before


def test_a_restore_that_was_cut_off_leaves_nothing_behind(store_path):
    fill(store_path, 1)
    for suffix in (RESTORING, RESTORING + "-wal"):
        store_path.with_name(store_path.name + suffix).write_bytes(b"half of it")
    store = ChatStore.open(store_path)
    assert titles(store) == ["chat 0"] and not list(store_path.parent.glob("*restoring*"))
    store.close()


def test_restoring_twice_in_a_second_keeps_both_states(store, tmp_path):
    for title in ("first", "second"):
        other = ChatStore.open(tmp_path / title)
        save(other, exchange(title))
        other.close()
    save(store, exchange("mine"))
    kept = [backup.restore(store, tmp_path / title).kept for title in ("first", "second")]
    assert titles(store) == ["second"]
    assert [titles(ChatStore.open(path)) for path in kept] == [["mine"], ["first"]]


def test_a_second_window_backs_up_and_does_not_restore(store, store_path, tmp_path):
    save(store, exchange("mine"))
    second = ChatStore.open(store_path)
    backup.write(second, tmp_path / "copy")
    for attempt in (lambda: backup.restore(second, tmp_path / "copy"), lambda: backup.wipe(second)):
        with pytest.raises(StoreError, match="cannot write"):
            attempt()
    second.close()
    assert titles(store) == ["mine"]


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_wiping_leaves_no_word_behind_but_presets(store, store_path):
    for number in range(20):
        save(store, exchange("SECRETWORD", answer="SECRETWORD " * 100, created=float(number)))
    store.save_preset(Preset("Pirate", "system", text="Arr."))
    other = store_path.with_name("other")
    backup.write(store, other)
    backup.restore(store, other)  # keeps a file beside
    other.unlink()
    (store_path.with_name(store_path.name + ".damaged-1")).write_bytes(b"SECRETWORD")
    inodes = [os.open(path, os.O_RDONLY) for path in store_path.parent.iterdir() if "lock" not in path.name]
    assert b"SECRETWORD" in everything(store_path.parent)
    backup.wipe(store)
    assert store.conversations() == [] and [each.name for each in store.presets("system")] == ["Pirate"]
    assert b"SECRETWORD" not in everything(store_path.parent)
    for inode in inodes:  # what was deleted was overwritten first
        assert b"SECRETWORD" not in os.pread(inode, os.fstat(inode).st_size, 0)
        os.close(inode)
    save(store, exchange("after"))
    store.close()
    assert titles(ChatStore.open(store_path)) == ["after"]


def test_a_wipe_that_was_cut_off_goes_on_at_the_next_start(store_path):
    fill(store_path, 1)
    left = store_path.with_name(store_path.name + WIPING)
    left.write_bytes(b"SECRETWORD")
    handle = os.open(left, os.O_RDONLY)
    store = ChatStore.open(store_path)
    assert titles(store) == ["chat 0"] and not left.exists() and os.pread(handle, 20, 0) == bytes(10)
    os.close(handle)
    store.close()
