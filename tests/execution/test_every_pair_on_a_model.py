"""Every pair of discipline, order, preemption mode, cache, speculation and block size on a tiny real model.

The ids are those of a cold engine, in float32, whatever shares the batch, yields, comes back or is aborted; invariants,
progress and whole pools are held by :class:`tests.oracles.EngineProbe`. The full product runs under ``-m slow``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.core import EngineCore
from engine.request import SamplingParams, branch_id
from engine.scheduling.costs import PreemptionCosts
from tests.execution.helpers import PagedModel, random_prompt
from tests.models.families import VOCAB, SavedModel, save_family
from tests.oracles import EngineProbe, make_core
from tests.scheduling.pairs import CORE_DIMENSIONS, Case, covering, name_of, products, with_order

POOL_TOKENS = 128
LENGTHS = (1, 15, 16, 17, 33, 31, 48, 32)
OUTPUT = 14
DIMENSIONS = {**CORE_DIMENSIONS, "block_size": (1, 2, 16)}
Answers = dict[int, list[int]]
"""Tokens by the answer's id."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    return save_family("qwen3", tmp_path_factory.mktemp("small"), seed=8)


@pytest.fixture(scope="module")
def make(tiny: SavedModel, small: SavedModel) -> Callable[..., EngineCore]:
    """Cores over models that are loaded once for each block size and drafter."""
    loaded: dict[tuple[int, bool], PagedModel] = {}

    def core(block_size: int = 16, speculative: str = "off", **options: Any) -> EngineCore:
        num_blocks, drafts = POOL_TOKENS // block_size, speculative.startswith("draft:")
        model = loaded.get((block_size, drafts))
        if model is None:
            folder = small.folder if drafts else None
            model = PagedModel(tiny.folder, block_size=block_size, num_blocks=num_blocks, draft_folder=folder)
            for backend in filter(None, (model.backend, model.draft_backend)):
                backend.allocate_host_kv(num_blocks + 1)
            loaded[block_size, drafts] = model
        return make_core(
            runner=model.runner,
            num_blocks=num_blocks,
            num_host_blocks=num_blocks,
            block_size=block_size,
            speculative=f"draft:{small.folder}" if drafts else speculative,
            **{"max_model_len": POOL_TOKENS, "vocab_size": VOCAB, "token_budget": 33, "max_num_seqs": 4, **options},
        )

    return core


def requests() -> list[tuple[list[int], SamplingParams]]:
    head = random_prompt(20, VOCAB, seed=2)
    asked = []
    for i, length in enumerate(LENGTHS):
        prompt = [*head[: length // 2], *random_prompt(length - length // 2, VOCAB, seed=9)]
        drawn = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "n": 2} if i % 4 == 1 else {}
        asked.append((prompt * 2 if i % 4 == 3 else prompt, SamplingParams(max_tokens=OUTPUT, **drawn)))
    return asked


@pytest.fixture(scope="module")
def cold(make: Callable[..., EngineCore]) -> Answers:
    probe = EngineProbe(make(prefix_cache=False, token_budget=256, max_num_seqs=1))
    for prompt, params in requests():
        probe.add(prompt, params)
        probe.run()
    assert all(len(answer.token_ids) == OUTPUT for answer in probe.answers.values())
    assert len({tuple(answer.token_ids) for answer in probe.answers.values()}) == len(LENGTHS) + 2
    return {answer_id: answer.token_ids for answer_id, answer in probe.answers.items()}


def run(make: Callable[..., EngineCore], cold: Answers, case: Case, seed: int) -> EngineProbe:
    rng = random.Random(f"{seed} {case}")
    costs = PreemptionCosts(1.0, case["block_size"] * rng.choice([0.2, 5.0]))
    core = make(**with_order(case), costs=costs, waiting_served_ratio=rng.choice([0.0, 0.5]))
    probe, aborted = EngineProbe(core), set[int]()
    for prompt, params in requests():
        probe.add(prompt, params, priority=rng.randrange(3), user=rng.choice("ab"))
        for _ in range(rng.choice([0, 0, 2, 5])):
            probe.step()
        if rng.random() < 0.2:
            victim = rng.choice(core.keyframe().requests or [None])
            if victim is not None:
                core.abort(victim.request_id % (1 << 32))
                aborted.add(victim.request_id % (1 << 32))
    probe.run()
    for request_id, (_, params) in enumerate(requests(), start=1):
        for index in range(params.n):
            answer, expected = probe.answers[branch_id(request_id, index)], cold[branch_id(request_id, index)]
            assert answer.token_ids == expected[: len(answer.token_ids)]
            assert request_id in aborted or answer.token_ids == expected
    return probe


PAIRWISE = covering(DIMENSIONS)
PRODUCT = list(products(CORE_DIMENSIONS, len(CORE_DIMENSIONS)))


@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
def test_every_pair(make: Callable[..., EngineCore], cold: Answers, case: Case) -> None:
    run(make, cold, case, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=name_of)
def test_the_full_product(make: Callable[..., EngineCore], cold: Answers, case: Case) -> None:
    for seed, block_size in enumerate(DIMENSIONS["block_size"]):
        run(make, cold, {**case, "block_size": block_size}, seed)


def test_the_pool_is_tight_enough_to_swap_and_to_recompute(make: Callable[..., EngineCore], cold: Answers) -> None:
    case = {"discipline": "vllm", "order": "priority", "prefix_cache": True, "speculative": "ngram", "block_size": 2}
    swapped = run(make, cold, {**case, "preemption": "swap"}, seed=1).records[-1].totals
    again = run(make, cold, {**case, "preemption": "recompute"}, seed=1).records[-1].totals
    assert swapped.swapped_in_blocks > 0 and again.recomputed_tokens > 0
    assert swapped.prefix_hit_tokens > 0 and swapped.draft_tokens > 0
