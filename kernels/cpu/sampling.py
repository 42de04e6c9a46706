"""Choosing tokens on the CPU: penalties, truncation, one uniform number a token.

Rows that are plainly greedy are an argmax. Each other row is worked on alone, in numpy: its
logits fit the core's own cache, and nothing in its result can depend on who shares the batch.

Order of the steps: penalties, bias and bans on the logits; temperature; top-k; top-p over what top-k left; min-p.
Truncation only finds *how many* of the likeliest tokens stay; where several tie at the edge, those with the lowest ids
do. The draw inverts the cumulative distribution over the kept tokens in order of their ids, at one uniform number that
is a hash of (seed, position) and nothing else.

Minus infinity among the logits is a masked token; a row whose largest logit is not finite (NaN anywhere, plus infinity,
all masked) is not sampled and gives -1.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from kernels.sampling import SampledTokens, SamplingBatch, SamplingRow, TokenLogprobs

GREEDY_TEMPERATURE = 1e-5
"""Below it a row is argmax."""
LOWEST_LOGPROB = -9999.0
"""Reported in place of minus infinity, which no JSON can carry."""
CHUNK = 256
"""Weights per partial sum: a cumulative sum over a whole vocabulary would be most of the work."""
_MASK64 = (1 << 64) - 1


def sample(logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
    """One token for each row of ``logits`` [R, vocab]; the logits are not changed."""
    raw = logits.float().numpy()
    # numpy finds the place of a largest number with vectors, torch one by one; NaN counts as the largest.
    tokens = np.fromiter((row.argmax() for row in raw), dtype=np.int64, count=raw.shape[0])
    tokens[~np.isfinite(raw[np.arange(raw.shape[0]), tokens])] = -1
    chosen = torch.from_numpy(tokens)
    special = [i for i, row in enumerate(sampling.rows) if not row.is_plain_greedy]
    if not special:
        return SampledTokens(chosen, [])
    logprobs: list[TokenLogprobs | None] = [None] * len(sampling.rows)
    for i in special:
        row = sampling.rows[i]
        if tokens[i] < 0:
            continue
        tokens[i] = _draw(raw[i].copy(), row)
        if row.logprobs is not None and tokens[i] >= 0:
            logprobs[i] = _report(raw[i], int(tokens[i]), row.logprobs)
    return SampledTokens(chosen, logprobs if any(logprobs) else [])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of (seed, position) alone: two rounds of SplitMix64's mixer
    (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA '14)."""
    state = _mix64((_mix64(seed & _MASK64) + 0x9E3779B97F4A7C15 * (position + 1)) & _MASK64)
    return (state >> 11) * 2.0**-53


def _mix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _penalise(logits: np.ndarray, row: SamplingRow) -> None:
    """In place: penalties, bias and bans of one row [vocab]."""
    if row.repetition_penalty != 1.0:
        seen = np.array(row.prompt_token_ids + row.output_token_ids, dtype=np.int64)
        values = logits[seen]
        penalty = np.float32(row.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if (row.presence_penalty != 0.0 or row.frequency_penalty != 0.0) and row.output_token_ids:
        seen, counts = np.unique(np.array(row.output_token_ids, dtype=np.int64), return_counts=True)
        logits[seen] -= (row.presence_penalty + row.frequency_penalty * counts).astype(np.float32)
    if row.logit_bias:
        logits[np.fromiter(row.logit_bias, np.int64)] += np.fromiter(row.logit_bias.values(), np.float32)
    if row.banned_token_ids:
        logits[list(row.banned_token_ids)] = -np.inf


def _draw(logits: np.ndarray, row: SamplingRow) -> int:
    """The token of one row, whose float32 ``logits`` [vocab] are overwritten; -1 where every token is banned."""
    _penalise(logits, row)
    likeliest = int(logits.argmax())
    largest = logits[likeliest]
    if not np.isfinite(largest):
        return -1
    if row.temperature < GREEDY_TEMPERATURE:
        return likeliest
    # exp((logit - largest) / temperature): the likeliest weighs 1 and nothing overflows.
    logits -= largest
    logits /= np.float32(row.temperature)
    weights = np.exp(logits, out=logits)
    _truncate(weights, row)
    return _locate(weights, uniform(row.seed, row.position), "right")


def _truncate(weights: np.ndarray, row: SamplingRow) -> None:
    """In place: weights of tokens that top-k, top-p or min-p drop become 0. The largest weight is 1."""
    vocab = weights.shape[0]
    kept = min(row.top_k, vocab) if row.top_k > 0 else vocab
    if kept < vocab or row.top_p < 1.0:
        likeliest = np.partition(weights, -kept)[-kept:] if kept < vocab else weights
        if row.top_p < 1.0:
            likeliest = np.sort(likeliest)[::-1]
            kept = 1 + _locate(likeliest, row.top_p, "left")
            threshold = likeliest[kept - 1]
        else:
            threshold = likeliest.min()
        surplus = int(np.count_nonzero(weights >= threshold)) - kept
        if surplus > 0:
            weights[np.flatnonzero(weights == threshold)[-surplus:]] = 0.0
        weights[weights < threshold] = 0.0
    if row.min_p > 0.0:
        weights[weights < np.float32(row.min_p)] = 0.0


def _locate(weights: np.ndarray, share: float, side: Literal["left", "right"]) -> int:
    """First index where the cumulative sum of ``weights`` reaches (``left``) or passes (``right``) ``share`` × total.

    Never the index of a weight of 0. Summed in float64: over chunks, then inside the chunk that holds the place.
    """
    edges = np.arange(0, weights.shape[0], CHUNK)
    chunks = np.cumsum(np.add.reduceat(weights, edges, dtype=np.float64))
    target = share * chunks[-1]
    chunk = min(int(np.searchsorted(chunks, target, side=side)), chunks.shape[0] - 1)
    if chunk > 0:
        target -= chunks[chunk - 1]
    inside = weights[chunk * CHUNK : (chunk + 1) * CHUNK]
    index = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), target, side=side))
    if index == inside.shape[0]:
        # Two ways to sum differ in the last bit: the place fell behind the last weight that counts.
        return int(np.flatnonzero(weights[: chunk * CHUNK + inside.shape[0]])[-1])
    return chunk * CHUNK + index


def _report(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    """Raw log-softmax of one row of float32 ``logits`` [vocab]: the token's, and the ``count`` likeliest."""
    largest = logits.max()
    normaliser = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))

    def logprob(index: int) -> float:
        return max(float(logits[index]) - normaliser, LOWEST_LOGPROB)

    top: list[int] = []
    count = min(count, logits.shape[0])
    if count > 0:
        threshold = np.partition(logits, -count)[-count]
        candidates = np.flatnonzero(logits >= threshold)
        top = candidates[np.argsort(-logits[candidates], kind="stable")][:count].tolist()
    return TokenLogprobs(token, logprob(token), [(index, logprob(index)) for index in top])
