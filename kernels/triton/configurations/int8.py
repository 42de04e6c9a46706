"""The configurations with weights of 8 bits that ship, and those of the embedding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.triton import embedding, int8_matmul
from kernels.triton.configurations.base import TYPE_NAMES, Configuration, Traffic
from kernels.triton.verification.base import tolerance
from kernels.triton.verification.int8 import embedding_error, int8_matmul_error

_OUTPUTS, _INPUTS = 4096, 14336
"""The down projection of an 8B model, which the stated traffic is that of."""


def _matmul(dtype: torch.dtype, rows: int, inputs: int, *, bias: bool = False) -> Configuration:
    tile = int8_matmul.matmul_tile(rows, inputs, dtype)
    name = TYPE_NAMES[dtype]
    types = dict.fromkeys(("out_ptr", "x_ptr"), f"*{name}")
    types |= {"partial_ptr": "*fp32", "q_ptr": "*i8", "scale_ptr": "*fp32"}
    types |= dict.fromkeys(("num_rows", "num_outputs", "num_cuts", "steps_per_cut"), "i32")
    constants: dict[str, Any] = dict(int8_matmul.matmul_constants(tile, inputs))
    if bias:
        types |= {"bias_ptr": f"*{name}"}
    else:
        constants |= {"bias_ptr": None}
    grid = int8_matmul.matmul_grid(tile, rows, _OUTPUTS, inputs)
    results = 4 * grid.cuts * rows * _OUTPUTS if grid.cuts > 1 else dtype.itemsize * rows * _OUTPUTS
    return Configuration(
        kernel="int8_matmul",
        config=f"{name} {rows} rows {inputs} deep{' + bias' if bias else ''} {tile.rows}x{tile.outputs}x{tile.depth}",
        function=int8_matmul.int8_matmul_kernel,
        types=types,
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        # Of the same tile and masks, but a few steps, as the interpreter is slow.
        error=partial(
            int8_matmul_error,
            dtype=dtype,
            rows=rows - 1,
            outputs=tile.outputs + 6,
            inputs=2 * tile.depth + inputs % tile.depth,
            bias=bias,
        ),
        tolerance=tolerance(dtype),
        traffic=Traffic(
            f"{rows} rows, {inputs} inputs, {_OUTPUTS} outputs",
            (inputs + 4) * _OUTPUTS + dtype.itemsize * rows * inputs + results,
            2 * rows * inputs * _OUTPUTS,
        ),
    )


def _sum_cuts(dtype: torch.dtype) -> Configuration:
    name, rows = TYPE_NAMES[dtype], 16
    cuts = int8_matmul.matmul_grid(int8_matmul.matmul_tile(rows, _INPUTS, dtype), rows, _OUTPUTS, _INPUTS).cuts
    return Configuration(
        kernel="sum_cuts",
        config=name,
        function=int8_matmul.sum_cuts_kernel,
        types={"out_ptr": f"*{name}", "partial_ptr": "*fp32", "scale_ptr": "*fp32"}
        | dict.fromkeys(("num_rows", "num_outputs", "num_cuts"), "i32"),
        constants={"bias_ptr": None, "BLOCK": int8_matmul.REDUCE_BLOCK},
        num_warps=int8_matmul.REDUCE_WARPS,
        num_stages=None,
        error=partial(int8_matmul_error, dtype=dtype, rows=3, outputs=70, inputs=1153, bias=False),
        tolerance=tolerance(dtype),
        traffic=Traffic(
            f"{cuts} cuts, {rows} rows, {_OUTPUTS} outputs",
            (4 * cuts + dtype.itemsize) * rows * _OUTPUTS + 4 * _OUTPUTS,
            0,
        ),
    )


def _embedding(dtype: torch.dtype, columns: int, *, quantised: bool, sampled: bool = True) -> Configuration:
    """``sampled``: some ids come from the step before."""
    name, tokens = TYPE_NAMES[dtype], 256
    types = {"out_ptr": f"*{name}", "table_ptr": "*i8" if quantised else f"*{name}"}
    types |= {"token_ids_ptr": "*i64", "num_rows": "i32"}
    constants: dict[str, Any] = dict(embedding.embedding_constants(columns))
    if sampled:
        types |= {"source_ptr": "*i32", "previous_ptr": "*i64"}
    else:
        constants |= {"source_ptr": None, "previous_ptr": None}
    if quantised:
        types |= {"scale_ptr": "*fp32"}
    else:
        constants |= {"scale_ptr": None}
    row_bytes = columns + 4 if quantised else dtype.itemsize * columns
    return Configuration(
        kernel="embedding",
        config=f"{name}{' of int8' if quantised else ''} {columns} wide{'' if sampled else ', ids known'}",
        function=embedding.embedding_kernel,
        types=types,
        constants=constants,
        num_warps=embedding.NUM_WARPS,
        num_stages=None,
        error=partial(embedding_error, dtype=dtype, quantised=quantised, columns=min(columns, 577), sampled=sampled),
        tolerance=tolerance(dtype) if quantised else 0.0,
        traffic=Traffic(f"{tokens} tokens", tokens * (row_bytes + dtype.itemsize * columns + 8 + 4 * sampled), 0),
    )


def configurations() -> list[Configuration]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _matmul(bf16, 16, _INPUTS),
        _matmul(bf16, 64, _INPUTS),
        _matmul(bf16, 256, _INPUTS),
        _matmul(fp16, 16, 960, bias=True),
        _matmul(bf16, 64, 960, bias=True),
        _matmul(bf16, 256, 960, bias=True),
        _matmul(fp32, 16, 960, bias=True),
        _matmul(fp32, 256, 960, bias=True),
        _matmul(bf16, 64, 577, bias=True),
        _matmul(fp32, 64, 577, bias=True),
        _sum_cuts(bf16),
        _sum_cuts(fp32),
        _embedding(bf16, 4096, quantised=False),
        _embedding(bf16, 4096, quantised=False, sampled=False),
        _embedding(bf16, 4096, quantised=True),
        _embedding(fp32, 577, quantised=False),
    ]
