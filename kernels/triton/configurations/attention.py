"""The configurations of paged attention that ship: every row of its tile table, with the model shapes that make it work
hardest."""

from __future__ import annotations

from functools import partial

import torch

from kernels.triton import paged_attention
from kernels.triton.configurations.base import BLOCK_SIZE, TYPE_NAMES, Configuration, Traffic
from kernels.triton.verification.attention import attention_error
from kernels.triton.verification.base import tolerance


def _attention(dtype: torch.dtype, head_dim: int, group: int, *, one_token: bool) -> Configuration:
    tile = paged_attention.attention_tile(one_token=one_token, dtype=dtype, head_dim=head_dim, group=group)
    constants = paged_attention.attention_constants(
        tile, one_token=one_token, head_dim=head_dim, num_heads=2 * group, num_kv_heads=2, block_size=BLOCK_SIZE
    )
    name = TYPE_NAMES[dtype]
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
            attention_error,
            dtype=dtype,
            head_dim=head_dim,
            group=group,
            query_lens=lengths[0],
            seq_lens=lengths[1],
            block_size=BLOCK_SIZE,
        ),
        tolerance=tolerance(dtype),
        traffic=_traffic(dtype, head_dim, group, one_token=one_token),
    )


def _traffic(dtype: torch.dtype, head_dim: int, group: int, *, one_token: bool) -> Traffic:
    """32 requests of 1,024 tokens that decode, or one prompt of 2,048, with 8 key/value heads."""
    heads, requests, context = 8, 32 if one_token else 1, 1024 if one_token else 2048
    queries = requests if one_token else context
    pairs = requests * context if one_token else context * (context + 1) // 2
    moved = 2 * heads * head_dim * (requests * context + group * queries) * dtype.itemsize
    workload = f"{requests} decodes of {context:,} tokens" if one_token else f"a prompt of {context:,} tokens"
    return Traffic(workload, moved, 4 * heads * group * head_dim * pairs)


def configurations() -> list[Configuration]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
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
