"""The CPU backend against a plain decoder in float64: all that a spec can ask for, whatever way the work is split."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.models.architecture import expected_tensors
from kernels.cpu import attention
from kernels.cpu.backend import CpuBackend
from kernels.spec import DecoderSpec, StepBatch
from tests.kernels.swap_contract import IMPOSSIBLE_PAIRS, assert_refused

Weights = dict[str, torch.Tensor]

BASE = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=61,
    hidden_size=48,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position=512,
    dtype=torch.float32,
    inv_freq=1.0 / 100.0 ** (torch.arange(0, 16, 2).float() / 16),
)
SPECS = {
    "plain": BASE,
    "partial-rotary": dataclasses.replace(BASE, inv_freq=1.0 / 100.0 ** (torch.arange(0, 8, 2).float() / 8)),
    "partial-rotary-qk-norm": dataclasses.replace(
        BASE, inv_freq=1.0 / 100.0 ** (torch.arange(0, 12, 2).float() / 12), qk_norm=True
    ),
    "all-biases": dataclasses.replace(BASE, attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "mixed-windows": dataclasses.replace(BASE, sliding_window=(None, 5, 9), rope_layers=(True, False, True)),
    "rope-scaling-factor": dataclasses.replace(BASE, rope_attention_scaling=1.2, tie_embeddings=True),
    "group-5-head-80": dataclasses.replace(
        BASE, num_heads=5, num_kv_heads=1, head_dim=80, inv_freq=1.0 / 100.0 ** (torch.arange(0, 80, 2).float() / 80)
    ),
}


def random_weights(spec: DecoderSpec) -> Weights:
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in expected_tensors(spec).items():
        tensor = torch.randn(shape, generator=generator)
        weights[name] = tensor * 0.2 + 1.0 if "norm" in name else tensor * (0.5 if "bias" in name else 0.2)
    return weights


# The plain decoder ---------------------------------------------------------------------------------------------------


def reference_logits(spec: DecoderSpec, weights: Weights, token_ids: list[int]) -> torch.Tensor:
    """float64 [T, vocab], straight from the definitions: no cache, no pages, one head at a time."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][token_ids]
    for layer in range(spec.num_layers):
        p = f"model.layers.{layer}."
        x = x + _attention(spec, w, p, layer, _norm(x, w[p + "input_layernorm.weight"], spec.rms_norm_eps))
        h = _norm(x, w[p + "post_attention_layernorm.weight"], spec.rms_norm_eps)
        gate, up = _linear(w, p + "mlp.gate_proj", h), _linear(w, p + "mlp.up_proj", h)
        x = x + _linear(w, p + "mlp.down_proj", gate * gate.sigmoid() * up)
    head = w["model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"]
    return _norm(x, w["model.norm.weight"], spec.rms_norm_eps) @ head.t()


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ w[name + ".weight"].t()
    return y + w[name + ".bias"] if name + ".bias" in w else y


def _rotated(spec: DecoderSpec, head: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + r/2) turned by position · inv_freq[i]; [T, head_dim]."""
    half = spec.rotary_dim // 2
    angles = torch.arange(head.shape[0]).double()[:, None] * spec.inv_freq.double()
    cos, sin = angles.cos() * spec.rope_attention_scaling, angles.sin() * spec.rope_attention_scaling
    a, b, rest = head[:, :half], head[:, half : 2 * half], head[:, 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _attention(spec: DecoderSpec, w: Weights, p: str, layer: int, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (_linear(w, p + f"self_attn.{n}_proj", x).split(spec.head_dim, dim=-1) for n in "qkv")
    position = torch.arange(x.shape[0])
    hidden = position[None] > position[:, None]
    window = spec.layer_window(layer)
    if window is not None:
        hidden |= position[None] <= position[:, None] - window
    outputs = []
    for head in range(spec.num_heads):
        kv = head // (spec.num_heads // spec.num_kv_heads)
        query, key = q[head], k[kv]
        if spec.qk_norm:
            query = _norm(query, w[p + "self_attn.q_norm.weight"], spec.rms_norm_eps)
            key = _norm(key, w[p + "self_attn.k_norm.weight"], spec.rms_norm_eps)
        if spec.layer_uses_rope(layer):
            query, key = _rotated(spec, query), _rotated(spec, key)
        scores = (query @ key.t() / math.sqrt(spec.head_dim)).masked_fill(hidden, -math.inf)
        outputs.append(scores.softmax(-1) @ v[kv])
    return _linear(w, p + "self_attn.o_proj", torch.cat(outputs, dim=-1))


# Driving the backend -------------------------------------------------------------------------------------------------


def make_batch(rows: list[tuple[list[int], int, int, list[int]]], block_size: int) -> StepBatch:
    """Rows of (all token ids, start, count, block table); the logits of every new token are wanted."""
    tokens, positions, slots = [], [], []
    for ids, start, count, table in rows:
        for position in range(start, start + count):
            tokens.append(ids[position])
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
    counts = [count for _, _, count, _ in rows]
    seq_lens = [start + count for _, start, count, _ in rows]
    widest = max(len(table) for *_, table in rows)
    return StepBatch(
        token_ids=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (widest - len(table)) for *_, table in rows], dtype=torch.int32),
        logits_rows=torch.arange(len(tokens)),
        query_lens_list=counts,
        seq_lens_list=seq_lens,
    )


def worst_difference(
    spec: DecoderSpec, block_size: int = 4, lengths: tuple[int, ...] = (3, 8, 21, 40, 41, 5, 30)
) -> float:
    """Random chunks of several requests, mixed with decodes, until all are computed; against the plain decoder."""
    weights = random_weights(spec)
    backend = CpuBackend()
    backend.load(spec, weights)
    free = list(range(1, 1 + sum(-(-length // block_size) for length in lengths)))
    backend.allocate_kv(1 + len(free), block_size)
    generator = random.Random(2)
    generator.shuffle(free)
    ids = [[generator.randrange(spec.vocab_size) for _ in range(length)] for length in lengths]
    tables = [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]
    references = [reference_logits(spec, weights, each) for each in ids]
    done = [0] * len(lengths)
    worst = 0.0
    while any(done[i] < length for i, length in enumerate(lengths)):
        active = [i for i, length in enumerate(lengths) if done[i] < length]
        counts = {i: min(lengths[i] - done[i], generator.choice([1, 1, 1, 2, 7, 16])) for i in active}
        batch = make_batch([(ids[i], done[i], counts[i], tables[i]) for i in active], block_size)
        for i, logits in zip(active, backend.forward(batch).split(list(counts.values())), strict=True):
            expected = references[i][done[i] : done[i] + counts[i]]
            worst = max(worst, float((logits - expected).abs().max()))
            done[i] += counts[i]
    return worst


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_feature_equals_the_plain_decoder(name: str, block_size: int) -> None:
    assert worst_difference(SPECS[name], block_size) < 1e-4


@pytest.mark.parametrize("name", ["plain", "mixed-windows"])
@pytest.mark.parametrize(
    "limits",
    [
        {"MAX_GROUP_PADDING": 0},
        {"MAX_GROUP_PADDING": 10_000, "MAX_GROUP_BYTES": 1 << 30},
        {"MAX_GROUP_BYTES": 1},
        {"MAX_PIECE_ELEMENTS": 16},
        {"MAX_PIECE_ELEMENTS": 16, "MAX_MASK_ELEMENTS": 0},
        {"MAX_MASK_ELEMENTS": 0},
    ],
)
def test_the_split_of_the_work_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, limits: dict[str, int]
) -> None:
    """Groups of one and of all, chunks in pieces, masks kept and made anew."""
    for constant, value in limits.items():
        monkeypatch.setattr(attention, constant, value)
    assert worst_difference(SPECS[name], lengths=(3, 8, 21, 90, 41, 5, 30)) < 1e-4


@pytest.mark.parametrize("name", ["partial-rotary-qk-norm", "mixed-windows", "all-biases"])
def test_bfloat16_is_near(name: str) -> None:
    spec = dataclasses.replace(SPECS[name], dtype=torch.bfloat16)
    reference = reference_logits(spec, random_weights(spec), list(range(40)))
    assert worst_difference(spec) < 0.4 * float(reference.std())  # a wrong place gives four times the deviation


def test_a_step_without_logits_still_writes_keys_and_values() -> None:
    weights, ids = random_weights(BASE), [5, 6, 7, 8, 9]
    backend = CpuBackend()
    backend.load(BASE, weights)
    backend.allocate_kv(4, 4)
    prompt = make_batch([(ids, 0, 4, [2])], 4)
    nothing = backend.forward(dataclasses.replace(prompt, logits_rows=torch.tensor([], dtype=torch.int64)))
    assert nothing.shape == (0, BASE.vocab_size) and nothing.dtype == torch.float32
    last = backend.forward(make_batch([(ids, 4, 1, [2, 1])], 4))
    assert torch.allclose(last[0].double(), reference_logits(BASE, weights, ids)[-1], atol=1e-4)


def test_a_step_wants_a_model_and_memory() -> None:
    backend, batch = CpuBackend(), make_batch([([5, 6, 7], 0, 3, [1])], 4)
    with pytest.raises(RuntimeError, match="load a model"):
        backend.forward(batch)
    backend.load(BASE, random_weights(BASE))
    with pytest.raises(RuntimeError, match="allocate"):
        backend.forward(batch)


def test_kv_bytes_are_what_is_allocated() -> None:
    backend = CpuBackend()
    backend.load(BASE, random_weights(BASE))
    backend.allocate_kv(10, 16)
    storage = backend._kv()
    assert storage.numel() * storage.element_size() == 10 * backend.kv_bytes_per_block(16)
    assert backend.kv_bytes_per_block(16) == 16 * BASE.kv_bytes_per_token()
    assert not storage.any()


# Host memory ---------------------------------------------------------------------------------------------------------


def filled_backend(num_blocks: int, num_host_blocks: int) -> tuple[CpuBackend, torch.Tensor]:
    """A backend whose pool holds numbers, and a copy of them: [layers, blocks, values]."""
    backend = CpuBackend()
    backend.load(BASE, random_weights(BASE))
    backend.allocate_kv(num_blocks, 4)
    backend.allocate_host_kv(num_host_blocks)
    backend._kv().copy_(torch.randn(backend._kv().shape, generator=torch.Generator().manual_seed(4)))
    return backend, backend._kv().clone()


def test_swapped_blocks_come_back_in_every_layer() -> None:
    """Pairs in odd orders, to other blocks than they came from, and out of blocks that were overwritten meanwhile."""
    backend, before = filled_backend(12, 9)
    backend.swap_out([(7, 3), (2, 8), (11, 1)])
    backend._kv()[:, [7, 2, 11]] = math.nan
    backend.swap_out([(5, 4)])
    backend.swap_in([(8, 9), (1, 2), (4, 11), (3, 7)])
    expected = before.clone()
    expected[:, [9, 2, 11, 7]] = before[:, [2, 11, 5, 7]]
    assert torch.equal(backend._kv(), expected)


def test_many_blocks_move_at_once() -> None:
    backend, before = filled_backend(2001, 1500)
    generator = random.Random(8)
    blocks, host_blocks = generator.sample(range(1, 2001), 1499), generator.sample(range(1, 1500), 1499)
    backend.swap_out(list(zip(blocks, host_blocks, strict=True)))
    backend._kv()[:, blocks] = 0.0
    backend.swap_in(list(zip(host_blocks, blocks, strict=True)))
    assert torch.equal(backend._kv(), before)


@pytest.mark.parametrize("pair", IMPOSSIBLE_PAIRS)
def test_blocks_that_do_not_exist_are_not_moved(pair: tuple[int, int]) -> None:
    backend, before = filled_backend(12, 9)
    assert_refused(backend, pair)
    assert torch.equal(backend._kv(), before)


def test_host_memory_is_asked_for_before_it_is_used() -> None:
    backend, _ = filled_backend(12, 9)
    backend._host_storage = None
    with pytest.raises(RuntimeError, match="host"):
        backend.swap_out([(1, 1)])


# Large steps ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def peak_below(megabytes: int) -> Iterator[None]:
    """Linux keeps a process's highest use of memory, since 5 was last written to ``clear_refs`` (``man proc``)."""

    def kilobytes(name: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1])

    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    yield
    assert kilobytes("VmHWM") - before < megabytes * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
def test_large_steps_take_little_memory_and_change_nothing() -> None:
    """A prompt of 4,000 tokens in one step, then 2,048 behind them: no whole matrix of scores or mask is ever there. A
    step of 32 padded prompts gives what each gives alone."""
    spec = dataclasses.replace(BASE, num_layers=1, max_position=8192)
    backend = CpuBackend()
    backend.load(spec, random_weights(spec))
    backend.allocate_kv(1 + 2 * 378, 16)
    generator = random.Random(6)
    ids = [generator.randrange(spec.vocab_size) for _ in range(6048)]
    whole, parts = list(range(1, 379)), list(range(379, 757))

    def last_logits(rows: list[tuple[list[int], int, int, list[int]]]) -> torch.Tensor:
        batch = make_batch(rows, 16)
        return backend.forward(dataclasses.replace(batch, logits_rows=batch.query_start[1:].long() - 1))

    last_logits([(ids, 0, 64, parts)])
    with peak_below(64):  # the scores of one head alone would be 61 MiB, the second step's mask 47 MiB
        logits = [last_logits([(ids, 0, 4000, whole)]), last_logits([(ids, 4000, 2048, whole)])]
    for start, end in itertools.pairwise([0, 1500, 3000, 4000, 5000, 6048]):
        stepwise = last_logits([(ids, start, end - start, parts)])
        if end in (4000, 6048):
            assert torch.allclose(stepwise, logits.pop(0), atol=1e-4)
    assert not logits
    rows = [(ids[i:], 0, 64, parts[4 * i : 4 * i + 4]) for i in range(32)]
    with peak_below(64):
        together = last_logits(rows)
    alone = torch.cat([last_logits([row]) for row in rows])
    assert torch.allclose(together, alone, atol=1e-4)
