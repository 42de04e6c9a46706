"""Sampled ids and truncation against their references; ids are equal or they are wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from kernels.sampling import SamplingBatch, SamplingRow
from kernels.triton.reference import sampled_tokens_reference, truncation_reference
from kernels.triton.sampling import host_columns, sample_rows, sampling_columns
from kernels.triton.truncation import truncation_edges

NEAR_TIE = 1e-5
"""Perturbed logits as close as this may change places by rounding."""
EDGE_TOLERANCE = 1e-5
"""Share of the probability that rounding may put on the wrong side of top-p's edge."""


@dataclass(frozen=True, slots=True)
class _Case:
    logits: torch.Tensor
    """[R, vocab], in the kernels' type."""
    sampling: SamplingBatch
    columns: dict[str, torch.Tensor]


def sampling_error(
    *,
    dtype: torch.dtype = torch.float32,
    vocab: int = 577,
    greedy: bool = False,
    truncated: bool = False,
    device: str = "cpu",
) -> float:
    """0, or infinite where an id is another than the reference's; the reference's two best may change places where they
    are nearly equal. Into an ``out`` that is poisoned with an id that no row can have."""
    case = _case(dtype, vocab, greedy=greedy, truncated=truncated, device=device)
    out = torch.full((len(case.sampling.rows),), vocab + 1, dtype=torch.int64, device=device)
    tokens = sample_rows(case.logits.to(device), sampling_columns(case.sampling, case.columns), out).cpu()
    for i, row in enumerate(case.sampling.rows):
        reference = sampled_tokens_reference(case.logits[i].float().numpy(), row)
        token = int(tokens[i])
        nearly = token == reference.second_id and reference.gap <= NEAR_TIE and not row.is_plain_greedy
        if token != reference.token_id and not nearly:
            return math.inf
    return 0.0


def truncation_error(*, dtype: torch.dtype = torch.float32, vocab: int = 577, device: str = "cpu") -> float:
    """Largest share of a row's probability that the edge puts on the wrong side; infinite where the number of tokens
    that top-k keeps is wrong, or no token is kept."""
    case = _case(dtype, vocab, greedy=False, truncated=True, device=device)
    columns = case.columns
    value, last = truncation_edges(
        case.logits.to(device), columns["temperature"], columns["min_p"], columns["top_k"], columns["top_p"]
    )
    ids = np.arange(vocab)
    worst = 0.0
    for i, row in enumerate(case.sampling.rows):
        logits = case.logits[i].float().numpy()
        if row.is_plain_greedy or not np.isfinite(logits.max()):
            continue
        edge = value[i].item()
        kept = (logits > edge) | ((logits == edge) & (ids <= last[i].item()))
        expected = truncation_reference(logits, row)
        if not kept.any() or (row.top_p == 1.0 and row.min_p == 0.0 and kept.sum() != expected.sum()):
            return math.inf
        weights = np.exp((logits.astype(np.float64) - logits.max()) / row.temperature)
        worst = max(worst, float(weights[kept != expected].sum() / weights.sum()))
    return worst


def _case(dtype: torch.dtype, vocab: int, *, greedy: bool, truncated: bool, device: str) -> _Case:
    """Rows of every kind, with ties at the top and at the edges, masked tokens and, among them, rows that are not
    finite."""
    rows = [SamplingRow(), SamplingRow(temperature=1e-9)]
    if not greedy:
        rows += [
            SamplingRow(temperature=0.8, seed=42, position=7),
            SamplingRow(temperature=100.0, seed=2**64 - 5, position=2**33 + 1),
            SamplingRow(temperature=1e-5, seed=-1, position=0),
        ]
    if truncated:
        rows += [
            SamplingRow(temperature=1.0, top_k=7, seed=1, position=3),
            SamplingRow(temperature=1.5, top_p=0.9, seed=2, position=4),
            SamplingRow(temperature=0.7, top_k=50, top_p=0.6, seed=3, position=5),
            SamplingRow(temperature=2.0, min_p=0.3, seed=4, position=6),
            SamplingRow(temperature=1.0, top_k=20, top_p=0.8, min_p=0.1, seed=5, position=7),
            SamplingRow(temperature=1.0, top_k=10**7, top_p=1e-9, seed=6, position=8),
        ]
    random = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(rows) + 3, vocab, generator=random) * 3
    # Quarters tie in every type, often at an edge.
    logits[:, : vocab // 2] = (logits[:, : vocab // 2] * 4).round() / 4
    logits[:, vocab // 3 : vocab // 3 + 4] = -math.inf
    logits[0, vocab - 2 :] = logits[0].max() + 1
    logits[-3, vocab // 2], logits[-2, vocab - 1], logits[-1, :] = math.nan, math.inf, -math.inf
    broken = SamplingRow() if greedy else SamplingRow(temperature=1.0, seed=9)
    cut = SamplingRow(temperature=1.0, top_k=3, top_p=0.9) if truncated else broken
    sampling = SamplingBatch([*rows, cut, broken, broken])
    columns = {name: torch.from_numpy(array).to(device) for name, array in host_columns(sampling).items()}
    return _Case(logits.to(dtype), sampling, columns)
