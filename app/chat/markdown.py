"""Markdown of a model to HTML for a ``QTextDocument``: text in, text out.

The text of a model is hostile until proven otherwise. HTML in it is shown as text; pictures are shown as their source;
links are links only to http, https and mailto, everything else (``javascript:``, ``file:``, ``data:``) stays text. The
HTML made here names no resource at all, so there is nothing a document could load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape, unescape
from typing import Any
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from app.chat.blocks import BlockSplitter, Piece
from app.chat.highlight import highlight

LINK_SCHEMES = ("http", "https", "mailto")
COPY_SCHEME = "copy"
"""``copy:PIECE.BLOCK`` is the address of a code block's copy button; no text of a model can make one."""


@dataclass(frozen=True, slots=True)
class MarkdownColors:
    """As ``#rrggbb``."""

    dark: bool
    text: str
    muted: str
    accent: str
    raised: str
    line: str


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
                if not following.piece.fence or not following.codes:
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


def render_piece(piece: Piece, number: int, colors: MarkdownColors) -> RenderedPiece:
    env = _Environment(colors, piece, number)
    html = _parser().render(piece.markdown, {"environment": env})
    return RenderedPiece(piece, html, tuple(env.codes))


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


@dataclass(slots=True)
class _Environment:
    """What the renderer needs to know of the piece it is in."""

    colors: MarkdownColors
    piece: Piece
    number: int
    codes: list[str] = field(default_factory=list)


def _allowed_link(url: str) -> bool:
    try:
        return urlsplit(unescape(url).strip()).scheme.lower() in LINK_SCHEMES
    except ValueError:
        return False


class _Renderer(RendererHTML):
    """The rules whose HTML differs from the usual."""

    def fence(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        language = tokens[idx].info.strip().partition(" ")[0]
        return _code_block(tokens[idx].content, language, env["environment"])

    def code_block(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        return _code_block(tokens[idx].content, "", env["environment"])

    def image(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        token = tokens[idx]
        alternative = self.renderInlineAsText(token.children or [], options, env)
        return escape(f"![{alternative}]({token.attrGet('src') or ''})")

    def link_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        # No title: Qt shows one as a tool tip, and reads it as markup.
        return f'<a href="{escape(str(tokens[idx].attrGet("href")))}">'

    def table_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        line = env["environment"].colors.line
        return (
            f'<table border="1" cellspacing="0" cellpadding="5" '
            f'style="border-collapse:collapse; border-style:solid; border-color:{line}; '
            f'margin-top:4px; margin-bottom:8px">\n'
        )


def _code_block(code: str, language: str, env: _Environment) -> str:
    """A surface with the language and a copy button above the code; what continues a cut block has the code only."""
    continues = bool(env.piece.fence) and not env.codes
    goes_on = env.piece.goes_on
    env.codes.append(code)
    if continues and not code:
        return ""
    colors = env.colors
    header = ""
    if not continues:
        address = f"{COPY_SCHEME}:{env.number}.{len(env.codes) - 1}"
        header = (
            f'<tr><td style="padding:6px 8px 0 8px"><span style="color:{colors.muted}">'
            f"{escape(language) or 'code'}</span></td>"
            f'<td align="right" style="padding:6px 8px 0 8px">'
            f'<a href="{address}" style="text-decoration:none">Copy</a></td></tr>'
        )
    above, below = (0 if continues else 6), (0 if goes_on else 6)
    body = highlight(code.removesuffix("\n"), language, colors.dark)
    return (
        f'<table width="100%" border="0" cellspacing="0" cellpadding="0" bgcolor="{colors.raised}" '
        f'style="margin-top:0; margin-bottom:{0 if goes_on else 8}px">{header}'
        f'<tr><td colspan="2" style="padding:{above}px 8px {below}px 8px">'
        f'<pre style="white-space:pre-wrap; margin:0">{body}</pre></td></tr></table>\n'
    )


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True}, renderer_cls=_Renderer)
    parser.enable(["table", "strikethrough"])
    # A link defined further down would change what is already on the screen.
    parser.disable(["reference", "html_block", "html_inline"])
    parser.validateLink = _allowed_link  # type: ignore[method-assign]
    return parser
