"""The configurations of the kernels around attention that ship: the model shapes that make them work hardest."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.triton import activation, block_copy, kv_write, norms
from kernels.triton.configurations.base import BLOCK_SIZE, TYPE_NAMES, Configuration, Traffic
from kernels.triton.verification.base import tolerance
from kernels.triton.verification.elementwise import activation_error, copy_error, kv_write_error, norm_error

FP8_TOLERANCE = 2.0**-4
"""Half a unit in the last of three bits."""
FP8_TARGETS = {
    torch.float8_e4m3fn: frozenset({"sm_89", "sm_90", "sm_120"}),
    torch.float8_e4m3fnuz: frozenset({"gfx942"}),
}


def _kv_write(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    *,
    qk_norm: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> Configuration:
    """``kv_dtype``: of a cache of 8 bits."""
    name = TYPE_NAMES[dtype]
    constants: dict[str, Any] = dict(
        kv_write.kv_write_constants(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            block_size=BLOCK_SIZE,
            kv_dtype=kv_dtype or dtype,
        )
    )
    types = dict.fromkeys(("q_ptr", "qkv_ptr"), f"*{name}")
    types |= dict.fromkeys(("key_ptr", "value_ptr"), "*u8" if kv_dtype else f"*{name}")
    types |= {"slots_ptr": "*i64", "positions_ptr": "*i64", "rotary_ptr": "*fp32"}
    types |= {"last_position": "i32", "eps": "fp32"}
    if qk_norm:
        types |= {"q_norm_ptr": f"*{name}", "k_norm_ptr": f"*{name}"}
    else:
        constants |= {"q_norm_ptr": None, "k_norm_ptr": None}
    shape = f"{num_heads}/{num_kv_heads} heads d{head_dim} rotary {rotary_dim}{' norm' if qk_norm else ''}"
    cache = f" {str(kv_dtype).removeprefix('torch.float8_')} cache" if kv_dtype else ""
    moved = 2 * (num_heads + num_kv_heads) * dtype.itemsize + 2 * num_kv_heads * (kv_dtype or dtype).itemsize
    return Configuration(
        kernel="kv_write",
        config=f"{name} {shape}{cache}",
        function=kv_write.kv_write_kernel,
        types=types,
        constants=constants,
        num_warps=kv_write.NUM_WARPS,
        num_stages=None,
        error=partial(
            kv_write_error,
            dtype=dtype,
            kv_dtype=kv_dtype,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_size=BLOCK_SIZE,
            qk_norm=qk_norm,
        ),
        tolerance=tolerance(dtype) + (FP8_TOLERANCE if kv_dtype else 0.0),
        # Each token: its queries in and out, keys and values in and into the cache, a row of the rotary table, its
        # slot and its position.
        traffic=_row_traffic(moved * head_dim + 4 * rotary_dim + 2 * 8),
        targets=None if kv_dtype is None else FP8_TARGETS[kv_dtype],
    )


def _norm(dtype: torch.dtype, columns: int, *, residual: bool) -> Configuration:
    name = TYPE_NAMES[dtype]
    constants: dict[str, Any] = dict(norms.norm_constants(columns))
    types = dict.fromkeys(("out_ptr", "x_ptr", "weight_ptr"), f"*{name}") | {"eps": "fp32"}
    if residual:
        types |= {"sum_ptr": f"*{name}", "residual_ptr": f"*{name}"}
    else:
        constants |= {"sum_ptr": None, "residual_ptr": None}
    return Configuration(
        kernel="rms_norm",
        config=f"{name} {columns} wide{' + residual' if residual else ''}",
        function=norms.rms_norm_kernel,
        types=types,
        constants=constants,
        num_warps=norms.norm_warps(columns),
        num_stages=None,
        error=partial(norm_error, dtype=dtype, columns=columns, residual=residual),
        tolerance=tolerance(dtype),
        traffic=_row_traffic((4 if residual else 2) * columns * dtype.itemsize, columns * dtype.itemsize),
    )


def _activation(dtype: torch.dtype, width: int) -> Configuration:
    name = TYPE_NAMES[dtype]
    return Configuration(
        kernel="silu_mul",
        config=f"{name} {width} wide",
        function=activation.silu_mul_kernel,
        types={"out_ptr": f"*{name}", "gate_up_ptr": f"*{name}"},
        constants=dict(activation.activation_constants(width)),
        num_warps=activation.NUM_WARPS,
        num_stages=None,
        error=partial(activation_error, dtype=dtype, width=width),
        tolerance=tolerance(dtype),
        traffic=_row_traffic(3 * width * dtype.itemsize),
    )


def _copy(dtype: torch.dtype, elements: int) -> Configuration:
    """``elements``: of a block in each plane."""
    word = block_copy.word_type(elements * dtype.itemsize)
    words = elements * dtype.itemsize // word.itemsize
    name = {torch.int64: "i64", torch.uint8: "u8"}[word]
    return Configuration(
        kernel="copy_blocks",
        config=f"{words} words of {8 * word.itemsize} bits",
        function=block_copy.copy_blocks_kernel,
        types={
            "source_ptr": f"*{name}",
            "destination_ptr": f"*{name}",
            "pairs_ptr": "*i64",
            "source_blocks": "i32",
            "destination_blocks": "i32",
        },
        constants=dict(block_copy.copy_constants(words)),
        num_warps=block_copy.NUM_WARPS,
        num_stages=None,
        error=partial(copy_error, dtype=dtype, elements=elements, pairs=[(1, 2), (3, 4), (2, 5), (6, 1)]),
        tolerance=0.0,
        traffic=Traffic("64 blocks in 32 planes", 64 * (2 * 32 * elements * dtype.itemsize + 2 * 8), 0),
    )


def _row_traffic(row_bytes: int, shared_bytes: int = 0) -> Traffic:
    """``row_bytes`` moved for each of 2,048 tokens, ``shared_bytes`` once for all."""
    return Traffic("2,048 tokens", 2048 * row_bytes + shared_bytes, 0)


def configurations() -> list[Configuration]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _kv_write(bf16, 9, 3, 64, 64),
        _kv_write(fp16, 32, 8, 128, 128, qk_norm=True),
        _kv_write(bf16, 32, 32, 80, 32),
        _kv_write(fp32, 9, 3, 64, 0),
        _kv_write(bf16, 9, 3, 64, 64, kv_dtype=torch.float8_e4m3fn),
        _kv_write(fp16, 32, 8, 128, 128, qk_norm=True, kv_dtype=torch.float8_e4m3fn),
        _kv_write(bf16, 32, 8, 128, 128, qk_norm=True, kv_dtype=torch.float8_e4m3fnuz),
        _norm(bf16, 577, residual=True),
        _norm(bf16, 8192, residual=True),
        _norm(fp16, 16384, residual=False),
        _norm(fp32, 577, residual=True),
        _activation(bf16, 1537),
        _activation(fp32, 1537),
        _copy(bf16, 3 * BLOCK_SIZE * 64),
        _copy(torch.float8_e4m3fn, 577),
    ]
