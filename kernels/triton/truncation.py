"""Where top-k, top-p and min-p cut a row of logits: one launch, without sorting and without memory.

Of a row's tokens, the likeliest first and equal ones by their ids, truncation keeps the first so many. So an edge says
it all: the value of the last kept logit, and the last id that is kept with that value::

    logit   9.1  7.5  7.5  7.5  3.2  0.4 …       top-k = 3
    id       17    4   80  211    9   55         edge: value 7.5, last id 80
            └── kept ──┘

The value is found digit by digit: a float's bits, with those of negative numbers turned over, are an integer that
orders as the floats do. A pass over the row weighs the tokens above three candidates for the next two bits, with
weight 1 for top-k and exp((logit - largest) / temperature) for top-p. One program reads its row alone and adds in an
order that only the vocabulary decides, so an edge depends on nothing but its row; the row stays in the second-level
cache.

Order of the steps: top-k; top-p over what top-k left; min-p.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 512
"""Logits at a time, one a thread: with more, ptxas spills registers to fit another program beside."""
NUM_WARPS = 16
LOWEST = tl.constexpr(-1e30)
"""Stands for minus infinity where that may be multiplied with 0."""


def truncation_constants(vocab: int) -> dict[str, int]:
    """The kernel's compile-time values."""
    return {"VOCAB": vocab, "BLOCK": min(BLOCK, triton.next_power_of_2(max(vocab, 16)))}


@triton.jit
def _keys(x: tl.tensor) -> tl.tensor:
    """Integers, as wide as the floats ``x``, that order as they do."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    SIGN: tl.constexpr = 1 << (BITS - 1)
    bits = x.to(tl.uint32, bitcast=True) if BITS == 32 else x.to(tl.uint16, bitcast=True).to(tl.uint32)
    bits = tl.where(bits == SIGN, 0, bits)  # -0 is 0
    return tl.where(bits >= SIGN, 2 * SIGN - 1 - bits, bits | SIGN)


@triton.jit
def _value(key: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The float32 value of the float of type ``dtype`` whose key this is."""
    BITS: tl.constexpr = dtype.primitive_bitwidth
    SIGN: tl.constexpr = 1 << (BITS - 1)
    bits = tl.where(key >= SIGN, key ^ SIGN, 2 * SIGN - 1 - key)
    value = bits.to(dtype, bitcast=True) if BITS == 32 else bits.to(tl.uint16).to(dtype, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _weigh(
    row_ptr: tl.tensor,
    start: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    key: tl.tensor,
    last: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Keys and weights of the BLOCK tokens from ``start`` on: 2 ** (rate · (logit - largest)), but 0 behind the edge
    (``key``, ``last``)."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=-float("inf"))
    keys = _keys(x)
    weights = tl.exp2(tl.maximum(x.to(tl.float32) - largest, LOWEST) * rate)
    return keys, tl.where((keys > key) | ((keys == key) & (ids <= last)), weights, 0.0)


@triton.jit
def _reach(
    row_ptr: tl.tensor,
    target: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    key: tl.tensor,
    last: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The greatest key of which the tokens with it or a greater one weigh (:func:`_weigh`) at least ``target``, and the
    weight of those with a greater one."""
    BITS: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth
    found = tl.full((), 0, tl.uint32)
    unit = tl.full((), 1 << (BITS - 2), tl.uint32)
    above = tl.full((), 0.0, tl.float32)
    for _ in range(BITS // 2):
        one = found + unit
        two = one + unit
        three = two + unit
        from_one = tl.full([BLOCK], 0.0, tl.float32)
        from_two = tl.full([BLOCK], 0.0, tl.float32)
        from_three = tl.full([BLOCK], 0.0, tl.float32)
        for start in range(0, VOCAB, BLOCK):
            keys, weights = _weigh(row_ptr, start, largest, rate, key, last, VOCAB, BLOCK)
            from_one += tl.where(keys >= one, weights, 0.0)
            from_two += tl.where(keys >= two, weights, 0.0)
            from_three += tl.where(keys >= three, weights, 0.0)
        a, b, c = tl.sum(from_one, axis=0), tl.sum(from_two, axis=0), tl.sum(from_three, axis=0)
        above = tl.where(c >= target, above, tl.where(b >= target, c, tl.where(a >= target, b, a)))
        found = tl.where(c >= target, three, tl.where(b >= target, two, tl.where(a >= target, one, found)))
        unit = unit >> 2
    return found, above


@triton.jit
def _total(
    row_ptr: tl.tensor,
    largest: tl.tensor,
    rate: tl.tensor,
    key: tl.tensor,
    last: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """What all tokens weigh together, added in the order of :func:`_reach`."""
    total = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        _, weights = _weigh(row_ptr, start, largest, rate, key, last, VOCAB, BLOCK)
        total += weights
    return tl.sum(total, axis=0)


@triton.jit
def _last_of(
    row_ptr: tl.tensor, key: tl.tensor, count: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The id of the ``count``-th token with this key, counted from 1; VOCAB where there are fewer."""
    seen = tl.full((), 0, tl.int32)
    last = tl.full((), VOCAB, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=-float("inf"))
        tied = (_keys(x) == key).to(tl.int32)
        ranks = seen + tl.cumsum(tied, axis=0)
        last = tl.minimum(last, tl.min(tl.where((tied != 0) & (ranks == count), ids, VOCAB), axis=0))
        seen += tl.sum(tied, axis=0)
    return last


@triton.jit(
    do_not_specialize_on_alignment=["value_ptr", "last_ptr", "temperature_ptr", "min_p_ptr", "top_k_ptr", "top_p_ptr"]
)
def truncation_kernel(
    value_ptr: tl.tensor,
    last_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * VOCAB
    temperature = tl.load(temperature_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    cut_k = (top_k > 0) & (top_k < VOCAB)
    value = tl.full((), -float("inf"), tl.float32)
    last = tl.full((), VOCAB, tl.int32)
    if (temperature > 0) & (cut_k | (top_p < 1) | (min_p > 0)):
        peak = tl.full([BLOCK], -float("inf"), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            peak = tl.maximum(peak, tl.load(row_ptr + ids, mask=ids < VOCAB, other=-float("inf")).to(tl.float32))
        largest = tl.max(peak, axis=0)
        key = tl.full((), 0, tl.uint32)
        for step in range(2):
            by_probability = step == 1
            if tl.where(by_probability, top_p < 1, cut_k):
                # At an infinite temperature every token weighs 1, and top-k is the top-p that reaches k.
                rate = tl.where(by_probability, 1.4426950408889634 / temperature, 0.0)
                target = top_k.to(tl.float32)
                if by_probability:
                    # At least the likeliest token, whose weight is 1, stays.
                    target = tl.maximum(top_p * _total(row_ptr, largest, rate, key, last, VOCAB, BLOCK), 1e-30)
                reached, above = _reach(row_ptr, target, largest, rate, key, last, VOCAB, BLOCK)
                value = _value(reached, row_ptr.dtype.element_ty)
                count = tl.ceil((target - above) / tl.exp2(tl.maximum(value - largest, LOWEST) * rate))
                count = tl.minimum(tl.maximum(count, 1.0), VOCAB * 1.0).to(tl.int32)
                # Among equals the edge of top-k still holds.
                within = tl.where(reached == key, last, VOCAB)
                last = tl.minimum(_last_of(row_ptr, reached, count, VOCAB, BLOCK), within)
                key = reached
        if min_p > 0:
            bound = largest + temperature * tl.log(tl.minimum(min_p, 1.0))
            last = tl.where(bound > value, VOCAB, last)
            value = tl.maximum(bound, value)
    tl.store(value_ptr + row, value)
    tl.store(last_ptr + row, last)


def truncation_edges(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of ``logits`` [R, vocab], contiguous, the edge: value float32 [R], last id int32 [R].

    A token stays where its logit is greater than the value, or equal to it with an id up to the last one.
    ``temperature``, ``min_p`` and ``top_p`` are float32 [R], ``top_k`` int32 [R]; a row of temperature 0 is not
    truncated. A row that is not finite gives any edge.
    """
    rows, vocab = logits.shape
    value = torch.empty(rows, dtype=torch.float32, device=logits.device)
    last = torch.empty(rows, dtype=torch.int32, device=logits.device)
    truncation_kernel[(rows,)](
        value, last, logits, temperature, min_p, top_k, top_p, **truncation_constants(vocab), num_warps=NUM_WARPS
    )
    return value, last
