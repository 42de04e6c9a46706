"""Random traces in tight pools: every answer is the cold one, no block is lost, somebody always moves.

The runner checks at each step that every request reads exactly its own tokens through its block table.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.events import Preempted
from engine.request import SamplingParams
from tests.oracles import EngineProbe, cold_answer, make_core

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no cache": {"prefix_cache": False},
    "whole prompts": {"chunked_prefill": False},
    "priority": {"order": "priority", "watermark": 0.1},
    "ageing": {"order": "priority", "ageing": 3.0},
}


def run_trace(seed: int, block_size: int, settings: dict[str, Any], num_requests: int) -> EngineProbe:
    """Requests that arrive while others run; a fifth is aborted somewhere, many share a beginning."""
    rng = random.Random(f"{seed} {block_size}")
    pool_tokens = 128
    core = make_core(
        num_blocks=pool_tokens // block_size,
        block_size=block_size,
        token_budget=rng.choice([64, 70]),
        max_num_seqs=rng.randint(2, 8),
        max_model_len=100,
        clock=iter(range(10**9)).__next__,
        **settings,
    )
    probe = EngineProbe(core)
    heads = [[rng.randrange(900) for _ in range(40)] for _ in range(3)]
    asked: dict[int, tuple[list[int], int]] = {}
    aborted: set[int] = set()
    while len(asked) < num_requests or core.has_work:
        if len(asked) < num_requests and rng.random() < 0.5:
            head = rng.choice(heads)[: rng.randrange(41)]
            prompt = head + [rng.randrange(900) for _ in range(rng.randint(0 if head else 1, 20))]
            length = rng.randint(1, 30)
            request = probe.add(prompt, SamplingParams(max_tokens=length), priority=rng.randrange(3))
            asked[request] = (prompt, length)
        if asked and rng.random() < 0.1:
            victim = rng.choice(list(asked))
            core.abort(victim)
            if probe.answers[victim].last is None:
                aborted.add(victim)
        probe.step()
    probe.run()
    for request, (prompt, length) in asked.items():
        answer = probe.answers[request]
        expected = cold_answer(prompt, length)
        if request in aborted:
            assert answer.finish_reason == "abort"
            assert answer.token_ids == expected[: len(answer.token_ids)]
        else:
            assert answer.finish_reason == "length" and answer.token_ids == expected
    return probe


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
@pytest.mark.parametrize("seed", range(2))
def test_traces(seed: int, block_size: int, settings: str) -> None:
    run_trace(seed, block_size, SETTINGS[settings], num_requests=40)


def test_the_traces_are_tight_enough_to_preempt_and_share() -> None:
    probes = [run_trace(seed, 2, {}, num_requests=60) for seed in range(3)]
    assert sum(len(probe.of(Preempted)) for probe in probes) >= 10
    assert sum(probe.records[-1].totals.prefix_hit_tokens for probe in probes) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
@pytest.mark.parametrize("seed", range(20))
def test_long_traces(seed: int, block_size: int) -> None:
    """500 requests, chunk 64, a fifth aborted at random steps."""
    run_trace(1_000 + seed, block_size, SETTINGS[list(SETTINGS)[seed % len(SETTINGS)]], num_requests=500)
