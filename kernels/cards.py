"""Named cards, by their vendors' figures, and the least time that a kernel can take on one: the roofline model.

A kernel that must move ``bytes`` and compute ``operations`` takes at least ``max(bytes / bandwidth, operations /
rate)`` (Williams, Waterman and Patterson, "Roofline", CACM 2009). Both peaks are the vendor's; no program reaches them,
and what one does reach is measured on the card, never here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GB = 1_000_000_000
TERA = 1_000_000_000_000


@dataclass(frozen=True, slots=True)
class Card:
    """Figures of one card. None, and a type that is missing from ``rates``: the source does not say."""

    name: str
    target: str
    """What its kernels are compiled for (:data:`kernels.aot.TARGETS`)."""
    bandwidth: float
    """Peak of its memory, bytes per second."""
    rates: Mapping[str, float]
    """Operations per second (a multiplication and an addition are two) by type, dense: fp16, bf16 and fp8 on its matrix
    units with sums in float32, fp32 without TF32."""
    source: str
    memory: int | None = None
    """Bytes, as sold: 10⁹ to the gigabyte."""
    l2: int | None = None
    """Bytes; on the MI300X the sum of the caches of its 8 dies."""
    multiprocessors: int | None = None

    def roofline_s(self, bytes_moved: int, operations: int, type_name: str) -> float | None:
        """Least seconds for a launch; None where its rate is needed and not known."""
        if not operations:
            return bytes_moved / self.bandwidth
        rate = self.rates.get(type_name)
        return None if rate is None else max(bytes_moved / self.bandwidth, operations / rate)


def _half(rate: float) -> dict[str, float]:
    return {"fp16": rate, "bf16": rate}


# The first card of a target is the one that it is shown with where none is named.
CARDS = (
    Card(
        "A100 80GB SXM",
        "sm_80",
        bandwidth=2_039 * GB,
        rates=_half(312 * TERA) | {"fp32": 19.5 * TERA},
        memory=80 * GB,
        l2=40 << 20,
        multiprocessors=108,
        source="NVIDIA A100 data sheet; A100 architecture white paper (L2, multiprocessors)",
    ),
    Card(
        "RTX 4090",
        "sm_89",
        bandwidth=1_008 * GB,
        rates=_half(165.2 * TERA) | {"fp8": 330.3 * TERA, "fp32": 82.6 * TERA},
        memory=24 * GB,
        l2=72 << 20,
        multiprocessors=128,
        source="NVIDIA Ada GPU architecture white paper, appendix A",
    ),
    Card(
        "H200 SXM",
        "sm_90",
        bandwidth=4_800 * GB,
        rates=_half(989.5 * TERA) | {"fp8": 1_979 * TERA, "fp32": 67 * TERA},
        memory=141 * GB,
        multiprocessors=132,
        source="NVIDIA H200 data sheet (rates with sparsity, halved); H100 white paper (the same multiprocessors)",
    ),
    Card(
        "RTX 5090",
        "sm_120",
        bandwidth=1_792 * GB,
        rates=_half(209.5 * TERA) | {"fp8": 419 * TERA, "fp32": 104.8 * TERA},
        memory=32 * GB,
        l2=96 << 20,
        multiprocessors=170,
        source="NVIDIA RTX Blackwell GPU architecture white paper, appendix A",
    ),
    Card(
        "MI300X",
        "gfx942",
        bandwidth=5_300 * GB,
        rates=_half(1_307.4 * TERA) | {"fp8": 2_614.9 * TERA, "fp32": 163.4 * TERA},
        memory=192 * GB,
        l2=8 * (4 << 20),
        multiprocessors=304,
        source="AMD Instinct MI300X data sheet; ROCm documentation, GPU specifications (L2, compute units)",
    ),
)


def card_of(target: str) -> Card:
    return next(card for card in CARDS if card.target == target)


def _plain(name: str) -> str:
    return "".join(name.split()).casefold()


def named_card(text: str) -> Card:
    """One of :data:`CARDS` by its name, in any case and with or without its spaces, or another as
    ``NAME:TARGET:GB/s:TFLOP/s``, the last of fp16 and bf16. Raises ValueError with a sentence."""
    for card in CARDS:
        if _plain(card.name) == _plain(text):
            return card
    fields = text.split(":")
    if len(fields) != 4:
        known = ", ".join(card.name for card in CARDS)
        raise ValueError(f"unknown card {text!r}; known are {known}, another is NAME:TARGET:GB/s:TFLOP/s")
    name, target, bandwidth, rate = fields
    if target not in {card.target for card in CARDS}:
        known = ", ".join(card.target for card in CARDS)
        raise ValueError(f"{text!r}: unknown target {target!r}; known are {known}")
    try:
        numbers = float(bandwidth), float(rate)
    except ValueError:
        numbers = 0.0, 0.0
    if not all(0 < number < float("inf") for number in numbers):
        raise ValueError(f"{text!r}: GB/s and TFLOP/s are positive numbers")
    return Card(name, target, numbers[0] * GB, _half(numbers[1] * TERA), source="as named")
