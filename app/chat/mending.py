"""Puts the messages that could be read into one tree, whatever is missing between them.

A lost message costs itself: a placeholder, which is never saved, stands in its place, so that what hangs below it stays
reachable and questions and answers still alternate.
"""

from __future__ import annotations

from collections.abc import Iterable

from app.chat.conversation import Message, Role
from app.chat.tree import MessageTree
from app.translation import tr

LOST = "lost:"
"""Begins the id of a placeholder for a message whose own is unknown: ``lost:X`` is the answer to a question X, or the
question of an answer X. What is written below a placeholder refers to it, so the same damage must give the same id."""


def mended_tree(messages: Iterable[Message], choices: dict[str, str]) -> MessageTree:
    """``messages`` may lack any of the tree's; one whose role could not be read says so by its ``damage``."""
    return MessageTree(_Mending(messages).run(), choices)


class _Mending:
    def __init__(self, messages: Iterable[Message]) -> None:
        self._read = sorted(messages, key=lambda message: message.number)
        self._known = {message.id: message for message in self._read}
        self._placed: dict[str, Message] = {}
        self._last: Message | None = None
        """Of those read, the one placed last."""

    def run(self) -> list[Message]:
        for message in self._read:
            self._place(message, self._parent_of(message))
            self._last = message
        answered = {message.parent for message in self._placed.values()}
        for message in list(self._placed.values()):
            if message.role is Role.USER and message.id not in answered:
                self._lost(LOST + message.id, Role.ASSISTANT, message)
        return list(self._placed.values())

    def _parent_of(self, message: Message) -> Message | None:
        if message.parent is None:
            return None
        parent = self._placed.get(message.parent)
        if parent is not None:
            return parent
        if message.parent in self._known:  # written after it, so the link is damaged
            return self._last
        known = self._placed.get(message.parent.removeprefix(LOST))
        return self._lost(message.parent, message.role.other, known or self._last)

    def _place(self, message: Message, parent: Message | None) -> None:
        """Hangs it below ``parent``, with a placeholder between where the two are of the same role."""
        if parent is None and message.role is Role.ASSISTANT:
            parent = self._lost(LOST + message.id, Role.USER, None)
        elif parent is not None and parent.role is message.role:
            of = parent if message.role is Role.USER else message
            parent = self._lost(LOST + of.id, message.role.other, parent)
        message.parent = None if parent is None else parent.id
        self._placed[message.id] = message

    def _lost(self, message_id: str, role: Role, parent: Message | None) -> Message:
        above = None if parent is None else parent.id
        while (found := self._known.get(message_id) or self._placed.get(message_id)) is not None:
            if found.role is role and found.parent == above and found.id in self._placed:
                return found
            message_id = LOST + message_id  # a message has this id, which is no placeholder's or not of this place
        reason = (
            tr("the question of this answer is missing from the file")
            if role is Role.USER
            else tr("the answer to this question is missing from the file")
        )
        number = 0 if parent is None else parent.number + 1
        placeholder = Message(role, id=message_id, number=number, damage=reason)
        self._place(placeholder, parent)
        return placeholder
