"""Every discipline with every order, preemption mode, cache, speculation and block size, under random traffic.

By default the cases cover every pair of values of any two dimensions at least once; the full product of the five that
the engine is made of runs under ``-m slow``, with several seeds. What must hold is in :mod:`tests.scheduling.traces`.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from engine.config import STATIC_DELIVERIES
from engine.events import BatchEnded, BlockCopied, Deferred, Preempted, Recovered, SwapDropped, SwappedIn
from tests.scheduling.pairs import CORE_DIMENSIONS, Case, covering, name_of, pairs_of, products, with_order
from tests.scheduling.traces import run_trace

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    **CORE_DIMENSIONS,
    "block_size": (1, 2, 16),
    "host": ("whole", "few", "none"),
    "chunked_prefill": (True, False),
    "static_delivery": STATIC_DELIVERIES,
    "changes": (0.0, 0.05),
}


def run(case: Case, seed: int, **options: Any) -> Any:
    return run_trace(seed, **with_order({"block_size": 2, **case, **options}))


PAIRWISE = covering(DIMENSIONS)
PRODUCT = list(products(CORE_DIMENSIONS, len(CORE_DIMENSIONS)))


@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
@pytest.mark.parametrize("seed", range(3))
def test_every_pair(seed: int, case: Case) -> None:
    run(case, seed, num_requests=25)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=name_of)
def test_the_full_product(case: Case) -> None:
    sizes, hosts = DIMENSIONS["block_size"], DIMENSIONS["host"]
    for seed in range(9):
        run(case, seed, block_size=sizes[seed % 3], host=hosts[seed // 3], num_requests=30, changes=0.05 * (seed % 2))


def test_the_cases_cover_what_they_say() -> None:
    met = Counter(pair for case in PAIRWISE for pair in pairs_of(case))
    assert all(pairs_of(case) <= met.keys() for case in products(DIMENSIONS, 2))
    assert len(PAIRWISE) <= 40
    assert len(PRODUCT) == 6 * 4 * 3 * 2 * 3


def test_the_traffic_reaches_the_rare_states() -> None:
    """Or the rest would prove little."""
    seen: Counter[str] = Counter()
    for seed, host, prefix_cache, preemption in product(range(3), ("whole", "few"), (True, False), ("swap", "auto")):
        case = {"order": "priority", "preemption": preemption, "speculative": "ngram", "host": host}
        for discipline in ("vllm", "trtllm-max-util"):
            trace = run(case, seed, discipline=discipline, prefix_cache=prefix_cache, aborts=0.15)
            seen.update(trace.aborted_in)
            seen.update(type(event).__name__ for event in trace.probe.events)
            seen.update(f"{event.mode}{' by fallback' * bool(event.fallback)}" for event in trace.probe.of(Preempted))
            totals = trace.probe.records[-1].totals
            seen["accepted"] += totals.accepted_tokens
            seen["hits"] += totals.prefix_hit_tokens
    for seed in range(8):
        trace = run({"order": "fcfs"}, seed, discipline="static", aborts=0.15)
        seen.update(trace.aborted_in)
        seen.update(type(event).__name__ for event in trace.probe.events)
    kinds = (BatchEnded, BlockCopied, Deferred, Preempted, Recovered, SwappedIn, SwapDropped)
    states = ("WAITING", "RUNNING", "PREEMPTED", "SWAPPED", "ENDED", "EXECUTING", "SWAPPED IN")
    other = ("recompute", "recompute by fallback", "swap", "accepted", "hits")
    missing = [name for name in (*(kind.__name__ for kind in kinds), *states, *other) if not seen[name]]
    assert not missing, seen
