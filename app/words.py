"""Numbers in sentences, the same in every part of the window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from app.translation import ntr, tr

NOT_AVAILABLE = "n/a"
"""In place of a figure that has no sample."""


def count(number: int, noun: str) -> str:
    """``1 block``, ``12 blocks``, ``1,204 tokens``."""
    return _COUNTED[noun](number)


def are(number: int) -> str:
    """``is`` or ``are``, of so many."""
    return ntr("is", "are", number)


def and_list(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return tr("{first} and {last}", first=", ".join(parts[:-1]), last=parts[-1]) if len(parts) > 1 else parts[0]


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
    for larger in ("MiB", "GiB", tr("TiB")):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:,.0f} {unit}"


_COUNTED: dict[str, Callable[[int], str]] = {
    "answer": lambda n: ntr("{count:,} answer", "{count:,} answers", n),
    "block": lambda n: ntr("{count:,} block", "{count:,} blocks", n),
    "cached block": lambda n: ntr("{count:,} cached block", "{count:,} cached blocks", n),
    "chunk": lambda n: ntr("{count:,} chunk", "{count:,} chunks", n),
    "computed token": lambda n: ntr("{count:,} computed token", "{count:,} computed tokens", n),
    "continuation": lambda n: ntr("{count:,} continuation", "{count:,} continuations", n),
    "core": lambda n: ntr("{count:,} core", "{count:,} cores", n),
    "decode": lambda n: ntr("{count:,} decode", "{count:,} decodes", n),
    "draft": lambda n: ntr("{count:,} draft", "{count:,} drafts", n),
    "drafted token": lambda n: ntr("{count:,} drafted token", "{count:,} drafted tokens", n),
    "preemption": lambda n: ntr("{count:,} preemption", "{count:,} preemptions", n),
    "prompt": lambda n: ntr("{count:,} prompt", "{count:,} prompts", n),
    "prompt token": lambda n: ntr("{count:,} prompt token", "{count:,} prompt tokens", n),
    "request": lambda n: ntr("{count:,} request", "{count:,} requests", n),
    "row": lambda n: ntr("{count:,} row", "{count:,} rows", n),
    "run": lambda n: ntr("{count:,} run", "{count:,} runs", n),
    "running place": lambda n: ntr("{count:,} running place", "{count:,} running places", n),
    "running request": lambda n: ntr("{count:,} running request", "{count:,} running requests", n),
    "seed": lambda n: ntr("{count:,} seed", "{count:,} seeds", n),
    "slot": lambda n: ntr("{count:,} slot", "{count:,} slots", n),
    "step": lambda n: ntr("{count:,} step", "{count:,} steps", n),
    "token": lambda n: ntr("{count:,} token", "{count:,} tokens", n),
    "variant": lambda n: ntr("{count:,} variant", "{count:,} variants", n),
}
"""By the noun in the singular. Each is written out, so that it can be translated."""
