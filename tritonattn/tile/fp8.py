"""float32 to the bits of an 8-bit float, to nearest even, in integer arithmetic.

The same bits come out on every backend and for every type: Triton's own conversion is missing or emulated at length on some targets
(gfx942: e4m3fn), and its interpreter truncates.
"""

import torch
import triton
import triton.language as tl

# (largest value, mantissa bits, exponent bias, code of NaN, has a negative zero)
FP8_FORMATS = {
    torch.float8_e4m3fn: (448.0, 3, 7, 0x7F, True),
    torch.float8_e4m3fnuz: (240.0, 3, 8, 0x80, False),
    torch.float8_e5m2: (57344.0, 2, 15, 0x7F, True),
    torch.float8_e5m2fnuz: (57344.0, 2, 16, 0x80, False),
}


@triton.jit
def to_fp8_bits(x, LIMIT: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr, SIGNED_ZERO: tl.constexpr):
    """uint8 codes of x: saturating at +-LIMIT (infinities too), NaN as the code NAN."""
    magnitude = tl.minimum(tl.abs(x), LIMIT)
    magnitude = tl.where(x == x, magnitude, 0.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    drop: tl.constexpr = 23 - MANTISSA
    normal = ((bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal number the codes are the multiples of the smallest step; adding 2^23 rounds to an integer.
    steps = (magnitude * (2.0 ** (BIAS - 1 + MANTISSA)) + 8388608.0).to(tl.uint32, bitcast=True) - 0x4B000000
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), steps, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 31) << 7
    if not SIGNED_ZERO:
        sign = tl.where(code == 0, 0, sign)
    return tl.where(x == x, code | sign, NAN).to(tl.uint8)


@triton.jit
def fp8_range(largest):
    """(up, down): powers of two; |x| <= largest times `up` is below 128, `down` undoes it."""
    exponent = tl.maximum(largest, 2.0**-100).to(tl.int32, bitcast=True) & 0x7F800000
    up = (133 << 23) - (exponent - (127 << 23))
    return up.to(tl.float32, bitcast=True), (exponent - (6 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def third_fp8(x, high, rest):
    """What `split_fp8` leaves of x, as a third number for e5m2, which then has 9 bits; `rest` for e4m3, which needs none."""
    third = rest
    if rest.dtype == tl.float8e5 or rest.dtype == tl.float8e5b16:
        third = (x - high.to(tl.float32) - rest.to(tl.float32)).to(rest.dtype)
    return third


@triton.jit
def split_fp8(x, dtype: tl.constexpr):
    """(high, rest) of an 8-bit float type whose sum is x: to 8 bits in e4m3, to 6 in e5m2. Two fp8 products then stand for one in bfloat16.

    Both parts have the type of the other operand: a product of e5m2 with e4m3 is compiled by Triton 3.6 with the two types exchanged.
    """
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)
