"""The session: what is asked of the engine, what reaches the disk, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.chat.answer_line import explain
from app.chat.conversation import ChatError, ContextPolicy, Conversation, MessageStatus, ScrollPlace
from app.chat.preset import BUILT_IN, Preset
from app.chat.session import ChatSession
from engine.messages import ContextCut
from engine.request import SamplingParams
from tests.app.chat.fake_bridge import INFO, FakeBridge


@pytest.fixture
def session(bridge: FakeBridge, store_path: Path):
    made = ChatSession(bridge, store_path)
    yield made
    made.close()


def restarted(session: ChatSession) -> ChatSession:
    """The program ended and began again; close what this returns."""
    session.close()
    again = ChatSession(FakeBridge(), session.store.path)
    for conversation in again.conversations:
        again.open(conversation)
    return again


def told(session: ChatSession, bridge: FakeBridge, *texts: str) -> Conversation:
    chat = session.new_conversation()
    for question, answer in zip(texts[::2], texts[1::2], strict=True):
        session.send(chat, question)
        bridge.finish(chat.open_answer.request_id, answer)
    return chat


def test_a_request_says_all_that_the_chat_wants(session, bridge):
    chat = session.new_conversation()
    session.set_options(chat, "Be kind.", SamplingParams(seed=3, max_tokens=9))
    session.set_priority(chat, -2)
    session.set_policy(chat, ContextPolicy.DROP_OLDEST)
    session.send(chat, "hello")
    asked = bridge.asked[1]
    assert [(each.role, each.content) for each in asked.messages] == [("system", "Be kind."), ("user", "hello")]
    assert (asked.priority, asked.drop_oldest, asked.continues, asked.user) == (-2, True, False, "chat")
    assert asked.params == SamplingParams(seed=3, max_tokens=9) == chat.open_answer.params
    bridge.context_cut.emit(ContextCut(1, 4, 900))
    bridge.finish(1, "hi")
    answer = chat.path[1]
    assert (answer.dropped, answer.model) == (4, INFO.name)
    again = restarted(session)
    (found,) = again.conversations
    assert (found.path[1].dropped, found.path[1].model) == (4, INFO.name)
    again.close()


def test_another_priority_reaches_the_answer_that_runs(session, bridge, monkeypatch):
    said = []
    bridge.set_priority = lambda request, priority: said.append((request, priority))
    chat, quiet = session.new_conversation(), session.new_conversation()
    session.send(chat, "hello")
    session.set_priority(quiet, 7)
    session.set_priority(chat, 5)
    assert said == [(1, 5)]


def test_a_continued_answer_is_asked_for_with_its_text_and_grows_on(session, bridge, qtbot):
    chat = session.new_conversation()
    session.send(chat, "count")
    bridge.say(1, "1 2")
    session.stop(chat)
    with qtbot.waitSignal(session.message_changed):
        session.continue_answer(chat)
    asked = bridge.asked[2]
    assert asked.continues and [each.content for each in asked.messages] == ["count", "1 2"]
    bridge.say(1, "zombie")
    bridge.finish(2, " 3")
    assert chat.path[1].text == "1 2 3" and chat.num_messages == 2
    again = restarted(session)
    (found,) = again.conversations
    assert found.path[1].text == "1 2 3" and found.path[1].status is MessageStatus.COMPLETE
    again.close()


def test_an_answer_that_cannot_go_on_stays_as_it_was_and_says_why(session, bridge, qtbot):
    chat = session.new_conversation()
    session.send(chat, "count")
    bridge.finish(1, "1 2", reason="length")
    answer = chat.path[1]
    before = (answer.status, answer.text, answer.error, answer.finish_reason, answer.request_id)
    with qtbot.waitSignal(session.refused) as told:
        session.continue_answer(chat)
        bridge.finish(2, "", reason="error", error="No room: 316 tokens.")
    assert told.args[0] == chat.id and "316 tokens" in told.args[1]
    assert (answer.status, answer.text, answer.error, answer.finish_reason, answer.request_id) == before
    assert chat.open_answer is None and answer.can_continue
    again = restarted(session)
    (found,) = again.conversations
    assert found.path[1].status is MessageStatus.COMPLETE and found.path[1].can_continue
    again.close()


def test_a_continued_answer_that_waits_for_the_model_goes_on_when_it_is_there(session, bridge):
    chat = session.new_conversation()
    session.send(chat, "count")
    bridge.say(1, "1 2")
    bridge.die()
    bridge.set_state("loading")
    session.continue_answer(chat)
    assert 2 not in bridge.asked and chat.path[1].status is MessageStatus.QUEUED
    bridge.become_ready()
    assert bridge.asked[2].continues and bridge.asked[2].messages[-1].content == "1 2"


def test_an_unchanged_question_is_answered_anew_and_an_empty_one_refused(session, bridge):
    chat = told(session, bridge, "hello", "hi")
    question, answer = chat.path
    session.resend(chat, question.id, "hello\n")
    assert chat.versions(question.id) == [question] and len(chat.versions(answer.id)) == 2
    session.stop(chat)
    with pytest.raises(ChatError, match="empty"):
        session.resend(chat, question.id, "  ")
    session.resend(chat, question.id, "hello you")
    assert [each.text for each in chat.versions(question.id)] == ["hello", "hello you"]


def test_while_no_model_runs_nothing_is_asked_and_nothing_changes(session, bridge):
    chat = told(session, bridge, "hello", "hi")
    bridge.set_state("stopped")
    question, answer = chat.path
    for attempt in (
        lambda: session.send(chat, "more"),
        lambda: session.regenerate(chat),
        lambda: session.resend(chat, question.id, "other"),
        lambda: session.continue_answer(chat),
    ):
        with pytest.raises(ChatError, match="No model is running"):
            attempt()
    assert chat.path == [question, answer] and chat.num_messages == 2


def test_versions_shown_last_are_shown_again(session, bridge):
    chat = told(session, bridge, "hello", "hi")
    session.regenerate(chat)
    bridge.finish(2, "good day")
    session.show_version(chat, chat.versions(chat.path[1].id)[0].id)
    again = restarted(session)
    (found,) = again.conversations
    assert [each.text for each in found.path] == ["hello", "hi"] and found.num_messages == 3
    again.close()


def test_pins_folders_drafts_and_places_come_back(session, bridge):
    chat = told(session, bridge, "hello", "hi")
    session.set_pinned(chat, True)
    session.set_folder(chat, "  at   work ")
    session.set_draft(chat, "and then")
    session.set_scroll(chat, ScrollPlace(chat.path[1].id, 40))
    only_draft = session.new_conversation()
    session.set_draft(only_draft, "begun")
    session.new_conversation()  # empty: not kept
    again = restarted(session)
    found = {each.draft: each for each in again.conversations}
    assert set(found) == {"and then", "begun"}
    one = found["and then"]
    assert (one.pinned, one.folder, one.scroll) == (True, "at work", ScrollPlace(one.path[1].id, 40))
    again.close()


def test_folders_are_renamed_joined_and_dissolved(session, bridge):
    chats = [told(session, bridge) for _ in range(3)]
    for chat, folder in zip(chats, ("work", "Home", "work"), strict=True):
        session.send(chat, "hello")
        session.set_folder(chat, folder)
    assert session.folders() == ["Home", "work"]
    session.rename_folder("work", "Home")
    assert session.folders() == ["Home"] and {each.folder for each in chats} == {"Home"}
    session.rename_folder("Home", "")
    assert session.folders() == []
    again = restarted(session)
    assert {each.folder for each in again.conversations} == {""}
    again.close()


def test_half_a_character_is_replaced_and_stops_no_save(session, bridge):
    chat = session.new_conversation()
    session.set_draft(chat, "\udc00 draft")
    session.set_options(chat, "\ud83d", SamplingParams(stop=("\ud83d",)))
    session.send(chat, "half \ud83d")
    session.rename(chat, "\ud83d title")
    session.set_folder(chat, "\ud83d")
    session.save_preset(Preset("\ud83d", "system", text="\ud83d"))
    assert session.flush() and session.problem == ""
    assert chat.path[0].text == "half �" and bridge.asked[1].messages[-1].content == "half �"


def test_presets_of_the_program_stay_and_ones_own_are_kept(session):
    shipped = session.presets("system")
    assert shipped == [each for each in BUILT_IN if each.kind == "system"] and len(shipped) > 3
    for bad in (Preset(" ", "system"), Preset(shipped[1].name.upper(), "system")):
        with pytest.raises(ChatError):
            session.save_preset(bad)
    with pytest.raises(ChatError):
        session.delete_preset(shipped[0])
    session.save_preset(Preset(" My  own ", "system", text="one"))
    session.save_preset(Preset("My own", "system", text="two"))
    (mine,) = session.presets("system")[len(shipped) :]
    assert mine == Preset("My own", "system", text="two")
    session.delete_preset(mine)
    assert session.presets("system") == shipped


def test_restoring_and_wiping_replace_all_chats_and_say_so(session, bridge, qtbot, tmp_path):
    told(session, bridge, "hello", "hi")
    session.backup(tmp_path / "backup")
    running = session.new_conversation()
    session.send(running, "more")
    with qtbot.waitSignals([session.reloaded, session.listed]):
        summary = session.restore_backup(tmp_path / "backup")
    assert bridge.aborted == [2] and summary.conversations == 1
    (chat,) = session.conversations
    session.open(chat)
    session.send(chat, "again")
    bridge.finish(3, "yes")
    with qtbot.waitSignal(session.reloaded):
        session.wipe()
    assert list(session.conversations) == []
    told(session, bridge, "after", "it")
    again = restarted(session)
    assert [each.title for each in again.conversations] == ["after"]
    with pytest.raises(ChatError, match="holds no chats"):
        again.restore_backup(tmp_path / "nowhere")
    assert [each.title for each in again.conversations] == ["after"]
    again.close()


def test_a_second_window_reads_searches_and_exports_and_writes_nothing(session, bridge, store_path):
    told(session, bridge, "hello", "hi")
    before = store_path.read_bytes()
    second = ChatSession(FakeBridge(), store_path)
    assert "Another Batchscope" in second.problem
    (found,) = second.search("hell")
    second.open(found.conversation)
    second.send(found.conversation, "only here")
    second.set_draft(found.conversation, "only here")
    second.close()
    assert store_path.read_bytes() == before
    again = restarted(session)
    assert [len(each.path) for each in again.conversations] == [2]
    again.close()


@pytest.mark.parametrize(("tokens", "blamed"), [(10, "max tokens (10)"), (4, "context ends")])
def test_a_continued_answer_says_which_limit_cut_it(session, bridge, tokens, blamed):
    """Its tokens are those of all parts; each part may have as many as were asked for."""
    chat = session.new_conversation()
    session.set_options(chat, "", SamplingParams(max_tokens=10))
    session.send(chat, "count")
    answer = chat.open_answer
    bridge.say(answer.request_id, "one", tokens=10)
    bridge.finish(answer.request_id, reason="length")
    assert "max tokens (10)" in explain(answer)
    session.continue_answer(chat)
    assert not answer.error
    bridge.say(answer.request_id, "two", tokens=tokens)
    bridge.finish(answer.request_id, reason="length")
    assert blamed in explain(answer)
    again = restarted(session)
    (found,) = again.conversations
    assert blamed in explain(found.path[1])
    again.close()


def test_bringing_back_a_question_does_not_bring_back_what_followed_and_was_deleted_since(session, bridge):
    chat = told(session, bridge, "one", "1", "two", "2")
    first = session.delete_message(chat, chat.path[0].id)
    session.delete_message(chat, chat.path[0].id)
    session.undelete(chat, first)
    assert [each.text for each in chat.messages] == ["one", "1"]
    again = restarted(session)
    (found,) = again.conversations
    assert [each.text for each in found.messages] == ["one", "1"]
    again.close()


def test_many_chats_are_deleted_and_brought_back_in_one_transaction_each(session, bridge):
    chats = [told(session, bridge, f"question {number}", "answer") for number in range(20)]
    session.send(chats[3], "once more")
    statements: list[str] = []
    listed: list[int] = []
    session.store._connection.set_trace_callback(statements.append)
    session.listed.connect(lambda: listed.append(len(session.conversations)))
    session.delete(*chats)
    assert chats[3].open_answer is None and bridge.aborted
    assert len([each for each in statements if each == "COMMIT"]) <= 2  # the stopped answer, and all that are deleted
    assert listed[-1] == 0 and len(listed) <= 2
    statements.clear()
    listed.clear()
    session.restore(*chats)
    assert [each for each in statements if each == "COMMIT"] == ["COMMIT"] and listed == [20]
    again = restarted(session)
    assert len(again.conversations) == 20
    again.close()
