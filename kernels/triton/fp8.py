"""Numbers of 8 bits for keys and values: sign, 4 bits of exponent, 3 of mantissa, without a scale.

::

    torch.float8_e4m3fn     bias 7   largest 448   NaN s1111111            NVIDIA from compute capability 8.9 on
    torch.float8_e4m3fnuz   bias 8   largest 240   NaN 10000000, no -0     AMD CDNA 3 (gfx942)

Neither has an infinity (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433; AMD's form is that of
Noune et al., arXiv 2206.02915). The kernels see such memory as bytes (``tensor.view(torch.uint8)``).

Encoding is integer arithmetic rather than the compiler's cast: what is written is then the same, to the bit, on every
GPU and under the interpreter. Decoding, which attention does for every key, is the GPU's own instruction; the
interpreter, whose casts lose a carry into the exponent and every NaN, decodes exactly too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_BIASES = {torch.float8_e4m3fn: 7, torch.float8_e4m3fnuz: 8}


def fp8_bias(dtype: torch.dtype) -> int:
    """The exponent's bias of an 8-bit type, which tells the two apart; 0 for every other type."""
    return _BIASES.get(dtype, 0)


@triton.jit
def encode_fp8(x: tl.tensor, BIAS: tl.constexpr) -> tl.tensor:
    """float32 to the bytes of the nearest number, ties to even; what is beyond the largest, infinities too, becomes the
    largest; NaN stays NaN."""
    LARGEST: tl.constexpr = 448.0 if BIAS == 7 else 240.0
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    is_nan = x != x
    magnitude = tl.minimum(tl.abs(tl.where(is_nan, 0.0, x)), LARGEST)
    # A float32 of 1.5 · 2^23 units has no bits below one unit: adding it rounds there, taking it away is exact. A unit
    # is the last bit of the result's mantissa, 2^-3 of its power of two, or of the smallest normal number's below that.
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 128 - BIAS)
    units = ((exponent + 20) << 23).to(tl.float32, bitcast=True) * 1.5
    rounded = (magnitude + units) - units
    normal = (rounded.to(tl.int32, bitcast=True) >> 20) - ((127 - BIAS) << 3)
    subnormal = (rounded * (2.0 ** (BIAS + 2))).to(tl.int32)
    code = tl.where(rounded < SMALLEST_NORMAL, subnormal, normal)
    negative = x.to(tl.int32, bitcast=True) < 0
    if BIAS == 7:
        code = tl.where(negative, code | 0x80, code)
        code = tl.where(is_nan, 0x7F, code)
    else:
        code = tl.where(negative & (code != 0), code | 0x80, code)
        code = tl.where(is_nan, 0x80, code)
    return code.to(tl.uint8)


@triton.jit
def decode_fp8(codes: tl.tensor, BIAS: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """The numbers that bytes stand for, exactly, in a wider type; on a GPU that has such a type itself."""
    if _INTERPRETED:
        # The fields of a float16 with an exponent of one bit more and a bias of 15.
        fields = codes.to(tl.uint16)
        halves = (((fields & 0x80) << 8) | ((fields & 0x7F) << 7)).to(tl.float16, bitcast=True)
        is_nan = (fields & 0x7F) == 0x7F if BIAS == 7 else fields == 0x80
        decoded = tl.where(is_nan, float("nan"), halves.to(tl.float32) * (2.0 ** (15 - BIAS))).to(dtype)
    elif BIAS == 7:
        decoded = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        decoded = codes.to(tl.float8e4b8, bitcast=True).to(dtype)
    return decoded
