"""What a model thought before it answered: the text up to ``</think>``.

Some templates write ``<think>`` themselves, so that an answer may hold the closing tag alone. It counts then only at
the end of a line outside a code block: an answer *about* these tags stays an answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TAGS = ("think", "thinking")
_OPENING = re.compile(rf"\s*<({'|'.join(_TAGS)})>")
_ALONE = re.compile(rf"(?:^[ \t]*|(?<=[^\s`]))</({'|'.join(_TAGS)})>[ \t]*(\n|\Z)", re.MULTILINE)
_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Parts:
    thought: str | None
    """None: it did not think."""
    answer: str
    is_thinking: bool = False
    """Whether the thought has no end yet."""


def split(text: str, *, growing: bool = False) -> Parts:
    """``growing``: more may come, so half a tag at the end is not shown yet."""
    if "<" not in text:
        return Parts(None, text)
    opening = _OPENING.match(text)
    if opening:
        closing = f"</{opening[1]}>"
        begin, end = opening.end(), text.find(closing, opening.end())
        if end < 0:
            thought = _without_half(text[begin:], closing) if growing else text[begin:]
            return Parts(thought.strip("\n"), "", is_thinking=True)
        return Parts(_thought(text[begin:end]), text[end + len(closing) :].lstrip())
    for alone in _ALONE.finditer(text) if "</think" in text else ():
        is_whole_line = bool(alone[2]) or not growing
        if is_whole_line and len(_FENCE.findall(text, 0, alone.start())) % 2 == 0:
            return Parts(_thought(text[: alone.start()]), text[alone.end() :].lstrip())
    if growing and any(f"<{tag}>".startswith(text.lstrip()) for tag in _TAGS):
        return Parts(None, "")
    return Parts(None, text)


def _thought(text: str) -> str | None:
    """Models that are told not to think say so by an empty thought."""
    return text.strip("\n") if text.strip() else None


def _without_half(text: str, tag: str) -> str:
    """``text`` without a beginning of ``tag`` at its end."""
    at = text.rfind("<")
    return text[:at] if at >= 0 and tag.startswith(text[at:]) else text
