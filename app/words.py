"""Numbers in sentences, the same in every part of the window."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """``1 block``, ``12 blocks``, ``1,204 tokens``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
