"""Sections and changes of the chat list, without Qt."""

from __future__ import annotations

import random
import time
from datetime import datetime, timedelta

import pytest

from app.chat.chat_list_rows import MOST_CHANGES, Row, Section, changes, listing_of
from app.chat.conversation import Conversation

NOON = datetime(2026, 5, 20, 12).timestamp()


def chat(name: str, moment: float = NOON, **fields: object) -> Conversation:
    return Conversation(id=name, title=name, created=moment, updated=moment, **fields)


def rows(*chats: Conversation, folders: tuple[str, ...] = (), collapsed: tuple[str, ...] = ()) -> list[Row]:
    return listing_of(chats, folders, set(collapsed), NOON).rows


@pytest.mark.parametrize(
    ("ago", "name"),
    [
        (timedelta(hours=-3), "today"),
        (timedelta(0), "today"),
        (timedelta(hours=12), "today"),
        (timedelta(hours=12, seconds=1), "yesterday"),
        (timedelta(hours=36), "yesterday"),
        (timedelta(hours=37), "week"),
        (timedelta(days=7, hours=12), "week"),
        (timedelta(days=8), "month"),
        (timedelta(days=30), "month"),
        (timedelta(days=40), "2026-04"),
        (timedelta(days=139), "2026-01"),
        (timedelta(days=141), "2025"),
        (timedelta(days=4000), "2015"),
    ],
)
def test_days_have_the_names_that_people_give_them(ago, name):
    moment = (datetime.fromtimestamp(NOON) - ago).timestamp()
    assert rows(chat("a", moment)) == [Section("date", name), "a"]


def test_a_moment_that_no_calendar_knows_is_long_ago():
    assert rows(chat("a", -1e18)) == [Section("date", "unknown"), "a"]


def test_pinned_first_then_folders_by_name_then_the_others():
    day = 86_400
    shown = rows(
        chat("old", NOON - 40 * day),
        chat("today"),
        chat("in b", NOON - day, folder="b"),
        chat("in A", folder="A"),
        chat("newer in b", folder="b"),
        chat("pinned", NOON - 90 * day, pinned=True),
        chat("pinned in b", NOON - 91 * day, pinned=True, folder="b"),
        folders=("b", "A"),
    )
    assert shown == [
        *(Section("pinned"), "pinned", "pinned in b"),
        *(Section("folder", "A"), "in A", Section("folder", "b"), "newer in b", "in b"),
        *(Section("date", "today"), "today", Section("date", "2026-04"), "old"),
    ]


def test_a_folder_that_is_folded_away_still_counts_its_chats():
    listing = listing_of([chat("x", folder="a"), chat("y", folder="a")], ["a"], {"a", "gone"}, NOON)
    assert listing.rows == [Section("folder", "a")] and listing.counts == {Section("folder", "a"): 2}


def apply(old: list[Row], steps: list) -> list[Row]:
    rows = list(old)
    for step in steps:
        if step.rows:
            assert len(step.rows) == step.count
            rows[step.place : step.place] = step.rows
        else:
            assert step.place + step.count <= len(rows)
            del rows[step.place : step.place + step.count]
    return rows


def test_changes_lead_from_any_list_to_any_other():
    for seed in range(3000):
        random_ = random.Random(seed)
        old, new = ([str(n) for n in random_.sample(range(12), random_.randint(0, 9))] for _ in range(2))
        assert apply(old, changes(old, new)) == new


def test_one_chat_that_moves_is_two_changes_however_long_the_list():
    old = [str(number) for number in range(5000)]
    for place, target in ((4000, 0), (0, 4000), (2500, 2490)):
        new = list(old)
        new.insert(target, new.pop(place))
        steps = changes(old, new)
        assert len(steps) == 2 and apply(old, steps) == new
    assert changes(old, old) == []


def test_very_many_changes_are_shown_whole():
    old = [str(number) for number in range(4 * MOST_CHANGES)]
    assert changes(old, old[::2]) is None


def test_listing_thousands_is_quick():
    day = 86_400
    chats = [chat(str(n), NOON - n * day / 10, folder="f" if n % 7 == 0 else "") for n in range(5000)]
    best = 1.0
    for _ in range(5):
        begun = time.thread_time()
        listing_of(chats, ["f"], set(), NOON)
        best = min(best, time.thread_time() - begun)
    assert best < 0.02
