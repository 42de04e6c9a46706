"""Search: any part of any word in titles and texts, also while texts change, are damaged, or are very long."""

from __future__ import annotations

import random
import sqlite3
import time

import pytest

from app.chat import schema, search
from app.chat import session as session_module
from app.chat.conversation import Conversation, Message, MessageStatus, Role
from app.chat.search import HIT_BEGINS, HIT_ENDS, Found, snippet_of
from app.chat.store import ChatStore, SavedMessage
from tests.app.chat.fake_bridge import FakeBridge
from tests.app.chat.test_store import damage_a_page, exchange, save
from tests.app.chat.version_1 import make_version_1


@pytest.fixture
def store(store_path):
    opened = ChatStore.open(store_path)
    yield opened
    opened.close()


def find(store: ChatStore, needle: str, *conversations: Conversation) -> list[str]:
    return [found.conversation.title for found in search.find(needle, conversations, store)]


def told(found: Found) -> tuple:
    return found.conversation, found.message_id, found.snippet, found.messages


@pytest.mark.parametrize(
    "needle",
    [
        "über",
        "ÜBER",
        "locks",
        "a Tok",
        "okenizer spl",
        "TOKENIZER",
        'say "when',
        "100 %",
        "_x",
        "%",
        "q",
        "日本",
        "語のテ",
        "👋",
    ],
)
def test_any_part_of_a_word_is_found_whatever_its_case(store, needle):
    text = 'A tokenizer splits; say "when" at 100 % or _x. 日本語のテスト 👋 blocks, Q'
    chat, other = exchange("Über etwas", answer=text), exchange("other", "no?", "nothing here")
    for each in (chat, other):
        save(store, each)
    assert find(store, needle, chat, other) == ["Über etwas"]


def test_what_is_not_there_is_not_found_though_all_its_trigrams_are(store):
    chat = exchange("one", answer="abcd bcde")
    save(store, chat)
    assert find(store, "bcd", chat) == ["one"] and find(store, "abcde", chat) == []


def test_the_last_used_is_first_with_its_youngest_hit(store):
    old, new = exchange("old", "a fox", "the fox ran", created=1.0), exchange("new", "fox?", "no", created=2.0)
    for each in (old, new):
        save(store, each)
    first, second = search.find(" fox ", [old, new], store)
    assert told(first) == (new, new.path[0].id, f"{HIT_BEGINS}fox{HIT_ENDS}?", 1)
    assert told(second) == (old, old.path[1].id, f"the {HIT_BEGINS}fox{HIT_ENDS} ran", 2)
    assert [told(each) for each in search.find("", [old, new], store)] == [(new, None, "", 0), (old, None, "", 0)]


def test_a_title_is_a_hit_of_its_own(store):
    chat = exchange("Foxes and hounds", "a fox")
    save(store, chat)
    (found,) = search.find("fox", [chat], store)
    assert told(found) == (chat, None, f"{HIT_BEGINS}Fox{HIT_ENDS}es and hounds", 1)


def test_texts_are_found_as_they_are_and_not_as_they_were(store):
    chat = exchange("one", answer="the first words")
    save(store, chat)
    answer = chat.path[1]
    answer.text = "quite different"
    save(store, chat)
    assert find(store, "first words", chat) == [] and find(store, "different", chat) == ["one"]
    answer.status, answer.text = MessageStatus.STREAMING, "being written"  # it goes on
    save(store, chat)
    assert find(store, "different", chat) == [] and find(store, "being wr", chat) == ["one"]
    answer.status = MessageStatus.COMPLETE
    save(store, chat)
    assert find(store, "being wr", chat) == ["one"]
    store.save([], deleted=[answer])
    assert find(store, "being wr", chat) == []
    store.set_deleted([chat.id], True)
    store.purge(chat.id)
    assert store.find_texts("why?") == {}
    left = "SELECT count(*) FROM message_trigrams WHERE message_trigrams MATCH '\"why\"'"
    assert store._connection.execute(left).fetchone()[0] == 0


def test_an_answer_of_20_000_tokens_is_indexed_once_and_saved_without_a_pause(store):
    """Streamed for 40 s at 500 tokens/s and saved every 300 ms; no save may stop the window for 100 ms."""
    chat = exchange("long", answer="")
    answer = chat.path[1]
    answer.status = MessageStatus.STREAMING
    counted = []
    store._connection.set_trace_callback(lambda sql: counted.append(sql) if "message_trigrams (rowid" in sql else None)
    slowest = 0.0
    for second in range(133):
        answer.text += f"word{second} " * 150
        begun = time.thread_time()
        save(store, chat)
        slowest = max(slowest, time.thread_time() - begun)
    assert not counted
    answer.status = MessageStatus.COMPLETE
    begun = time.thread_time()
    save(store, chat)
    last = time.thread_time() - begun
    assert len(answer.text) > 130_000 and slowest < 0.1 and last < 0.1, (slowest, last)
    begun = time.thread_time()
    assert find(store, "word131 word", chat) == ["long"]
    assert time.thread_time() - begun < 0.1
    store._connection.set_trace_callback(None)


def test_four_thousand_messages_are_searched_in_a_moment(store):
    store._connection.execute("BEGIN")
    chats = []
    for number in range(100):
        chat = Conversation(title=f"chat {number}", created=1.0, updated=float(number))
        chats.append(chat)
        store._connection.execute(schema.SAVE_CONVERSATION, schema.conversation_values(chat))
        for at in range(40):
            message = Message(Role.USER, f"message {at} " + "of many words " * 40, number=at)
            store._connection.execute(schema.SAVE_MESSAGE, schema.message_values(chat.id, message))
    store._connection.execute("COMMIT")
    for needle, hits in (("many words", 100), ("message 39", 100), ("message 40", 0), ("ny", 100), ("zz", 0)):
        begun = time.thread_time()
        assert len(search.find(needle, chats, store)) == hits
        assert time.thread_time() - begun < 0.15, needle


def test_without_an_index_every_text_is_read(store):
    chat = exchange("one", answer="something to find")
    search._drop_triggers(store._connection)
    save(store, chat)
    assert find(store, "thing to", chat) == ["one"] and find(store, "nothing to", chat) == []


def test_an_index_that_is_gone_is_built_anew_at_the_next_start(store_path):
    store = ChatStore.open(store_path)
    chat = exchange("one", answer="something to find")
    save(store, chat)
    store.close()
    with sqlite3.connect(store_path) as raw:
        raw.execute("DROP TRIGGER trigrams_of_new")
        raw.execute("DELETE FROM message_trigrams_data")
    raw.close()
    store = ChatStore.open(store_path)
    assert store.notice == "" and find(store, "thing to", chat) == ["one"]
    save(store, exchange("two", answer="something else"))
    store.close()


def test_a_damaged_index_costs_no_chat(store_path):
    store = ChatStore.open(store_path)
    chat = exchange("one", answer="something to find")
    chat.path[0].text = "".join(map(chr, range(40, 120)))
    save(store, chat)
    store.close()
    with sqlite3.connect(store_path) as raw:
        block = raw.execute("SELECT block FROM message_trigrams_data WHERE length(block) > 200").fetchone()[0]
    raw.close()
    damage_a_page(store_path, block[:20])
    store = ChatStore.open(store_path)
    more = exchange("two", answer="something else")
    save(store, more)
    (first, second) = sorted(store.conversations(), key=lambda each: each.title)
    assert find(store, "something", first, second) == ["one", "two"]
    store.close()


def test_snippets_are_one_line_cut_between_words():
    text = "line one\nline two of the text with the needle\nin the midst " + "and more " * 30
    snippet = snippet_of(text, "NEEDLE")
    assert f"{HIT_BEGINS}needle{HIT_ENDS}" in snippet and "\n" not in snippet and len(snippet) < 110
    assert snippet.startswith("…") and snippet.endswith("…") and not snippet.startswith("…ine")
    assert snippet_of("a \u2068false\u2069 mark", "mark") == f"a false {HIT_BEGINS}mark{HIT_ENDS}"


@pytest.mark.parametrize("seed", range(5))
def test_an_index_that_is_filled_bit_by_bit_finds_all_at_any_time(store_path, monkeypatch, seed):
    monkeypatch.setattr(search, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(search, "_BATCH_ROWS", 7)
    dice = random.Random(seed)
    make_version_1(store_path, chats=6, turns=5)
    store = ChatStore.open(store_path)
    chats = store.conversations()
    for chat in chats:
        store.load_messages(chat)
    is_whole = False
    for number in range(60):
        chat = dice.choice(chats)
        message = dice.choice(chat.messages)
        what = dice.choice(["change", "stream", "close", "delete", "new", "index", "search"])
        if what == "change":
            message.text = f"changed at {number}"
        elif what in ("stream", "close") and message.role is Role.ASSISTANT:
            message.status = MessageStatus.STREAMING if what == "stream" else MessageStatus.COMPLETE
        elif what == "delete" and not chat.tree.children(message.id):
            chat.tree.remove(message)
            store.save([], [], [message])
            continue
        elif what == "new":
            message = Message(message.role.other, f"new at {number}", parent=message.id, number=chat.tree.next_number)
            chat.tree.add(message)
        elif what == "index":
            is_whole = store.index_more(0.0)
        store.save([chat], [SavedMessage(chat, message)])
        for needle in ("answer 3", "question", "changed", "new at", f"at {number}"):
            wanted = {
                each.id: count for each in chats if (count := sum(needle in message.text for message in each.messages))
            }
            assert {key: hit.messages for key, hit in store.find_texts(needle).items()} == wanted
    while not is_whole:
        is_whole = store.index_more(0.0)
    assert store._connection.execute("SELECT up_to FROM trigrams_filled").fetchone()[0] == search._ALL
    store.close()


def test_a_large_file_is_indexed_once_the_window_is_up(qapp, qtbot, store_path, monkeypatch):
    monkeypatch.setattr(search, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(search, "_BATCH_ROWS", 7)
    for name in ("INDEX_AFTER_MS", "INDEX_REST_MS"):
        monkeypatch.setattr(session_module, name, 1)
    monkeypatch.setattr(session_module, "INDEX_SECONDS", 0.0)
    make_version_1(store_path, chats=6, turns=5)
    session = session_module.ChatSession(FakeBridge(), store_path)
    assert len(session.search("answer 4")) == 6

    def up_to() -> int:
        return session.store._connection.execute("SELECT up_to FROM trigrams_filled").fetchone()[0]

    assert up_to() < 60
    qtbot.waitUntil(lambda: up_to() == search._ALL)
    assert len(session.search("answer 4")) == 6
    session.close()


@pytest.mark.parametrize("needle", ["common", "co", "ÄRGER"])
def test_a_slice_looks_at_few_texts_and_cuts_no_snippet(store, monkeypatch, needle):
    monkeypatch.setattr(search, "SLICE_BYTES", 5_000)
    chats = [exchange(f"chat {number}", answer="common ärger " * 100) for number in range(30)]
    for number, chat in enumerate(chats):
        chat.updated = float(number)
        save(store, chat)
    cut = []
    monkeypatch.setattr(ChatStore, "text_of", lambda _store, message_id: cut.append(message_id) or "a common text")
    under_way = search.Search(needle, chats, store)
    slices, known = 0, 0
    while not (is_whole := under_way.more()):
        slices += 1
        assert len(under_way.found) - known <= 4
        known = len(under_way.found)
        assert [each.conversation for each in under_way.found] == chats[-known:][::-1]  # the youngest are known first
    assert slices >= 7 and is_whole
    assert [each.conversation for each in under_way.found] == chats[::-1]
    assert cut == []
    assert under_way.found[0].snippet and len(cut) == 1
