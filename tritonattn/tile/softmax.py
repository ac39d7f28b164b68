"""Online softmax (Milakov & Gimelshein, arXiv:1805.02867) in base 2, and what enters or leaves its running state.

The state of a row is (m, l, acc): the running maximum in log2 units, the sum of exp2(score - m), and the sum of
exp2(score - m) * v. A row that has seen no key holds (-inf, 0, 0). Masked scores are -inf, never a large finite number: with a
finite one, `scale * score - m` computed as one fused operation differs from the rounded product in `m` by far more than exp2 can
take (field case 93).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def safe_max(m):
    """`m` with -inf replaced by 0, so that `-inf - m` stays -inf instead of NaN."""
    return tl.where(m == NEG_INF, 0.0, m)


@triton.jit
def sink_score(sink):
    """A sink as the running maximum that it starts, in log2 units: +inf as the largest number, since `inf - inf` would be NaN."""
    return tl.minimum(sink.to(tl.float32) * LOG2E, FLOAT_MAX)


@triton.jit
def modify_scores(s, scale, softcap, slope, distance, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Softcap, then ALiBi; returns (scores, factor) such that `scores * factor` is in log2 units.

    s         raw q.k, fp32
    scale     softmax_scale * descales * log2(e)
    softcap   in natural units; > 0 where SOFTCAP
    slope     ALiBi slope, broadcastable to s, natural units
    distance  key position - query position, int, same shape as s

    Without either the scores stay raw, and the multiplication rides in the one FMA that feeds exp2.
    """
    factor = scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + e^2x), which saturates at +-1 without an overflow turning into NaN.
        e = tl.math.exp2(s * (2.0 * scale / softcap))
        s = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + e))
        factor = 1.0
    if ALIBI:
        s = s * factor + (slope * LOG2E) * distance.to(tl.float32)
        factor = 1.0
    return s, factor


@triton.jit
def online_step(s, m, l, factor, MASKED: tl.constexpr):
    """One tile of scores into the state: returns (p, alpha, m, l); the caller does `acc = acc * alpha + p @ v`.

    s       [..., rows, keys] scores, -inf where masked; factor > 0 takes them to log2 units.
    l       [..., rows]; or as s, where the sum over the keys is left for the end and every tile is spared a reduction.
    MASKED  the tile may hold a row without any visible key; unmasked tiles spare the guard.
    """
    axis: tl.constexpr = len(s.shape) - 1
    m_new = tl.maximum(m, tl.max(s, axis) * factor)
    shift = safe_max(m_new) if MASKED else m_new
    p = tl.math.exp2(s * factor - tl.expand_dims(shift, axis))
    alpha = tl.math.exp2(m - shift)
    if len(l.shape) == len(s.shape):
        l = l * tl.expand_dims(alpha, axis) + p
    else:
        l = l * alpha + tl.sum(p, axis)
    return p, alpha, m_new, l


@triton.jit
def online_step_narrow(s, m, l, top, factor, MASKED: tl.constexpr, P_LOG2: tl.constexpr):
    """`online_step` for a P of few exponents: the largest p of every tile is 2^P_LOG2, however far it lies below an earlier tile's.

    top is the running maximum. m, what l and acc are relative to, is that of the tile less P_LOG2, so it may fall again (alpha is then
    above 1), but not further than DROP below top: that keeps l and acc finite, and what is smaller yet does not count in float32.
    """
    DROP: tl.constexpr = 64.0
    axis: tl.constexpr = len(s.shape) - 1
    tile = tl.max(s, axis) * factor
    top = tl.maximum(top, tile)
    m_new = tl.maximum(tile, top - DROP) - P_LOG2
    if MASKED:
        m_new = tl.where(tile == NEG_INF, m, m_new)
    shift = safe_max(m_new) if MASKED else m_new
    p = tl.math.exp2(s * factor - tl.expand_dims(shift, axis))
    alpha = tl.math.exp2(m - shift)
    if len(l.shape) == len(s.shape):
        l = l * tl.expand_dims(alpha, axis) + p
    else:
        l = l * alpha + tl.sum(p, axis)
    return p, alpha, m_new, l, top


@triton.jit
def round_p(p, dtype: tl.constexpr, CHEAP: tl.constexpr):
    """P in the dtype of V for the second product.

    CHEAP rounds to bfloat16 by adding half an ulp and truncating, i.e. to nearest with ties away from zero: the error bound of half
    an ulp is the same as that of round-to-nearest-even, and P is finite and >= 0, so carry and NaN need no care. gfx942 has no
    conversion instruction: there it replaces six vector operations by two.
    """
    if CHEAP and dtype == tl.bfloat16:
        bits = (p.to(tl.uint32, bitcast=True) + 0x8000) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return p.to(dtype)


@triton.jit
def finish(m, l):
    """(1 / l, lse in log2 units) of a state; an empty row gives (0, -inf)."""
    empty = l == 0.0
    denominator = tl.where(empty, 1.0, l)
    return tl.where(empty, 0.0, 1.0 / denominator), tl.where(empty, NEG_INF, m + tl.math.log2(denominator))


@triton.jit
def resume(lse):
    """(m, l) of the state whose normalised output is `acc` and whose LSE is `lse` (log2 units; -inf: empty)."""
    return lse, tl.where(lse == NEG_INF, 0.0, 1.0)


@triton.jit
def merge_weights(lse_a, lse_b):
    """Weights of two normalised outputs and the LSE of their union, all in log2 units.

    A part with lse = -inf weighs exactly 0, and so does one with +inf or NaN, which some producers write for "no key".
    """
    lse_a = tl.where((lse_a == lse_a) & (lse_a != float("inf")), lse_a, NEG_INF)
    lse_b = tl.where((lse_b == lse_b) & (lse_b != float("inf")), lse_b, NEG_INF)
    shift = safe_max(tl.maximum(lse_a, lse_b))
    a = tl.math.exp2(lse_a - shift)
    b = tl.math.exp2(lse_b - shift)
    total = a + b
    inverse, lse = finish(shift, total)
    return a * inverse, b * inverse, lse


@triton.jit
def rejoin(m, l):
    """Partial states [parts, rows] of the same rows: (weight [parts, rows], m [rows], l [rows]); acc adds up after times its weight."""
    m_all = tl.max(m, 0)
    weight = tl.math.exp2(m - safe_max(m_all)[None, :])
    return weight, m_all, tl.sum(l * weight, 0)
