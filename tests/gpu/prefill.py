"""Prefill against the measured matrix rate, and products with 8-bit weights against the measured copy bandwidth.

``attention``: 4 · heads · head_dim operations for each pair of a query and a key that it sees (two products, a multiply
and an add each), over time, over the matrix rate. ``whole prefill``: that of all layers, and 2 operations for each
weight of a matrix and each token that meets it (the head only meets the last token of each prompt).
``8-bit product``: bytes of weights, scales, rows and results over time, over the copy bandwidth; the calls of a graph
read one matrix after the other, together at least four times the L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.execution.runner import host_step
from engine.models.architecture import expected_tensors
from kernels.spec import DecoderSpec, StepLimits
from kernels.triton.backend import TritonBackend
from kernels.triton.int8_matmul import int8_matmul
from kernels.triton.paged_attention import paged_attention
from kernels.triton.verification.base import make_batch
from tests.gpu.card import Card
from tests.gpu.figures import Report
from tests.gpu.models import LLAMA_1B, LLAMA_8B, TINY, Shape, random_weights

BLOCK_SIZE = 16
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "one prompt of 8192": ([8192], [8192]),
    "four prompts of 2048": ([2048] * 4, [2048] * 4),
    "a chunk of 2048 behind 30720": ([2048], [32_768]),
}
"""New tokens and contexts of each request."""
REHEARSED_STEPS: dict[str, tuple[list[int], list[int]]] = {"a chunk and a prompt": ([2, 5], [21, 5])}
PRODUCTS = (
    ("1B gate and up", 16_384, 2048),
    ("8B qkv", 6144, 4096),
    ("8B gate and up", 28_672, 4096),
    ("8B down", 4096, 14_336),
)
"""Outputs and inputs. Each number of inputs costs compiling."""
REHEARSED_PRODUCTS = (("tiny", 40, 48),)
ROWS = (1, 8, 32)
TOLERANCE = 2e-2


def pairs_seen(query_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
    """Of a query and a key at or before it."""
    return sum(
        query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
    )


def prefill_operations(spec: DecoderSpec, query_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
    """Of the products of a step, with logits of one token for each request."""
    in_layers = sum(
        shape[0] * shape[1]
        for name, shape in expected_tensors(spec).items()
        if len(shape) == 2 and name.startswith("model.layers.")
    )
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * pairs_seen(query_lens, seq_lens)
    head = 2 * len(query_lens) * spec.vocab_size * spec.hidden_size
    return 2 * sum(query_lens) * in_layers + attention + head


@torch.inference_mode()
def run(card: Card, report: Report, facts: dict[str, Any]) -> None:
    steps = REHEARSED_STEPS if card.rehearsal else STEPS
    for shape in (TINY,) if card.rehearsal else (LLAMA_1B, LLAMA_8B):
        for name, (query_lens, seq_lens) in steps.items():
            _attention(card, report, facts, shape, name, query_lens, seq_lens)
            card.release()
    _whole(card, report, facts, TINY if card.rehearsal else LLAMA_1B)
    card.release()
    for name, outputs, inputs in REHEARSED_PRODUCTS if card.rehearsal else PRODUCTS:
        for rows in ROWS[:1] if card.rehearsal else ROWS:
            _product(card, report, facts, name, outputs, inputs, rows)


def _attention(
    card: Card,
    report: Report,
    facts: dict[str, Any],
    shape: Shape,
    name: str,
    query_lens: list[int],
    seq_lens: list[int],
) -> None:
    random = torch.Generator().manual_seed(5)
    batch, num_blocks = make_batch(query_lens, seq_lens, BLOCK_SIZE, random, device=str(card.device))
    generator = card.generator(6)

    def made(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device=card.device).normal_(generator=generator)

    q = made(sum(query_lens), shape.heads, shape.head_dim)
    keys, values = (made(num_blocks, shape.kv_heads, BLOCK_SIZE, shape.head_dim) for _ in range(2))
    out = torch.empty_like(q)
    replay = card.captured(lambda: paged_attention(q, keys, values, batch, scale=shape.head_dim**-0.5, out=out))
    seconds = card.queued_seconds(replay, 10)
    operations = 4 * shape.heads * shape.head_dim * pairs_seen(query_lens, seq_lens)
    share = 100 * operations / seconds / facts["matrix_rate"]
    report.rate(
        f"{shape.name} attention, {name}: share of matrix rate", share, "%", operations=operations, seconds=seconds
    )


def _whole(card: Card, report: Report, facts: dict[str, Any], shape: Shape) -> None:
    spec = shape.spec(torch.bfloat16)
    lengths = [2, 3] if card.rehearsal else [2048] * 4
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    backend = TritonBackend(card.device)
    backend.load(spec, random_weights(spec, card))
    backend.allocate_kv(1 + sum(blocks), BLOCK_SIZE)
    backend.make_ready(StepLimits(max_requests=len(lengths), max_tokens=sum(lengths), max_blocks=max(blocks)))
    ends = np.cumsum(blocks)
    tables = [list(range(1 + end - count, 1 + end)) for end, count in zip(ends.tolist(), blocks, strict=True)]
    random = np.random.default_rng(8)
    tokens = [random.integers(0, spec.vocab_size, length).tolist() for length in lengths]
    last = np.array(lengths) - 1
    step = host_step(tokens, [0] * len(lengths), tables, last, np.ones_like(last), BLOCK_SIZE)
    batch = backend.upload(step)
    logits = backend.forward(batch)
    report.check(f"{shape.name} logits of a prefill are finite", bool(torch.isfinite(logits).all()), "finite")
    seconds = card.queued_seconds(lambda: backend.forward(batch), 3)
    operations = prefill_operations(spec, lengths, lengths)
    share = 100 * operations / seconds / facts["matrix_rate"]
    name = f"{shape.name} whole prefill of {len(lengths)} x {lengths[0]}"
    report.rate(f"{name}: share of matrix rate", share, "%", operations=operations, seconds=seconds)
    report.rate(f"{name}: tokens", sum(lengths) / seconds, "tokens/s")


def _product(
    card: Card, report: Report, facts: dict[str, Any], name: str, outputs: int, inputs: int, rows: int
) -> None:
    generator = card.generator(9)
    count = max(2, -(-4 * card.l2_bytes // (outputs * inputs)))
    weights = [
        torch.empty((outputs, inputs), dtype=torch.int8, device=card.device).random_(-127, 128, generator=generator)
        for _ in range(count)
    ]
    scale = torch.rand(outputs, device=card.device, generator=generator) / 1000 + 1e-4
    x = torch.randn(rows, inputs, device=card.device, generator=generator).bfloat16()
    out = torch.full((rows, outputs), float("nan"), dtype=torch.bfloat16, device=card.device)
    replay = card.captured(lambda: [int8_matmul(x, each, scale, out=out) for each in weights])
    expected = F.linear(x.float(), weights[-1].float() * scale[:, None])
    error = float(((out.float() - expected).abs() / expected.abs().clamp(min=1.0)).max())
    report.check(f"{name} {rows} rows, 8-bit", error <= TOLERANCE, f"error {error:.1e}", listed=False)
    seconds = card.queued_seconds(replay, 3) / count
    num_bytes = outputs * inputs + 4 * outputs + 2 * rows * (inputs + outputs)
    share = 100 * num_bytes / facts["bandwidth"] / seconds
    report.rate(f"{name}, 8-bit product, {rows} rows: share of copy bandwidth", share, "%", seconds=seconds)
