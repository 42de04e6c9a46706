"""Sampling: greedy, drawn and truncated rows, each over the vocabulary of a model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.triton import sampling, truncation
from kernels.triton.configurations.base import TYPE_NAMES, Configuration, Traffic
from kernels.triton.verification.sampling import EDGE_TOLERANCE, sampling_error, truncation_error

ROWS = 64
_DRAWN = {"temperature_ptr": "*fp32", "seed_ptr": "*i64", "position_ptr": "*i64"}
_TRUNCATED = {"edge_ptr": "*fp32", "last_ptr": "*i32"}
_PARTS = {"largest_ptr": "*fp32", "score_ptr": "*fp32", "token_ptr": "*i32"}


def _workload(vocab: int) -> str:
    return f"{ROWS} rows of {vocab:,} logits"


def _sample(dtype: torch.dtype, vocab: int, kind: str) -> Configuration:
    """``kind``: greedy, drawn or truncated."""
    name = TYPE_NAMES[dtype]
    columns = {"greedy": {}, "drawn": _DRAWN, "truncated": _DRAWN | _TRUNCATED}[kind]
    constants: dict[str, Any] = dict(sampling.sampling_constants(vocab))
    constants |= dict.fromkeys((_DRAWN | _TRUNCATED).keys() - columns.keys())
    part_bytes = 12 * sampling.reduce_constants(vocab)["PARTS"]
    column_bytes = {"greedy": 0, "drawn": 20, "truncated": 28}[kind]
    return Configuration(
        kernel="sample",
        config=f"{name} {vocab} tokens {kind}",
        function=sampling.sample_kernel,
        types=_PARTS | {"logits_ptr": f"*{name}"} | columns,
        constants=constants,
        num_warps=sampling.NUM_WARPS,
        num_stages=None,
        error=partial(sampling_error, dtype=dtype, vocab=353, greedy=kind == "greedy", truncated=kind == "truncated"),
        tolerance=0.0,
        traffic=Traffic(_workload(vocab), ROWS * (vocab * dtype.itemsize + part_bytes + column_bytes), 0),
    )


def _reduce(vocab: int, *, drawn: bool) -> Configuration:
    constants: dict[str, Any] = dict(sampling.reduce_constants(vocab))
    types = {"out_ptr": "*i64"} | _PARTS
    if drawn:
        types |= {"temperature_ptr": "*fp32"}
    else:
        constants |= {"temperature_ptr": None}
    return Configuration(
        kernel="sample_reduce",
        config=f"{vocab} tokens {'drawn' if drawn else 'greedy'}",
        function=sampling.sample_reduce_kernel,
        types=types,
        constants=constants,
        num_warps=sampling.REDUCE_WARPS,
        num_stages=None,
        error=partial(sampling_error, vocab=4601, greedy=not drawn),
        tolerance=0.0,
        traffic=Traffic(_workload(vocab), ROWS * (12 * constants["PARTS"] + 8 + 4 * drawn), 0),
    )


def _truncation(dtype: torch.dtype, vocab: int) -> Configuration:
    name = TYPE_NAMES[dtype]
    columns = {"temperature_ptr": "*fp32", "min_p_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32"}
    return Configuration(
        kernel="truncation",
        config=f"{name} {vocab} tokens",
        function=truncation.truncation_kernel,
        types={"value_ptr": "*fp32", "last_ptr": "*i32", "logits_ptr": f"*{name}"} | columns,
        constants=dict(truncation.truncation_constants(vocab)),
        num_warps=truncation.NUM_WARPS,
        num_stages=None,
        error=partial(truncation_error, dtype=dtype, vocab=353),
        tolerance=EDGE_TOLERANCE,
        traffic=Traffic(_workload(vocab), ROWS * (vocab * dtype.itemsize + 24), 0),
    )


def configurations() -> list[Configuration]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _sample(bf16, 128256, "greedy"),
        _sample(bf16, 128256, "drawn"),
        _sample(fp16, 49152, "truncated"),
        _sample(fp32, 151669, "greedy"),
        _sample(fp32, 151669, "truncated"),
        _reduce(49152, drawn=False),
        _reduce(128256, drawn=True),
        _truncation(bf16, 128256),
        _truncation(fp16, 49152),
        _truncation(fp32, 151669),
    ]
