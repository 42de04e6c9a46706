"""Tokens drawn where the logits are: the ids stay on the device, and nothing waits for it.

A row is cut into parts, so that even a single row of a large vocabulary keeps the whole device busy; a second, small
launch takes the best of a row's parts::

    logits [R, vocab]   | part 0 | part 1 | part 2 |      a program each: largest logit, best score, its token
                              └──────┬──────┘
                                   token                  a program a row

A draw is a maximum too: with independent Gumbel noise g, argmax(logit / temperature + g) has the distribution of the
softmax (Gumbel, "Statistical Theory of Extreme Values and Some Practical Applications", 1954). The noise of a token
is a function of the row's seed, the position and the token's id alone: Philox 4x32 with ten rounds (Salmon, Moraes,
Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC '11), keyed by the seed, at the counter (id // 4,
position's low word, position's high word, 0); word id % 4 of the result is the token's. So a row gives the same id in
any batch. Scores are relative to a part's largest logit until the parts meet, so that large logits leave their
differences, and the noise, all digits.

The lowest id wins among equals. A row with NaN, plus infinity, or nothing but minus infinity gives -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.cpu.sampling import GREEDY_TEMPERATURE, sample
from kernels.sampling import SampledTokens, SamplingBatch, SamplingRow, TokenLogprobs
from kernels.triton.truncation import truncation_edges

_GREEDY = SamplingRow()
BLOCK = 2048
"""Logits of a part."""
NUM_WARPS = 4
REDUCE_WARPS = 1


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The parameters of R rows on the device, and which launches they need."""

    temperature: torch.Tensor
    """float32 [R]; 0: greedy."""
    min_p: torch.Tensor
    """float32 [R]"""
    top_k: torch.Tensor
    """int32 [R]; 0: all."""
    top_p: torch.Tensor
    """float32 [R]"""
    seed: torch.Tensor
    """int64 [R]"""
    position: torch.Tensor
    """int64 [R]: index of the token to be drawn in its request."""
    any_drawn: bool
    """Whether any row is more than greedy; else only the launch matters, not the columns."""
    any_truncated: bool
    """Whether any row that is drawn has top-k, top-p or min-p."""


def host_columns(sampling: SamplingBatch) -> dict[str, np.ndarray]:
    """The tensors of :class:`SamplingColumns`, by name, as arrays; rows that the device cannot draw are greedy."""
    if all(row is sampling.rows[0] for row in sampling.rows) and sampling.rows and sampling.rows[0] == _GREEDY:
        return _greedy_arrays(len(sampling.rows))
    return _arrays([row if row.is_drawn_on_device else _GREEDY for row in sampling.rows])


@lru_cache(maxsize=64)
def _greedy_arrays(count: int) -> dict[str, np.ndarray]:
    """Most steps have nothing but greedy rows, all one object; nobody writes to these arrays."""
    return _arrays([_GREEDY] * count)


def _arrays(rows: Sequence[SamplingRow]) -> dict[str, np.ndarray]:
    temperatures = [0.0 if row.temperature < GREEDY_TEMPERATURE else row.temperature for row in rows]
    return {
        "temperature": np.array(temperatures, dtype=np.float32),
        "min_p": np.array([row.min_p for row in rows], dtype=np.float32),
        "top_k": np.array([min(row.top_k, 2**31 - 1) for row in rows], dtype=np.int32),
        "top_p": np.array([row.top_p for row in rows], dtype=np.float32),
        "seed": np.array([row.seed & (2**64 - 1) for row in rows], dtype=np.uint64).view(np.int64),
        "position": np.array([row.position for row in rows], dtype=np.int64),
    }


def sampling_columns(sampling: SamplingBatch, tensors: Mapping[str, torch.Tensor]) -> SamplingColumns:
    """``tensors``: the arrays of :func:`host_columns` on the device."""
    drawn = [row for row in sampling.rows if row.is_drawn_on_device and not row.is_plain_greedy]
    truncated = any(row.top_k > 0 or row.top_p < 1.0 or row.min_p > 0.0 for row in drawn)
    return SamplingColumns(**tensors, any_drawn=bool(drawn), any_truncated=truncated)


def sampling_constants(vocab: int) -> dict[str, int]:
    """Compile-time values of the kernel that reads the logits."""
    return {"VOCAB": vocab, "BLOCK": min(BLOCK, triton.next_power_of_2(max(vocab, 16)))}


def reduce_constants(vocab: int) -> dict[str, int]:
    """Compile-time values of the kernel that joins the parts."""
    parts = triton.cdiv(vocab, sampling_constants(vocab)["BLOCK"])
    return {"PARTS": parts, "PADDED": triton.next_power_of_2(parts)}


@triton.jit
def gumbel(words: tl.tensor) -> tl.tensor:
    """Gumbel noise of random ``words``, uint32: float32.

    Of a uniform number v, E = -log(1 - v) is exponential and -log(E) Gumbel. Large noise, which wins, comes of small v:
    they keep 32 bits, where 1 - v would round them to a few.
    """
    v = (words.to(tl.float32) + 0.5) * 2.0**-32
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32  # 1 - v
    # The Taylor series of -log(1 - v); below 1/16 what it leaves out is less than float32 can hold.
    series = 1 / 5 + v * (1 / 6 + v * (1 / 7))
    series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * series))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(rest)))


@triton.jit
def random_words(seed: tl.tensor, position: tl.tensor, part: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The random words of a part's tokens, uint32 [BLOCK]."""
    group = (part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = group * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + (position >> 32).to(tl.uint32)
    first, second, third, fourth = tl.philox(seed, group, low, high, zero)
    return tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature_ptr",
        "seed_ptr",
        "position_ptr",
        "edge_ptr",
        "last_ptr",
    ]
)
def sample_kernel(
    largest_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    edge_ptr: tl.tensor,
    last_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    mask = columns < VOCAB
    x = tl.load(logits_ptr + row * VOCAB + columns, mask=mask, other=-float("inf")).to(tl.float32)
    finite = x < float("inf")  # False for NaN too
    x = tl.where(finite, x, -float("inf"))
    largest = tl.max(x, axis=0)
    scores = x - tl.where(largest == -float("inf"), 0.0, largest)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            words = random_words(tl.load(seed_ptr + row), tl.load(position_ptr + row), part, BLOCK)
            scores = scores / temperature + gumbel(words)
            if edge_ptr is not None:
                edge = tl.load(edge_ptr + row)
                kept = (x > edge) | ((x == edge) & (columns <= tl.load(last_ptr + row)))
                scores = tl.where(kept, scores, -float("inf"))
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == best, columns, VOCAB), axis=0)
    sound = tl.min(finite.to(tl.int32), axis=0)
    place = row * tl.num_programs(1) + part
    tl.store(largest_ptr + place, largest)
    tl.store(score_ptr + place, best)
    tl.store(token_ptr + place, tl.where(sound != 0, token, -1))


@triton.jit(do_not_specialize_on_alignment=["out_ptr", "temperature_ptr"])
def sample_reduce_kernel(
    out_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    mask = part < PARTS
    place = row * PARTS + part
    largest = tl.load(largest_ptr + place, mask=mask, other=-float("inf"))
    scores = tl.load(score_ptr + place, mask=mask, other=-float("inf"))
    tokens = tl.load(token_ptr + place, mask=mask, other=2**31 - 1)
    peak = tl.max(largest, axis=0)
    behind = largest - tl.where(peak == -float("inf"), 0.0, peak)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        behind = behind / tl.where(temperature > 0, temperature, 1.0)
    scores += behind
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == best, tokens, 2**31 - 1), axis=0)
    sound = (tl.min(tokens, axis=0) >= 0) & (peak > -float("inf"))
    tl.store(out_ptr + row, tl.where(sound, token, -1).to(tl.int64))


def sample_rows(logits: torch.Tensor, columns: SamplingColumns, out: torch.Tensor) -> torch.Tensor:
    """Write one token for each row of ``logits`` [R, vocab] into ``out``, int64 [R], and return it.

    The logits are float32, bfloat16 or float16 and contiguous. Nothing waits for the device; which kernels are launched
    depends on ``any_drawn`` and ``any_truncated`` alone. A row with min-p is read once more, one with top-k or top-p
    some twenty times more, by one program.
    """
    rows, vocab = logits.shape
    if rows == 0:
        return out
    constants = reduce_constants(vocab)
    temperature = seed = position = edge = last = None
    if columns.any_drawn:
        temperature, seed, position = columns.temperature, columns.seed, columns.position
        if columns.any_truncated:
            edge, last = truncation_edges(logits, temperature, columns.min_p, columns.top_k, columns.top_p)
    # Each with memory of its own: where one began within another's would decide what is compiled.
    largest = torch.empty((rows, constants["PARTS"]), dtype=torch.float32, device=logits.device)
    scores, tokens = torch.empty_like(largest), torch.empty_like(largest, dtype=torch.int32)
    sample_kernel[(rows, constants["PARTS"])](
        largest,
        scores,
        tokens,
        logits,
        temperature,
        seed,
        position,
        edge,
        last,
        **sampling_constants(vocab),
        num_warps=NUM_WARPS,
    )
    sample_reduce_kernel[(rows,)](out, largest, scores, tokens, temperature, **constants, num_warps=REDUCE_WARPS)
    return out


def sample_on_device(
    logits: torch.Tensor,
    sampling: SamplingBatch,
    tensors: Mapping[str, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> SampledTokens:
    """One token for each row of ``logits`` [R, vocab]. Rows with penalties, bias, bans or log-probabilities are drawn
    in host memory, which waits for the device; the others never leave it.

    ``tensors``: the arrays of :func:`host_columns` on the device, where they are there. ``out``: int64 [R] to be
    written into.
    """
    rows = sampling.rows
    if tensors is None:
        tensors = {name: torch.from_numpy(array).to(logits.device) for name, array in host_columns(sampling).items()}
    if out is None:
        out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    sample_rows(logits.contiguous(), sampling_columns(sampling, tensors), out)
    on_host = [i for i, row in enumerate(rows) if not row.is_drawn_on_device]
    if not on_host:
        return SampledTokens(out, [])
    index = torch.tensor(on_host, device=logits.device)
    drawn = sample(logits.index_select(0, index).cpu(), SamplingBatch([rows[i] for i in on_host]))
    out[index] = drawn.token_ids.to(logits.device)
    if not drawn.logprobs:
        return SampledTokens(out, [])
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    for i, report in zip(on_host, drawn.logprobs, strict=True):
        logprobs[i] = report
    return SampledTokens(out, logprobs)
