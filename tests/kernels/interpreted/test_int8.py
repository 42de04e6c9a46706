"""Weights of 8 bits on a GPU: how they are rounded, multiplied and looked up, and a whole engine on them."""

from __future__ import annotations

import dataclasses
import math
import mmap
from typing import Any

import numpy as np
import pytest
import torch

from engine.execution.runner import host_step
from kernels.backend import Backend
from kernels.spec import DecoderSpec
from kernels.triton import matrix
from kernels.triton.backend import TritonBackend
from kernels.triton.embedding import embedding
from kernels.triton.int8_matmul import (
    ODD_TILE,
    PROGRAMS,
    TILES,
    int8_matmul,
    int8_matmul_kernel,
    matmul_constants,
    matmul_grid,
    matmul_tile,
)
from kernels.triton.matrix import LARGEST, Matrix, linear, packed, quantise
from kernels.triton.verification.base import tolerance
from kernels.triton.verification.int8 import embedding_error, int8_matmul_error
from tests.kernels.interpreted.tiny_engine import (
    BLOCK_SIZE,
    run_engine,
    tiny_spec,
    tiny_weights,
)

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is allocated without being filled holds NaN: partial sums, and results that nobody wrote."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        memory = empty(*size, **options)
        return memory.fill_(math.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        (1, 1, 16),
        (1, 65, 1072),  # several cuts, the last one shorter, its last step partly masked
        (16, 64, 128),
        (17, 129, 80),
        (64, 3, 1088),
        (65, 130, 144),
        (3, 33, 577),
        (70, 31, 17),
    ],
)
def test_products(dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    assert int8_matmul_error(dtype=dtype, rows=rows, outputs=outputs, inputs=inputs) <= tolerance(dtype)


def test_the_shapes_above_take_every_tile_and_both_ways_to_the_result() -> None:
    shapes = [(1, 65, 1072), (17, 129, 80), (65, 130, 144), (3, 33, 577)]
    tiles = {matmul_tile(rows, inputs, dtype) for dtype in (FP32, BF16) for rows, _, inputs in shapes}
    assert tiles == {*TILES.values(), ODD_TILE}
    assert [matmul_grid(matmul_tile(r, k, BF16), r, n, k).cuts > 1 for r, n, k in shapes] == [True, False, False, False]


def test_products_without_a_bias_and_without_rows() -> None:
    assert int8_matmul_error(inputs=528, bias=False) <= tolerance(FP32)
    nothing = int8_matmul(torch.empty(0, 32), torch.ones(5, 32, dtype=torch.int8), torch.ones(5))
    assert nothing.shape == (0, 5)


def test_a_row_gives_the_same_bits_in_any_batch_of_its_tile() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(16, 528, generator=generator)
    q = torch.randint(-LARGEST, LARGEST + 1, (33, 528), generator=generator, dtype=torch.int8)
    scale = torch.rand(33, generator=generator)
    assert matmul_grid(TILES[(16, 4)], 16, 33, 528).cuts > 1
    together = int8_matmul(x, q, scale)
    for rows in (1, 15):
        assert torch.equal(int8_matmul(x[:rows], q, scale), together[:rows])


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    x = torch.ones(3, 528)
    x[1, 400] = math.nan
    result = int8_matmul(x, torch.ones(5, 528, dtype=torch.int8), torch.ones(5))
    assert bool(torch.isnan(result[1]).all()) and bool((result[[0, 2]] == 528).all())


@pytest.mark.parametrize(
    "shape", [(2048, 2048), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 256, 2048])
def test_grids_cover_k_once_and_fill_a_gpu(shape: tuple[int, int], rows: int) -> None:
    outputs, inputs = shape
    tile = matmul_tile(rows, inputs, BF16)
    grid = matmul_grid(tile, rows, outputs, inputs)
    steps = -(-inputs // tile.depth)
    assert (grid.cuts - 1) * grid.steps_per_cut < steps <= grid.cuts * grid.steps_per_cut
    partial_bytes = 0 if grid.cuts == 1 else 2 * 4 * grid.cuts * tile.rows * outputs
    assert partial_bytes <= outputs * inputs / 2
    if rows <= 16:
        assert grid.tiles * grid.cuts >= min(PROGRAMS, outputs // tile.outputs * (steps // 4)) * 3 // 4
        assert grid == matmul_grid(tile, 1, outputs, inputs), "the order of sums depends on who shares the batch"


def test_products_beyond_two_to_the_31() -> None:
    """Outputs whose weights begin behind 2^31 numbers, of which the first cut reads but 128 each."""
    inputs, outputs = 2**26, 64
    memory = mmap.mmap(-1, outputs * inputs, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    q = torch.frombuffer(memory, dtype=torch.int8).view(outputs, inputs)
    q[:, :128] = torch.arange(outputs)[:, None]
    tile = TILES[(16, 2)]
    partials = torch.full((2, 1, outputs), math.nan)
    x = torch.ones(128, dtype=FP16)
    int8_matmul_kernel[(1, 1)](
        x, partials, x, q, partials, None, 1, outputs, 2, 1, **matmul_constants(tile, inputs), num_warps=tile.num_warps
    )
    assert torch.equal(partials[0, 0], 128.0 * torch.arange(outputs))
    assert bool(torch.isnan(partials[1]).all())


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("columns", [1, 577, 2049])
def test_rows_of_the_embedding(dtype: torch.dtype, quantised: bool, columns: int) -> None:
    error = embedding_error(dtype=dtype, quantised=quantised, columns=columns)
    assert error <= (tolerance(dtype) if quantised else 0.0)


def test_ids_that_are_all_known() -> None:
    assert embedding_error(sampled=False) == 0.0
    table = Matrix(torch.arange(12.0).view(4, 3))
    ids, source = torch.tensor([3, 1]), torch.tensor([-1, -1], dtype=torch.int32)
    expected = [[9.0, 10.0, 11.0], [3.0, 4.0, 5.0]]
    assert embedding(ids, table, FP32).tolist() == expected
    assert embedding(ids, table, FP32, token_source=source, previous=torch.tensor([0])).tolist() == expected
    assert embedding(ids[:0], table, FP32).shape == (0, 3)


def _quantised(rows: torch.Tensor) -> Matrix:
    weight = torch.full(rows.shape, -128, dtype=torch.int8)
    scale = torch.full((rows.shape[0],), math.nan)
    quantise(rows, weight, scale)
    return Matrix(weight, scale)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_no_weight_moves_by_more_than_half_a_scale(dtype: torch.dtype) -> None:
    rows = (torch.randn(50, 77, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 50)[:, None]).to(
        dtype
    )
    result = _quantised(rows)
    assert result.scale is not None
    exact = rows.double()
    assert torch.equal(result.scale, rows.float().abs().amax(dim=1) / 127)
    moved = (result.scale.double()[:, None] * result.weight.double() - exact).abs()
    assert bool((moved <= result.scale.double()[:, None] * 0.50001).all())
    assert bool((result.weight.abs().amax(dim=1) == 127).all()), "the largest weight of a row keeps its value"


def test_rows_of_zeros_and_of_next_to_nothing() -> None:
    rows = torch.zeros(4, 8)
    rows[1, 3] = -(2.0**-149)  # float32 holds no 127th part of it
    rows[2, 5] = 2.0**-126
    rows[3] = -0.0
    result = _quantised(rows)
    y = linear(torch.ones(1, 8), result)
    assert bool(torch.isfinite(y).all()) and y[0, [0, 1, 3]].tolist() == [0.0, 0.0, 0.0]
    assert result.weight[2, 5] == 127


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # zero times infinity, as is wanted
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_give_none(value: float) -> None:
    rows = torch.ones(3, 16)
    rows[1, 4] = value
    result = _quantised(rows)
    y = linear(torch.ones(2, 16), result)
    assert bool(torch.isnan(y[:, 1]).all()) and bool((y[:, [0, 2]] == 16.0).all())
    looked_up = embedding(torch.tensor([0, 1, 2]), result, BF16)
    assert bool(torch.isnan(looked_up[1]).all()) and bool((looked_up[[0, 2]] == 1.0).all())


def test_parts_are_packed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.randn(rows, 24, generator=torch.Generator().manual_seed(rows)).to(BF16) for rows in (7, 1, 12)]
    whole = packed(parts, CPU, FP16, torch.int8)
    monkeypatch.setattr(matrix, "_NUMBERS_AT_ONCE", 50)
    piecewise, alone = packed(parts, CPU, FP16, torch.int8), _quantised(torch.cat(parts))
    for result in (whole, piecewise):
        assert result.scale is not None and alone.scale is not None
        assert torch.equal(result.weight, alone.weight) and torch.equal(result.scale, alone.scale)
    plain = packed(parts, CPU, FP16, None)
    assert plain.scale is None and torch.equal(plain.weight, torch.cat(parts).to(FP16))


ALIGNED = tiny_spec(hidden_size=64, intermediate_size=96, num_layers=1, num_heads=2, tie_embeddings=True)
ODD = tiny_spec(
    num_layers=1, num_heads=3, head_dim=24, attention_bias=True, attention_out_bias=True, mlp_bias=True, qk_norm=True
)
INT8_SPECS = {"odd widths, untied, biases": ODD, "widths of 16, tied": ALIGNED}


def _int8(spec: DecoderSpec) -> DecoderSpec:
    return dataclasses.replace(spec, weight_dtype=torch.int8)


def _dequantised(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kept = dict(weights)
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            rounded = _quantised(tensor)
            assert rounded.scale is not None
            kept[name] = rounded.scale[:, None] * rounded.weight
    return kept


def _logits(backend: Backend, spec: DecoderSpec, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of every token of two prompts."""
    backend.load(spec, weights)
    backend.allocate_kv(8, BLOCK_SIZE)
    tokens = [[3, 14, 15, 9, 26, 5, 35], [8, 9, 7]]
    lengths = np.array([len(each) for each in tokens])
    step = host_step(tokens, [0, 0], [[1, 2], [3]], np.array([0, 0]), lengths, BLOCK_SIZE)
    return backend.forward(backend.upload(step)).float()


@pytest.mark.parametrize("name", INT8_SPECS)
def test_logits_are_those_of_the_rounded_weights(name: str) -> None:
    """Nothing else is rounded: beside float32 on the same rounded weights only the order of sums differs. Beside the
    weights that were not, logits move by less than a twentieth of their size."""
    spec = INT8_SPECS[name]
    weights = tiny_weights(spec)
    result = _logits(TritonBackend("cpu"), _int8(spec), weights)
    assert torch.allclose(result, _logits(TritonBackend("cpu"), spec, _dequantised(weights)), atol=5e-5)
    exact = _logits(TritonBackend("cpu"), spec, weights)
    assert 1e-4 < float((result - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_beside_int8_the_rest_has_the_models_type(dtype: torch.dtype) -> None:
    spec = dataclasses.replace(_int8(ALIGNED), dtype=dtype)
    backend = TritonBackend("cpu")
    result = _logits(backend, spec, tiny_weights(spec))
    exact = _logits(TritonBackend("cpu"), ALIGNED, tiny_weights(ALIGNED))
    assert backend.kv.dtype == dtype and backend.weights.final_norm.dtype == dtype
    assert backend.weights.head is backend.weights.embedding, "a tied matrix is there once"
    assert float((result - exact).norm() / exact.norm()) < 0.05


def test_another_type_of_weights_is_refused() -> None:
    spec = dataclasses.replace(ALIGNED, weight_dtype=torch.float16)
    with pytest.raises(ValueError, match="float16"):
        TritonBackend("cpu").load(spec, tiny_weights(spec))


def test_the_same_ids_in_a_pool_that_is_too_small_and_in_a_large_one() -> None:
    """Together, preempted and with hits; then each prompt with fewer neighbours. The longer one comes in chunks."""
    spec, lengths = _int8(ALIGNED), (7, 17)
    together = run_engine(TritonBackend("cpu"), spec, prompt_lengths=lengths)
    assert together.preemptions > 0 and together.cached_tokens > 0
    for place, length in enumerate(lengths):
        alone = run_engine(TritonBackend("cpu"), spec, num_blocks=20, prompt_lengths=(length,))
        assert alone.preemptions == 0
        assert alone.token_ids == [together.token_ids[place], together.token_ids[-1]]
