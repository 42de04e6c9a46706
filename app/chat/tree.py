"""The messages of a conversation as a tree, and the one path through it that is shown.

::

    question ─┬─ answer 1 ── question ── answer
              └─ answer 2 ─┬─ question ── answer        ‹2/2› of the answers, ‹1/2› of the questions below it
                           └─ question, edited ── answer

At each fork the youngest branch is shown unless another was chosen. No Qt, no files.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.chat.conversation import Message


class MessageTree:
    def __init__(self, messages: Iterable[Message] = (), choices: dict[str, str] | None = None) -> None:
        """``choices``: at which message (empty: at the beginning) which of the next ones is shown."""
        self._messages: dict[str, Message] = {}
        self._children: dict[str | None, list[Message]] = {}
        self._path: list[Message] | None = None
        self._choices: dict[str | None, str] = {}
        self.next_number = 0
        """Of the next message; never given twice while the tree is in memory, so that what was deleted can return."""
        for message in messages:
            self.add(message)
        for parent, child in (choices or {}).items():
            if child in self._messages and (self._messages[child].parent or "") == parent:
                self.choose(self._messages[child])

    def __len__(self) -> int:
        return len(self._messages)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MessageTree):
            return NotImplemented
        return self._messages == other._messages and self.choices == other.choices

    __hash__ = None  # type: ignore[assignment]

    @property
    def messages(self) -> list[Message]:
        """All of them, in the order in which they were written."""
        return sorted(self._messages.values(), key=_number)

    @property
    def choices(self) -> dict[str, str]:
        """Where an older branch is shown than the youngest: message (empty: the beginning) → the next one."""
        return {parent or "": child for parent, child in self._choices.items()}

    @property
    def path(self) -> list[Message]:
        """What is shown, first to last."""
        if self._path is None:
            self._path = []
            message = self.shown_below(None)
            while message is not None:
                self._path.append(message)
                message = self.shown_below(message.id)
        return list(self._path)

    def get(self, message_id: str | None) -> Message | None:
        return None if message_id is None else self._messages.get(message_id)

    def children(self, message_id: str | None) -> list[Message]:
        """What follows a message (None: what begins the conversation), oldest first."""
        return list(self._children.get(message_id, ()))

    def shown_below(self, message_id: str | None) -> Message | None:
        children = self._children.get(message_id)
        if not children:
            return None
        chosen = self._choices.get(message_id)
        return children[-1] if chosen is None else self._messages[chosen]

    def ancestors(self, message: Message) -> list[Message]:
        """From the first message down to this one, itself included."""
        line = [message]
        while (parent := self.get(line[-1].parent)) is not None:
            line.append(parent)
        return line[::-1]

    def branch(self, message: Message) -> list[Message]:
        """The message and everything below it, parents before children."""
        found = [message]
        for each in found:
            found += self._children.get(each.id, ())
        return found

    # Changes ---------------------------------------------------------------------------------------------------------

    def add(self, message: Message) -> None:
        """Hangs it below its parent. Which branch is shown there stays, where one was chosen."""
        self._messages[message.id] = message
        bisect.insort(self._children.setdefault(message.parent, []), message, key=_number)
        self.next_number = max(self.next_number, message.number + 1)
        self._path = None

    def remove(self, message: Message) -> None:
        """Takes a single message out; what hung below it must be taken out or moved, too."""
        del self._messages[message.id]
        siblings = [each for each in self._children.pop(message.parent) if each is not message]
        if siblings:
            self._children[message.parent] = siblings
        if self._choices.get(message.parent) == message.id:
            del self._choices[message.parent]
        self._choices.pop(message.id, None)
        self._path = None

    def move(self, message: Message, parent: str | None) -> None:
        """Hangs a message, with all that is below it, elsewhere."""
        below = self._choices.get(message.id)
        self.remove(message)
        message.parent = parent
        self.add(message)
        if below is not None:
            self._choices[message.id] = below

    def show(self, message: Message) -> None:
        """Has the path lead through this message, below it as it was last seen."""
        for each in self.ancestors(message):
            self.choose(each)

    def choose(self, message: Message) -> None:
        """Has this one shown of those that follow its parent, wherever the path leads above."""
        if self._children[message.parent][-1] is message:
            self._choices.pop(message.parent, None)
        else:
            self._choices[message.parent] = message.id
        self._path = None


def _number(message: Message) -> int:
    return message.number
