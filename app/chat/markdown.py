"""Markdown of a model to HTML for a ``QTextDocument``: text in, text out.

The text of a model is hostile until proven otherwise. HTML in it is shown as text; pictures are shown as their source;
links are links only to http, https and mailto, everything else (``javascript:``, ``file:``, ``data:``) stays text. The
HTML made here names no resource at all, so there is nothing a document could load.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from app.chat.blocks import BlockSplitter, Piece
from app.chat.highlight import highlight
from app.chat.markup import MarkdownColors


@dataclass(frozen=True, slots=True)
class RenderedPiece:
    piece: Piece
    html: str
    codes: tuple[str, ...]
    """The code blocks in it, as they are copied."""


class MarkdownStream:
    """A text that grows, and its HTML: finished pieces are rendered once, only the tail again."""

    def __init__(self, colors: MarkdownColors) -> None:
        self._colors = colors
        self._splitter = BlockSplitter()
        self._length = 0
        self.finished: list[RenderedPiece] = []
        self.tail: RenderedPiece | None = None
        """None where nothing is unfinished."""
        self.rendered_characters = 0
        """How much source has been rendered so far, repetitions counted."""

    def update(self, text: str) -> None:
        """``text`` is the whole text: what was given before, and more."""
        for piece in self._splitter.push(text[self._length :]):
            self.finished.append(self._render(piece, len(self.finished)))
        self._length = len(text)
        tail = self._splitter.tail
        self.tail = self._render(tail, len(self.finished)) if tail.source.strip() else None

    @property
    def pieces(self) -> list[RenderedPiece]:
        return self.finished if self.tail is None else [*self.finished, self.tail]

    @property
    def html(self) -> str:
        return "".join(piece.html for piece in self.pieces)

    def code(self, piece: int, block: int) -> str:
        """The code block at an address of a copy button, whole even where it was cut into pieces."""
        pieces = self.pieces
        code = pieces[piece].codes[block]
        if block == len(pieces[piece].codes) - 1:
            for following in pieces[piece + 1 :]:
                if not following.piece.opening or not following.codes:
                    break
                code += following.codes[0]
                if len(following.codes) > 1:
                    break
        return code

    def _render(self, piece: Piece, number: int) -> RenderedPiece:
        self.rendered_characters += len(piece.source)
        return render_piece(piece, number, self._colors)


def render(text: str, colors: MarkdownColors) -> str:
    """The HTML of a whole text at once."""
    stream = MarkdownStream(colors)
    stream.update(text)
    return stream.html


def warm_up() -> Iterator[bool]:
    """Imports what the first message needs, in parts of about 40 ms each, so that it does not wait for all at once."""
    import markdown_it  # noqa: F401

    yield True
    from app.chat import dialect  # noqa: F401

    yield True
    highlight("x = 1", "python", dark=True)
    yield True
    _spare_collector()


@lru_cache(maxsize=1)
def _spare_collector() -> None:
    """What the window has made by now stays: looking through it for garbage, as every few thousand tokens of Markdown
    make Python do, takes longer than drawing them (40 to 60 ms at once)."""
    gc.freeze()


def render_piece(piece: Piece, number: int, colors: MarkdownColors) -> RenderedPiece:
    # Imported with the first message: the window opens without it.
    from app.chat.dialect import to_html

    html, codes = to_html(piece, number, colors)
    return RenderedPiece(piece, html, codes)


def style_sheet(colors: MarkdownColors) -> str:
    """The default style sheet of the documents that show this HTML."""
    return f"""
p {{ margin-top: 0; margin-bottom: 8px; }}
h1, h2, h3, h4, h5, h6 {{ margin-top: 8px; margin-bottom: 6px; font-weight: 600; }}
h1 {{ font-size: 18px; }} h2 {{ font-size: 16px; }} h3 {{ font-size: 14px; }} h4, h5, h6 {{ font-size: 13px; }}
ul, ol {{ margin-top: 0; margin-bottom: 8px; }}
li {{ margin-bottom: 2px; }}
blockquote {{ margin: 0 0 8px 12px; color: {colors.muted}; }}
code, pre {{ font-family: monospace; }}
code {{ background-color: {colors.raised}; }}
a {{ color: {colors.accent}; }}
th {{ font-weight: 600; }}
"""
