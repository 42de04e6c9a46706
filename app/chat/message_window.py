"""Which messages of a long conversation are built, and which shall be.

::

    path     0 ········ goal ──▶ first ━━━━━━━━━━━━━━ end ──▶ goal ········ len
"""

from __future__ import annotations

from dataclasses import dataclass

from app.chat.conversation import Message

PAGE_MESSAGES = 24
"""Messages by which the window is widened."""
FIRST_MESSAGES = 6
MORE_MESSAGES = 2
"""Messages that are built at once: to begin with, and in every turn of the event loop after that."""


@dataclass(slots=True)
class MessageWindow:
    """Indices in the path; an end of None: to the path's end, whatever comes."""

    first: int = 0
    end: int | None = None
    goal_first: int = 0
    goal_end: int | None = None

    @property
    def is_grown(self) -> bool:
        return (self.first, self.end) == (self.goal_first, self.goal_end)

    def open_at(self, index: int | None, length: int) -> None:
        """Around a message of a path of ``length``; None: at its end."""
        if index is None:
            self.first, self.end = max(0, length - FIRST_MESSAGES), None
            self.goal_first, self.goal_end = max(0, length - PAGE_MESSAGES), None
            return
        self.first, self.end = index, index + FIRST_MESSAGES
        self.goal_first = max(0, min(index, length - PAGE_MESSAGES // 2) - PAGE_MESSAGES // 2)
        self.goal_end = self.goal_first + PAGE_MESSAGES
        self.fit(length)

    def fit(self, length: int) -> None:
        """The path has another length."""
        self.first = min(self.first, max(0, length - 2))
        self.goal_first = min(self.goal_first, self.first)
        self.goal_end = None if self.goal_end is None or self.goal_end >= length else self.goal_end
        self.end = None if self.end is None or self.end >= length else self.end

    def of(self, path: list[Message]) -> list[Message]:
        return path[self.first : self.end]

    def widen_up(self) -> None:
        self.goal_first = max(0, self.goal_first - PAGE_MESSAGES)

    def widen_down(self) -> None:
        self.goal_end = None if self.goal_end is None else self.goal_end + PAGE_MESSAGES

    def grow(self, length: int) -> None:
        """A few messages more, the later ones first: they are nearer to what is in sight."""
        if self.end is not None and self.end != self.goal_end:
            goal = length if self.goal_end is None else self.goal_end
            self.end = min(goal, self.end + MORE_MESSAGES)
        else:
            self.first = max(self.goal_first, self.first - MORE_MESSAGES)
        self.fit(length)
