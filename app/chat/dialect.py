"""The dialect of Markdown that is shown, and its HTML: CommonMark, tables and struck text; no HTML, no pictures."""

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

from app.chat.blocks import Piece
from app.chat.highlight import highlight
from app.chat.markup import COPY_SCHEME, LINK_SCHEMES, MarkdownColors


def to_html(piece: Piece, number: int, colors: MarkdownColors) -> tuple[str, tuple[str, ...]]:
    """The HTML of a piece, and the code blocks in it; ``number`` is the piece's, for its copy buttons."""
    env = Environment(colors, piece, number)
    html = _parser().render(piece.markdown, {"environment": env})
    return html, tuple(env.codes)


@dataclass(slots=True)
class Environment:
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


class Renderer(RendererHTML):
    """The rules whose HTML differs from the usual."""

    def fence(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        language = tokens[idx].info.strip().partition(" ")[0]
        return _code_surface(tokens[idx].content, language, env["environment"])

    def code_block(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        return _code_surface(tokens[idx].content, "", env["environment"])

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


def _code_surface(code: str, language: str, env: Environment) -> str:
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
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True}, renderer_cls=Renderer)
    parser.enable(["table", "strikethrough"])
    # A link defined further down would change what is already on the screen.
    parser.disable(["reference", "html_block", "html_inline"])
    parser.validateLink = _allowed_link  # type: ignore[method-assign]
    return parser
