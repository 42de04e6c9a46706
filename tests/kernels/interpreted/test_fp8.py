"""Eight-bit numbers: encoded as torch rounds what is in range, decoded exactly."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton.fp8 import decode_fp8, encode_fp8, fp8_bias

FORMATS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]


@triton.jit
def _encode(out_ptr: tl.tensor, x_ptr: tl.tensor, BIAS: tl.constexpr, COUNT: tl.constexpr) -> None:
    i = tl.arange(0, COUNT)
    tl.store(out_ptr + i, encode_fp8(tl.load(x_ptr + i).to(tl.float32), BIAS))


@triton.jit
def _decode(out_ptr: tl.tensor, codes_ptr: tl.tensor, BIAS: tl.constexpr) -> None:
    i = tl.arange(0, 256)
    tl.store(out_ptr + i, decode_fp8(tl.load(codes_ptr + i), BIAS, out_ptr.dtype.element_ty))


def _encoded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    count = triton.next_power_of_2(len(x))
    padded = torch.nn.functional.pad(x, (0, count - len(x)))
    out = torch.empty(count, dtype=torch.uint8)
    _encode[(1,)](out, padded, fp8_bias(dtype), count)
    return out[: len(x)].view(dtype)


def _representable(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of the type, ascending."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return numbers[numbers.isfinite()].unique()


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_number_and_every_tie_is_rounded_as_torch_does(dtype: torch.dtype) -> None:
    numbers = _representable(dtype)
    ties = (numbers[1:] + numbers[:-1]) / 2
    above, below = (torch.nextafter(ties, torch.tensor(end)) for end in (math.inf, -math.inf))
    x = torch.cat((numbers, ties, above, below, torch.tensor([-0.0, 1e-40, -1e-40])))
    assert torch.equal(_encoded(x, dtype).view(torch.uint8), x.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", FORMATS)
def test_random_numbers_are_rounded_as_torch_does(dtype: torch.dtype, source: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    powers = torch.randint(-14, 7, (4096,), generator=generator)
    x = (torch.randn(4096, generator=generator) * torch.exp2(powers.float())).to(source)
    largest = torch.finfo(dtype).max
    expected = x.float().clamp(-largest, largest).to(dtype)
    assert torch.equal(_encoded(x, dtype).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_too_large_becomes_the_largest(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([1.04, 1.5, 1e30, math.inf]) * largest
    assert _encoded(torch.cat((x, -x)), dtype).float().tolist() == [largest] * 4 + [-largest] * 4


@pytest.mark.parametrize("dtype", FORMATS)
def test_nan_stays_nan(dtype: torch.dtype) -> None:
    encoded = _encoded(torch.tensor([math.nan, -math.nan, 1.0]), dtype).float()
    assert encoded.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", FORMATS)
def test_every_byte_is_decoded_exactly(dtype: torch.dtype, target: torch.dtype) -> None:
    codes, out = torch.arange(256, dtype=torch.uint8), torch.empty(256, dtype=target)
    _decode[(1,)](out, codes, fp8_bias(dtype))
    expected = codes.view(dtype).to(target)
    assert torch.equal(out.isnan(), expected.isnan()) and bool(expected.isnan().any())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_other_types_have_no_bias() -> None:
    assert [fp8_bias(dtype) for dtype in (torch.bfloat16, torch.uint8, torch.float8_e5m2)] == [0, 0, 0]
