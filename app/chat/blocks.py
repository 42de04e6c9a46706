"""Cuts growing Markdown into pieces that can be rendered one by one, once each.

A top-level block is finished as soon as another one begins below it on a complete line: nothing that follows can change
it, because references to links defined elsewhere are switched off. What is left, the *tail*, is never longer than
``BLOCK_LIMIT`` characters (``DEAR_LIMIT`` where it is not a paragraph, which makes it dearer): a block that grows past
it is cut at a line end or a space, and what is inside a code block or a table goes on in one. Every cut depends only on
the text from the cut before it to the limit, so the pieces are the same however the text arrived.

::

    # Title ¶ paragraph … ¶ | - item    <- tail: parsed again when text arrives
    finished    finished
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from app.chat.latex import use_block_rule

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

BLOCK_LIMIT = 2_500
DEAR_LIMIT = 1_000
"""Characters of the longest piece, and of the longest that is not a paragraph."""


@dataclass(frozen=True, slots=True)
class Piece:
    source: str
    opening: str = ""
    """Where the piece goes on inside a code block or a table that was cut: the lines that open the block."""
    goes_on: bool = False
    """Whether its code block or table goes on in the next piece."""

    @property
    def markdown(self) -> str:
        return f"{self.opening}\n{self.source}" if self.opening else self.source

    @property
    def opening_lines(self) -> int:
        return len(self.opening.splitlines())

    @property
    def continues_table(self) -> bool:
        return self.opening_lines == 2


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    """Blocks only. Imported with the first message: the window opens without it."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["reference", "html_block"])
    parser.core.ruler.enableOnly(["normalize", "block"])
    use_block_rule(parser)
    return parser


class BlockSplitter:
    def __init__(self) -> None:
        self._tail = ""
        self._opening = ""
        self._held = ""

    @property
    def tail(self) -> Piece:
        """What may still change."""
        return Piece(self._tail, self._opening)

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
        for limit in (DEAR_LIMIT, BLOCK_LIMIT):
            window = self._tail[:limit]
            complete = window[: window.rfind("\n") + 1]
            piece = Piece(complete, self._opening)
            blocks = _top_level(piece)
            lines = [token.map[0] - piece.opening_lines for token in blocks[1:] if token.map]
            starts = [_line_offset(complete, line) for line in lines]
            if starts:
                self._emit(finished, starts)
                return True
            if len(self._tail) <= limit:
                return False
            if limit == BLOCK_LIMIT or (blocks and blocks[0].type != "paragraph_open"):
                opening = self._opening or _opening_lines(complete, blocks)
                self._emit(finished, [_place_to_cut(window, anywhere=bool(opening))], goes_on=bool(opening))
                self._opening = opening
                return True
        return False

    def _emit(self, finished: list[Piece], ends: list[int], *, goes_on: bool = False) -> None:
        begin = 0
        for end in ends:
            finished.append(Piece(self._tail[begin:end], self._opening, goes_on))
            self._opening = ""
            begin = end
        self._tail = self._tail[begin:]


def _top_level(piece: Piece) -> list[Token]:
    return [token for token in _parser().parse(piece.markdown) if token.level == 0 and token.nesting >= 0]


def _line_offset(text: str, line: int) -> int:
    offset = 0
    for _ in range(line):
        offset = text.find("\n", offset) + 1
        if offset == 0:
            return len(text)
    return offset


def _opening_lines(text: str, blocks: list[Token]) -> str:
    """The lines that open the code block or the table with which a text begins; empty where it is another block."""
    count = {"fence": 1, "table_open": 2}.get(blocks[0].type, 0) if blocks else 0
    if not count or not blocks[0].map:
        return ""
    first = blocks[0].map[0]
    return text[_line_offset(text, first) : _line_offset(text, first + count)].rstrip("\n")


def _place_to_cut(window: str, *, anywhere: bool) -> int:
    """The last line end before a line at the margin, with ``anywhere`` before any; else a line end or a space of the
    second half; else the end."""
    ends = [at + 1 for at in range(len(window) - 1) if window[at] == "\n"]
    at_margin = [end for end in ends if not window[end].isspace()]
    half = len(window) // 2
    if anywhere and ends:
        return ends[-1]
    if at_margin:
        return at_margin[-1]
    if ends and ends[-1] > half:
        return ends[-1]
    space = window.rfind(" ", half)
    return space + 1 if space >= 0 else len(window)
