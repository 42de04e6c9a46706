"""Products with weights of 8 bits, and the embedding's rows, against their references."""

from __future__ import annotations

import math

import torch

from kernels.triton.embedding import embedding
from kernels.triton.int8_matmul import int8_matmul
from kernels.triton.matrix import LARGEST, Matrix
from kernels.triton.reference import embedding_reference, int8_matmul_reference
from kernels.triton.verification.base import largest_error


def _between(values: torch.Tensor, poison: float, device: str) -> torch.Tensor:
    """``values`` on the device, in the middle of memory whose every other number is ``poison``."""
    margin = 1024
    memory = torch.full((values.numel() + 2 * margin,), poison, dtype=values.dtype, device=device)
    inner = memory[margin:-margin]
    inner.copy_(values.flatten())
    return inner.view(values.shape)


def _untouched(out: torch.Tensor) -> bool:
    """Whether what lies around ``out``, made by :func:`_between`, is still NaN."""
    begin, count = out.storage_offset(), out.numel()
    memory = out.as_strided((count + 2 * begin,), (1,), 0)
    return bool(torch.isnan(memory[:begin]).all()) and bool(torch.isnan(memory[begin + count :]).all())


def int8_matmul_error(
    *,
    dtype: torch.dtype = torch.float32,
    rows: int = 3,
    outputs: int = 70,
    inputs: int = 577,
    bias: bool = True,
    device: str = "cpu",
) -> float:
    """Results of size 1; x, scales and biases lie among NaN, the weights among the largest number there is."""
    random = torch.Generator().manual_seed(1000 * rows + inputs)
    x = torch.randn(rows, inputs, generator=random).to(dtype)
    q = torch.randint(-LARGEST, LARGEST + 1, (outputs, inputs), generator=random, dtype=torch.int8)
    scale = (0.5 + torch.rand(outputs, generator=random)) / (LARGEST / math.sqrt(3) * math.sqrt(inputs))
    added = torch.randn(outputs, generator=random).to(dtype) if bias else None
    out = _between(torch.full((rows, outputs), math.nan, dtype=dtype), math.nan, device)
    int8_matmul(
        _between(x, math.nan, device),
        _between(q, LARGEST, device),
        _between(scale, math.nan, device),
        None if added is None else _between(added, math.nan, device),
        out=out,
    )
    return largest_error(out, int8_matmul_reference(x, q, scale, added)) if _untouched(out) else math.inf


def embedding_error(
    *,
    dtype: torch.dtype = torch.float32,
    quantised: bool = False,
    columns: int = 577,
    vocab: int = 11,
    sampled: bool = True,
    device: str = "cpu",
) -> float:
    """Ids of both ends of the table and of none of its rows; with ``sampled`` some come from the step before."""
    random = torch.Generator().manual_seed(columns)
    ids, source = [0, vocab - 1, -1, vocab, 3, 7, 2**40], [-1, -1, -1, -1, -1, -1, -1]
    scale = None
    if quantised:
        table = torch.randint(-LARGEST, LARGEST + 1, (vocab, columns), generator=random, dtype=torch.int8)
        scale = torch.rand(vocab, generator=random) / LARGEST
    else:
        table = torch.randn(vocab, columns, generator=random).to(dtype)
    previous, wanted = [5, -1, vocab - 1], list(ids)
    if sampled:
        for place, entry in ((0, 2), (4, 0), (5, 1)):
            source[place], wanted[place] = entry, previous[entry]
    out = _between(torch.full((len(ids), columns), math.nan, dtype=dtype), math.nan, device)
    embedding(
        torch.tensor(ids, device=device),
        Matrix(
            _between(table, LARGEST if quantised else math.nan, device),
            None if scale is None else _between(scale, math.nan, device),
        ),
        dtype,
        token_source=torch.tensor(source, dtype=torch.int32, device=device),
        previous=_between(torch.tensor(previous), 2**62, device) if sampled else None,
        out=out,
    )
    return largest_error(out, embedding_reference(wanted, table, scale)) if _untouched(out) else math.inf
