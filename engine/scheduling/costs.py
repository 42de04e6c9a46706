"""What it costs to take a request's blocks: computing its keys and values again, or moving them out and back in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Measured on the loaded model, by :mod:`engine.execution.sizing`."""

    seconds_per_token: float
    """Of one token in a prefill."""
    seconds_per_block: float
    """One block over all layers, out to the host and back in."""

    def recompute_seconds(self, num_tokens: int) -> float:
        """Computing ``num_tokens`` tokens a second time."""
        return num_tokens * self.seconds_per_token

    def swap_seconds(self, num_blocks: int) -> float:
        """Moving ``num_blocks`` blocks out and back in."""
        return num_blocks * self.seconds_per_block
