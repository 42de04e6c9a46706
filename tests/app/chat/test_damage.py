"""Bytes of the chat file that are others than were written: it opens, shows what can be read, and saves what comes."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from app.chat import files, salvage, schema
from app.chat.session import ChatSession
from app.chat.store import ChatStore
from tests.app.chat.fake_bridge import FakeBridge
from tests.app.chat.version_1 import make_version_1

PAGE = 4096


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "chats.sqlite3"
    make_version_1(path, chats=8, turns=6, length=500)
    ChatStore.open(path).close()
    return path.read_bytes()


def flipped(content: bytearray, dice: random.Random) -> None:
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)


def flipped_in_the_tables_description(content: bytearray, dice: random.Random) -> None:
    content[dice.randrange(100, PAGE)] = dice.randrange(256)


def another_page(content: bytearray, dice: random.Random) -> None:
    page = dice.randrange(1, len(content) // PAGE)
    content[page * PAGE : (page + 1) * PAGE] = dice.randbytes(PAGE)


def everything(session: ChatSession) -> list[str]:
    for conversation in session.conversations:
        session.open(conversation)
        conversation.context()
    return [message.text for conversation in session.conversations for message in conversation.messages]


@pytest.mark.parametrize("damage", [flipped, flipped_in_the_tables_description, another_page])
@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_file_opens_and_takes_what_is_written(qapp, store_path, sound_file, damage, seed):
    content = bytearray(sound_file)
    damage(content, random.Random(seed))
    store_path.write_bytes(content)
    session = ChatSession(FakeBridge(), store_path)
    shown = set(everything(session))
    written = []
    for conversation in [*session.conversations, session.new_conversation()]:
        if not conversation.damage:
            written.append(f"written in {conversation.id}")
            session.send(conversation, written[-1])
            session.stop(conversation)
    session.search("answer")
    assert session.flush(), session.problem
    session.close()
    session = ChatSession(FakeBridge(), store_path)
    assert shown | set(written) <= set(everything(session))
    session.close()


def test_rows_are_read_whatever_the_file_says_of_their_table(store_path, sound_file):
    content = sound_file.replace(b"finish_reason TEXT NOT NULL", b"finish_raeson TEXT NOT\xffNULL")
    assert content != sound_file
    store_path.write_bytes(content)
    store = ChatStore.open(store_path)
    assert store.is_kept
    assert ".damaged-" in store.notice
    chats = store.conversations()
    for chat in chats:
        store.load_messages(chat)
    assert [chat.num_messages for chat in chats] == [12] * 8
    assert not any(message.damage for chat in chats for message in chat.messages)
    store.close()


@pytest.mark.parametrize("writes", [True, False])
def test_a_damaged_file_of_version_1_opens_in_both_windows(store_path, writes):
    make_version_1(store_path, chats=2, turns=2)
    content = store_path.read_bytes().replace(b"preemptions INTEGER", b"preempti\xffns INTEGER")
    store_path.write_bytes(content)
    lock = None if writes else files.take_lock(files.beside(store_path, ".lock"))
    store = ChatStore.open(store_path)
    assert store.is_kept is writes
    assert len(store.conversations()) == 2
    for chat in store.conversations():
        store.load_messages(chat)
        assert chat.num_messages == 4
    if lock is not None:
        lock.close()
    store.close()


def test_rows_beyond_the_first_hundred_thousand_are_kept(tmp_path):
    """Row numbers grow with every message that was ever written."""
    path = tmp_path / "chats.sqlite3"
    make_version_1(path, chats=30, turns=30, length=800)
    raw = sqlite3.connect(path)
    raw.execute("UPDATE messages SET rowid = rowid + 150000")
    raw.commit()
    raw.close()
    content = bytearray(path.read_bytes())
    at = content.index(b"answer 7....")
    page = at // PAGE * PAGE
    content[page : page + 64] = b"\xff" * 64
    path.write_bytes(content)
    copy = files.connect(Path(":memory:"))
    lost = salvage.copy_readable(path, copy)
    assert 0 < lost < 20
    assert copy.execute("SELECT count(*) FROM messages").fetchone()[0] == 30 * 30 * 2 - lost
    copy.close()


@pytest.mark.parametrize("value", [9.9e300, -9.9e300, 2**62])
@pytest.mark.parametrize("column", ["number", "tokens", "created"])
def test_a_number_out_of_all_bounds_is_damage(qapp, store_path, sound_file, column, value):
    store_path.write_bytes(sound_file)
    raw = sqlite3.connect(store_path)
    raw.execute(f"UPDATE messages SET {column} = ? WHERE id = '0-1-assistant'", (value,))
    raw.commit()
    raw.close()
    session = ChatSession(FakeBridge(), store_path)
    conversation = session.conversations.get("chat0")
    session.open(conversation)
    assert column in conversation.find("0-1-assistant").damage
    session.send(conversation, "on we go")
    assert session.flush()
    session.close()


def test_a_message_that_an_index_lost_is_found_in_its_table(store_path, sound_file):
    store_path.write_bytes(sound_file)
    connection = files.connect(store_path)
    root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'messages_of_conversation'").fetchone()
    connection.close()
    content = bytearray(sound_file)
    begin = (root[0] - 1) * PAGE
    at = content.index(b"chat3", begin, begin + PAGE)
    content[at : at + 5] = b"chat2"
    store_path.write_bytes(content)
    store = ChatStore.open(store_path)
    chat = next(each for each in store.conversations() if each.id == "chat3")
    store.load_messages(chat)
    assert chat.num_messages == 12
    assert not any(message.damage for message in chat.messages)
    store.close()


def test_messages_without_their_chat_get_one(store_path, sound_file):
    store_path.write_bytes(sound_file)
    raw = sqlite3.connect(store_path)
    raw.execute("DELETE FROM conversations WHERE id = 'chat4'")
    raw.commit()
    raw.close()
    store = ChatStore.open(store_path)
    chats = {chat.id: chat for chat in store.conversations()}
    store.load_messages(chats["chat4"])
    assert chats["chat4"].num_messages == 12
    store.close()


def test_a_sound_file_is_sound(store_path, sound_file):
    store_path.write_bytes(sound_file)
    assert files.reads(store_path, schema.is_sound)
    store_path.unlink()
    ChatStore.open(store_path).close()
    assert files.reads(store_path, schema.is_sound)


@pytest.mark.parametrize("value", [1, b"x", "never", -3.5])
def test_damage_does_not_delete_a_chat(store_path, sound_file, value):
    """Only the time at which a user deleted it does."""
    store_path.write_bytes(sound_file)
    raw = sqlite3.connect(store_path)
    edit = "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = replace(sql, {}, {})"
    raw.executescript(edit.format("'deleted REAL'", "'deleted'"))
    raw.close()
    raw = sqlite3.connect(store_path)
    raw.execute("UPDATE conversations SET deleted = ? WHERE id = 'chat1'", (value,))
    raw.commit()
    raw.executescript(edit.format("' deleted'", "' deleted REAL'"))
    raw.close()
    store = ChatStore.open(store_path)
    assert len(store.conversations()) == 8
    store.close()
