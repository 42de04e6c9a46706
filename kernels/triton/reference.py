"""What each kernel must compute, in plain float32 torch: loops, no tricks, nothing shared with the kernels.

The ``kernels`` command and the tests measure against these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.sampling import SamplingRow


def paged_attention_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """``q`` [T, heads, head_dim], caches [blocks, kv_heads, block_size, head_dim] → float32 [T, heads, head_dim]; a
    token of a request without a context (``seq_lens`` 0) sees nothing and gets 0."""
    num_heads, head_dim = q.shape[1:]
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    outputs = []
    row = 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        positions = torch.arange(seq_len)
        blocks, offsets = block_tables[request, positions // block_size].long(), positions % block_size
        keys = key_cache[blocks, :, offsets].float()  # [seq_len, kv_heads, head_dim]
        values = value_cache[blocks, :, offsets].float()
        for position in range(seq_len - query_len, seq_len):
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            query = q[row].float().reshape(num_kv_heads, group, head_dim)
            scores = torch.einsum("kgd,skd->kgs", query, keys[seen]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out = torch.einsum("kgs,skd->kgd", torch.softmax(scores, dim=-1), values[seen])
            outputs.append(out.reshape(num_heads, head_dim))
            row += 1
    return torch.stack(outputs)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, float32."""
    x = x.float()
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight.float()


def rotary_reference(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``heads`` [T, H, head_dim], ``cos`` and ``sin`` [T, rotary_dim / 2]: pairs (i, i + rotary_dim / 2), float32."""
    heads = heads.float()
    half = cos.shape[1]
    out = heads.clone()
    for i in range(half):
        a, b = heads[:, :, i], heads[:, :, i + half]
        out[:, :, i] = a * cos[:, i, None] - b * sin[:, i, None]
        out[:, :, i + half] = b * cos[:, i, None] + a * sin[:, i, None]
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 · width] → float32 [T, width]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def copy_blocks_reference(kv: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """The copy of ``kv`` [planes, blocks, elements] in which the pairs have been copied one after another."""
    kv = kv.clone()
    for source, destination in pairs:
        kv[:, destination] = kv[:, source]
    return kv


def int8_matmul_reference(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x`` [M, K], int8 ``q`` [N, K], ``scale`` [N] → float32 [M, N], summed in float64."""
    weight = scale.double()[:, None] * q.double()
    result = x.double() @ weight.t()
    return (result if bias is None else result + bias.double()).float()


def embedding_reference(ids: list[int], table: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows of ``table`` [vocab, hidden], times their scale, as float32; zeros for an id that is no row."""
    rows = table.float() if scale is None else table.float() * scale[:, None]
    nothing = torch.zeros(table.shape[1])
    return torch.stack([rows[token] if 0 <= token < table.shape[0] else nothing for token in ids])


@dataclass(frozen=True, slots=True)
class SampledReference:
    """The best and the second-best token of one row, and by how much their perturbed logits differ."""

    token_id: int
    """-1 where the row is not finite."""
    second_id: int
    gap: float


def philox_reference(seed: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Four words of 32 bits: Philox 4x32 with ten rounds (Salmon et al., SC '11) at ``counter``, keyed by ``seed``."""
    words, key = list(counter), [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        even, odd = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [odd >> 32 ^ words[1] ^ key[0], odd & 0xFFFFFFFF, even >> 32 ^ words[3] ^ key[1], even & 0xFFFFFFFF]
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return words


def gumbel_reference(vocab: int, row: SamplingRow) -> np.ndarray:
    """The noise of a row's tokens, float64 [vocab]."""
    position = row.position & 0xFFFFFFFF, row.position >> 32
    words = [word for group in range(-(-vocab // 4)) for word in philox_reference(row.seed, (group, *position, 0))]
    uniform = (np.array(words[:vocab], dtype=np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-uniform))


def truncation_reference(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """Which tokens of finite float32 ``logits`` [vocab] stay: bool [vocab]."""
    logits = logits.astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order] - logits.max()) / row.temperature)
    if row.top_k > 0:
        weights[row.top_k :] = 0.0
    count = min(row.top_k or len(order), len(order))
    if row.top_p < 1.0:
        count = 1 + int(np.count_nonzero(np.cumsum(weights) < row.top_p * weights.sum()))
    kept = np.zeros(len(order), dtype=bool)
    kept[order[:count]] = True
    kept[order[weights < row.min_p]] = False
    return kept


def sampled_tokens_reference(logits: np.ndarray, row: SamplingRow) -> SampledReference:
    """What is drawn of one row of float32 ``logits`` [vocab], and what nearly was."""
    if not logits.max() < np.inf or logits.max() == -np.inf:
        return SampledReference(-1, -1, np.inf)
    scores = logits.astype(np.float64) - logits.max()
    if row.temperature >= 1e-5:
        scores = scores / row.temperature + gumbel_reference(len(logits), row)
        scores[~truncation_reference(logits, row)] = -np.inf
    best, second = np.argsort(-scores, kind="stable")[:2]
    return SampledReference(int(best), int(second), float(scores[best] - scores[second]))
