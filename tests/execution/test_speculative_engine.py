"""Speculation in the whole engine: with preemption, prefix hits, chunks, stops and limits, and as it is loaded."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.events import RowKind
from engine.execution.sizing import plan_memory
from engine.loader import LoadedEngine, load_engine
from engine.models.checkpoint import Checkpoint
from engine.models.errors import ModelLoadError
from engine.request import SamplingParams
from tests.execution.helpers import PagedModel, random_prompt
from tests.models.families import VOCAB, SavedModel, save_family
from tests.oracles import EDGE_LENGTHS, EngineProbe, assert_pool_whole, make_core
from tests.process.tiny_model import make_tiny_model

OUTPUT = 24
Prompts = Sequence[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    return save_family("qwen3", tmp_path_factory.mktemp("other"), seed=8)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    greedy = SamplingParams(max_tokens=OUTPUT)
    drawn = SamplingParams(max_tokens=OUTPUT, temperature=0.9, top_p=0.9, seed=1)
    shaped = SamplingParams(max_tokens=OUTPUT, repetition_penalty=1.2, frequency_penalty=0.3)
    parameters = [greedy, drawn, greedy, shaped]
    plain = [(random_prompt(n, VOCAB, seed=8), parameters[i % 4]) for i, n in enumerate(EDGE_LENGTHS)]
    return [*plain, *((random_prompt(n, VOCAB, seed=n) * 6, greedy) for n in (2, 5))]


@pytest.fixture(scope="module")
def make(tiny: SavedModel, other: SavedModel) -> Callable[..., EngineCore]:
    """A core; ``drafts``: ``off``, ``ngram``, ``same`` (the model drafts for itself) or ``other``."""

    def core(drafts: str = "off", num_blocks: int = 200, block_size: int = 16, **options: Any) -> EngineCore:
        folder = {"same": tiny.folder, "other": other.folder}.get(drafts)
        model = PagedModel(tiny.folder, block_size=block_size, num_blocks=num_blocks, draft_folder=folder)
        for backend in filter(None, (model.backend, model.draft_backend)):
            backend.allocate_host_kv(options.get("num_host_blocks", 0) + 1)
        options = {"max_model_len": 256, "vocab_size": VOCAB, "token_budget": 128, **options}
        speculative = drafts if folder is None else f"draft:{folder}"
        return make_core(
            runner=model.runner, num_blocks=num_blocks, block_size=block_size, speculative=speculative, **options
        )

    return core


def run(probe: EngineProbe, prompts: Prompts) -> list[list[int]]:
    ids = [probe.add(prompt, params) for prompt, params in prompts]
    probe.run()
    return [probe.answers[request_id].token_ids for request_id in ids]


def drafted(probe: EngineProbe) -> tuple[int, int]:
    totals = probe.records[-1].totals
    return totals.draft_tokens, totals.accepted_tokens


@pytest.fixture(scope="module")
def cold(make: Callable[..., EngineCore], prompts: Prompts) -> list[list[int]]:
    probe = EngineProbe(make(prefix_cache=False, max_num_seqs=1))
    answers = [run(probe, [each])[0] for each in prompts]
    assert all(len(answer) == OUTPUT for answer in answers)
    return answers


# The same answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", ["ngram", "other", "same"])
@pytest.mark.parametrize("draft_tokens", [1, 3, 8])
def test_batches_chunks_and_prefix_hits(
    make: Callable[..., EngineCore], prompts: Prompts, cold: list[list[int]], drafts: str, draft_tokens: int
) -> None:
    probe = EngineProbe(make(drafts, draft_tokens=draft_tokens, token_budget=33))
    assert run(probe, prompts) == cold
    assert run(probe, prompts) == cold
    assert probe.records[-1].totals.prefix_hit_tokens > 100
    proposed, accepted = drafted(probe)
    assert proposed > 0
    if drafts != "other":
        assert accepted > 0
    for record in probe.records:
        assert sum(record.num_tokens) <= 33, "drafts are part of the budget"


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("drafts", ["ngram", "other", "same"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_preemption(
    make: Callable[..., EngineCore],
    prompts: Prompts,
    cold: list[list[int]],
    drafts: str,
    preemption: str,
    block_size: int,
) -> None:
    num_blocks = 160 // block_size
    core = make(
        drafts,
        num_blocks=num_blocks,
        block_size=block_size,
        token_budget=40,
        preemption=preemption,
        num_host_blocks=num_blocks,
    )
    probe = EngineProbe(core)
    assert run(probe, prompts) == cold
    totals = probe.records[-1].totals
    assert totals.preemptions >= 2 and totals.draft_tokens > 0
    assert (totals.swapped_in_blocks > 0) == (preemption == "swap")


def test_as_many_drafts_are_right_after_hits_and_preemptions(make: Callable[..., EngineCore], prompts: Prompts) -> None:
    """Pitfall D7: where the model drafts for itself every draft is right, whatever happened to the blocks before: a
    hole in the draft model's memory would show."""
    for options in (
        {},
        {"token_budget": 33},
        {"block_size": 4, "num_blocks": 40, "preemption": "recompute"},
        {"block_size": 4, "num_blocks": 40, "preemption": "swap", "num_host_blocks": 40},
    ):
        probe = EngineProbe(make("same", **options))
        run(probe, prompts)
        run(probe, prompts)
        totals = probe.records[-1].totals
        assert (totals.preemptions if "num_blocks" in options else totals.prefix_hit_tokens) > 0
        assert (totals.swapped_in_blocks > 0) == ("num_host_blocks" in options)
        assert totals.accepted_tokens == totals.draft_tokens > 200


def test_answers_to_one_prompt(make: Callable[..., EngineCore]) -> None:
    """n > 1: the answers share blocks, and a copied block is copied for the draft model too."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=3)
    prompt = random_prompt(21, VOCAB)
    given: list[list[list[int]]] = []
    for drafts in ("off", "same"):
        core = make(drafts)
        core.add_request(1, prompt, params)
        given.append([[], [], []])
        while core.has_work:
            result = core.step()
            for output in result.outputs:
                given[-1][output.index] += output.token_ids
            if result.record is not None and result.record.request_ids:
                totals = result.record.totals
    assert given[0] == given[1] and len({tuple(answer) for answer in given[0]}) == 3
    assert totals.accepted_tokens == totals.draft_tokens > 10


# Where an answer ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", ["same", "ngram"])
def test_an_answer_ends_in_the_middle_of_accepted_drafts(make: Callable[..., EngineCore], drafts: str) -> None:
    """Pitfall D3: by a stop id, by length, by a replayed end: ids, log-probabilities and computed tokens end there."""
    prompt = random_prompt(4, VOCAB, seed=2) * 4
    plain = EngineProbe(make())
    [answer] = run(plain, [(prompt, SamplingParams(max_tokens=OUTPUT))])
    for end in range(1, 14):
        stop = answer[end - 1]
        expected = answer[: answer.index(stop) + 1]
        for params, options, wanted, reason in (
            (SamplingParams(max_tokens=OUTPUT, stop_token_ids=(stop,), logprobs=1), {}, expected, "stop"),
            (SamplingParams(max_tokens=end, logprobs=1), {}, answer[:end], "length"),
            (SamplingParams(max_tokens=OUTPUT, logprobs=1), {"ends_after": end}, answer[:end], "length"),
        ):
            probe = EngineProbe(make(drafts, draft_tokens=8))
            request_id = probe.add(prompt, params, **options)
            probe.run()
            given = probe.answers[request_id]
            assert (given.token_ids, given.finish_reason) == (wanted, reason)
            assert [report.token_id for report in given.logprobs] == wanted
            assert probe.records[-1].totals.output_tokens == len(wanted)
            assert max(max(record.num_computed) for record in probe.records) <= len(prompt) + len(wanted)


def test_min_tokens_hold_within_drafts(make: Callable[..., EngineCore]) -> None:
    prompt = random_prompt(6, VOCAB, seed=3)
    params = SamplingParams(max_tokens=OUTPUT, min_tokens=10, stop_token_ids=tuple(range(0, VOCAB, 2)))
    [expected] = run(EngineProbe(make()), [(prompt, params)])
    assert len(expected) >= 10 and all(token % 2 for token in expected[:9])
    assert run(EngineProbe(make("same", draft_tokens=6)), [(prompt, params)]) == [expected]


def test_drafts_at_the_edge_of_the_context_and_of_the_pool(make: Callable[..., EngineCore]) -> None:
    """Pitfall D8: they are shortened to what fits, down to none."""
    prompt = random_prompt(3, VOCAB, seed=1) * 84  # 252 of 256
    expected = run(EngineProbe(make()), [(prompt, SamplingParams())])
    assert len(expected[0]) == 4
    for drafts in ("same", "ngram"):
        assert run(EngineProbe(make(drafts, draft_tokens=5)), [(prompt, SamplingParams())]) == expected
    short = [(random_prompt(14, VOCAB, seed=seed), SamplingParams(max_tokens=17)) for seed in (1, 2)]
    plain = run(EngineProbe(make()), short)
    for num_blocks in (2, 3, 4):
        probe = EngineProbe(make("same", num_blocks=num_blocks, draft_tokens=5))
        assert run(probe, short) == plain
        assert drafted(probe)[0] > 0


def test_a_chunk_beside_drafts_is_not_sampled(make: Callable[..., EngineCore]) -> None:
    """Pitfall D9: one request in the middle of its prompt, one that decodes with drafts."""
    probe = EngineProbe(make("same", token_budget=20, draft_tokens=4))
    first = probe.add(random_prompt(5, VOCAB), SamplingParams(max_tokens=40))
    probe.step()
    second = probe.add(random_prompt(60, VOCAB), SamplingParams(max_tokens=2))
    mixed = 0
    while not probe.answers[second].token_ids:
        record = probe.step().record
        assert record is not None and sum(record.num_tokens) <= 20
        rows = dict(zip(record.request_ids, range(len(record.request_ids)), strict=True))
        if second in rows and first in rows:
            chunk, decode = rows[second], rows[first]
            done = record.num_computed[chunk] >= 60
            assert record.kinds[chunk] == RowKind.PREFILL and record.new_tokens[chunk] == int(done)
            assert not record.drafts or record.drafts[chunk] == 0
            mixed += record.drafts[decode] > 0 if record.drafts else 0
            assert record.new_tokens[decode] >= 1
    probe.run()
    assert len(probe.answers[first].token_ids) == 40 and len(probe.answers[second].token_ids) == 2


@pytest.mark.parametrize("drafts", ["ngram", "other"])
@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
def test_nothing_leaks_under_aborts(make: Callable[..., EngineCore], drafts: str, block_size: int) -> None:
    """Pitfall K16: random requests, one in five aborted at a random step, in a tight pool."""
    generator = random.Random(block_size)
    core = make(drafts, num_blocks=max(128 // block_size, 4), block_size=block_size, token_budget=48, max_num_seqs=6)
    probe = EngineProbe(core)
    alive: list[int] = []
    for _ in range(30):
        length = generator.randrange(1, 8)
        prompt = random_prompt(length, VOCAB, seed=generator.randrange(9)) * generator.randrange(1, 5)
        alive.append(probe.add(prompt, SamplingParams(max_tokens=generator.randrange(1, 20))))
        for _ in range(generator.randrange(4)):
            probe.step()
        if generator.random() < 0.2:
            core.abort(generator.choice(alive))
    probe.run()
    assert_pool_whole(core)
    assert drafted(probe)[0] > 0


# Loading -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target") / "model")


def load(folder: Path, speculative: str, **scheduler: Any) -> LoadedEngine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        threads=1,
        cache=CacheConfig(num_blocks=40, swap_blocks=4),
        scheduler=SchedulerConfig(speculative=speculative, max_num_batched_tokens=64, **scheduler),
    )
    return load_engine(config, lambda stage, done, total: None)


def test_a_draft_model_is_loaded_with_the_model(folder: Path) -> None:
    prompts = [(random_prompt(9, 256, seed=seed), SamplingParams(max_tokens=20)) for seed in range(3)]
    plain = load(folder, "off")
    expected = run(EngineProbe(plain.core), prompts)
    speculative = f"draft:{folder}"
    loaded = load(folder, speculative)
    probe = EngineProbe(loaded.core)
    assert run(probe, prompts) == expected
    proposed, accepted = drafted(probe)
    assert proposed == accepted > 20
    assert loaded.info.weight_bytes == 2 * plain.info.weight_bytes
    assert loaded.info.kv_bytes_per_block == 2 * plain.info.kv_bytes_per_block
    assert loaded.info.num_host_blocks == 4


def test_speculation_changes_without_loading_where_nothing_has_to_be_loaded(folder: Path) -> None:
    plain = load(folder, "off")
    prompts = [([5, 6, 7] * 6, SamplingParams(max_tokens=20))]
    expected = run(EngineProbe(plain.core), prompts)
    probe = EngineProbe(plain.fresh_core(SchedulerConfig(speculative="ngram")))
    assert run(probe, prompts) == expected
    assert drafted(probe)[0] > 0
    speculative = f"draft:{folder}"
    plain.core.reconfigure(SchedulerConfig(speculative="ngram"))
    with pytest.raises(ConfigError, match=f"{speculative}.*loaded with the model"):
        plain.core.reconfigure(SchedulerConfig(speculative=speculative))
    with pytest.raises(ConfigError, match="loaded with the model"):
        plain.fresh_core(SchedulerConfig(speculative=speculative))
    drafting = load(folder, speculative).fresh_core(SchedulerConfig())
    for allowed in (speculative, "off"):
        drafting.reconfigure(SchedulerConfig(speculative=allowed))
    with pytest.raises(ConfigError, match=r"ngram.*only change between off and draft"):
        drafting.reconfigure(SchedulerConfig(speculative="ngram"))


def test_a_model_of_other_tokens_cannot_draft(folder: Path, tiny: SavedModel, tmp_path: Path) -> None:
    def refusal(draft: Path) -> str:
        with pytest.raises(ModelLoadError) as caught:
            load(folder, f"draft:{draft}")
        assert caught.value.kind == "unsupported"
        assert str(draft) in caught.value.message and str(folder) in caught.value.message
        return caught.value.message

    message = refusal(tiny.folder)
    assert str(VOCAB) in message and "258" in message
    renamed = tmp_path / "renamed"
    shutil.copytree(folder, renamed)
    tokenizer = json.loads((renamed / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (renamed / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "token 40" in refusal(renamed)


def test_the_memory_plan_counts_both_models(tiny: SavedModel, other: SavedModel) -> None:
    import torch

    spec, draft = (Checkpoint.open(each.folder).spec(torch.float32) for each in (tiny, other))
    config = EngineConfig()
    alone = plan_memory(spec, config, 256, 2**30, on_gpu=False)
    with_draft = plan_memory(spec, config, 256, 2**30, on_gpu=False, draft=draft)
    of_draft = plan_memory(draft, config, 256, 2**30, on_gpu=False)
    assert with_draft.weight_bytes == alone.weight_bytes + of_draft.weight_bytes
    assert with_draft.block_bytes == alone.block_bytes + of_draft.block_bytes
    with pytest.raises(ModelLoadError, match="draft model need"):
        plan_memory(spec, config, 256, alone.working_bytes, on_gpu=False, draft=draft)
