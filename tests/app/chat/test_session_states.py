"""Whatever the user does, in whatever order: roles alternate, one answer is open at most, and the disk agrees."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from PySide6.QtWidgets import QApplication

from app.chat import schema
from app.chat.conversation import ChatError, ContextPolicy, Conversation, Deleted, Message, Role, ScrollPlace
from app.chat.session import ChatSession
from app.chat.store import ChatStore
from tests.app.chat.fake_bridge import FakeBridge

PICK = st.integers(0, 30)


class Chat(RuleBasedStateMachine):
    """One conversation under every command that a user or an engine can give."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "chats.sqlite3"
        self.words = 0

    @initialize()
    def begin(self) -> None:
        self._start()
        self.chat = self.session.new_conversation()

    def teardown(self) -> None:
        self.session.close()
        shutil.rmtree(self.folder)

    def _start(self) -> None:
        self.bridge = FakeBridge()
        self.session = ChatSession(self.bridge, self.path)
        self.deleted: list[Deleted] = []
        self.request = 0

    def _new_words(self) -> str:
        self.words += 1
        return f"words{self.words}"

    def _pick(self, pick: int) -> Message:
        messages = self.chat.messages
        return messages[pick % len(messages)]

    def _attempt(self, action) -> None:
        """What is refused must have changed nothing."""
        before = snapshot(self.chat)
        try:
            action()
        except ChatError:
            assert snapshot(self.chat) == before

    # What the user does ----------------------------------------------------------------------------------------------

    @rule()
    def send(self) -> None:
        self._attempt(lambda: self.session.send(self.chat, self._new_words()))

    @rule(pick=PICK)
    @precondition(lambda self: self.chat.num_messages)
    def regenerate(self, pick: int) -> None:
        message = self._pick(pick)
        self._attempt(lambda: self.session.regenerate(self.chat, None if pick % 3 else message.id))

    @rule(pick=PICK, same=st.booleans())
    @precondition(lambda self: self.chat.num_messages)
    def resend(self, pick: int, same: bool) -> None:
        message = self._pick(pick)
        self._attempt(lambda: self.session.resend(self.chat, message.id, message.text if same else self._new_words()))

    @rule()
    def continue_answer(self) -> None:
        self._attempt(lambda: self.session.continue_answer(self.chat))

    @rule()
    def stop(self) -> None:
        self.session.stop(self.chat)
        assert self.chat.open_answer is None

    @rule(pick=PICK)
    @precondition(lambda self: self.chat.num_messages)
    def show_version(self, pick: int) -> None:
        message = self._pick(pick)
        self.session.show_version(self.chat, message.id)
        assert message in self.chat.path

    @rule(pick=PICK)
    @precondition(lambda self: self.chat.num_messages)
    def delete(self, pick: int) -> None:
        message = self._pick(pick)
        self._attempt(lambda: self.deleted.append(self.session.delete_message(self.chat, message.id)))

    @rule(pick=PICK)
    @precondition(lambda self: self.chat.path)
    def delete_and_undo(self, pick: int) -> None:
        message = self.chat.path[pick % len(self.chat.path)]
        before = snapshot(self.chat)

        def both() -> None:
            self.session.undelete(self.chat, self.session.delete_message(self.chat, message.id))

        self._attempt(both)
        assert snapshot(self.chat) == before

    @rule(pick=PICK)
    @precondition(lambda self: self.deleted)
    def undelete(self, pick: int) -> None:
        deleted = self.deleted.pop(pick % len(self.deleted))
        self._attempt(lambda: self.session.undelete(self.chat, deleted))

    @rule(pick=PICK)
    def look(self, pick: int) -> None:
        """What is set and not said."""
        self.session.set_pinned(self.chat, pick % 2 == 0)
        self.session.set_folder(self.chat, ("", "work", "home")[pick % 3])
        self.session.set_draft(self.chat, f"draft {pick}")
        self.session.set_priority(self.chat, pick - 15)
        self.session.set_policy(self.chat, list(ContextPolicy)[pick % 2])
        place = ScrollPlace(self._pick(pick).id, pick) if self.chat.num_messages else None
        self.session.set_scroll(self.chat, place)

    # What the engine does --------------------------------------------------------------------------------------------

    @rule(pick=PICK)
    def text(self, pick: int) -> None:
        """Also for requests that were stopped long ago."""
        if self.bridge.requests:
            self.bridge.say(1 + pick % len(self.bridge.requests), self._new_words())

    @rule(reason=st.sampled_from(["stop", "length", "error"]), with_text=st.booleans())
    def finish(self, reason: str, with_text: bool) -> None:
        answer = self.chat.open_answer
        if answer is not None and answer.request_id is not None:
            self.bridge.finish(answer.request_id, self._new_words() if with_text else "", reason=reason)

    @rule()
    def die_and_come_back(self) -> None:
        self.bridge.die()
        self.bridge.set_state("loading")

    @rule()
    def become_ready(self) -> None:
        self.bridge.become_ready()

    @rule()
    @precondition(lambda self: self.chat.num_messages)
    def restart(self) -> None:
        """The program ends and begins again."""
        self.session.close()
        self._start()
        (self.chat,) = self.session.conversations
        self.session.open(self.chat)

    # What always holds -----------------------------------------------------------------------------------------------

    @invariant()
    def roles_alternate(self) -> None:
        path = self.chat.path
        assert [message.role for message in path] == ([Role.USER, Role.ASSISTANT] * len(path))[: len(path)]
        for message in self.chat.messages:
            parent = self.chat.find(message.parent) if message.parent else None
            assert message.role is (Role.USER if parent is None else parent.role.other)
            assert parent is None or parent.number < message.number
            assert message.role is Role.ASSISTANT or self.chat.tree.children(message.id)

    @invariant()
    def the_path_is_one(self) -> None:
        path = self.chat.path
        assert [message.parent for message in path] == [None, *(message.id for message in path)][: len(path)]
        assert not path or not self.chat.tree.children(path[-1].id)

    @invariant()
    def one_answer_is_open_at_most(self) -> None:
        is_open = [message for message in self.chat.messages if message.status.is_open]
        assert is_open == ([] if self.chat.open_answer is None else [self.chat.open_answer])

    @invariant()
    def the_model_is_told_what_is_shown_on_the_way(self) -> None:
        context = self.chat.context()
        assert [each.role for each in context] == ["user", "assistant"] * (len(context) // 2) + ["user"] * (
            len(context) % 2
        )
        end = self.chat.open_answer
        line = self.chat.path if end is None else self.chat.tree.ancestors(end)
        texts = [each.text[: each.continued] if each is end else each.text for each in line]
        assert "".join(each.content.replace("\n\n", "") for each in context) == "".join(texts)

    @invariant()
    def the_disk_agrees(self) -> None:
        self.session.flush()
        store = ChatStore.open(self.path)
        on_disk = store.conversations()
        if self.chat.num_messages or on_disk:
            (found,) = on_disk
            store.load_messages(found)
            assert snapshot(found) == snapshot(self.chat)
        store.close()


def snapshot(chat: Conversation) -> tuple:
    """All that is kept; an answer that is open counts as cut off, since whoever reads it from disk sees it so."""
    rows = []
    for message in chat.messages:
        values = list(schema.message_values(chat.id, message))
        if message.status.is_open or message.status == "incomplete":
            values[6], values[8] = "cut off", ""
        rows.append(tuple(values))
    chosen = [message.id for message in chat.path]
    return schema.conversation_values(chat), rows, chosen


@pytest.fixture(scope="module", autouse=True)
def application(qapp_cls: type[QApplication]) -> QApplication:
    return QApplication.instance() or qapp_cls([])


TestChat = Chat.TestCase
TestChat.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
