"""What a request's logits do not depend on, bit for bit: who is beside it, how it is cut into steps, how many threads
there are, where its blocks lie and lay, and what others left in memory, be it NaN."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from kernels.spec import DecoderSpec
from tests.kernels.plain_decoder import BASE, SPECS, TYPES, Row, Weights, loaded, make_batch, random_weights, typed

BLOCK = 4
BLOCKS = 120
LENGTHS = (23, 1, 40, 9)
# Windows that start within a block, biases, and heads in fives, which do not fill a tile: whatever takes a path of its
# own. More rows than a row block of a product in the batch of all.
MODELS = {
    "windows": dataclasses.replace(SPECS["mixed-windows"], attention_bias=True, mlp_bias=True, qk_norm=True),
    "odd": dataclasses.replace(SPECS["group-5-head-80"], hidden_size=47, intermediate_size=37, vocab_size=101),
}

pytestmark = pytest.mark.parametrize("kind", TYPES)
by_model = pytest.mark.parametrize("model", MODELS)


class Requests:
    """Token ids of a few requests, and a backend that computes them."""

    def __init__(self, spec: DecoderSpec, threads: int = 1, weights: Weights | None = None, seed: int = 3) -> None:
        self.spec = spec
        self.backend = loaded(spec, random_weights(spec) if weights is None else weights, BLOCKS, BLOCK, threads)
        self.generator = random.Random(seed)
        ids = random.Random(5)
        self.ids = [[ids.randrange(1, spec.vocab_size) for _ in range(length)] for length in LENGTHS]
        self.free = list(range(1, BLOCKS))
        self.generator.shuffle(self.free)

    def table(self, request: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-len(self.ids[request]) // BLOCK))]

    def step(self, rows: list[Row]) -> list[torch.Tensor]:
        counts = [count for _, _, count, _ in rows]
        return list(self.backend.forward(make_batch(rows, BLOCK)).split(counts))

    def alone(self, request: int, chunks: list[int] | None = None, table: list[int] | None = None) -> torch.Tensor:
        """Logits of all its tokens, in steps of ``chunks`` tokens."""
        ids, done, parts = self.ids[request], 0, []
        table = self.table(request) if table is None else table
        for count in chunks or [len(ids)]:
            parts += self.step([(ids, done, count, table)])
            done += count
        assert done == len(ids)
        return torch.cat(parts)

    def together(self) -> list[torch.Tensor]:
        """Logits of all requests, in steps of random chunks of a random choice of them, in random order."""
        tables = [self.table(request) for request in range(len(LENGTHS))]
        done, parts = [0] * len(LENGTHS), [[] for _ in LENGTHS]  # type: ignore[var-annotated]
        while any(done[i] < length for i, length in enumerate(LENGTHS)):
            left = [i for i, length in enumerate(LENGTHS) if done[i] < length]
            chosen = self.generator.sample(left, self.generator.randint(1, len(left)))
            counts = [min(LENGTHS[i] - done[i], self.generator.choice([1, 2, 5, 30])) for i in chosen]
            rows = [(self.ids[i], done[i], count, tables[i]) for i, count in zip(chosen, counts, strict=True)]
            for i, count, logits in zip(chosen, counts, self.step(rows), strict=True):
                parts[i].append(logits)
                done[i] += count
        return [torch.cat(each) for each in parts]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.isfinite().all()) and torch.equal(a, b)


@by_model
def test_the_chunking(model: str, kind: str) -> None:
    requests = Requests(typed(MODELS[model], kind))
    for request, length in enumerate(LENGTHS):
        whole = requests.alone(request)
        assert same(whole, requests.alone(request, [1] * length))
        if length > 8:
            assert same(whole, requests.alone(request, [length - 8, 1, 1, 6]))
            assert same(whole, requests.alone(request, [3, length - 3]))


@by_model
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_batch_and_the_threads(model: str, kind: str, threads: int) -> None:
    spec = typed(MODELS[model], kind)
    single = Requests(spec)
    alone = [single.alone(request) for request in range(len(LENGTHS))]
    requests = Requests(spec, threads, seed=threads)
    rows = [(requests.ids[i], 0, length, requests.table(i)) for i, length in enumerate(LENGTHS)]
    for logits in (requests.step(rows), requests.together(), requests.together()):
        assert all(same(one, other) for one, other in zip(alone, logits, strict=True))


def test_more_rows_than_a_product_takes_at_once(kind: str) -> None:
    requests = Requests(typed(BASE, kind), threads=2)
    alone = requests.alone(0)
    copies = [(requests.ids[0], 0, len(alone), requests.table(0)) for _ in range(9)]  # 207 rows
    assert all(same(alone, logits) for logits in requests.step(copies))


def test_which_logits_are_wanted(kind: str) -> None:
    requests = Requests(typed(BASE, kind))
    alone = requests.alone(2)
    batch = make_batch([(requests.ids[2], 0, len(alone), requests.table(2))], BLOCK)
    for wanted in ([5], [39, 5, 5, 0], []):
        rows = torch.tensor(wanted, dtype=torch.int64)
        assert same(alone[rows], requests.backend.forward(dataclasses.replace(batch, logits_rows=rows)))


@by_model
def test_blocks_that_moved(model: str, kind: str) -> None:
    """To the host and back to others, and to copies, with the last block not full; the ones left behind are NaN."""
    requests = Requests(typed(MODELS[model], kind))
    backend, ids = requests.backend, requests.ids[0]
    backend.allocate_host_kv(20)
    backend._host_kv().fill_(math.nan)
    expected = requests.alone(0)[14:]

    def moved(table: list[int], places: list[int]) -> torch.Tensor:
        backend._kv()[:, table] = math.nan
        return torch.cat([logits for at in range(14, 23) for logits in requests.step([(ids, at, 1, places)])])

    table, places = requests.table(0), requests.table(0)
    requests.step([(ids, 0, 14, table)])
    backend.copy_blocks(list(zip(table[:4], places[:4], strict=True)))
    assert same(expected, moved(table, places))
    requests.step([(ids, 0, 14, table)])
    host = [7, 3, 12, 1]
    backend.swap_out(list(zip(table[:4], host, strict=True)))
    backend._kv()[:, places] = math.nan
    backend.swap_in(list(zip(host, places[:4], strict=True)))
    assert same(expected, moved(table, places))


@by_model
def test_tokens_that_are_taken_back(model: str, kind: str) -> None:
    """Drafts that were computed and refused leave keys and values, in a block that they began too."""
    requests = Requests(typed(MODELS[model], kind))
    ids, table = requests.ids[0], requests.table(0)
    expected = requests.alone(0)
    drafts = [*ids[:7], *reversed(ids)]
    requests.step([(drafts, 0, 14, table)])
    logits = [requests.step([(ids, at, 1, table)])[0] for at in range(7, 23)]
    assert same(expected[7:], torch.cat(logits))


# What is not finite -------------------------------------------------------------------------------------------------


def broken_at_token_0(spec: DecoderSpec, value: float) -> Weights:
    """One number of a token's embedding is ``value``."""
    weights = random_weights(spec)
    weights["model.embed_tokens.weight"][0, 3] = value
    return weights


@by_model
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_ends_its_request_alone(model: str, kind: str, value: float) -> None:
    spec = typed(MODELS[model], kind)
    sound = Requests(spec)
    expected = [sound.alone(request) for request in range(len(LENGTHS))]
    requests = Requests(spec, threads=2, weights=broken_at_token_0(spec, value))
    broken = list(requests.ids[2])
    broken[11] = 0
    table = requests.table(2)
    rows: list[Row] = [(requests.ids[i], 0, LENGTHS[i], requests.table(i)) for i in (0, 1, 3)]
    for start in (0, 20):
        first, last = (requests.step([*rows[:2], (broken, start, 20, table), rows[2]]) for _ in range(2))
        for one, other in zip(first, last, strict=True):
            assert torch.equal(one.nan_to_num(7.0, 7.0, 7.0), other.nan_to_num(7.0, 7.0, 7.0))
        for logits, i in zip((first[0], first[1], first[3]), (0, 1, 3), strict=True):
            assert same(expected[i], logits)
        assert not first[2][-9:].isfinite().any()
        if start == 0:
            assert same(expected[2][:8], first[2][:8])  # tokens before it in its block meet it with a weight of 0
            assert not first[2][11:].isfinite().any()
    # Its blocks go to another request, which fills the last of them only in part.
    assert same(expected[0], requests.alone(0, [5] * 4 + [3], table[::-1]))


@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.down_proj"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_shows(name: str, value: float, kind: str) -> None:
    spec = typed(BASE, kind)
    weights = random_weights(spec)
    weights[f"model.layers.1.{name}.weight"][7, 5] = value
    assert not Requests(spec, weights=weights).alone(0).isfinite().any()


def test_a_row_of_zeros_is_no_number_gone_wrong(kind: str) -> None:
    """Its largest magnitude has no inverse; neither has one that is nearly zero."""
    spec = typed(BASE, kind)
    weights = random_weights(spec)
    for name, factor in (("1.self_attn.v_proj", 0.0), ("0.mlp.up_proj", 1e-37), ("2.mlp.down_proj", 1e-39)):
        weights[f"model.layers.{name}.weight"] *= factor
    logits = Requests(spec, weights=weights).alone(0)
    for name in ("1.self_attn.o_proj", "0.mlp.down_proj", "2.mlp.down_proj"):
        weights[f"model.layers.{name}.weight"] *= 0.0
    assert torch.allclose(logits, Requests(spec, weights=weights).alone(0), atol=1e-5)
