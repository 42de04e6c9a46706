"""Random traffic of the default discipline in tight pools, long and at every block size: nothing wrong, nothing lost.

What must hold is in :mod:`tests.scheduling.traces`; other disciplines are in ``test_every_pair``.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import DISCIPLINES
from engine.events import Preempted
from tests.scheduling.traces import run_trace

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no cache": {"prefix_cache": False},
    "whole prompts": {"chunked_prefill": False},
    "priority": {"order": "priority", "watermark": 0.1},
    "ageing": {"order": "priority", "ageing": 3.0, "preemption": "swap"},
    "drafts": {"speculative": "ngram", "draft_tokens": 6},
}


SPECULATIVE = ("off", "ngram", "draft:small")


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
def test_traces(block_size: int, settings: str) -> None:
    run_trace(0, block_size=block_size, num_requests=50, aborts=0.1, **SETTINGS[settings])


def test_the_traces_are_tight_enough_to_preempt_and_share() -> None:
    probes = [run_trace(seed, block_size=2, num_requests=60).probe for seed in range(3)]
    assert sum(len(probe.of(Preempted)) for probe in probes) >= 10
    assert sum(probe.records[-1].totals.prefix_hit_tokens for probe in probes) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
@pytest.mark.parametrize("seed", range(20))
def test_long_traces(seed: int, block_size: int) -> None:
    """500 requests, chunk 64, a fifth aborted at random steps, knobs that change in half of the traces."""
    run_trace(
        seed,
        block_size=block_size,
        num_requests=500,
        token_budget=64,
        aborts=0.1,
        changes=0.02 * (seed % 2),
        discipline=DISCIPLINES[seed % len(DISCIPLINES)],
        **{"speculative": SPECULATIVE[seed % 3], **SETTINGS[list(SETTINGS)[seed % len(SETTINGS)]]},
    )
