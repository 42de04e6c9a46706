"""Source code to coloured HTML: Pygments finds the tokens, a few colours that read well on the surface mark them."""

from __future__ import annotations

from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygments.lexer import Lexer

LONGEST_LANGUAGE_NAME = 32

CODE_COLORS = {
    # Kind of token (as Pygments names it): colour on dark, colour on light.
    "Comment": ("#9aa1ad", "#5f6877"),
    "Keyword": ("#c792ea", "#7b3fb5"),
    "Literal.String": ("#9ccc7f", "#23732b"),
    "Literal.Number": ("#f2b441", "#8f5400"),
    "Name.Function": ("#6cb6ff", "#1257b0"),
    "Name.Class": ("#6cb6ff", "#1257b0"),
    "Name.Tag": ("#6cb6ff", "#1257b0"),
    "Name.Builtin": ("#56c8c0", "#0b6767"),
    "Name.Decorator": ("#56c8c0", "#0b6767"),
    "Name.Attribute": ("#56c8c0", "#0b6767"),
    "Generic.Deleted": ("#ff8a80", "#b3261e"),
    "Generic.Inserted": ("#9ccc7f", "#23732b"),
    "Generic.Heading": ("#6cb6ff", "#1257b0"),
}


def highlight(code: str, language: str, dark: bool) -> str:
    """HTML whose text is exactly ``code``; plain where the language is unknown. Never guesses and never fails."""
    lexer = _lexer(language.lower()) if 0 < len(language) <= LONGEST_LANGUAGE_NAME else None
    if lexer is None:
        return escape(code)
    pieces: list[str] = []
    for kind, text in lexer.get_tokens(code):
        color = _color(str(kind), dark)
        pieces.append(f'<span style="color:{color}">{escape(text)}</span>' if color else escape(text))
    return "".join(pieces)


@lru_cache(maxsize=512)
def _color(kind: str, dark: bool) -> str:
    name = kind.removeprefix("Token.")
    while name:
        if name in CODE_COLORS:
            return CODE_COLORS[name][0 if dark else 1]
        name = name.rpartition(".")[0]
    return ""


@lru_cache(maxsize=128)
def _lexer(language: str) -> Lexer | None:
    # Imported with the first code block: the window opens without it.
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None
