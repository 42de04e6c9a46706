"""The chat file: what was saved is there after a kill, and damage costs only what is damaged."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from app.chat import schema
from app.chat.conversation import AnswerTimings, Conversation, Message, MessageStatus, Role, Turn
from app.chat.store import ChatStore, SavedMessage, StoreError
from engine.request import SamplingParams


def exchange(title: str, question: str = "why?", answer: str = "because", created: float = 1.0) -> Conversation:
    conversation = Conversation(title=title, created=created, updated=created, system_prompt="Be kind.")
    reply = Message(
        Role.ASSISTANT,
        answer,
        finish_reason="stop",
        timings=AnswerTimings(tokens=12, ttft=0.25, tokens_per_second=40.0, prompt_tokens=9, cached_tokens=8),
        params=SamplingParams(temperature=0.5, stop=("\n",), logit_bias={3: 1.0}),
    )
    conversation.turns = [Turn(0, Message(Role.USER, question), reply)]
    return conversation


def save(store: ChatStore, conversation: Conversation) -> None:
    messages = [SavedMessage(conversation, turn.number, m) for turn in conversation.turns for m in turn.messages]
    store.save([conversation], messages)


def fill(path: Path, count: int) -> None:
    store = ChatStore.open(path)
    for number in range(count):
        save(store, exchange(f"chat {number}", answer="x" * 3000, created=float(number)))
    store.close()


def load(store: ChatStore) -> list[Conversation]:
    conversations = store.conversations()
    for conversation in conversations:
        store.load_turns(conversation)
    return conversations


def test_everything_comes_back(store_path):
    store = ChatStore.open(store_path)
    kept = exchange("Grüße 👋")
    save(store, kept)
    store.close()
    store = ChatStore.open(store_path)
    (found,) = load(store)
    assert store.notice == "" and store.is_kept
    assert found.next_turn == 1
    found.next_turn = kept.next_turn
    assert found == kept
    store.close()


def test_the_last_used_is_first(store_path):
    store = ChatStore.open(store_path)
    for title, created in (("old", 1.0), ("new", 3.0), ("middle", 2.0)):
        save(store, exchange(title, created=created))
    assert [each.title for each in store.conversations()] == ["new", "middle", "old"]
    store.close()


def test_saving_again_updates_and_deleting_messages_deletes(store_path):
    store = ChatStore.open(store_path)
    kept = exchange("one")
    save(store, kept)
    answer = kept.turns[0].answer
    answer.text += " of rain"
    save(store, kept)
    store.close()
    store = ChatStore.open(store_path)
    assert load(store)[0].turns[0].answer.text == "because of rain"
    store.save([], [], [answer.id])
    assert load(store)[0].turns[0].answer is None
    store.close()


def test_open_answers_are_marked_at_the_next_start(store_path):
    store = ChatStore.open(store_path)
    kept = exchange("one", answer="half")
    kept.turns[0].answer.status = MessageStatus.STREAMING
    save(store, kept)
    store.close()
    answer = load(ChatStore.open(store_path))[0].turns[0].answer
    assert (answer.text, answer.status) == ("half", MessageStatus.INCOMPLETE)
    assert "ended before" in answer.error


KILLED = """
    import sys, time
    from pathlib import Path
    from PySide6.QtCore import QCoreApplication, QTimer
    from app.chat.session import ChatSession
    from tests.app.chat.fake_bridge import FakeBridge
    app = QCoreApplication([])
    bridge = FakeBridge()
    session = ChatSession(bridge, Path(sys.argv[1]))
    session.send(session.new_conversation(), "count for me")
    number = 0
    def speak():
        global number
        number += 1
        bridge.say(1, f"{number} ")
        print(number, flush=True)
    timer = QTimer()
    timer.timeout.connect(speak)
    timer.start(10)
    app.exec()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is a POSIX thing")
def test_kill_9_in_mid_answer_loses_at_most_the_last_second(store_path):
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root), "QT_QPA_PLATFORM": "offscreen"}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(store_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    spoken: list[tuple[float, int]] = []
    begun = None
    for line in process.stdout:
        spoken.append((time.monotonic(), int(line)))
        begun = begun or spoken[0][0]
        if spoken[-1][0] - begun > 1.6:
            break
    killed = time.monotonic()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (found,) = load(ChatStore.open(store_path))
    turn = found.turns[0]
    assert found.title == turn.user.text == "count for me"
    assert turn.answer.status is MessageStatus.INCOMPLETE
    numbers = [int(word) for word in turn.answer.text.split()]
    assert numbers == list(range(1, len(numbers) + 1))
    safe = max(number for at, number in spoken if at <= killed - 1.0)
    assert numbers[-1] >= safe > 10


DAMAGE = [
    "UPDATE messages SET text = CAST(x'80ff41' AS TEXT) WHERE role = 'assistant'",
    "UPDATE messages SET status = 'dancing' WHERE role = 'assistant'",
    "UPDATE messages SET tokens = 'many' WHERE role = 'assistant'",
    "UPDATE messages SET params = '{' WHERE role = 'assistant'",
    "UPDATE messages SET role = 'narrator' WHERE role = 'assistant'",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_message_costs_itself_and_is_kept(store_path, damage):
    fill(store_path, 20)
    with sqlite3.connect(store_path) as raw:
        victim = raw.execute("SELECT id FROM conversations WHERE title = 'chat 7'").fetchone()[0]
        raw.text_factory = bytes
        raw.execute(f"{damage} AND conversation_id = ?", (victim,))
        before = raw.execute("SELECT * FROM messages WHERE conversation_id = ?", (victim,)).fetchone()
    raw.close()
    store = ChatStore.open(store_path)
    found = load(store)
    assert len(found) == 20 and not any(each.damage for each in found)
    bad = next(each for each in found if each.id == victim)
    assert bad.turns[0].user.text == "why?" and bad.turns[0].answer.damage
    assert all(each.turns[0].answer.text == "x" * 3000 for each in found if each is not bad)
    assert [m.role for m in bad.context()] == ["system", "user"]
    save(store, bad)  # must leave the damaged row alone
    store.close()
    with sqlite3.connect(store_path) as raw:
        raw.text_factory = bytes
        assert raw.execute("SELECT * FROM messages WHERE conversation_id = ?", (victim,)).fetchone() == before
    raw.close()


@pytest.mark.parametrize("change", ["params = 'nonsense'", "title = CAST(x'ff' AS TEXT)", "updated = 'soon'"])
def test_a_damaged_conversation_is_listed_with_a_message_and_its_texts_stay(store_path, change):
    fill(store_path, 20)
    with sqlite3.connect(store_path) as raw:
        raw.execute(f"UPDATE conversations SET {change} WHERE title = 'chat 7'")
    raw.close()
    store = ChatStore.open(store_path)
    found = load(store)
    (bad,) = [each for each in found if each.damage]
    assert len(found) == 20 and bad.damage.split()[0].rstrip(":") == change.split()[0]
    assert bad.turns[0].answer.text == "x" * 3000
    store.save([bad])
    store.close()
    assert [each.damage for each in ChatStore.open(store_path).conversations() if each.damage] == [bad.damage]


def test_a_damaged_page_costs_the_rows_on_it(store_path):
    fill(store_path, 40)
    content = bytearray(store_path.read_bytes())
    page = 4096
    # A leaf page of the messages table, somewhere in the middle of the file.
    victim = next(at for at in range(10 * page, len(content), page) if content[at] == 0x0D)
    content[victim : victim + page] = b"\xa5" * page
    store_path.write_bytes(content)
    store = ChatStore.open(store_path)
    found = load(store)
    whole = [each for each in found if len(each.turns) == 1 and each.turns[0].answer is not None]
    assert 35 <= len(whole) < 40
    assert any("could not be read" in each.damage for each in found)
    assert store_path.read_bytes()[victim : victim + page] == b"\xa5" * page


def test_a_file_of_a_newer_version_is_refused_with_its_number_and_left_alone(store_path):
    fill(store_path, 3)
    with sqlite3.connect(store_path) as raw:
        raw.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION + 6}")
    raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    raw.close()
    before = store_path.read_bytes()
    store = ChatStore.open(store_path)
    assert f"format {schema.SCHEMA_VERSION + 6}" in store.notice and not store.is_kept
    assert store.conversations() == []
    save(store, exchange("not kept"))
    assert [each.title for each in store.conversations()] == ["not kept"]
    store.close()
    assert store_path.read_bytes() == before


def test_a_second_window_reads_and_does_not_write(store_path):
    first = ChatStore.open(store_path)
    save(first, exchange("mine"))
    second = ChatStore.open(store_path)
    assert "Another Batchscope" in second.notice and not second.is_kept
    assert load(second)[0].turns[0].answer.text == "because"
    save(second, exchange("theirs"))
    second.close()
    save(first, exchange("mine too"))
    first.close()
    third = ChatStore.open(store_path)
    assert third.is_kept
    assert {each.title for each in third.conversations()} == {"mine", "mine too"}
    third.close()


def test_a_file_that_is_no_database_is_set_aside(store_path):
    store_path.write_bytes(b"these were my chats" * 500)
    store = ChatStore.open(store_path)
    assert "damaged" in store.notice and store.is_kept
    save(store, exchange("new"))
    store.close()
    (aside,) = [path for path in store_path.parent.iterdir() if "damaged-" in path.name]
    assert aside.read_bytes() == b"these were my chats" * 500


def test_a_full_disk_is_said_and_what_was_saved_stays(store_path):
    store = ChatStore.open(store_path)
    save(store, exchange("kept"))
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    big = exchange("too big", answer="x" * 200_000)
    with pytest.raises(StoreError, match="disk is full"):
        save(store, big)
    assert [each.title for each in load(store)] == ["kept"]
    store._connection.execute("PRAGMA max_page_count = 1000000")
    save(store, big)
    store.close()
    assert {each.title for each in ChatStore.open(store_path).conversations()} == {"kept", "too big"}


def test_a_text_that_cannot_be_written_does_not_stop_later_saves(store_path):
    store = ChatStore.open(store_path)
    with pytest.raises(UnicodeEncodeError):
        save(store, exchange("half a character", question="\ud83d"))
    save(store, exchange("whole"))
    assert [each.title for each in load(store)] == ["whole"]
    store.close()


def test_a_locked_file_is_said_and_the_save_succeeds_later(store_path):
    store = ChatStore.open(store_path)
    other = sqlite3.connect(store_path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    begun = time.perf_counter()
    with pytest.raises(StoreError, match="locked"):
        save(store, exchange("one"))
    assert time.perf_counter() - begun < 2.0
    other.execute("ROLLBACK")
    other.close()
    save(store, exchange("one"))
    store.close()


def test_deleted_conversations_come_back_until_they_are_purged(store_path):
    store = ChatStore.open(store_path)
    secret = exchange("gone", answer="SECRETWORD" * 50)
    save(store, secret)
    store.set_deleted(secret.id, True)
    assert store.conversations() == [] and store.search("secretword") == set()
    store.set_deleted(secret.id, False)
    assert [each.title for each in store.conversations()] == ["gone"]
    store.set_deleted(secret.id, True)
    store.purge(secret.id)
    store.close()
    assert all(b"SECRETWORD" not in path.read_bytes() for path in store_path.parent.iterdir())


def test_search_finds_title_and_text_whatever_the_case(store_path):
    store = ChatStore.open(store_path)
    first, second = exchange("Über Blöcke"), exchange("other", answer="a Token here")
    save(store, first)
    save(store, second)
    assert store.search("über") == {first.id}
    assert store.search("TOKEN") == {second.id}
    assert store.search("%") == set()
    store.close()


def test_an_older_file_is_brought_forward(store_path, monkeypatch):
    fill(store_path, 2)
    more = (*schema.MIGRATIONS, ("ALTER TABLE conversations ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",))
    monkeypatch.setattr(schema, "MIGRATIONS", more)
    monkeypatch.setattr(schema, "SCHEMA_VERSION", len(more))
    store = ChatStore.open(store_path)
    assert len(load(store)) == 2
    assert store._connection.execute("SELECT sum(pinned) FROM conversations").fetchone()[0] == 0
    store.close()
    with sqlite3.connect(store_path) as raw:
        assert raw.execute("PRAGMA user_version").fetchone()[0] == len(more)
    raw.close()


def test_a_folder_that_cannot_be_made_leaves_a_working_store(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = ChatStore.open(tmp_path / "file" / "chats.sqlite3")
    assert "not kept" in store.notice and not store.is_kept
    save(store, exchange("one"))
    assert len(load(store)) == 1
    store.close()
