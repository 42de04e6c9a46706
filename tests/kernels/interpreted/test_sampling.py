"""Sampling on the device: ids against the reference, the distribution, truncation, and what must never matter."""

from __future__ import annotations

import dataclasses
import math
import mmap
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.cpu.sampling import sample as sample_in_host_memory
from kernels.sampling import SamplingBatch, SamplingRow
from kernels.triton import sampling
from kernels.triton.reference import (
    gumbel_reference,
    philox_reference,
    sampled_tokens_reference,
    truncation_reference,
)
from kernels.triton.sampling import (
    SamplingColumns,
    gumbel,
    host_columns,
    random_words,
    sample_on_device,
    sample_rows,
)
from kernels.triton.truncation import truncation_edges
from kernels.triton.verification.sampling import EDGE_TOLERANCE, NEAR_TIE, sampling_error, truncation_error

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
VOCAB = 37

# Not finite on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: torch.Tensor, *rows: SamplingRow) -> list[int]:
    before = logits.clone()
    ids: list[int] = sample_on_device(logits, SamplingBatch(list(rows))).token_ids.tolist()
    assert torch.equal(torch.nan_to_num(logits), torch.nan_to_num(before)), "the logits were changed"
    return ids


# Against the reference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("vocab", [3, 16, 17, 577, 2049, 4500])
def test_greedy_ids(vocab: int, dtype: torch.dtype) -> None:
    assert sampling_error(dtype=dtype, vocab=vocab, greedy=True) == 0.0


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("vocab", [3, 577, 4500])
def test_drawn_ids(vocab: int, dtype: torch.dtype) -> None:
    assert sampling_error(dtype=dtype, vocab=vocab) == 0.0


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_ids_of_truncated_rows(dtype: torch.dtype) -> None:
    assert sampling_error(dtype=dtype, vocab=61, truncated=True) == 0.0


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_edges(dtype: torch.dtype) -> None:
    assert truncation_error(dtype=dtype, vocab=103) <= EDGE_TOLERANCE


def test_philox_gives_the_published_words() -> None:
    """Random123's own answers for philox4x32-10."""
    everything = 2**32 - 1
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, seed, words in (
        ((0, 0, 0, 0), 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ((everything,) * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi, 0x299F31D0A4093822, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ):
        assert philox_reference(seed, counter) == words


@triton.jit
def _gumbel_kernel(out_ptr: tl.tensor, words_ptr: tl.tensor, COUNT: tl.constexpr) -> None:
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, gumbel(tl.load(words_ptr + place).to(tl.uint32)))


def test_the_noise_is_exact_at_both_ends() -> None:
    edges = [0, 1, 2, 3, 255, 2**23 + 1, 2**24 + 1, 2**28 - 1, 2**28, 2**31 - 1, 2**31, 2**32 - 2**28, 2**32 - 129]
    words = np.array([*edges, 2**32 - 2, 2**32 - 1, *(2**i for i in range(17, 32)), 12345, 54321], dtype=np.float64)
    out = torch.full((32,), math.nan)
    _gumbel_kernel[(1,)](out, torch.from_numpy(words.astype(np.int64)), 32)
    expected = -np.log(-np.log1p(-(words + 0.5) * 2.0**-32))
    assert expected.max() > 22.8
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-6, atol=2e-6)


# Distribution ---------------------------------------------------------------------------------------------------------


def surprise(counts: np.ndarray, shares: np.ndarray) -> float:
    """Pearson's statistic in standard deviations above its mean, over the tokens that can be drawn."""
    possible = shares > 0
    assert counts[~possible].sum() == 0
    expected = counts.sum() * shares[possible]
    freedom = int(possible.sum()) - 1
    return float((((counts[possible] - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return weights / weights.sum()


@triton.jit
def _noise_kernel(out_ptr: tl.tensor, seed_ptr: tl.tensor, position_ptr: tl.tensor, COUNT: tl.constexpr) -> None:
    part = tl.program_id(0)
    noise = gumbel(random_words(tl.load(seed_ptr), tl.load(position_ptr), part, COUNT))
    tl.store(out_ptr + part * COUNT + tl.arange(0, COUNT), noise)


def test_the_noise_of_the_tokens_is_gumbel_distributed() -> None:
    count, row = 4096, SamplingRow(temperature=1.0, seed=2**63 + 11, position=2**35 + 4)
    out = torch.full((2 * count,), math.nan)
    columns = host_columns(SamplingBatch([row]))
    _noise_kernel[(2,)](out, torch.from_numpy(columns["seed"]), torch.from_numpy(columns["position"]), count)
    noise = out.numpy().astype(np.float64)
    np.testing.assert_allclose(noise, gumbel_reference(2 * count, row), rtol=2e-6, atol=2e-6)
    # Kolmogorov and Smirnov's distance; beyond 1.63 / sqrt(n) in one of a hundred samples.
    cumulative = np.exp(-np.exp(-np.sort(noise)))
    assert np.abs(cumulative - (np.arange(2 * count) + 0.5) / (2 * count)).max() < 1.63 / math.sqrt(2 * count)


def test_draws_are_the_references_at_any_seed_and_position() -> None:
    logits = random_logits(1, 6, seed=6, scale=1.0)[0]
    rows = [SamplingRow(temperature=0.9, seed=11 * i - 99, position=i % 4) for i in range(24)]
    expected = [sampled_tokens_reference(logits.numpy(), row) for row in rows]
    assert min(reference.gap for reference in expected) > NEAR_TIE
    assert draw(logits.expand(24, -1).contiguous(), *rows) == [reference.token_id for reference in expected]


@pytest.mark.parametrize("knobs", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.8}])
def test_the_reference_follows_the_truncated_softmax(knobs: dict[str, Any]) -> None:
    """What the kernels are compared with, over more draws than the interpreter can do."""
    logits = random_logits(1, 8, seed=7, scale=1.0)[0].numpy()
    row = SamplingRow(temperature=0.9, seed=5, **knobs)
    kept = truncation_reference(logits, row)
    shares = np.where(kept, softmax(logits, row.temperature), 0.0)
    scores = np.where(kept, logits / row.temperature, -np.inf)
    noise = [gumbel_reference(8, dataclasses.replace(row, position=position)) for position in range(6000)]
    counts = np.bincount(np.argmax(scores + np.array(noise), axis=1), minlength=8)
    assert surprise(counts, shares / shares.sum()) < 4


# What must not matter -------------------------------------------------------------------------------------------------

ROWS = [
    SamplingRow(),
    SamplingRow(temperature=0.8, seed=42, position=7),
    SamplingRow(temperature=2.0, seed=42, position=8),
    SamplingRow(temperature=1.0, top_k=5, seed=1),
    SamplingRow(temperature=1.0, top_p=0.8, min_p=0.05, seed=2),
    SamplingRow(temperature=1.0, min_p=0.1, seed=2),
]


def test_a_row_gives_the_same_id_whoever_shares_its_batch() -> None:
    logits = random_logits(len(ROWS), 2100).to(BF16)
    expected = draw(logits, *ROWS)
    for i, row in enumerate(ROWS):
        assert draw(logits[i : i + 1], row) == [expected[i]]
    order = [5, 4, 3, 2, 1, 0]
    assert draw(logits[order], *[ROWS[i] for i in order]) == [expected[i] for i in order]
    for i in (1, 5):
        greedy = [ROWS[i] if j == i else SamplingRow() for j in range(len(ROWS))]
        assert draw(logits, *greedy)[i] == expected[i]


def test_the_seed_and_the_position_decide() -> None:
    count = 8
    logits = random_logits(1, scale=0.1).expand(4 * count, -1).contiguous()
    row = SamplingRow(temperature=1.0, seed=42, position=7)
    seeds = [dataclasses.replace(row, seed=42 + i) for i in range(count)]
    positions = [dataclasses.replace(row, position=i) for i in range(count)]
    far_positions = [dataclasses.replace(row, position=7 + 2**32 * i) for i in range(count)]
    ids = draw(logits, *[row] * count, *seeds, *positions, *far_positions)
    same, *others = (ids[i : i + count] for i in range(0, 4 * count, count))
    assert len(set(same)) == 1
    assert all(len(set(drawn)) > 4 for drawn in others)
    assert others[0][0] == others[1][7] == others[2][0] == same[0]


def test_the_lowest_id_wins_among_equals_within_a_part_and_across_parts() -> None:
    logits = random_logits(3, 4500)
    logits[0, [4400, 2100, 2049]] = logits[0].max() + 1
    logits[1, [4400, 2050, 77]] = logits[1].max() + 1
    logits[2] = 0.0
    logits[2, :9] = -0.0
    assert draw(logits, *[SamplingRow()] * 3) == [2049, 77, 0]
    # With the same rows beside one that is drawn, which is another compiled kernel.
    assert draw(logits, SamplingRow(), SamplingRow(), SamplingRow(temperature=1.0))[:2] == [2049, 77]


@pytest.mark.parametrize("top_p", [1e-9, 1e-4, 1.0])
def test_tiny_parameters_are_argmax(top_p: float) -> None:
    logits = random_logits(4)
    temperatures = (0.0, 1e-9, 1e-4, 1e-2)
    rows = [SamplingRow(temperature=temperature, top_p=top_p, seed=i) for i, temperature in enumerate(temperatures)]
    assert draw(logits, *rows) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("knobs", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-12}, {"min_p": 1.0}, {"min_p": 2.0}])
def test_truncations_that_leave_one_token_leave_the_likeliest(knobs: dict[str, Any]) -> None:
    logits = random_logits(2).to(FP16)
    rows = [SamplingRow(temperature=50.0, seed=i, **knobs) for i in range(2)]
    assert draw(logits, *rows) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_large_logits_and_masks_stay_finite(dtype: torch.dtype) -> None:
    logits = torch.full((8, VOCAB), -math.inf, dtype=dtype)
    logits[:, 10:20] = -6e4
    logits[:, 20:22] = 6e4
    temperatures = (1e-5, 1e-5, 1.0, 1.0, 1.0, 100.0, 100.0, 100.0)
    rows = [
        SamplingRow(temperature=temperature, top_p=0.999 if i % 2 else 1.0, seed=i)
        for i, temperature in enumerate(temperatures)
    ]
    ids = draw(logits, *rows)
    assert set(ids) == {20, 21}, "equals that are large are drawn alike"


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = random_logits(7)
    logits[1, 5], logits[2, 36], logits[3], logits[5, 0] = math.nan, math.inf, -math.inf, math.nan
    drawn = SamplingRow(temperature=0.8, seed=1)
    rows = [drawn, drawn, SamplingRow(), drawn, SamplingRow(), dataclasses.replace(drawn, top_k=4, top_p=0.9), drawn]
    ids = draw(logits, *rows)
    assert [i for i, token in enumerate(ids) if token == -1] == [1, 2, 3, 5]
    for i in (0, 4, 6):
        assert [ids[i]] == draw(logits[i : i + 1], rows[i])


# Truncation -----------------------------------------------------------------------------------------------------------


def kept(logits: torch.Tensor, row: SamplingRow) -> list[int]:
    """The ids of one row [vocab] that the edge keeps."""
    tensors = {name: torch.from_numpy(array) for name, array in host_columns(SamplingBatch([row])).items()}
    value, last = truncation_edges(
        logits[None], tensors["temperature"], tensors["min_p"], tensors["top_k"], tensors["top_p"]
    )
    stays = (logits.float() > value) | ((logits.float() == value) & (torch.arange(len(logits)) <= last))
    ids: list[int] = torch.nonzero(stays).flatten().tolist()
    return ids


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_where_tokens_tie_at_the_edge_the_lowest_ids_stay(dtype: torch.dtype) -> None:
    logits = torch.tensor([-0.0, 2.0, 0.0, 2.0, -1.0, 0.0, -0.0], dtype=dtype)
    assert kept(logits, SamplingRow(temperature=1.0, top_k=4)) == [0, 1, 2, 3]
    assert kept(logits, SamplingRow(temperature=1.0, top_k=1)) == [1]
    # Two tokens of weight 1 and four of exp(-2): 1.2 of 2.58 needs the second of the first two.
    assert kept(logits, SamplingRow(temperature=1.0, top_p=0.5)) == [1, 3]
    assert kept(logits, SamplingRow(temperature=1.0, top_p=0.85)) == [0, 1, 2, 3]
    # Within four of them, 2.04 of 2.27 needs one of the other two.
    assert kept(logits, SamplingRow(temperature=1.0, top_k=4, top_p=0.9)) == [0, 1, 3]
    assert kept(logits, SamplingRow(temperature=1.0, min_p=0.13)) == [0, 1, 2, 3, 5, 6]
    assert kept(logits, SamplingRow(temperature=1.0, top_k=4, min_p=0.14)) == [1, 3]
    assert kept(logits, SamplingRow(temperature=1.0, top_k=7)) == list(range(7))


def test_edges_of_a_row_longer_than_a_block() -> None:
    logits = random_logits(1, 1300)[0].to(BF16)
    logits[[3, 300, 700, 1100, 1299]] = logits.max() + 1
    assert kept(logits, SamplingRow(temperature=1.0, top_k=3)) == [3, 300, 700]
    row = SamplingRow(temperature=1.0, top_p=0.5)
    assert kept(logits, row) == np.flatnonzero(truncation_reference(logits.float().numpy(), row)).tolist()


def test_top_k_beyond_the_vocabulary_means_all() -> None:
    logits = random_logits(1).expand(6, -1).contiguous()
    rows = [SamplingRow(temperature=1.0, seed=9, position=position) for position in range(6)]
    expected = draw(logits, *rows)
    assert draw(logits, *[dataclasses.replace(row, top_k=10**12) for row in rows]) == expected


def test_top_k_counts_masked_tokens_last() -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[:, 30:33] = 1.0
    rows = [SamplingRow(temperature=1.0, top_k=10, top_p=top_p, seed=3) for top_p in (1.0, 0.9)]
    assert set(draw(logits, *rows)) <= {30, 31, 32}


# Launches and memory --------------------------------------------------------------------------------------------------


def test_what_no_row_asks_for_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> None:
        raise AssertionError("truncation was launched")

    monkeypatch.setattr(sampling, "truncation_edges", forbidden)
    logits = random_logits(2)
    greedy = SamplingRow(top_k=5, top_p=0.5, min_p=0.1)
    ids = draw(logits, greedy, SamplingRow(temperature=1.0, top_p=1.0))
    assert ids[0] == int(logits[0].argmax())
    with pytest.raises(AssertionError, match="truncation was launched"):
        draw(logits, greedy, SamplingRow(temperature=1.0, top_p=0.99))
    # Where all rows are greedy the columns are not even read.
    nothing: Any = None
    columns = SamplingColumns(*[nothing] * 6, any_drawn=False, any_truncated=False)
    out = torch.full((2,), 99)
    assert sample_rows(logits, columns, out) is out
    assert out.tolist() == logits.argmax(dim=-1).tolist()


def test_no_rows_are_no_launch() -> None:
    assert draw(torch.zeros(0, VOCAB)) == []


def test_rows_that_need_the_host_are_drawn_as_the_host_draws_them() -> None:
    logits = random_logits(5).to(BF16)
    penalty = SamplingRow(temperature=0.8, presence_penalty=1.0, output_token_ids=[1, 2], seed=3)
    rows = [ROWS[1], penalty, SamplingRow(logprobs=2), ROWS[0], SamplingRow(temperature=1.0, logit_bias={4: 50.0})]
    out = torch.full((5,), 99)
    sampled = sample_on_device(logits, SamplingBatch(rows), out=out)
    assert sampled.token_ids is out
    expected = sample_in_host_memory(logits, SamplingBatch(rows))
    assert out[[1, 2, 3, 4]].tolist() == expected.token_ids[[1, 2, 3, 4]].tolist() and int(out[4]) == 4
    assert int(out[0]) == draw(logits[:1], rows[0])[0]
    assert [report is not None for report in sampled.logprobs] == [False, False, True, False, False]
    assert sampled.logprobs[2] == expected.logprobs[2]


def test_host_columns() -> None:
    rows = [
        SamplingRow(temperature=1e-6, seed=2**63 + 5, position=2**40),
        SamplingRow(temperature=0.5, min_p=0.25, top_k=10**12, top_p=0.75, seed=-3),
        SamplingRow(temperature=0.5, logprobs=0),
    ]
    columns = host_columns(SamplingBatch(rows))
    assert set(columns) == {field.name for field in dataclasses.fields(SamplingColumns)} - {
        "any_drawn",
        "any_truncated",
    }
    assert columns["temperature"].tolist() == [0.0, 0.5, 0.0]
    assert columns["seed"].tolist() == [5 - 2**63, -3, 0] and columns["seed"].dtype == np.int64
    assert columns["position"].tolist() == [2**40, 0, 0]
    assert columns["top_k"].tolist() == [0, 2**31 - 1, 0] and columns["top_k"].dtype == np.int32
    assert columns["min_p"].tolist() == [0.0, 0.25, 0.0] and columns["top_p"].tolist() == [1.0, 0.75, 1.0]


def test_rows_beyond_two_to_the_31() -> None:
    """Only the first few columns of each row are looked at, so that nearly all of the memory stays untouched."""
    rows, vocab = 130, 2**24
    memory = mmap.mmap(-1, rows * vocab * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    logits = torch.frombuffer(memory, dtype=FP16).view(rows, vocab)
    logits[rows - 1, 5] = 1.0
    parts = torch.full((2, rows), math.nan)
    tokens = torch.full((rows,), -7, dtype=torch.int32)
    sampling.sample_kernel[(rows, 1)](
        parts[0], parts[1], tokens, logits, None, None, None, None, None, VOCAB=vocab, BLOCK=16
    )
    assert tokens.tolist() == [0] * (rows - 1) + [5] and float(parts[0, -1]) == 1.0
