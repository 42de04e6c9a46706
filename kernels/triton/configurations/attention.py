"""The configurations of paged attention that ship: every row of its tile tables, with the model shapes that make it
work hardest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from kernels.triton.attention_kernels import combine_splits_kernel, paged_attention_kernel
from kernels.triton.attention_tiles import (
    AttentionTile,
    Family,
    attention_constants,
    attention_tile,
    combine_constants,
)
from kernels.triton.configurations.base import BLOCK_SIZE, TYPE_NAMES, Configuration, Traffic
from kernels.triton.paged_attention import COMBINE_WARPS
from kernels.triton.verification.attention import attention_error
from kernels.triton.verification.base import tolerance

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
FAMILY_TARGETS: dict[Family, frozenset[str]] = {
    "sm_80": frozenset({"sm_80", "sm_89", "sm_120"}),
    "sm_90": frozenset({"sm_90"}),
    "amd": frozenset({"gfx942"}),
}
_KV_HEADS = 8
"""Key/value heads of the workloads whose traffic is counted."""


@dataclass(frozen=True, slots=True)
class _Shape:
    dtype: torch.dtype
    head_dim: int
    group: int
    is_fp8: bool = False
    """Whether keys and values have 8 bits."""
    softcap: float | None = None

    def kv_dtype(self, family: Family) -> torch.dtype:
        if not self.is_fp8:
            return self.dtype
        return torch.float8_e4m3fnuz if family == "amd" else torch.float8_e4m3fn

    def targets(self, family: Family) -> frozenset[str]:
        # 8-bit floats begin with compute capability 8.9.
        return FAMILY_TARGETS[family] - ({"sm_80"} if self.is_fp8 else frozenset())

    def tile(self, family: Family, *, one_token: bool) -> AttentionTile:
        return attention_tile(
            one_token=one_token,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype(family),
            head_dim=self.head_dim,
            group=self.group,
            family=family,
        )


_SHAPES = (
    _Shape(_BF16, 64, 3),
    _Shape(_BF16, 80, 1),
    _Shape(_FP16, 96, 5),
    _Shape(_BF16, 128, 8),
    _Shape(_BF16, 256, 7),
    _Shape(_BF16, 256, 2, softcap=50.0),
    _Shape(_BF16, 64, 3, is_fp8=True),
    _Shape(_BF16, 128, 4, is_fp8=True),
    _Shape(_FP16, 256, 2, is_fp8=True),
    _Shape(_FP32, 64, 3),
    _Shape(_FP32, 128, 4),
    _Shape(_FP32, 256, 2),
)


def _attention(shape: _Shape, family: Family, targets: frozenset[str], *, one_token: bool) -> Configuration:
    tile = shape.tile(family, one_token=one_token)
    kv_dtype = shape.kv_dtype(family)
    constants = attention_constants(
        tile,
        one_token=one_token,
        head_dim=shape.head_dim,
        num_heads=2 * shape.group,
        num_kv_heads=2,
        block_size=BLOCK_SIZE,
        kv_dtype=kv_dtype,
        has_softcap=shape.softcap is not None,
    )
    name = TYPE_NAMES[shape.dtype]
    words = [name, "fp8-kv" if shape.is_fp8 else "", "decode" if one_token else "prefill", f"d{shape.head_dim}"]
    words += [f"g{shape.group}", f"{tile.rows}x{tile.keys}", f"{tile.num_warps}w{tile.num_stages}s"]
    words += ["softcap" if shape.softcap else ""]
    types = dict.fromkeys(("out_ptr", "q_ptr"), f"*{name}")
    types |= dict.fromkeys(("key_ptr", "value_ptr"), "*u8" if shape.is_fp8 else f"*{name}")
    types |= dict.fromkeys(("partial_ptr", "partial_lse_ptr"), "*fp32")
    types |= dict.fromkeys(("query_start_ptr", "seq_lens_ptr", "tables_ptr", "table_stride_ptr"), "*i32")
    types |= {"num_requests": "i32", "scale": "fp32", "softcap": "fp32", "window": "i32", "filling": "i32"}
    return Configuration(
        kernel="paged_attention",
        config=" ".join(filter(None, words)),
        function=paged_attention_kernel,
        types=types,
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        error=partial(
            attention_error,
            dtype=shape.dtype,
            kv_dtype=kv_dtype,
            head_dim=shape.head_dim,
            group=shape.group,
            query_lens=[1, 1] if one_token else [21, 7],
            seq_lens=[17, 75] if one_token else [21, 40],
            block_size=BLOCK_SIZE,
            softcap=shape.softcap,
            splits=1,
            family=family,
        ),
        tolerance=tolerance(shape.dtype),
        traffic=_traffic(shape.dtype, kv_dtype, shape.head_dim, shape.group, one_token=one_token),
        targets=targets,
    )


def _traffic(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, group: int, *, one_token: bool) -> Traffic:
    """32 requests of 1,024 tokens that decode, or one prompt of 2,048."""
    requests, context = 32 if one_token else 1, 1024 if one_token else 2048
    queries = requests if one_token else context
    pairs = requests * context if one_token else context * (context + 1) // 2
    keys_and_values = 2 * _KV_HEADS * head_dim * requests * context * kv_dtype.itemsize
    q_and_out = 2 * _KV_HEADS * group * head_dim * queries * dtype.itemsize
    workload = f"{requests} decodes of {context:,} tokens" if one_token else f"a prompt of {context:,} tokens"
    return Traffic(workload, keys_and_values + q_and_out, 4 * _KV_HEADS * group * head_dim * pairs)


def _combine(dtype: torch.dtype, head_dim: int, group: int) -> Configuration:
    name = TYPE_NAMES[dtype]
    requests, splits, heads = 4, 8, _KV_HEADS * group
    types = {"out_ptr": f"*{name}", "partial_ptr": "*fp32", "partial_lse_ptr": "*fp32"}
    types |= {"query_start_ptr": "*i32", "seq_lens_ptr": "*i32", "window": "i32", "splits": "i32", "filling": "i32"}
    moved = requests * heads * (splits * (head_dim + 1) * 4 + head_dim * dtype.itemsize)
    return Configuration(
        kernel="combine_splits",
        config=f"{name} d{head_dim} {group} heads",
        function=combine_splits_kernel,
        types=types,
        constants=combine_constants(num_heads=group, head_dim=head_dim),
        num_warps=COMBINE_WARPS,
        num_stages=None,
        error=partial(
            attention_error,
            dtype=dtype,
            head_dim=head_dim,
            group=group,
            num_kv_heads=1,
            query_lens=[1, 1],
            seq_lens=[1, 150],
            block_size=BLOCK_SIZE,
            splits=3,
        ),
        tolerance=tolerance(dtype),
        traffic=Traffic(f"{requests} decodes in {splits} splits", moved, 0),
    )


def _by_tile(shape: _Shape, *, one_token: bool) -> dict[tuple[AttentionTile, torch.dtype], list[Family]]:
    """Families that compile the same kernel for a shape."""
    families: dict[tuple[AttentionTile, torch.dtype], list[Family]] = {}
    for family in FAMILY_TARGETS:
        key = (shape.tile(family, one_token=one_token), shape.kv_dtype(family))
        families.setdefault(key, []).append(family)
    return families


def configurations() -> list[Configuration]:
    attention = [
        _attention(shape, families[0], frozenset().union(*map(shape.targets, families)), one_token=one_token)
        for one_token in (True, False)
        for shape in _SHAPES
        for families in _by_tile(shape, one_token=one_token).values()
    ]
    combine = [_combine(_BF16, 64, 3), _combine(_FP16, 96, 5), _combine(_BF16, 256, 7), _combine(_FP32, 128, 4)]
    return attention + combine
