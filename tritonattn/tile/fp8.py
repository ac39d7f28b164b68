"""float32 to the bits of an 8-bit float, to nearest even, in integer arithmetic.

The same bits come out on every backend and for every type: Triton's own conversion is missing or emulated at length on some targets
(gfx950 with Triton 3.6: 30 instructions an element; gfx942: e4m3fn), and its interpreter truncates.
"""

import triton
import triton.language as tl


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
