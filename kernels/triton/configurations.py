"""The configurations that ship: every row of the tile tables, with the model shapes that make them work hardest.

Each one says how to compile a kernel without a GPU and how to measure it against its reference, with the very constants
that a launch would pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.triton import activation, block_copy, kv_write, norms, paged_attention, verification

_TYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Configuration:
    """One kernel as one model would launch it."""

    kernel: str
    config: str
    """What distinguishes it, for people: type, shapes, tile."""
    function: Any
    """The kernel itself, as ``triton.jit`` made it."""
    types: dict[str, str]
    """Triton's type of each run-time argument, e.g. ``*bf16`` or ``i32``."""
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    error: Callable[[], float]
    """Largest error against the reference at an odd shape; needs the interpreter."""
    tolerance: float


def _attention(dtype: torch.dtype, head_dim: int, group: int, *, one_token: bool) -> Configuration:
    tile = paged_attention.attention_tile(one_token=one_token, dtype=dtype, head_dim=head_dim, group=group)
    constants = paged_attention.attention_constants(
        tile, one_token=one_token, head_dim=head_dim, num_heads=2 * group, num_kv_heads=2, block_size=BLOCK_SIZE
    )
    name = _TYPE_NAMES[dtype]
    pointers = dict.fromkeys(("out_ptr", "q_ptr", "key_ptr", "value_ptr"), f"*{name}")
    tables = dict.fromkeys(("query_start_ptr", "seq_lens_ptr", "tables_ptr"), "*i32")
    scalars = {"num_requests": "i32", "table_stride": "i32", "scale_log2": "fp32", "window": "i32"}
    lengths = ([1, 1, 1, 1], [1, 16, 17, 75]) if one_token else ([1, 21, 7], [33, 21, 40])
    return Configuration(
        kernel="paged_attention",
        config=f"{name} {'decode' if one_token else 'mixed'} d{head_dim} g{group} {tile.rows}x{tile.keys}",
        function=paged_attention.paged_attention_kernel,
        types=pointers | tables | scalars,
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        error=partial(
            verification.attention_error,
            dtype=dtype,
            head_dim=head_dim,
            group=group,
            query_lens=lengths[0],
            seq_lens=lengths[1],
            block_size=BLOCK_SIZE,
        ),
        tolerance=verification.tolerance(dtype),
    )


def _kv_write(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, *, qk_norm: bool
) -> Configuration:
    name = _TYPE_NAMES[dtype]
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
            verification.kv_write_error,
            dtype=dtype,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_size=BLOCK_SIZE,
            qk_norm=qk_norm,
        ),
        tolerance=verification.tolerance(dtype),
    )


def _norm(dtype: torch.dtype, columns: int, *, residual: bool) -> Configuration:
    name = _TYPE_NAMES[dtype]
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
        error=partial(verification.norm_error, dtype=dtype, columns=columns, residual=residual),
        tolerance=verification.tolerance(dtype),
    )


def _activation(dtype: torch.dtype, width: int) -> Configuration:
    name = _TYPE_NAMES[dtype]
    return Configuration(
        kernel="silu_mul",
        config=f"{name} {width} wide",
        function=activation.silu_mul_kernel,
        types={"out_ptr": f"*{name}", "gate_up_ptr": f"*{name}"},
        constants=dict(activation.activation_constants(width)),
        num_warps=activation.NUM_WARPS,
        num_stages=1,
        error=partial(verification.activation_error, dtype=dtype, width=width),
        tolerance=verification.tolerance(dtype),
    )


def _copy(dtype: torch.dtype, elements: int) -> Configuration:
    name = _TYPE_NAMES[dtype]
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
        error=partial(verification.copy_error, dtype=dtype, elements=elements, pairs=[(1, 2), (3, 4), (2, 5), (6, 1)]),
        tolerance=0.0,
    )


def shipped_configurations() -> list[Configuration]:
    """Everything that ``kernels`` compiles and checks, in the order in which it is shown."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    attention = [
        _attention(dtype, head_dim, group, one_token=one_token)
        for one_token in (True, False)
        for dtype, head_dim, group in (
            (bf16, 64, 3),
            (bf16, 80, 1),
            (fp16, 96, 5),
            (bf16, 128, 8),
            (bf16, 256, 7),
            (fp32, 64, 3),
            (fp32, 128, 4),
            (fp32, 256, 2),
        )
    ]
    return [
        *attention,
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
