"""What the HTML of an answer is made with: its colours, and the schemes of the addresses in it."""

from __future__ import annotations

from dataclasses import dataclass

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
