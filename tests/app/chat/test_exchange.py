"""Export and import: every field and every branch goes out and comes back; what is damaged is refused whole."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from app.chat.conversation import (
    NAME_CHARACTERS,
    AnswerTimings,
    ContextPolicy,
    Conversation,
    Message,
    MessageStatus,
    Role,
    ScrollPlace,
)
from app.chat.exchange import ExchangeError, export_json, export_markdown, import_json
from app.chat.session import ChatSession
from engine.request import SamplingParams
from tests.app.chat.fake_bridge import FakeBridge

CLOSED = st.sampled_from([status for status in MessageStatus if not status.is_open])
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
NAME = TEXT.map(lambda text: " ".join(text.split()))
AMOUNT = st.floats(0, 1e9)
COUNT = st.integers(0, 10**6)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    stop=st.lists(TEXT.filter(bool), max_size=2).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=2),
    seed=st.none() | COUNT,
)
TIMINGS = st.builds(
    AnswerTimings,
    tokens=COUNT,
    ttft=st.none() | AMOUNT,
    tokens_per_second=st.none() | AMOUNT,
    prompt_tokens=COUNT,
    cached_tokens=COUNT,
    preemptions=COUNT,
)


@st.composite
def conversations(draw) -> Conversation:
    conversation = Conversation(
        title=draw(NAME),
        created=draw(AMOUNT),
        updated=draw(AMOUNT),
        system_prompt=draw(TEXT),
        params=draw(PARAMS),
        priority=draw(st.integers(-9, 9)),
        pinned=draw(st.booleans()),
        folder=draw(NAME),
        draft=draw(TEXT),
        policy=draw(st.sampled_from(ContextPolicy)),
    )
    tree = conversation.tree
    for number in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from([None, *tree.messages]))
        role = Role.USER if above is None else above.role.other
        message = Message(
            role,
            draw(TEXT),
            draw(CLOSED),
            parent=above.id if above else None,
            number=number,
            created=draw(AMOUNT),
            error=draw(TEXT),
            finish_reason=draw(TEXT),
            timings=draw(TIMINGS),
            params=draw(st.none() | PARAMS),
            dropped=draw(COUNT),
            model=draw(TEXT),
        )
        tree.add(message)
    for question in [each for each in tree.messages if each.role is Role.USER and not tree.children(each.id)]:
        tree.add(Message(Role.ASSISTANT, "said", parent=question.id, number=tree.next_number))
    if len(tree):
        message = draw(st.sampled_from(tree.messages))
        tree.show(message)
        conversation.scroll = draw(st.none() | st.builds(ScrollPlace, st.just(message.id), COUNT))
    return conversation


@settings(max_examples=60, deadline=None)
@given(st.lists(conversations(), max_size=3))
def test_every_field_and_every_branch_comes_back(chats):
    data = export_json(chats)
    found = import_json(data)
    assert found == chats
    assert [each.path for each in found] == [each.path for each in chats]
    json.loads(data)  # of any other reader's, too


def branched() -> Conversation:
    chat = Conversation(title="Two ways", created=1.0, updated=2.0, system_prompt="Be kind.")
    question = Message(Role.USER, "Which?", number=0)
    left = Message(Role.ASSISTANT, "Left.", number=1, parent=question.id, model="SmolLM2")
    right = Message(Role.ASSISTANT, "Right …", MessageStatus.STOPPED, number=2, parent=question.id, model="SmolLM2")
    for message in (question, left, right):
        chat.tree.add(message)
    return chat


def test_markdown_is_what_is_shown():
    chat = branched()
    expected = (
        "# Two ways\n\n## System prompt\n\nBe kind.\n\n## You\n\nWhich?\n\n## SmolLM2\n\nRight …\n\n*Stopped here.*\n"
    )
    assert export_markdown(chat) == expected
    chat.tree.show(chat.messages[1])
    assert export_markdown(chat).endswith("## SmolLM2\n\nLeft.\n")


def test_an_answer_exported_while_it_was_written_comes_back_incomplete():
    chat = branched()
    chat.path[1].status = MessageStatus.STREAMING
    answer = import_json(export_json([chat]))[0].path[1]
    assert answer.text == "Right …" and answer.status is MessageStatus.INCOMPLETE and "before" in answer.error


def test_a_damaged_message_leaves_a_gap_with_a_word():
    chat = branched()
    chat.path[1].damage = "bytes that are no text"
    answer = import_json(export_json([chat]))[0].path[1]
    assert answer.status is MessageStatus.INCOMPLETE and "could not be read" in answer.error and not answer.damage


def changed(**fields: object) -> bytes:
    file = json.loads(export_json([branched()]))
    for path, value in fields.items():
        where = file
        *steps, last = path.split("__")
        for step in steps:
            where = where[int(step[1:]) if step.startswith("i") and step[1:].isdigit() else step]
        where[last] = value
    return json.dumps(file).encode()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "no JSON"),
        (b"these were my chats", "no JSON"),
        (export_json([branched()])[:-40], "cut short"),
        (b"[1, 2]", "holds no chats"),
        (b'{"format": "other-chats", "version": 1}', "holds no chats"),
        (changed(version=2), "newer Batchscope .format 2"),
        (changed(conversations__i0__title=7), "damaged: .*title"),
        (changed(conversations__i0__messages__i1__role="narrator"), "damaged: .*narrator"),
        (changed(conversations__i0__params={"temperature": -1}), "damaged: .*temperature"),
        (changed(conversations__i0__messages=[]), None),
    ],
)
def test_what_is_damaged_or_foreign_is_refused_with_a_sentence(data, sentence):
    if sentence is None:
        assert import_json(data)[0].path == []
        return
    with pytest.raises(ExchangeError, match=sentence):
        import_json(data)


def test_two_messages_of_one_id_are_refused():
    data = msgspec.json.decode(export_json([branched()]))
    messages = data["conversations"][0]["messages"]
    messages[2]["id"] = messages[1]["id"]
    with pytest.raises(ExchangeError, match="same id"):
        import_json(msgspec.json.encode(data))


def test_links_that_lead_nowhere_become_placeholders():
    data = msgspec.json.decode(export_json([branched()]))
    data["conversations"][0]["messages"][2]["parent"] = "nowhere"
    (chat,) = import_json(msgspec.json.encode(data))
    assert [message.role for message in chat.path] == ["user", "assistant"] * (len(chat.path) // 2)
    assert {"Which?", "Left.", "Right …"} <= {message.text for message in chat.messages}


def test_imported_chats_get_other_ids_where_theirs_are_in_use(qapp, store_path):
    session = ChatSession(FakeBridge(), store_path)
    chat = branched()
    chat.tree.show(chat.messages[1])
    chat.scroll = ScrollPlace(chat.messages[1].id, 3)
    data = export_json([chat])
    session.add_imported(import_json(data))
    (first,) = session.conversations
    assert first == chat
    session.add_imported([*import_json(data), *import_json(data)])
    assert len(session.conversations) == 3
    session.close()
    session = ChatSession(FakeBridge(), store_path)
    ids: list[str] = []
    for found in session.conversations:
        session.open(found)
        ids += [found.id, *(message.id for message in found.messages)]
        assert [message.text for message in found.path] == ["Which?", "Left."]
        assert len(found.versions(found.path[1].id)) == 2 and found.scroll.message_id == found.path[1].id
    assert len(ids) == len(set(ids)) == 12
    session.close()


HUGE = 10**30


@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        ("message", "number", HUGE),
        ("message", "dropped", HUGE),
        ("message", "created", 1e300),
        ("message", "id", ""),
        ("message", "params", {"max_tokens": HUGE}),
        ("conversation", "priority", -HUGE),
        ("conversation", "updated", -1e300),
        ("conversation", "scroll", {"message_id": "x", "offset": HUGE}),
        ("conversation", "params", {"max_tokens": HUGE}),
        ("conversation", "id", ""),
    ],
)
def test_what_no_file_and_no_engine_could_hold_is_refused(where, field, value):
    data = json.loads(export_json([branched()]))
    chat = data["conversations"][0]
    (chat if where == "conversation" else chat["messages"][1])[field] = value
    with pytest.raises(ExchangeError, match="damaged"):
        import_json(json.dumps(data).encode())


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_endless_nesting_is_refused(opening):
    with pytest.raises(ExchangeError):
        import_json(b'{"format":"batchscope-chats","version":1,"x":' + opening * 100_000)


def test_a_byte_order_mark_and_endless_names_are_taken(qapp, store_path):
    chat = branched()
    chat.title = "T\n" * 100_000
    chat.folder = "F" * 100_000
    chat.tree.messages[0].text = "before\0after"
    (found,) = import_json(b"\xef\xbb\xbf" + export_json([chat]))
    assert len(found.title) <= NAME_CHARACTERS
    assert len(found.folder) <= NAME_CHARACTERS
    session = ChatSession(FakeBridge(), store_path)
    session.add_imported([found])
    assert [each.conversation.id for each in session.search("after")] == [found.id]
    session.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_ids_that_look_like_placeholders_keep_turns_alternating(order):
    chat = branched()
    question = chat.tree.messages[0].id
    data = json.loads(export_json([chat]))
    template = data["conversations"][0]["messages"][0]
    ids = [("lost:" + question, None), ("q2", question), ("lost:lost:" + question, "q2")]
    added = [template | {"id": ids[i][0], "parent": ids[i][1], "number": 5 + n} for n, i in enumerate(order)]
    data["conversations"][0]["messages"] += added
    (found,) = import_json(json.dumps(data).encode())
    for message in found.messages:
        line = found.tree.ancestors(message)
        assert [each.role for each in line] == [Role.USER, Role.ASSISTANT] * (len(line) // 2) + [Role.USER] * (
            len(line) % 2
        )
        assert message.role is Role.ASSISTANT or found.tree.children(message.id)
    assert {each["id"] for each in added} <= {message.id for message in found.messages}
    found.context()
