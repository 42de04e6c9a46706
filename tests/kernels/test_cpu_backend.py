"""The CPU backend against a plain decoder in float64: all that a spec can ask for, in every type, and its memory."""

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

from kernels.cpu.backend import CpuBackend
from kernels.spec import DecoderSpec
from tests.kernels.plain_decoder import (
    BASE,
    SPECS,
    TYPES,
    Row,
    loaded,
    make_batch,
    random_weights,
    reference_logits,
    typed,
)
from tests.kernels.swap_contract import IMPOSSIBLE_PAIRS, assert_refused

WORST = {"float32": 1e-4, "bfloat16": 2e-2, "int8": 1e-1}
"""Logits deviate by 1.5. A number of the cache near the middle between two of bfloat16 may fall to the other side; int8
products round their rows to 13 bits, and these decoders amplify any rounding some 200 times."""


def worst_difference(
    spec: DecoderSpec, block_size: int = 4, lengths: tuple[int, ...] = (3, 8, 21, 40, 41, 5, 30)
) -> float:
    """Random chunks of several requests, mixed with decodes, until all are computed; against the plain decoder."""
    weights = random_weights(spec)
    free = list(range(1, 1 + sum(-(-length // block_size) for length in lengths)))
    backend = loaded(spec, weights, 1 + len(free), block_size)
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
            assert logits.isfinite().all()
            expected = references[i][done[i] : done[i] + counts[i]]
            worst = max(worst, float((logits - expected).abs().max()))
            done[i] += counts[i]
    return worst


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_feature_equals_the_plain_decoder(name: str, block_size: int, kind: str) -> None:
    assert worst_difference(typed(SPECS[name], kind), block_size) < WORST[kind]


@pytest.mark.parametrize("kind", TYPES)
def test_a_long_context_equals_the_plain_decoder(kind: str) -> None:
    """Rotary angles are float32, so that they lose digits at high positions."""
    assert worst_difference(typed(BASE, kind), 16, lengths=(700, 3, 333)) < 4 * WORST[kind]


def test_other_types_are_refused() -> None:
    spec = dataclasses.replace(BASE, dtype=torch.float16)
    with pytest.raises(ValueError, match="float16"):
        CpuBackend().load(spec, random_weights(spec))


def test_a_step_without_logits_still_writes_keys_and_values() -> None:
    weights, ids = random_weights(BASE), [5, 6, 7, 8, 9]
    backend = loaded(BASE, weights, 4, 4)
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

    def last_logits(rows: list[Row]) -> torch.Tensor:
        batch = make_batch(rows, 16)
        return backend.forward(dataclasses.replace(batch, logits_rows=batch.query_start[1:].long() - 1))

    last_logits([(ids, 0, 64, parts)])
    with peak_below(64):  # the scores of one head alone would be 61 MiB, the second step's mask 47 MiB
        logits = [last_logits([(ids, 0, 4000, whole)]), last_logits([(ids, 4000, 2048, whole)])]
    for start, end in itertools.pairwise([0, 1500, 3000, 4000, 5000, 6048]):
        stepwise = last_logits([(ids, start, end - start, parts)])
        if end in (4000, 6048):
            assert torch.equal(stepwise, logits.pop(0))
    assert not logits
    rows = [(ids[i:], 0, 64, parts[4 * i : 4 * i + 4]) for i in range(32)]
    with peak_below(64):
        together = last_logits(rows)
    alone = torch.cat([last_logits([row]) for row in rows])
    assert torch.equal(together, alone)
