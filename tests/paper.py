"""A decode step on paper: ``python -m tests.paper`` prints the tables of the README's section on the GPU.

What a step of B requests, each with a context of n tokens, must at least move and compute::

    weights   every matrix of every layer and the head, once, and the norms
    KV        the keys and values of B · n tokens in every layer; those of B new ones are written
    logits    B rows of the vocabulary, written
    floor     max(bytes / bandwidth, operations / rate) on a card (:mod:`kernels.cards`)

and what our step adds to that, counted from the code that runs it: what the kernels of a layer hand to each other, what
sampling reads, how many kernels there are and what is copied to the device. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch

from kernels.cards import GB, TERA, Card, named_card
from kernels.spec import DecoderSpec
from kernels.triton.attention_tiles import decode_splits
from kernels.triton.int8_matmul import matmul_grid, matmul_tile
from kernels.triton.step_inputs import StepShape, step_layout

CONTEXT = 1024
BATCHES = (1, 32, 128)
BLOCK_SIZE = 16
CARDS = (named_card("RTX 4090"), named_card("H200 SXM"))
SCALE_BYTES = 4
"""Of an output channel of an int8 matrix."""


def _llama(hidden: int, intermediate: int, layers: int, head_dim: int, *, tied: bool) -> DecoderSpec:
    return DecoderSpec(
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_position=131_072,
        dtype=torch.bfloat16,
        inv_freq=torch.ones(head_dim // 2),
        tie_embeddings=tied,
    )


MODELS = {
    "Llama 3.2 1B": _llama(2048, 8192, 16, 64, tied=True),
    "Llama 3.1 8B": _llama(4096, 14336, 32, 128, tied=False),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    outputs: int
    inputs: int

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs


def layer_matrices(spec: DecoderSpec) -> list[Matrix]:
    """q, k and v; out; gate and up; down."""
    hidden, inner, queries = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    joined = queries + 2 * spec.num_kv_heads * spec.head_dim
    return [Matrix(joined, hidden), Matrix(hidden, queries), Matrix(2 * inner, hidden), Matrix(hidden, inner)]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Bytes and operations of one step, all at the least."""

    weights: int
    kv: int
    logits: int
    operations: int
    """Of matrix products, attention's included."""

    @property
    def bytes(self) -> int:
        return self.weights + self.kv + self.logits

    def floor_s(self, card: Card) -> float:
        seconds = card.roofline_s(self.bytes, self.operations, "bf16")
        assert seconds is not None
        return seconds


def decode_step(spec: DecoderSpec, requests: int, context: int = CONTEXT) -> DecodeStep:
    """Of ``requests`` requests that each have ``context`` tokens, the one that is computed among them."""
    matrices = layer_matrices(spec) * spec.num_layers + [Matrix(spec.vocab_size, spec.hidden_size)]
    norms = (2 * spec.num_layers + 1) * spec.hidden_size * spec.dtype.itemsize
    pairs = spec.num_layers * spec.num_heads * spec.head_dim * requests * context
    return DecodeStep(
        weights=sum(_matrix_bytes(spec, matrix) for matrix in matrices) + norms,
        kv=requests * (context + 1) * spec.kv_bytes_per_token(),
        logits=requests * spec.vocab_size * spec.dtype.itemsize,
        operations=2 * requests * sum(matrix.weights for matrix in matrices) + 4 * pairs,
    )


def _matrix_bytes(spec: DecoderSpec, matrix: Matrix) -> int:
    if spec.weight_dtype == torch.int8:
        return matrix.weights + SCALE_BYTES * matrix.outputs
    return matrix.weights * spec.dtype.itemsize


def resident_bytes(spec: DecoderSpec, requests: int, context: int = CONTEXT) -> int:
    """What weights and keys and values occupy: beside what a step reads, an embedding that is not the head."""
    step = decode_step(spec, requests, context)
    embedding = 0 if spec.tie_embeddings else _matrix_bytes(spec, Matrix(spec.vocab_size, spec.hidden_size))
    return step.weights + embedding + step.kv


# What our step adds --------------------------------------------------------------------------------------------------

KERNELS_OF_A_LAYER = 9
"""Norm, q/k/v, KV write, attention, out; norm, gate and up, SiLU·mul, down. A product of torch's counts as one."""
KERNELS_OF_A_STEP = 5
"""Embedding, final norm; head, and the two of sampling, which come behind the graph."""


@dataclass(frozen=True, slots=True)
class Added:
    """What our decode step takes beside its floor."""

    kernels: int
    """All but the head's and sampling's are launched by one CUDA graph."""
    between_kernels: int
    """Bytes that one kernel writes and another reads; a layer's share mostly stays in the second-level cache."""
    sampling: int
    """Bytes of logits read again."""
    upload: int
    """Bytes of the one copy to the device."""


def added(spec: DecoderSpec, requests: int, card: Card, context: int = CONTEXT) -> Added:
    assert card.multiprocessors is not None
    splits = decode_splits(requests, spec.num_kv_heads, card.multiprocessors)
    shape = StepShape(num_tokens=requests, num_requests=requests, num_logits=requests)
    return Added(
        kernels=num_kernels(spec, requests, splits.most),
        between_kernels=_between_kernels(spec, requests, splits.used(context)),
        sampling=requests * spec.vocab_size * spec.dtype.itemsize,
        upload=step_layout(shape).num_bytes(requests, -(-context // BLOCK_SIZE)),
    )


def num_kernels(spec: DecoderSpec, requests: int, splits: int) -> int:
    """Of a decode step whose attention may be split over so many programs: it has a second kernel then, as has an int8
    product whose depth is cut."""
    head = Matrix(spec.vocab_size, spec.hidden_size)
    cut = [_cuts(spec, matrix, requests) > 1 for matrix in layer_matrices(spec)]
    of_a_layer = KERNELS_OF_A_LAYER + (splits > 1) + sum(cut)
    return spec.num_layers * of_a_layer + KERNELS_OF_A_STEP + (_cuts(spec, head, requests) > 1)


def _cuts(spec: DecoderSpec, matrix: Matrix, rows: int) -> int:
    if spec.weight_dtype != torch.int8:
        return 1
    return matmul_grid(matmul_tile(rows, matrix.inputs, spec.dtype), rows, matrix.outputs, matrix.inputs).cuts


def _between_kernels(spec: DecoderSpec, requests: int, splits: int) -> int:
    hidden, inner, queries = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    joined = queries + 2 * spec.num_kv_heads * spec.head_dim
    norm = 4 * hidden  # two addends, their sum and its norm
    attention_block = norm + (hidden + joined) + (joined + queries) + 2 * queries + (queries + hidden)
    mlp_block = norm + (hidden + 2 * inner) + 3 * inner + (inner + hidden)
    # Partial results are float32: of each split a row of values and one logarithm, of each cut a row of sums.
    partials = splits * spec.num_heads * (spec.head_dim + 1) if splits > 1 else 0
    cuts = [(_cuts(spec, matrix, requests), matrix.outputs) for matrix in layer_matrices(spec)]
    partials += sum(count * outputs for count, outputs in cuts if count > 1)
    of_a_layer = (attention_block + mlp_block) * spec.dtype.itemsize + 2 * partials * torch.float32.itemsize
    return requests * spec.num_layers * of_a_layer


# The tables ----------------------------------------------------------------------------------------------------------

WEIGHTS = {"bf16": None, "int8": torch.int8}
LAUNCH_S = 1e-6
"""Assumed, from the end of a kernel to the start of the next in a graph."""


def variants() -> list[tuple[str, DecoderSpec]]:
    """Every model with every type of weights, as the tables name it."""
    return [
        (f"{model}, {name}", replace(spec, weight_dtype=weight_dtype))
        for model, spec in MODELS.items()
        for name, weight_dtype in WEIGHTS.items()
    ]


def _floor(spec: DecoderSpec, requests: int, card: Card) -> str:
    assert card.memory is not None
    if resident_bytes(spec, requests) > card.memory:
        return "does not fit"
    seconds = decode_step(spec, requests).floor_s(card)
    return f"{1e3 * seconds:.2f} ms, {requests / seconds:,.0f} tok/s"


def floor_table() -> str:
    rows = [["model", "requests", "weights", "KV", "logits", "operations", *(card.name for card in CARDS)]]
    for name, spec in variants():
        for requests in BATCHES:
            step = decode_step(spec, requests)
            sizes = [f"{step.weights / GB:.2f} GB", f"{step.kv / GB:.2f} GB", f"{step.logits / 1e6:.1f} MB"]
            operations = f"{step.operations / TERA:.3f} T"
            rows.append([name, str(requests), *sizes, operations, *(_floor(spec, requests, card) for card in CARDS)])
    return _markdown(rows)


def added_table() -> str:
    card = CARDS[-1]
    rows = [["model", "requests", "kernels", "at 1 µs each", "between kernels", "sampling", "upload"]]
    for name, spec in variants():
        for requests in BATCHES:
            ours, floor = added(spec, requests, card), decode_step(spec, requests).floor_s(card)

            def beside(seconds: float, floor: float = floor) -> str:
                return f"{1e3 * seconds:.2f} ms, {seconds / floor:.1%}"

            handed = f"{ours.between_kernels / 1e6:,.0f} MB, {ours.between_kernels / card.bandwidth / floor:.1%}"
            launches = beside(ours.kernels * LAUNCH_S)
            moved = [handed, f"{ours.sampling / 1e6:.1f} MB", f"{ours.upload / 1e3:.1f} kB"]
            rows.append([name, str(requests), str(ours.kernels), launches, *moved])
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m tests.paper",
        description="A decode step on paper: its floor on two cards, and what ours adds, as the README shows them.",
    ).parse_args()
    print(floor_table(), added_table(), sep="\n\n")
