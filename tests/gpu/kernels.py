"""Every shipped configuration against its reference, on the card: the same functions that the interpreter is held to.

A part is ``lane/lanes`` or ``lane/lanes/first``: every ``lanes``-th configuration, from ``lane`` (or ``first``) on.
"""

from __future__ import annotations

import time
import traceback
from typing import Any

from tests.gpu.card import Card
from tests.gpu.figures import Report


def run(card: Card, report: Report, facts: dict[str, Any], part: str = "0/1") -> str | None:
    """The part that is left where a kernel broke the context, which no later one would survive."""
    from kernels.triton.configurations import shipped_configurations

    lane, lanes, *first = map(int, part.split("/"))
    configurations = shipped_configurations()
    if card.rehearsal:
        configurations = list({each.kernel: each for each in reversed(configurations)}.values())
    for index in range(first[0] if first else lane, len(configurations), lanes):
        each = configurations[index]
        if each.targets is not None and card.target not in each.targets:
            continue
        name, begin = f"{each.kernel} {each.config}", time.perf_counter()
        try:
            error = each.error(device=str(card.device))
        except Exception:
            report.check(name, False, traceback.format_exc())
            if not card.is_sound():
                return f"{lane}/{lanes}/{index + lanes}"
            continue
        seconds = time.perf_counter() - begin
        words = f"error {error:.1e}, at most {each.tolerance:.1e}"
        report.check(name, error <= each.tolerance, words, listed=False, error=str(error), seconds=round(seconds, 2))
    return None
