"""The dialect of Markdown that is shown, and its HTML: CommonMark, tables, tasks, struck text, LaTeX as it was written;
no HTML, no pictures.
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

from app.chat.blocks import Piece
from app.chat.highlight import highlight
from app.chat.latex import use_block_rule, use_inline_rule
from app.chat.markup import COPY_SCHEME, LINK_SCHEMES, MarkdownColors
from app.translation import tr


def to_html(piece: Piece, number: int, colors: MarkdownColors) -> tuple[str, tuple[str, ...]]:
    """The HTML of a piece, and the code blocks in it; ``number`` is the piece's, for its copy buttons."""
    env = Environment(colors, piece, number)
    shared = {"environment": env}
    parser = _parser()
    tokens = parser.parse(piece.markdown, shared)
    _mark_tasks(tokens)
    if piece.goes_on or piece.continues_table:
        tokens = _cut_table(tokens, piece)
    return parser.renderer.render(tokens, parser.options, shared), tuple(env.codes)


def _mark_tasks(tokens: Sequence[Token]) -> None:
    """``- [ ] to do`` and ``- [x] done``: a box that shows it."""
    for item, inline in zip(tokens, tokens[2:], strict=False):
        if item.type == "list_item_open" and inline.type == "inline" and inline.children:
            text = inline.children[0]
            state = _TASKS.get(text.content[:4].lower()) if text.type == "text" else None
            if state:
                text.content = text.content[4:]
                item.attrSet("class", state)  # Qt draws a box for it


def _cut_table(tokens: list[Token], piece: Piece) -> list[Token]:
    """A part of a table that was cut: as wide as the other parts, and only the first part has the head."""
    if not tokens or tokens[0].type != "table_open":
        return tokens
    columns = sum(token.type == "th_open" for token in tokens)
    for token in tokens:
        if token.type in ("th_open", "td_open"):
            token.attrSet("width", f"{100 // columns}%")
    tokens[0].attrSet("width", "100%")
    kinds = [token.type for token in tokens]
    if not piece.continues_table:
        tokens[0].meta["goes_on"] = True
        return tokens
    if "tbody_open" not in kinds:
        return tokens[kinds.index("table_close") + 1 :]
    tokens[0].meta["goes_on"] = piece.goes_on
    return [tokens[0], *tokens[kinds.index("tbody_open") :]]


@dataclass(slots=True)
class Environment:
    """What the renderer needs to know of the piece it is in."""

    colors: MarkdownColors
    piece: Piece
    number: int
    codes: list[str] = field(default_factory=list)


_TASKS = {"[ ] ": "unchecked", "[x] ": "checked"}


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

    def math_inline(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        return f'<span style="font-family:monospace">{_lines(tokens[idx].content)}</span>'

    def math_block(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        return f'<p style="font-family:monospace; margin-left:12px">{_lines(tokens[idx].content.rstrip())}</p>\n'

    def table_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        token, line = tokens[idx], env["environment"].colors.line
        width = ' width="100%"' if token.attrGet("width") else ""
        above = 0 if env["environment"].piece.continues_table else 6
        below = 0 if token.meta.get("goes_on") else 8
        return (
            f'<table border="1" cellspacing="0" cellpadding="5"{width} '
            f'style="border-collapse:collapse; border-style:solid; border-color:{line}; '
            f'margin-top:{above}px; margin-bottom:{below}px">\n'
        )

    def th_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        return _cell(tokens[idx])

    def td_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        return _cell(tokens[idx])


def _lines(text: str) -> str:
    """Every line and every space as it is."""
    return escape(text).replace("  ", "\u00a0 ").replace("\n", "<br />")


def _cell(token: Token) -> str:
    """Qt knows the alignment of a cell as an attribute only."""
    side = str(token.attrGet("style") or "").removeprefix("text-align:")
    align = f' align="{side}"' if side in ("left", "center", "right") else ""
    width = f' width="{token.attrGet("width")}"' if token.attrGet("width") else ""
    return f"<{token.tag}{align}{width}>"


def _code_surface(code: str, language: str, env: Environment) -> str:
    """A surface with the language and a copy button above the code; what continues a cut block has the code only."""
    continues = env.piece.opening_lines == 1 and not env.codes
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
            f"{escape(language or tr('code'))}</span></td>"
            f'<td align="right" style="padding:6px 8px 0 8px">'
            f'<a href="{address}" style="text-decoration:none">{escape(tr("Copy"))}</a></td></tr>'
        )
    above, below = (0 if continues else 6), (0 if goes_on else 6)
    body = highlight(code.removesuffix("\n"), language, colors.dark)
    return (
        f'<table width="100%" border="0" cellspacing="0" cellpadding="0" bgcolor="{colors.raised}" '
        f'style="margin-top:{0 if continues else 6}px; margin-bottom:{0 if goes_on else 8}px">{header}'
        f'<tr><td colspan="2" style="padding:{above}px 8px {below}px 8px">'
        f'<pre style="white-space:pre-wrap; margin:0">{body}</pre></td></tr></table>\n'
    )


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True}, renderer_cls=Renderer)
    parser.enable(["table", "strikethrough"])
    # A link defined further down would change what is already on the screen.
    parser.disable(["reference", "html_block", "html_inline"])
    use_block_rule(parser)
    use_inline_rule(parser)
    parser.validateLink = _allowed_link  # type: ignore[method-assign]
    return parser
