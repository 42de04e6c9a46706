"""What becomes of a victim's keys and values: computed again, or moved to host memory and back."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.kv_cache import KVCacheManager
from engine.request import Request
from engine.scheduling.costs import PreemptionCosts


@dataclass(frozen=True, slots=True)
class PreemptionChoice:
    swapped_blocks: int
    """Blocks that move to the host; 0: it is computed again."""
    recompute_seconds: float | None
    """Estimate; None where nothing was measured."""
    swap_seconds: float | None
    fallback: str
    """Why it is computed again although it should be swapped."""


def choose_preemption(
    victim: Request, mode: str, memory: KVCacheManager, costs: PreemptionCosts | None
) -> PreemptionChoice:
    """``mode``: ``recompute``, ``swap``, or ``auto`` for the one that takes less time by the measured costs. What
    cannot be swapped is computed again. Without measured costs ``auto`` computes again."""
    recompute = swap = None
    moving = memory.blocks_to_swap(victim)
    if costs is not None:
        recompute = costs.recompute_seconds(victim.num_computed_tokens)
        swap = costs.swap_seconds(moving)
    wanted = mode == "swap" or (mode == "auto" and recompute is not None and swap is not None and swap < recompute)
    fallback = memory.swap_refusal(victim) if wanted else ""
    return PreemptionChoice(moving if wanted and not fallback else 0, recompute, swap, fallback)
