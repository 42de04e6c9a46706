"""Oracle 2 with a real model: batching, chunks, prefix hits and preemption give the tokens of a cold engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.core import EngineCore
from engine.request import SamplingParams
from tests.execution.helpers import PagedModel, random_prompt
from tests.models.families import VOCAB, SavedModel, save_family
from tests.oracles import EngineProbe, make_core

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49)
OUTPUT = 20
Prompts = Sequence[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral-window"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    return save_family(request.param, tmp_path_factory.mktemp("engine"), seed=3)


@pytest.fixture(scope="module")
def make(saved: SavedModel) -> Callable[..., EngineCore]:
    def core(num_blocks: int = 200, block_size: int = 16, **options: Any) -> EngineCore:
        model = PagedModel(saved.folder, block_size=block_size, num_blocks=num_blocks)
        limits = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": 256, "vocab_size": VOCAB}
        return make_core(runner=model.runner, **limits, **options)

    return core


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    greedy = SamplingParams(max_tokens=OUTPUT)
    drawn = [SamplingParams(max_tokens=OUTPUT, temperature=0.9, top_p=0.9, seed=seed) for seed in (1, 2)]
    shaped = SamplingParams(max_tokens=OUTPUT, repetition_penalty=1.2, frequency_penalty=0.3)
    parameters = [greedy, *drawn, shaped]
    return [(random_prompt(n, VOCAB, seed=8), parameters[i % 4]) for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def cold(make: Callable[..., EngineCore], prompts: Prompts) -> list[list[int]]:
    """One after the other through an engine that remembers nothing and computes whole prompts."""
    probe = EngineProbe(make(prefix_cache=False, token_budget=256, max_num_seqs=1))
    answers = []
    for prompt, params in prompts:
        request_id = probe.add(prompt, params)
        probe.run()
        answers.append(probe.answers[request_id].token_ids)
    assert all(len(answer) == OUTPUT for answer in answers)
    assert len({tuple(answer) for answer in answers}) == len(answers)
    return answers


def run(probe: EngineProbe, prompts: Prompts) -> list[list[int]]:
    ids = [probe.add(prompt, params) for prompt, params in prompts]
    probe.run()
    return [probe.answers[request_id].token_ids for request_id in ids]


def test_cold_answers_are_transformers_own(saved: SavedModel, prompts: Prompts, cold: list[list[int]]) -> None:
    for (prompt, params), answer in list(zip(prompts, cold, strict=True))[::4]:
        assert params.temperature == 0.0
        logits = saved.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == answer


@pytest.mark.parametrize("budget", [7, 33, 256])
def test_batches_and_chunks(
    make: Callable[..., EngineCore], prompts: Prompts, cold: list[list[int]], budget: int
) -> None:
    probe = EngineProbe(make(prefix_cache=False, token_budget=budget))
    assert run(probe, prompts) == cold
    assert max(len(record.request_ids) for record in probe.records) >= (4 if budget == 7 else 7)


def test_prefix_hits(make: Callable[..., EngineCore], prompts: Prompts, cold: list[list[int]]) -> None:
    probe = EngineProbe(make(token_budget=64))
    assert run(probe, prompts) == cold
    before = probe.records[-1].totals.prefix_hit_tokens
    assert run(probe, prompts) == cold
    again = probe.records[-1].totals.prefix_hit_tokens - before
    assert again >= sum((length - 1) // 16 * 16 for length in LENGTHS)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemptions(
    make: Callable[..., EngineCore], prompts: Prompts, cold: list[list[int]], block_size: int, prefix_cache: bool
) -> None:
    """A pool with room for about two of the longest: requests lose their blocks again and again."""
    core = make(num_blocks=160 // block_size, block_size=block_size, token_budget=40, prefix_cache=prefix_cache)
    probe = EngineProbe(core)
    assert run(probe, prompts) == cold
    assert probe.records[-1].totals.preemptions >= 3


def test_a_shared_head_warm_is_like_cold(make: Callable[..., EngineCore]) -> None:
    """Pitfall K12: prompts that share 40 tokens, with and without the cache."""
    head = random_prompt(40, VOCAB, seed=1)
    params = SamplingParams(max_tokens=6)
    prompts = [([*head, *random_prompt(1 + i, VOCAB, seed=i)], params) for i in range(20)]
    without = run(EngineProbe(make(prefix_cache=False, token_budget=256)), prompts)
    probe = EngineProbe(make(token_budget=64))
    assert run(probe, prompts) == without
    assert probe.records[-1].totals.prefix_hit_tokens > 0
    assert run(probe, prompts) == without


@pytest.mark.parametrize("options", [{}, {"preemption": "swap"}, {"discipline": "static"}, {"prefix_cache": False}])
def test_steps_in_flight(
    make: Callable[..., EngineCore], prompts: Prompts, cold: list[list[int]], options: dict[str, Any]
) -> None:
    """Tokens that the host does not know yet go from one step into the next on the device."""
    core = make(num_blocks=40, block_size=4, token_budget=40, overlap=True, num_host_blocks=40, **options)
    core._runner._backend.allocate_host_kv(41)
    plain = [pair for pair in prompts if pair[1].repetition_penalty == 1.0]
    steps = EngineProbe(core)
    expected = [answer for pair, answer in zip(prompts, cold, strict=True) if pair in plain]
    assert run(steps, plain) == expected
    assert run(EngineProbe(core), prompts) == cold, "penalties count tokens, which are waited for"
