"""Numbers in sentences, the same in every part of the window."""

from __future__ import annotations

import math
from collections.abc import Sequence

NOT_AVAILABLE = "n/a"
"""In place of a figure that has no sample."""


def count(number: int, noun: str) -> str:
    """``1 block``, ``12 blocks``, ``1,204 tokens``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def are(number: int) -> str:
    """``is`` or ``are``, of so many."""
    return "is" if number == 1 else "are"


def and_list(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def as_sentence(text: str) -> str:
    """A message of the engine's as a sentence: a capital first, a full stop last."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def lowered(text: str) -> str:
    """A sentence to go on with in the middle of another."""
    return text[:1].lower() + text[1:]


def percent(share: float) -> str:
    """``41 %``, ``0.3 %``."""
    return f"{100 * share:.1f} %" if 0 < share < 0.095 else f"{100 * share:.0f} %"


def seconds_label(seconds: float | None) -> str:
    """A duration for people: ``12 ms``, ``0.21 s``, ``3.4 s``, ``2:05 min``; ``–`` where there is none."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.00995 else f"{seconds * 1000:.1f} ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds < 0.995 else f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)}:{int(seconds % 60):02d} min"


def bytes_label(size: int) -> str:
    """``512 B``, ``36 KiB``, ``8.4 MiB``, ``1.2 GiB``."""
    if size < 1024:
        return f"{size} B"
    value, unit = size / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:,.0f} {unit}"
