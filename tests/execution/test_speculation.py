"""Drafts change nothing but the time: ids, log-probabilities and distributions are those of decoding without them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from engine.execution.draft_model import DraftModel
from engine.execution.proposers import NgramProposer, Proposer
from engine.execution.runner import ModelRunner
from engine.request import Request, SamplingParams
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from kernels.backend import uploaded
from kernels.cpu.backend import CpuBackend
from kernels.cpu.sampling import sample
from kernels.sampling import SampledTokens, SamplingBatch
from kernels.spec import DecoderSpec, HostStep, StepBatch
from tests.execution.helpers import PagedModel, make_request, random_prompt
from tests.models.families import VOCAB, SavedModel, save_family

OUTPUT = 40
BLOCK = 4
MOST = 8
"""Drafts a row."""
GREEDY = SamplingParams()
SHAPED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9)
DRAWN_AND_SHAPED = SamplingParams(
    temperature=1.1, top_k=20, frequency_penalty=0.5, min_tokens=25, stop_token_ids=(7, 9)
)
PARAMETERS = {"greedy": GREEDY, "shaped": SHAPED, "drawn": DRAWN, "drawn and shaped": DRAWN_AND_SHAPED}
PROMPTS = [
    *(random_prompt(length, VOCAB, seed=4) for length in (1, 3, 4, 5, 16, 17)),
    *(random_prompt(length, VOCAB, seed=length) * 5 for length in (1, 3, 6)),
]
SEED = 17


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """Another model of the same vocabulary: it drafts, and is mostly wrong."""
    return save_family("qwen3", tmp_path_factory.mktemp("other"), seed=8)


@pytest.fixture(scope="module")
def answers(tiny: SavedModel) -> dict[str, list[list[int]]]:
    """Alone, without drafts."""
    model = PagedModel(tiny.folder, block_size=BLOCK, num_blocks=100)

    def answer(index: int, params: SamplingParams) -> list[int]:
        [request], _ = generate(model, [PROMPTS[index]], params, most_drafts=0, first_seed=SEED + index)
        return request.output_token_ids

    return {name: [answer(i, params) for i in range(len(PROMPTS))] for name, params in PARAMETERS.items()}


def generate(
    model: PagedModel,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    most_drafts: int,
    chunk: int = 1000,
    num_tokens: int = OUTPUT,
    first_seed: int = SEED,
) -> tuple[list[Request], list[ModelRunnerOutput]]:
    """All together to ``num_tokens`` each, prompts in chunks; every decode may bring ``most_drafts``."""
    requests = [make_request(i, prompt, params, seed=first_seed + i) for i, prompt in enumerate(prompts)]
    results = []
    while work := [r for r in requests if r.num_output_tokens < num_tokens]:
        counts = [min(chunk, r.num_tokens - r.num_computed_tokens) for r in work]
        limits = [
            min(most_drafts, num_tokens - r.num_output_tokens - 1) if r.num_tokens - r.num_computed_tokens == 1 else 0
            for r in work
        ]
        results.append(model.step(list(zip(work, counts, strict=True)), limits))
    for request in requests:
        model.free(request)
    return requests, results


def proposed_and_accepted(results: Sequence[ModelRunnerOutput]) -> tuple[int, int]:
    proposed = sum(sum(result.drafts) for result in results)
    accepted = sum(
        len(tokens) - 1
        for result in results
        for tokens, drafts in zip(result.token_ids, result.drafts or [0] * len(result.token_ids), strict=True)
        if drafts
    )
    return proposed, accepted


class KnowsTheAnswer:
    """Drafts what will come, and every few tokens something else: drafts are accepted to all possible lengths."""

    name = "test"

    def __init__(self, answers: Sequence[list[int]], prompts: Sequence[list[int]] = PROMPTS) -> None:
        self._tokens = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        self._random = random.Random(3)

    def propose(self, output: SchedulerOutput) -> list[list[int]]:
        drafts = [
            self._tokens[request.request_id][request.num_tokens : request.num_tokens + limit]
            for request, limit in zip(output.requests, output.draft_limits, strict=True)
        ]
        for drafted in drafts:
            for index in range(len(drafted)):
                if self._random.random() < 0.2:
                    drafted[index] = (drafted[index] + 1) % VOCAB
        return drafts

    def settle(self, output: SchedulerOutput, drafts: list[list[int]], token_ids: list[list[int]]) -> None:
        pass


# The same answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most_drafts", range(1, MOST + 1))
def test_greedy_ids_are_those_without_drafts(
    tiny: SavedModel, other: SavedModel, answers: dict[str, list[list[int]]], most_drafts: int
) -> None:
    """Pitfall D1, whoever drafts: nobody, somebody always right, somebody often right, somebody wrong."""
    chunk = 5 + most_drafts
    for proposer, draft_folder in (
        (NgramProposer(), None),
        (KnowsTheAnswer(answers["greedy"]), None),
        (None, other.folder),
        (None, tiny.folder),
    ):
        model = PagedModel(tiny.folder, block_size=BLOCK, num_blocks=200, proposer=proposer, draft_folder=draft_folder)
        requests, results = generate(model, PROMPTS, GREEDY, most_drafts=most_drafts, chunk=chunk)
        assert [request.output_token_ids for request in requests] == answers["greedy"]
        proposed, accepted = proposed_and_accepted(results)
        assert proposed > 0
        if draft_folder != other.folder:
            assert accepted > 0
        if draft_folder == tiny.folder:
            assert accepted == proposed


@pytest.mark.parametrize("name", list(PARAMETERS)[1:])
@pytest.mark.parametrize("most_drafts", [1, 3, MOST])
def test_drawn_and_penalised_ids_are_those_without_drafts(
    tiny: SavedModel,
    answers: dict[str, list[list[int]]],
    name: str,
    most_drafts: int,
) -> None:
    """Each draft counts as output for the penalties, the bans and the random numbers of those behind it."""
    for proposer, draft_folder in ((KnowsTheAnswer(answers[name]), None), (None, tiny.folder)):
        model = PagedModel(tiny.folder, block_size=BLOCK, num_blocks=200, proposer=proposer, draft_folder=draft_folder)
        requests, results = generate(model, PROMPTS, PARAMETERS[name], most_drafts=most_drafts)
        assert [request.output_token_ids for request in requests] == answers[name]
        proposed, accepted = proposed_and_accepted(results)
        assert 0 < accepted < proposed if proposer else accepted == proposed > 150


@pytest.mark.parametrize("name", ["greedy", "drawn"])
def test_logprobs_are_those_without_drafts(tiny: SavedModel, answers: dict[str, list[list[int]]], name: str) -> None:
    """Pitfall D4: of accepted drafts, of the token in place of a rejected one, and of the one behind them all."""
    asking = dataclasses.replace(PARAMETERS[name], logprobs=3)

    def reports(proposer: Proposer | None, most_drafts: int) -> list[list[tuple[int, float, list[tuple[int, float]]]]]:
        model = PagedModel(tiny.folder, block_size=BLOCK, num_blocks=200, proposer=proposer)
        requests, results = generate(model, PROMPTS[:6], asking, most_drafts=most_drafts)
        found: list[list[tuple[int, float, list[tuple[int, float]]]]] = [[] for _ in requests]
        unfinished = [0] * len(requests)
        for result in results:
            rows = [i for i, _ in enumerate(requests) if unfinished[i] < OUTPUT]
            for i, row_tokens, row_reports in zip(rows, result.token_ids, result.logprobs, strict=True):
                assert [report.token_id for report in row_reports] == row_tokens
                found[i] += [(report.token_id, report.logprob, report.top) for report in row_reports]
                unfinished[i] += len(row_tokens)
        return found

    plain = reports(None, 0)
    drafted = reports(KnowsTheAnswer(answers[name]), 4)
    for expected, actual in zip(plain, drafted, strict=True):
        assert [token for token, _, _ in actual] == [token for token, _, _ in expected]
        assert [value for _, value, _ in actual] == pytest.approx([value for _, value, _ in expected], abs=1e-4)
        for (_, _, top), (_, _, wanted) in zip(actual, expected, strict=True):
            assert [token for token, _ in top] == [token for token, _ in wanted]
            assert [value for _, value in top] == pytest.approx([value for _, value in wanted], abs=1e-4)


# The draft model's memory --------------------------------------------------------------------------------------------


def keys_and_values(backend: CpuBackend, table: list[int], count: int) -> torch.Tensor:
    """[layers, count, values of a slot] of the first ``count`` tokens."""
    shape, blocks = backend._shape, backend._kv()[:, table]  # the layout is that of kernels.cpu.attention
    assert shape is not None
    keys_end = shape.kv_heads * shape.head_dim * shape.block_keys
    keys = blocks[..., :keys_end].unflatten(-1, (shape.kv_heads, shape.head_dim, shape.block_keys))[..., :BLOCK]
    values = blocks[..., keys_end:].unflatten(-1, (shape.kv_heads, BLOCK, shape.value_dims))[..., : shape.head_dim]
    slots = torch.cat((keys.permute(0, 1, 4, 2, 3), values.permute(0, 1, 3, 2, 4)), dim=-1)
    return slots.flatten(1, 2)[:, :count].flatten(2)


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
@pytest.mark.parametrize("most_drafts", [1, 4])
def test_a_draft_model_like_the_model_is_always_right(
    tiny: SavedModel, params: SamplingParams, most_drafts: int
) -> None:
    """Pitfall D5: over 200 rounds every draft is accepted."""
    model = PagedModel(tiny.folder, block_size=BLOCK, num_blocks=300, draft_folder=tiny.folder)
    prompts = [random_prompt(5 + i, VOCAB, seed=i) for i in range(8)]
    _, results = generate(model, prompts, params, most_drafts=most_drafts, num_tokens=25 * (1 + most_drafts) + 1)
    rounds = sum(drafts > 0 for result in results for drafts in result.drafts)
    assert rounds == 200
    assert proposed_and_accepted(results) == (200 * most_drafts, 200 * most_drafts)


@pytest.mark.parametrize("rejected_at", [0, 1, 2, 3, None])
def test_after_each_step_the_draft_model_has_computed_what_the_model_has(
    tiny: SavedModel, other: SavedModel, rejected_at: int | None
) -> None:
    """Pitfall D5: chunks, plain decodes and drafts rejected at any place leave neither hole nor remains behind. The
    model of the drafts is made to be right up to ``rejected_at`` by forcing what it draws."""
    model = PagedModel(tiny.folder, block_size=BLOCK, num_blocks=100, draft_folder=tiny.folder)
    draft_backend = model.draft_backend
    assert draft_backend is not None
    honest = draft_backend.sample
    draws = 0

    def sometimes_wrong(logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
        nonlocal draws
        sampled = honest(logits, sampling)
        if rejected_at is not None and draws % 4 == rejected_at:
            sampled = SampledTokens((sampled.token_ids + 1) % VOCAB, [])
        draws += 1
        return sampled

    draft_backend.sample = sometimes_wrong  # type: ignore[method-assign]
    request = make_request(0, random_prompt(11, VOCAB), DRAWN, seed=5)
    model.step([(request, 6)])
    model.step([(request, 5)])
    model.step([(request, 1)])
    for _ in range(6):
        result = model.step([(request, 1)], [4])
        expected = 5 if rejected_at is None else rejected_at + 1
        assert (result.drafts, len(result.token_ids[0])) == ([4], expected)
        fresh = PagedModel(tiny.folder, block_size=BLOCK, num_blocks=100)
        again = make_request(1, request.token_ids)
        computed = request.num_computed_tokens
        assert computed == request.num_tokens - 1
        fresh.step([(again, computed)])
        wanted = keys_and_values(fresh.backend, fresh.table(again), computed)
        actual = keys_and_values(draft_backend, model.table(request), computed)
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)


def test_blocks_move_in_the_draft_model_as_in_the_model(tiny: SavedModel) -> None:
    """Copied, moved out to the host and back in: drafts over them are as right as before."""
    model = PagedModel(tiny.folder, block_size=BLOCK, num_blocks=60, draft_folder=tiny.folder)
    assert model.draft_backend is not None
    for backend in (model.backend, model.draft_backend):
        backend.allocate_host_kv(8)
    prompt = random_prompt(10, VOCAB)
    request = make_request(0, prompt)
    model.step([(request, 10)])
    first = model.table(request)

    def follower(request_id: int, plan_changes: Callable[[list[int]], dict[str, list[tuple[int, int]]]]) -> None:
        twin = make_request(request_id, request.token_ids)
        twin.num_computed_tokens = 10
        plan = model.plan([(twin, 1)], draft_limits=[4])
        result = model.runner.execute(dataclasses.replace(plan, **plan_changes(plan.block_tables[0])))
        assert (result.drafts, len(result.token_ids[0])) == ([4], 5)

    follower(1, lambda table: {"block_copies": list(zip(first, table[:3], strict=True))})
    follower(
        2,
        lambda table: {
            "swap_out": list(zip(first, (1, 2, 3), strict=True)),
            "swap_in": list(zip((1, 2, 3), table[:3], strict=True)),
        },
    )


def test_no_drafts_beyond_what_the_draft_model_was_made_for(tiny: SavedModel) -> None:
    model = PagedModel(tiny.folder, block_size=BLOCK, num_blocks=60, draft_folder=tiny.folder)
    proposer = model.runner._proposer
    assert isinstance(proposer, DraftModel)
    proposer._spec = dataclasses.replace(proposer._spec, max_position=12)
    [request], results = generate(model, [random_prompt(8, VOCAB)], GREEDY, most_drafts=3, num_tokens=12)
    assert request.num_output_tokens == 12
    assert [result.drafts for result in results] == [[], [3], [], [], [], [], [], [], []][: len(results)]


# n-grams -------------------------------------------------------------------------------------------------------------


def lookup(tokens: list[int], limit: int = 4, proposer: NgramProposer | None = None) -> list[int]:
    request = make_request(0, tokens)
    request.num_computed_tokens = len(tokens) - 1
    output = SchedulerOutput(0, [request], [0], [len(tokens) - 1], [1], [[1]], [True], draft_limits=[limit])
    drafts = (proposer or NgramProposer()).propose(output)
    return drafts[0] if drafts else []


def test_what_followed_the_longest_and_latest_occurrence_is_drafted() -> None:
    assert lookup([1, 2, 3, 4, 5, 6, 9, 2, 3]) == [4, 5, 6, 9]
    assert lookup([1, 2, 3, 4, 5, 6, 9, 2, 3], limit=1) == [4]
    assert lookup([2, 3, 4, 0, 2, 3, 5, 0, 2, 3], limit=2) == [5, 0], "the latest of two"
    assert lookup([1, 2, 3, 4, 0, 9, 2, 3, 5, 0, 1, 2, 3], limit=2) == [4, 0], "three tokens say more than two"
    assert lookup([8, 1, 2, 3, 4, 0, 9, 1, 2, 3, 5, 0, 8, 1, 2, 3], limit=2) == [4, 0], "four more than three"
    assert lookup([7, 8, 7, 8, 7]) == [8, 7, 8, 7], "a loop goes on"
    assert lookup([5, 5, 5], limit=3) == [5, 5, 5]
    assert lookup([1, 2, 3, 4, 5, 6]) == lookup([1, 2, 1]) == lookup([1]) == []


def test_the_index_follows_a_request_and_goes_with_it(tiny: SavedModel) -> None:
    """What is drafted from an index that grew is what a new one would draft; no request is kept alive."""
    proposer = NgramProposer()
    generator = random.Random(2)
    request = make_request(0, [generator.randrange(4) for _ in range(3)])
    for _ in range(60):
        request.token_ids += [generator.randrange(4) for _ in range(generator.randrange(1, 4))]
        output = SchedulerOutput(
            0, [request], [0], [request.num_tokens - 1], [1], [[1]], [True], draft_limits=[generator.randrange(0, 5)]
        )
        drafts = proposer.propose(output)
        limit = output.draft_limits[0]
        assert (drafts[0] if drafts else []) == (lookup(request.token_ids, limit) if limit else [])
    assert len(proposer._indexes) == 1
    del request, output
    assert len(proposer._indexes) == 0


# Without a model: logits by the last token ---------------------------------------------------------------------------


class TableBackend:
    """A backend whose logits depend on the last token alone: a row of ``table``, float32 [vocab, vocab]."""

    name = "table"
    device = torch.device("cpu")

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def upload(
        self, step: HostStep, sampling: SamplingBatch | None = None, previous: torch.Tensor | None = None
    ) -> StepBatch:
        return uploaded(step, self.device, previous)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        return self._table[batch.token_ids[batch.logits_rows]]

    def sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
        return sample(logits, sampling)


NO_LAYERS = DecoderSpec(
    "Table", 16, 2, 2, 0, 1, 1, 2, 1e-5, max_position=10**6, dtype=torch.float32, inv_freq=torch.ones(1)
)


def table_runner(table: torch.Tensor, proposer: Proposer | None) -> ModelRunner:
    return ModelRunner(TableBackend(table), NO_LAYERS, 1024, proposer=proposer)  # type: ignore[arg-type]


def draft_table(table: torch.Tensor) -> DraftModel:
    return DraftModel(TableBackend(table), NO_LAYERS, 1024, "draft:table")  # type: ignore[arg-type]


class Independent:
    """Drafts by dice of its own."""

    name = "test"

    def __init__(self) -> None:
        self._random = random.Random(1)

    def propose(self, output: SchedulerOutput) -> list[list[int]]:
        return [[self._random.randrange(16) for _ in range(limit)] for limit in output.draft_limits]

    def settle(self, output: SchedulerOutput, drafts: list[list[int]], token_ids: list[list[int]]) -> None:
        pass


def table_step(runner: ModelRunner, requests: list[Request], limit: int) -> ModelRunnerOutput:
    result = runner.execute(
        SchedulerOutput(
            step=0,
            requests=requests,
            epochs=[0] * len(requests),
            starts=[request.num_tokens - 1 for request in requests],
            num_new_tokens=[1] * len(requests),
            block_tables=[[1]] * len(requests),
            samples=[True] * len(requests),
            draft_limits=[limit] * len(requests),
        )
    )
    for request, tokens in zip(requests, result.token_ids, strict=True):
        request.token_ids += tokens
    return result


def markov_table() -> torch.Tensor:
    table = 0.7 * torch.randn((16, 16), generator=torch.Generator().manual_seed(6))
    table[:, 8:] = -torch.inf
    table[8:, :] = 0.0  # never reached
    return table


def chi_square(requests: Sequence[Request], table: torch.Tensor) -> tuple[float, int]:
    """Of the transitions of all answers against the rows of softmax(``table``): the statistic, degrees of freedom."""
    counts = np.zeros((16, 16))
    for request in requests:
        tokens = np.array(request.token_ids)
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    reached = counts.sum(axis=1) > 0
    expected = table.softmax(dim=-1).double().numpy()[reached] * counts[reached].sum(axis=1, keepdims=True)
    assert counts[reached][expected == 0].sum() == 0, "a token was drawn that the model cannot give"
    possible = expected > 0
    assert expected[possible].min() > 5
    statistic = float((((counts[reached] - expected) ** 2)[possible] / expected[possible]).sum())
    return statistic, int(possible.sum() - reached.sum())


def critical_value(degrees: int) -> float:
    """Chi-square at 1 - 10^-4, after Wilson and Hilferty (1931)."""
    ninth = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - ninth + 3.719 * math.sqrt(ninth)) ** 3


def draw_with(proposer: Proposer | None, draws: int) -> tuple[list[Request], float]:
    """Answers of at least ``draws`` tokens together, of 500 seeds; the share of drafts that was accepted."""
    table = markov_table()
    runner = table_runner(table, proposer)
    requests = [make_request(i, [i % 8], SamplingParams(temperature=1.0), seed=1000 + i) for i in range(500)]
    proposed = accepted = 0
    while sum(request.num_output_tokens for request in requests) < draws:
        result = table_step(runner, requests, 2)
        step = proposed_and_accepted([result])
        proposed, accepted = proposed + step[0], accepted + step[1]
    return requests, accepted / max(proposed, 1)


PROPOSERS: dict[str, tuple[Callable[[], Proposer], float, float]] = {
    "target": (lambda: draft_table(markov_table()), 1.0, 1.0),
    "uniform": (lambda: draft_table(torch.zeros(16, 16)), 0.02, 0.9),
    "independent": (Independent, 0.02, 0.2),
    "disjoint": (lambda: draft_table(markov_table().flip(1)), 0.0, 0.0),
}


def check_distribution(name: str, draws: int) -> None:
    make, least, most = PROPOSERS[name]
    requests, rate = draw_with(make(), draws)
    assert least <= rate <= most
    statistic, degrees = chi_square(requests, markov_table())
    assert statistic < critical_value(degrees)


@pytest.mark.parametrize("name", list(PROPOSERS))
def test_drawn_tokens_have_the_models_distribution(name: str) -> None:
    """Pitfall N6, whoever drafts: the model itself, one that knows nothing, dice, one that is never right."""
    check_distribution(name, 6_000)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", list(PROPOSERS))
def test_drawn_tokens_have_the_models_distribution_in_200_000_draws(name: str) -> None:
    check_distribution(name, 200_000)


def test_the_test_of_the_distribution_tells_biased_draws() -> None:
    """Drafts taken unseen once in ten tokens are found out."""
    requests, _ = draw_with(None, 6_000)
    generator = random.Random(4)
    statistic, degrees = chi_square(requests, markov_table())
    assert statistic < critical_value(degrees)
    for request in requests:
        request.token_ids = [generator.randrange(8) if generator.random() < 0.1 else t for t in request.token_ids]
    statistic, degrees = chi_square(requests, markov_table())
    assert statistic > critical_value(degrees)


# Rows that fail ------------------------------------------------------------------------------------------------------


class Always:
    name = "test"

    def __init__(self, drafts: list[int]) -> None:
        self._drafts = drafts

    def propose(self, output: SchedulerOutput) -> list[list[int]]:
        return [self._drafts[:limit] for limit in output.draft_limits]

    def settle(self, output: SchedulerOutput, drafts: list[list[int]], token_ids: list[list[int]]) -> None:
        pass


def test_an_answer_ends_before_logits_that_are_not_finite() -> None:
    """0 → 1 → 2 → 3 → NaN: with drafts the tokens before it are kept, and the next step meets it as its first."""
    table = torch.zeros(16, 16)
    for token in range(4):
        table[token, token + 1] = 5.0
    table[3] = math.nan
    requests = [make_request(0, [0]), make_request(1, [4]), make_request(2, [3])]
    result = table_step(table_runner(table, Always([1, 2, 3, 4])), requests, 4)
    assert result.token_ids == [[1, 2, 3], [0], []]
    assert result.drafts == [4, 4, 4]
    assert list(result.errors) == [2] and "token 1" in result.errors[2]
    result = table_step(table_runner(table, Always([4])), requests[:1], 1)
    assert list(result.errors) == [0] and "token 4" in result.errors[0]


def test_a_draft_model_that_fails_drafts_nothing() -> None:
    broken = torch.full((16, 16), math.nan)
    broken[5] = 0.0
    broken[5, 6] = 1.0
    table = torch.zeros(16, 16)
    requests = [make_request(0, [1]), make_request(1, [5])]
    result = table_step(table_runner(table, draft_table(broken)), requests, 3)
    assert result.drafts == [0, 1] and result.token_ids == [[0], [0]] and not result.errors
    assert table_step(table_runner(table, draft_table(broken)), requests[:1], 3).drafts == []
