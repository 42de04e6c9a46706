"""Choosing tokens on the CPU: penalties, truncation, one uniform number a token.

Order of the steps, per row: penalties, bias and bans on the logits; temperature; top-k; top-p over what top-k left;
min-p. Truncation never asks *which* tokens are likeliest, only *how many* stay: m of them, ties kept by lowest id. So a
row's set of tokens does not depend on how a partial sort orders ties, nor on who shares the batch.

The draw is the inverse of the cumulative distribution over the kept tokens in order of their ids, at one uniform number
that is a hash of (seed, position) and nothing else.

Minus infinity among the logits is a masked token; a row whose largest logit is not finite (NaN anywhere, plus infinity,
all masked) is not sampled and gives -1.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from kernels.sampling import SampledTokens, SamplingBatch, SamplingRow, TokenLogprobs

GREEDY_TEMPERATURE = 1e-5
"""Below it a row is argmax."""
LOWEST_LOGPROB = -9999.0
"""Reported in place of minus infinity, which no JSON can carry."""
SORTED_CANDIDATES = 256
"""Likeliest tokens looked at before a full sort; enough for common truncations."""
MAX_CANDIDATES = 1024
"""A larger top-k is sorted in full."""
CHUNK = 256
"""Tokens per partial sum of a draw over the whole vocabulary."""
_MASK64 = (1 << 64) - 1


def sample(logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
    """One token for each row of float32 ``logits`` [R, vocab]; the logits are not changed."""
    rows = sampling.rows
    largest, likeliest = logits.max(dim=-1)
    chosen = torch.where(torch.isfinite(largest), likeliest, -1)
    special = [i for i, row in enumerate(rows) if not row.is_plain_greedy]
    if special:
        alive = torch.isfinite(largest).tolist()
        special = [i for i in special if alive[i]]
    if not special:
        return SampledTokens(chosen, [])
    raw = logits[special].float()  # indexing by a list copies: what follows works in place
    reported = [k for k, i in enumerate(special) if rows[i].logprobs is not None]
    scores = raw[reported].log_softmax(dim=-1)
    tokens = _draw(raw, [rows[i] for i in special])
    chosen[special] = tokens
    if not reported:
        return SampledTokens(chosen, [])
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    for k, row_scores in zip(reported, scores, strict=True):
        token = int(tokens[k])
        if token >= 0:
            logprobs[special[k]] = _report(row_scores, token, rows[special[k]].logprobs or 0)
    return SampledTokens(chosen, logprobs)


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


def _draw(logits: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """Tokens int64 [n] of rows whose ``logits`` [n, vocab] may be overwritten."""
    array = logits.numpy()
    for values, row in zip(array, rows, strict=True):
        _penalise(values, row)
    largest, tokens = logits.max(dim=-1)
    tokens = torch.where(torch.isfinite(largest), tokens, -1)
    alive = (tokens >= 0).tolist()
    plain: list[int] = []
    truncated: list[int] = []
    for i, row in enumerate(rows):
        if alive[i] and row.temperature >= GREEDY_TEMPERATURE:
            whole = row.top_k == 0 and row.top_p >= 1.0 and row.min_p <= 0.0
            (plain if whole else truncated).append(i)
    for indices, draw in ((plain, _draw_whole), (truncated, _draw_truncated)):
        if indices:
            temperatures = torch.tensor([rows[i].temperature for i in indices], dtype=torch.float32)[:, None]
            # exp((logit - largest) / temperature): the likeliest weighs 1, nothing overflows.
            weights = logits[indices].sub_(largest[indices][:, None]).div_(temperatures).exp_()
            tokens[indices] = torch.tensor(draw(weights, [rows[i] for i in indices]))
    return tokens


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


def _draw_whole(weights: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    """Draws from all tokens of ``weights`` [n, vocab], unnormalised: first a chunk of ids, then a token in it."""
    vocab = weights.shape[1]
    padded = F.pad(weights, (0, -vocab % CHUNK))
    chunks = padded.view(len(rows), -1, CHUNK)
    sums = chunks.sum(dim=-1).double().numpy()
    tokens = []
    for row, row_chunks, row_sums in zip(rows, chunks.numpy(), sums, strict=True):
        chunk, rest = _invert(row_sums, uniform(row.seed, row.position))
        within = row_chunks[chunk].astype(np.float64)
        token, _ = _invert(within, rest / row_sums[chunk])
        tokens.append(chunk * CHUNK + token)
    return tokens


def _draw_truncated(weights: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    vocab = weights.shape[1]
    widest = max(min(row.top_k, vocab) for row in rows)
    count = min(vocab, max(SORTED_CANDIDATES, min(widest, MAX_CANDIDATES)) + 1)
    likeliest, ids = weights.topk(count, dim=-1)
    tokens = []
    for i, row in enumerate(rows):
        row_weights = weights[i].numpy()
        descending, row_ids = likeliest[i].numpy(), ids[i].numpy()
        kept = _count_kept(descending, row_weights, row)
        if kept is None:
            order = np.argsort(-row_weights, kind="stable")
            descending, row_ids = row_weights[order], order
            kept = _count_kept(descending, row_weights, row)
            assert kept is not None  # every token is among the candidates now
        if kept < descending.shape[0] and descending[kept - 1] == descending[kept]:
            row_ids = _lowest_ids(row_weights, descending[kept - 1], kept)
        candidates = np.sort(row_ids[:kept])
        index, _ = _invert(row_weights[candidates].astype(np.float64), uniform(row.seed, row.position))
        tokens.append(int(candidates[index]))
    return tokens


def _count_kept(descending: np.ndarray, weights: np.ndarray, row: SamplingRow) -> int | None:
    """How many of the likeliest tokens stay, or None where ``descending`` (the likeliest, sorted) is too short to tell.

    ``weights`` [vocab] are those of all tokens; the largest is 1.
    """
    vocab, known = weights.shape[0], descending.shape[0]
    kept = min(row.top_k, vocab) if row.top_k > 0 else vocab
    if row.top_p < 1.0:
        cumulative = np.cumsum(descending[:kept], dtype=np.float64)
        if kept <= known:
            total = float(cumulative[-1])
        elif row.top_k > 0 and kept < vocab:
            return None  # the mass of the k likeliest is not known
        else:
            total = float(weights.sum(dtype=np.float64))
        reaching = int(np.searchsorted(cumulative, row.top_p * total, side="left")) + 1
        if reaching <= cumulative.shape[0]:
            kept = min(kept, reaching)
        elif known == vocab or kept <= known:
            kept = min(kept, known)  # rounding: the sum of all stays a hair below the total
    if row.min_p > 0.0:
        above = int(np.count_nonzero(descending >= np.float32(row.min_p)))
        if above < known or known == vocab:
            kept = min(kept, max(1, above))
    # The token behind the last kept one must be known too: it may tie with it.
    return kept if kept < known or known == vocab else None


def _lowest_ids(weights: np.ndarray, threshold: np.float32, kept: int) -> np.ndarray:
    """Ids of the ``kept`` likeliest where several tie at ``threshold``: of those the lowest ids."""
    above = np.flatnonzero(weights > threshold)
    tied = np.flatnonzero(weights == threshold)
    return np.concatenate((above, tied[: kept - above.shape[0]]))


def _invert(weights: np.ndarray, u: float) -> tuple[int, float]:
    """Where the cumulative sum of float64 ``weights`` passes u × total, and how much of u × total lies in that entry.

    Entries of weight zero are never chosen.
    """
    cumulative = np.cumsum(weights)
    target = u * cumulative[-1]
    index = int(np.searchsorted(cumulative, target, side="right"))
    if index >= weights.shape[0] or weights[index] <= 0.0:
        index = int(np.flatnonzero(weights)[-1])  # u × total rounded up to the total
    before = float(cumulative[index - 1]) if index > 0 else 0.0
    return index, max(0.0, float(target) - before)


def _report(scores: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """``scores`` is the raw log-softmax [vocab] of one row."""
    values, ids = scores.topk(min(count, scores.shape[0]))
    top = [(i, max(v, LOWEST_LOGPROB)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return TokenLogprobs(token, max(float(scores[token]), LOWEST_LOGPROB), top)
