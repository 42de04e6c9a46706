"""Cuts growing Markdown into pieces that can be rendered one by one, once each.

A top-level block is finished as soon as another one begins below it on a complete line: nothing that follows can change
it, because references to links defined elsewhere are switched off. What is left, the *tail*, is never longer than
``BLOCK_LIMIT`` characters (``FENCE_LIMIT`` in a code block, which is dearer): a block that grows past it is cut at a
line end or a space. Every cut depends only on the text from the cut before it to the limit, so the pieces are the same
however the text arrived.

::

    # Title ¶ paragraph … ¶ | - item    <- tail: parsed again when text arrives
    finished    finished
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

BLOCK_LIMIT = 2_500
FENCE_LIMIT = 1_500
"""Characters of the longest piece, and of the longest piece of a code block."""


@dataclass(frozen=True, slots=True)
class Piece:
    source: str
    fence: str = ""
    """Where the piece goes on inside a code block that was cut: the block's opening line."""
    goes_on: bool = False
    """Whether its code block goes on in the next piece."""

    @property
    def markdown(self) -> str:
        return f"{self.fence}\n{self.source}" if self.fence else self.source


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    """Blocks only. Imported with the first message: the window opens without it."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["reference", "html_block"])
    parser.core.ruler.enableOnly(["normalize", "block"])
    return parser


class BlockSplitter:
    def __init__(self) -> None:
        self._tail = ""
        self._fence = ""
        self._held = ""

    @property
    def tail(self) -> Piece:
        """What may still change."""
        return Piece(self._tail, self._fence)

    def push(self, text: str) -> list[Piece]:
        """Takes more text and returns the pieces that it finished."""
        text = self._held + text
        # A carriage return at the end may be half a line end.
        self._held = "\r" if text.endswith("\r") else ""
        text = text[: len(text) - len(self._held)]
        self._tail += text.replace("\r\n", "\n").replace("\r", "\n")
        finished: list[Piece] = []
        while self._cut(finished):
            pass
        return finished

    def _cut(self, finished: list[Piece]) -> bool:
        for limit in (FENCE_LIMIT, BLOCK_LIMIT):
            window = self._tail[:limit]
            complete = window[: window.rfind("\n") + 1]
            blocks = _top_level(Piece(complete, self._fence))
            starts = [_line_offset(complete, token.map[0] - bool(self._fence)) for token in blocks[1:] if token.map]
            if starts:
                self._emit(finished, starts)
                return True
            if len(self._tail) <= limit:
                return False
            fence = self._fence or _opening_line(window)
            if fence or limit == BLOCK_LIMIT:
                self._emit(finished, [_place_to_cut(window, in_fence=bool(fence))], goes_on=bool(fence))
                self._fence = fence
                return True
        return False

    def _emit(self, finished: list[Piece], ends: list[int], *, goes_on: bool = False) -> None:
        begin = 0
        for end in ends:
            finished.append(Piece(self._tail[begin:end], self._fence, goes_on))
            self._fence = ""
            begin = end
        self._tail = self._tail[begin:]


def _top_level(piece: Piece) -> list[Token]:
    return [token for token in _parser().parse(piece.markdown) if token.level == 0 and token.nesting >= 0]


def _line_offset(text: str, line: int) -> int:
    offset = 0
    for _ in range(line):
        offset = text.index("\n", offset) + 1
    return offset


def _opening_line(window: str) -> str:
    """The line that opens the code block with which the window begins; empty where it begins with something else."""
    blocks = _top_level(Piece(window))
    if not blocks or blocks[0].type != "fence" or not blocks[0].map:
        return ""
    return window[_line_offset(window, blocks[0].map[0]) :].partition("\n")[0]


def _place_to_cut(window: str, *, in_fence: bool) -> int:
    """A line end of the second half, outside code one before a line at the margin; else a space; else the end."""
    half = len(window) // 2
    ends = [at + 1 for at in range(half, len(window) - 1) if window[at] == "\n"]
    at_margin = [end for end in ends if not window[end].isspace()]
    if ends:
        return ends[-1] if in_fence or not at_margin else at_margin[-1]
    space = window.rfind(" ", half)
    return space + 1 if space >= 0 else len(window)
