"""The configurations of the kernels around attention that ship: the model shapes that make them work hardest."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.triton import activation, block_copy, kv_write, norms
from kernels.triton.configurations.base import BLOCK_SIZE, TYPE_NAMES, Configuration, Traffic
from kernels.triton.verification.base import tolerance
from kernels.triton.verification.elementwise import activation_error, copy_error, kv_write_error, norm_error


def _kv_write(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, *, qk_norm: bool
) -> Configuration:
    name = TYPE_NAMES[dtype]
    constants: dict[str, Any] = dict(
        kv_write.kv_write_constants(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            block_size=BLOCK_SIZE,
        )
    )
    types = dict.fromkeys(("q_ptr", "key_ptr", "value_ptr", "qkv_ptr"), f"*{name}")
    types |= {"slots_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "eps": "fp32"}
    if qk_norm:
        types |= {"q_norm_ptr": f"*{name}", "k_norm_ptr": f"*{name}"}
    else:
        constants |= {"q_norm_ptr": None, "k_norm_ptr": None}
    return Configuration(
        kernel="kv_write",
        config=f"{name} {num_heads}/{num_kv_heads} heads d{head_dim} rotary {rotary_dim}{' norm' if qk_norm else ''}",
        function=kv_write.kv_write_kernel,
        types=types,
        constants=constants,
        num_warps=kv_write.NUM_WARPS,
        num_stages=1,
        error=partial(
            kv_write_error,
            dtype=dtype,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_size=BLOCK_SIZE,
            qk_norm=qk_norm,
        ),
        tolerance=tolerance(dtype),
        traffic=_row_traffic(dtype, 2 * (num_heads + 2 * num_kv_heads) * head_dim),
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
        num_stages=1,
        error=partial(norm_error, dtype=dtype, columns=columns, residual=residual),
        tolerance=tolerance(dtype),
        traffic=_row_traffic(dtype, (4 if residual else 2) * columns),
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
        num_stages=1,
        error=partial(activation_error, dtype=dtype, width=width),
        tolerance=tolerance(dtype),
        traffic=_row_traffic(dtype, 3 * width),
    )


def _copy(dtype: torch.dtype, elements: int) -> Configuration:
    name = TYPE_NAMES[dtype]
    return Configuration(
        kernel="copy_blocks",
        config=f"{name} {elements} elements",
        function=block_copy.copy_blocks_kernel,
        types={
            "source_ptr": f"*{name}",
            "destination_ptr": f"*{name}",
            "pairs_ptr": "*i64",
            "source_blocks": "i32",
            "destination_blocks": "i32",
        },
        constants=dict(block_copy.copy_constants(elements)),
        num_warps=block_copy.NUM_WARPS,
        num_stages=1,
        error=partial(copy_error, dtype=dtype, elements=elements, pairs=[(1, 2), (3, 4), (2, 5), (6, 1)]),
        tolerance=0.0,
        traffic=Traffic("64 blocks in 32 planes", 2 * 64 * 32 * elements * dtype.itemsize, 0),
    )


def _row_traffic(dtype: torch.dtype, values: int) -> Traffic:
    """``values`` moved for each of 2,048 tokens."""
    return Traffic("2,048 tokens", 2048 * values * dtype.itemsize, 0)


def configurations() -> list[Configuration]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _kv_write(bf16, 9, 3, 64, 64, qk_norm=False),
        _kv_write(fp16, 32, 8, 128, 128, qk_norm=True),
        _kv_write(bf16, 32, 32, 80, 32, qk_norm=False),
        _kv_write(fp32, 9, 3, 64, 0, qk_norm=False),
        _norm(bf16, 577, residual=True),
        _norm(bf16, 8192, residual=True),
        _norm(fp16, 16384, residual=False),
        _norm(fp32, 577, residual=True),
        _activation(bf16, 1537),
        _activation(fp32, 1537),
        _copy(bf16, 3 * BLOCK_SIZE * 64),
        _copy(fp32, BLOCK_SIZE * 80),
    ]
