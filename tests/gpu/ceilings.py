"""What this card does at best, measured: the other sections hold their figures against these and no data sheet.

``copy bandwidth``: a device-to-device copy of a tensor far larger than the L2, bytes read plus bytes written over time.
``matrix rate``: a square product in bfloat16 of random numbers (zeros would be faster), 2·n³ operations over time.
``launch of an empty graph``: a graph with one kernel that adds to a single number, replayed by an idle card; the time
between an event before and an event after it.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu.card import Card
from tests.gpu.figures import Report

COPY_BYTES = 2**32
MATRIX = 8192


@torch.inference_mode()
def run(card: Card, report: Report, facts: dict[str, Any]) -> None:
    facts["bandwidth"] = _bandwidth(card, report)
    card.release()
    facts["matrix_rate"] = _matrix_rate(card, report)
    number = torch.zeros(1, device=card.device)
    replay = card.captured(lambda: number.add_(1))
    card.idle_seconds(replay, 20)
    facts["launch"] = card.idle_seconds(replay, 100)
    report.rate("launch of an empty graph", facts["launch"] * 1e6, "µs")


def _bandwidth(card: Card, report: Report) -> float:
    """Bytes a second."""
    count = 2**10 if card.rehearsal else min(COPY_BYTES, card.free_bytes() // 4) // 4
    source = torch.empty(count, dtype=torch.int32, device=card.device).random_(generator=card.generator(1))
    copied = torch.empty_like(source)
    seconds = card.queued_seconds(lambda: copied.copy_(source), 4)
    if not torch.equal(source, copied):
        raise RuntimeError("a copy on the device is not what was copied")
    bandwidth = 2 * source.nbytes / seconds
    report.rate("copy bandwidth", bandwidth / 1e12, "TB/s", bytes=2 * source.nbytes, seconds=seconds)
    return bandwidth


def _matrix_rate(card: Card, report: Report) -> float:
    """Operations a second."""
    size, random = 32 if card.rehearsal else MATRIX, card.generator(2)
    a, b = (torch.randn(size, size, device=card.device, generator=random).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    card.queued_seconds(lambda: torch.mm(a, b, out=out), 3)  # the clock rises, the library chooses
    seconds = card.queued_seconds(lambda: torch.mm(a, b, out=out), 8)
    rate = 2 * size**3 / seconds
    report.rate("matrix rate, bf16", rate / 1e12, "TFLOP/s", size=size, seconds=seconds)
    return rate
