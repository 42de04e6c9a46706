"""Sampling on the CPU: every knob against a plain definition, the draw's distribution, and what must never matter."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch

from kernels.cpu.sampling import sample, uniform
from kernels.sampling import SampledTokens, SamplingBatch, SamplingRow, TokenLogprobs

VOCAB = 100


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: torch.Tensor, *rows: SamplingRow) -> SampledTokens:
    before = logits.clone()
    sampled = sample(logits, SamplingBatch(list(rows)))
    assert torch.equal(logits, before) or bool(torch.isnan(before).any()), "the logits were changed"
    assert sampled.token_ids.dtype == torch.int64
    return sampled


def token(logits: torch.Tensor, row: SamplingRow) -> int:
    return int(draw(logits[None], row).token_ids[0])


def support(logits: torch.Tensor, row: SamplingRow, draws: int = 400) -> set[int]:
    """All tokens that the row's parameters ever give: near enough, where the distribution is flat."""
    rows = [dataclasses.replace(row, position=position) for position in range(draws)]
    return set(draw(logits.expand(draws, -1).contiguous(), *rows).token_ids.tolist())


# Greedy --------------------------------------------------------------------------------------------------------------


def test_greedy_rows_are_argmax() -> None:
    logits = random_logits(16)
    assert torch.equal(draw(logits, *[SamplingRow()] * 16).token_ids, logits.argmax(dim=-1))


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-4, 1e-2])
@pytest.mark.parametrize("top_p", [1e-9, 1e-4, 1.0])
def test_tiny_parameters_are_argmax(temperature: float, top_p: float) -> None:
    logits = random_logits(20)
    rows = [SamplingRow(temperature=temperature, top_p=top_p, seed=i, logprobs=3) for i in range(20)]
    sampled = draw(logits, *rows)
    assert torch.equal(sampled.token_ids, logits.argmax(dim=-1))
    assert all(report is not None and math.isfinite(report.logprob) for report in sampled.logprobs)


@pytest.mark.parametrize("kept", [{"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}])
def test_truncations_that_leave_one_token_leave_the_likeliest(kept: dict[str, float]) -> None:
    logits = random_logits(1)[0]
    assert support(logits, SamplingRow(temperature=5.0, **kept), 50) == {int(logits.argmax())}  # type: ignore[arg-type]


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_logits_and_masks_stay_finite(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.full((1, VOCAB), -torch.inf, dtype=dtype)
    logits[0, 10:20] = -6e4
    logits[0, 20] = 6e4
    logits[0, 21] = 6e4 - 64
    row = SamplingRow(temperature=temperature, logprobs=20, top_p=0.999)
    for position in range(20):
        sampled = draw(logits, dataclasses.replace(row, position=position))
        assert int(sampled.token_ids[0]) in (20, 21)
        assert_strict_json(sampled.logprobs[0])


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.zeros(VOCAB)
    logits[::2] = -torch.inf
    assert support(logits, SamplingRow(temperature=2.0), 1000) == set(range(1, VOCAB, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(value: float) -> None:
    logits = random_logits(6)
    logits[1, 5] = value
    logits[4, :] = -math.inf
    rows = [SamplingRow(), SamplingRow(), SamplingRow(temperature=0.8, seed=1), SamplingRow(), SamplingRow(logprobs=1)]
    rows.append(SamplingRow(temperature=0.8, top_k=4, logprobs=2))
    sampled = draw(logits, *rows)
    ids = sampled.token_ids.tolist()
    assert ids[1] == -1 and ids[4] == -1
    assert sampled.logprobs[1] is None and sampled.logprobs[4] is None
    for i in (0, 2, 3, 5):
        alone = draw(logits[i : i + 1], rows[i])
        assert ids[i] == int(alone.token_ids[0]) >= 0
    special = dataclasses.replace(rows[5], seed=3)
    assert draw(logits[1:2], special).token_ids.tolist() == [-1]


def test_banning_everything_is_a_failure_of_that_row() -> None:
    logits = random_logits(2)
    sampled = draw(logits, SamplingRow(banned_token_ids=tuple(range(VOCAB))), SamplingRow(temperature=1.0))
    assert sampled.token_ids[0] == -1 and sampled.token_ids[1] >= 0


# Truncation ----------------------------------------------------------------------------------------------------------


def test_top_k_beyond_the_vocabulary_means_all() -> None:
    logits = random_logits(1)[0]
    for position in range(50):
        row = SamplingRow(temperature=1.0, seed=9, position=position)
        assert token(logits, row) == token(logits, dataclasses.replace(row, top_k=10**7))


@pytest.mark.parametrize("k", [1, 2, 5, 50])
def test_top_k_keeps_k(k: int) -> None:
    logits = torch.linspace(0, 0.01, VOCAB)
    expected = set(range(VOCAB - k, VOCAB))
    assert support(logits, SamplingRow(temperature=1.0, top_k=k), 1200) == expected


def test_ties_at_the_edge_keep_the_lowest_ids() -> None:
    logits = torch.zeros(VOCAB)
    logits[70] = 0.001
    assert support(logits, SamplingRow(temperature=1.0, top_k=4)) == {0, 1, 2, 70}
    assert support(logits, SamplingRow(temperature=1.0, top_p=0.0395)) == {0, 1, 2, 70}


@pytest.mark.parametrize(("p", "kept"), [(0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.89, 3), (0.91, 4), (0.9999, 5)])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, kept: int) -> None:
    probabilities = [0.4, 0.3, 0.2, 0.07, 0.03]
    logits = torch.tensor([3.0, *probabilities, *[0.0] * 4])
    logits[1:6] = torch.log(torch.tensor(probabilities))
    logits[0], logits[6:] = -torch.inf, -torch.inf
    assert support(logits, SamplingRow(temperature=1.0, top_p=p), 800) == set(range(1, 1 + kept))


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([0.25, 0.25, 0.2, 0.15, 0.15]))
    # Of the first two, each has one half: 0.4 is reached by the first.
    assert support(logits, SamplingRow(temperature=1.0, top_k=2, top_p=0.4)) == {0}
    assert support(logits, SamplingRow(temperature=1.0, top_k=2, top_p=0.6)) == {0, 1}


def test_min_p_drops_below_a_share_of_the_likeliest() -> None:
    logits = torch.log(torch.tensor([0.5, 0.26, 0.24]))
    assert support(logits, SamplingRow(temperature=1.0, min_p=0.5)) == {0, 1}
    assert support(logits, SamplingRow(temperature=1.0, min_p=0.47)) == {0, 1, 2}


def test_truncation_on_a_large_vocabulary_matches_a_plain_sort() -> None:
    logits = random_logits(1, vocab=5000, seed=4, scale=1.0)[0]
    probabilities = (logits / 0.9).double().softmax(-1)
    order = probabilities.argsort(descending=True, stable=True)
    kept = int((probabilities[order].cumsum(0) < 0.7).sum()) + 1
    allowed = set(order[:kept].tolist())
    drawn = support(logits, SamplingRow(temperature=0.9, top_p=0.7), 1000)
    assert drawn <= allowed and len(drawn) > kept / 4


# Distribution --------------------------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Per degree of freedom, over tokens of which enough are expected; about 1 where the two agree."""
    enough = expected >= 5
    statistic = ((counts - expected)[enough] ** 2 / expected[enough]).sum()
    return float(statistic) / max(1, int(enough.sum()) - 1)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 9, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(knobs: dict[str, float], vary: str) -> None:
    logits = random_logits(1, vocab=16, seed=2, scale=1.0)[0]
    row = SamplingRow(temperature=1.0, seed=7, position=3)
    row = dataclasses.replace(row, **knobs)  # type: ignore[arg-type]
    number = 8_000
    batch = [dataclasses.replace(row, **{vary: i}) for i in range(number)]
    ids = draw(logits.expand(number, -1).contiguous(), *batch).token_ids
    probabilities = (logits.double() / row.temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = row.top_k or 16
    nucleus = probabilities[order][:kept] / probabilities[order][:kept].sum()
    if row.top_p < 1:
        kept = int((nucleus.cumsum(0) < row.top_p).sum()) + 1
    allowed = torch.zeros(16, dtype=torch.float64)
    allowed[order[:kept]] = 1.0
    allowed[probabilities < row.min_p * probabilities.max()] = 0.0
    expected = (probabilities * allowed / (probabilities * allowed).sum()).numpy() * number
    counts = np.bincount(ids.numpy(), minlength=16)
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts, expected) < 2.5
    assert chi_square(counts, np.roll(expected, 1)) > 10, "the test could not tell a wrong distribution"


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    numbers = np.array([[uniform(seed, position) for position in range(200)] for seed in range(200)])
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
    assert chi_square(counts, np.full(64, numbers.size / 64)) < 1.8
    for shifted in (
        numbers[1:, :] - numbers[:-1, :],
        numbers[:, 1:] - numbers[:, :-1],
        numbers[1:, :-1] - numbers[:-1, 1:],
    ):
        assert abs(float(np.var(shifted)) - 1 / 6) < 0.01, "neighbouring seeds or positions are correlated"
    assert uniform(2**63 - 1, 10**6) != uniform(2**63 - 2, 10**6)


def test_the_last_token_with_weight_is_drawn_at_the_upper_end() -> None:
    """A uniform number just below 1 gives the last token that weighs anything, never a masked one behind it."""
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, :300] = 0.0
    highest = max(range(20_000), key=lambda position: uniform(1, position))
    assert uniform(1, highest) > 0.9999
    assert int(draw(logits, SamplingRow(temperature=1.0, seed=1, position=highest)).token_ids[0]) == 299


# What must not matter ------------------------------------------------------------------------------------------------


def test_neighbours_and_order_do_not_matter() -> None:
    logits = random_logits(8, vocab=3000)
    rows = [
        SamplingRow(temperature=1.2, seed=42, position=5),
        SamplingRow(),
        SamplingRow(temperature=0.9, top_k=50, seed=42, position=5),
        SamplingRow(temperature=1.2, top_p=0.9, seed=1, position=5),
        SamplingRow(temperature=3.0, top_k=2000, top_p=0.99, seed=42, position=6),
        SamplingRow(repetition_penalty=1.3, prompt_token_ids=[1, 2, 3], logprobs=4),
        SamplingRow(temperature=1.5, min_p=0.01, seed=42, position=5),
        SamplingRow(temperature=1.2, seed=43, position=5),
    ]
    alone = [int(draw(logits[i : i + 1], row).token_ids[0]) for i, row in enumerate(rows)]
    assert draw(logits, *rows).token_ids.tolist() == alone
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 6]):
        assert draw(logits[order], *[rows[i] for i in order]).token_ids.tolist() == [alone[i] for i in order]


def test_seed_and_position_matter() -> None:
    logits = torch.zeros(1, 10_000)
    drawn = {
        int(draw(logits, SamplingRow(temperature=1.0, seed=seed, position=position)).token_ids[0])
        for seed, position in itertools.product(range(10), range(10))
    }
    assert len(drawn) > 90


# Penalties, bias, bans -----------------------------------------------------------------------------------------------


def test_scope_of_the_penalties() -> None:
    """Presence and frequency look at the output only; repetition looks at the prompt too."""
    logits = torch.zeros(VOCAB)
    logits[7], logits[8] = 2.0, 1.9
    seen = {"prompt_token_ids": [7, 7, 7], "output_token_ids": []}
    assert token(logits, SamplingRow(presence_penalty=2.0, frequency_penalty=2.0, **seen)) == 7  # type: ignore[arg-type]
    assert token(logits, SamplingRow(repetition_penalty=1.5, **seen)) == 8  # type: ignore[arg-type]
    assert token(logits, SamplingRow(presence_penalty=0.2, output_token_ids=[7])) == 8
    assert token(logits, SamplingRow(presence_penalty=0.05, output_token_ids=[7, 7, 7])) == 7
    assert token(logits, SamplingRow(frequency_penalty=0.05, output_token_ids=[7, 7, 7])) == 8
    assert token(logits, SamplingRow(frequency_penalty=0.05, output_token_ids=[7])) == 7


def test_repetition_penalty_moves_positive_and_negative_logits_down_once() -> None:
    logits = torch.tensor([-1.0, -1.5, -9.0, -9.0])
    # -1 · 2 = -2 < -1.5, however often it was seen.
    assert token(logits, SamplingRow(repetition_penalty=2.0, prompt_token_ids=[0, 0], output_token_ids=[0])) == 1
    logits = torch.tensor([3.0, 1.6, 0.0, 0.0])
    assert token(logits, SamplingRow(repetition_penalty=2.0, prompt_token_ids=[0])) == 1
    assert token(logits, SamplingRow(repetition_penalty=1.8, prompt_token_ids=[0, 0, 0, 0])) == 0
    assert token(logits, SamplingRow(repetition_penalty=0.5, prompt_token_ids=[1])) == 1


def test_bias_and_bans() -> None:
    logits = torch.zeros(VOCAB)
    logits[5] = 1.0
    assert token(logits, SamplingRow(logit_bias={9: 1.5, 3: -100.0})) == 9
    assert token(logits, SamplingRow(logit_bias={5: -2.0, 9: 0.5})) == 9
    assert token(logits, SamplingRow(logit_bias={9: 1.5}, banned_token_ids=(9,))) == 5
    drawn = support(logits, SamplingRow(temperature=1.0, banned_token_ids=(5, 0, 99)), 1500)
    assert drawn == set(range(1, 99)) - {5}


# Log-probabilities ---------------------------------------------------------------------------------------------------


def assert_strict_json(report: TokenLogprobs | None) -> None:
    assert report is not None
    json.dumps([report.token_id, report.logprob, report.top], allow_nan=False)


def test_logprobs_are_the_raw_log_softmax_whatever_the_knobs() -> None:
    logits = random_logits(1)
    reference = logits[0].double().log_softmax(-1)
    best = reference.argsort(descending=True)[:5].tolist()
    knobs: list[dict[str, float]] = [{"temperature": t} for t in (0.0, 0.1, 1.0, 2.0)]
    for knob in [*knobs, {"temperature": 1.0, "top_p": 0.5}, {"repetition_penalty": 1.7, "frequency_penalty": 1.0}]:
        row = SamplingRow(logprobs=5, seed=3, prompt_token_ids=best, output_token_ids=best, **knob)  # type: ignore[arg-type]
        sampled = draw(logits, row)
        report = sampled.logprobs[0]
        assert report is not None and report.token_id == int(sampled.token_ids[0])
        assert report.logprob == pytest.approx(float(reference[report.token_id]), abs=1e-5)
        assert [index for index, _ in report.top] == best
        assert [value for _, value in report.top] == pytest.approx(reference[best].tolist(), abs=1e-5)


def test_logprobs_of_masked_tokens_are_finite_numbers() -> None:
    logits = torch.full((1, 8), -torch.inf)
    logits[0, 3] = 1.0
    logits[0, 6] = 0.5
    sampled = draw(logits, SamplingRow(temperature=0.01, logprobs=5, banned_token_ids=(3,)))
    assert sampled.token_ids.tolist() == [6]
    report = sampled.logprobs[0]
    assert_strict_json(report)
    assert report is not None and len(report.top) == 5 and report.top[0][0] == 3
    assert report.logprob == pytest.approx(math.log(math.exp(0.5) / (math.exp(1.0) + math.exp(0.5))), abs=1e-6)


def test_logprobs_only_where_asked() -> None:
    logits = random_logits(3)
    sampled = draw(logits, SamplingRow(), SamplingRow(logprobs=0), SamplingRow(temperature=1.0))
    assert sampled.logprobs[0] is None and sampled.logprobs[2] is None
    report = sampled.logprobs[1]
    assert report is not None and report.top == []
    assert draw(logits, *[SamplingRow(temperature=1.0)] * 3).logprobs == []
    wide = draw(logits[:1, :4].contiguous(), SamplingRow(logprobs=20)).logprobs[0]
    assert wide is not None and len(wide.top) == 4
