// Vector instructions that work on each lane alone: result = f(sources), written where exec is set.
//
// A row: name, form (destination _ sources), shadow rule, and the result as an expression over a, b, c. Sources: f is f32, u is u32, i is i32,
// q is a 64-bit pair, d the old destination. Destinations: v 32-bit, V 64-bit, h 16-bit (the upper half becomes 0).

static f32 flush(f32 x) { return (bits(x) & 0x7F800000) ? x : flt(bits(x) & 0x80000000); }      // transcendental units drop denormals
static f32 max_num(f32 a, f32 b) { return a != a ? b : b != b ? a : a > b ? a : b > a ? b : flt(bits(a) & bits(b)); }
static f32 min_num(f32 a, f32 b) { return a != a ? b : b != b ? a : a < b ? a : b < a ? b : flt(bits(a) | bits(b)); }
static f32 med3(f32 a, f32 b, f32 c) {
    if (a != a || b != b || c != c) return min_num(min_num(a, b), c);
    return max_num(min_num(a, b), min_num(max_num(a, b), c));
}
static i32 med3_i(i32 a, i32 b, i32 c) { i32 lo = a < b ? a : b, hi = a < b ? b : a; return c < lo ? lo : c > hi ? hi : c; }
static u32 med3_u(u32 a, u32 b, u32 c) { u32 lo = a < b ? a : b, hi = a < b ? b : a; return c < lo ? lo : c > hi ? hi : c; }
static u32 to_u32(f32 x) { return !(x > 0) ? 0 : x >= 0x1p32f ? 0xFFFFFFFF : (u32)x; }
static u32 to_i32(f32 x) { return x != x ? 0 : x >= 0x1p31f ? 0x7FFFFFFF : x <= -0x1p31f ? 0x80000000 : (u32)(i32)x; }
static u32 ubfe(u32 a, u32 b, u32 c) { return a >> (b & 31) & ((1u << (c & 31)) - 1); }
static u32 sbfe(u32 a, u32 b, u32 c) { b &= 31; c &= 31; return c == 0 ? 0 : c + b >= 32 ? (u32)(sgn(a) >> b) : (u32)((i32)(a << (32 - c - b)) >> (32 - c)); }
static i32 i24(u32 a) { return (i32)(a << 8) >> 8; }
static u32 u24(u32 a) { return a & 0xFFFFFF; }
static u32 perm_byte(u64 both, u32 s) {
    s &= 255;
    if (s < 8) return both >> 8 * s & 255;
    if (s < 12) return both >> (16 * (s - 8) + 15) & 1 ? 255 : 0;
    return s == 12 ? 0 : 255;
}
static u32 perm(u32 a, u32 b, u32 c) {
    u64 both = (u64)a << 32 | b; u32 r = 0;
    for (int k = 0; k < 4; k++) r |= perm_byte(both, c >> 8 * k) << 8 * k;
    return r;
}
static u32 class_of(f32 x) {      // v_cmp_class bits: sNaN qNaN -inf -norm -den -0 +0 +den +norm +inf
    u32 u = bits(x), e = u >> 23 & 255, m = u & 0x7FFFFF, s = u >> 31;
    if (e == 255) return m ? (m >> 22 ? 2 : 1) : s ? 4 : 512;
    if (e == 0) return m ? (s ? 16 : 128) : s ? 32 : 64;
    return s ? 8 : 256;
}
#define F16(e) to_f16(e)
#define H(x) from_f16((x) & 0xFFFF)
#define LO(x) ((x) & 0xFFFF)

#define LANE_OPS(_) \
    _(v_mov_b32, v_u, HALVES, a) \
    _(v_accvgpr_read_b32, v_u, HALVES, a) \
    _(v_accvgpr_write_b32, v_u, HALVES, a) \
    _(v_accvgpr_mov_b32, v_u, HALVES, a) \
    _(v_not_b32, v_u, HALVES, ~a) \
    _(v_and_b32, v_uu, V_AND, a & b) \
    _(v_or_b32, v_uu, HALVES, a | b) \
    _(v_xor_b32, v_uu, HALVES, a ^ b) \
    _(v_xnor_b32, v_uu, HALVES, ~(a ^ b)) \
    _(v_and_or_b32, v_uuu, AND_OR, (a & b) | c) \
    _(v_or3_b32, v_uuu, HALVES, a | b | c) \
    _(v_bfi_b32, v_uuu, BFI, (a & b) | (~a & c)) \
    _(v_bfe_u32, v_uuu, BFE, ubfe(a, b, c)) \
    _(v_bfe_i32, v_uuu, BFE, sbfe(a, b, c)) \
    _(v_bfm_b32, v_uu, MIX, ((1u << (a & 31)) - 1) << (b & 31)) \
    _(v_bfrev_b32, v_u, MIX, reverse_bits(a)) \
    _(v_bcnt_u32_b32, v_uu, MIX, (u32)__builtin_popcount(a) + b) \
    _(v_ffbl_b32, v_u, MIX, a ? (u32)__builtin_ctz(a) : ~0u) \
    _(v_ffbh_u32, v_u, MIX, a ? (u32)__builtin_clz(a) : ~0u) \
    _(v_lshlrev_b32, v_uu, SHL, b << (a & 31)) \
    _(v_lshrrev_b32, v_uu, SHR, b >> (a & 31)) \
    _(v_ashrrev_i32, v_uu, SHR, (u32)(sgn(b) >> (a & 31))) \
    _(v_lshl_or_b32, v_uuu, SHL_OR, (a << (b & 31)) | c) \
    _(v_lshl_add_u32, v_uuu, MIX, (a << (b & 31)) + c) \
    _(v_add_lshl_u32, v_uuu, MIX, (a + b) << (c & 31)) \
    _(v_alignbit_b32, v_uuu, MIX, (u32)(((u64)a << 32 | b) >> (c & 31))) \
    _(v_alignbyte_b32, v_uuu, MIX, (u32)(((u64)a << 32 | b) >> 8 * (c & 3))) \
    _(v_perm_b32, v_uuu, PERM, perm(a, b, c)) \
    _(v_add_u32, v_uu, MIX, a + b) \
    _(v_sub_u32, v_uu, MIX, a - b) \
    _(v_subrev_u32, v_uu, MIX, b - a) \
    _(v_add3_u32, v_uuu, MIX, a + b + c) \
    _(v_xad_u32, v_uuu, MIX, (a ^ b) + c) \
    _(v_mul_lo_u32, v_uu, MIX, a * b) \
    _(v_mul_hi_u32, v_uu, MIX, (u32)((u64)a * b >> 32)) \
    _(v_mul_hi_i32, v_uu, MIX, (u32)((i64)sgn(a) * sgn(b) >> 32)) \
    _(v_mul_u32_u24, v_uu, MIX, u24(a) * u24(b)) \
    _(v_mul_hi_u32_u24, v_uu, MIX, (u32)((u64)u24(a) * u24(b) >> 32)) \
    _(v_mul_i32_i24, v_uu, MIX, (u32)((i64)i24(a) * i24(b))) \
    _(v_mad_u32_u24, v_uuu, MIX, u24(a) * u24(b) + c) \
    _(v_mad_i32_i24, v_uuu, MIX, (u32)((i64)i24(a) * i24(b)) + c) \
    _(v_sad_u32, v_uuu, MIX, (a > b ? a - b : b - a) + c) \
    _(v_min_u32, v_uu, MIX, a < b ? a : b) \
    _(v_max_u32, v_uu, MIX, a > b ? a : b) \
    _(v_min_i32, v_ii, MIX, (u32)(a < b ? a : b)) \
    _(v_max_i32, v_ii, MIX, (u32)(a > b ? a : b)) \
    _(v_min3_u32, v_uuu, MIX, (a < b ? a : b) < c ? (a < b ? a : b) : c) \
    _(v_max3_u32, v_uuu, MIX, (a > b ? a : b) > c ? (a > b ? a : b) : c) \
    _(v_min3_i32, v_iii, MIX, (u32)((a < b ? a : b) < c ? (a < b ? a : b) : c)) \
    _(v_max3_i32, v_iii, MIX, (u32)((a > b ? a : b) > c ? (a > b ? a : b) : c)) \
    _(v_med3_i32, v_iii, MIX, (u32)med3_i(a, b, c)) \
    _(v_med3_u32, v_uuu, MIX, med3_u(a, b, c)) \
    _(v_add_u16, h_uu, LOW, LO(a + b)) \
    _(v_sub_u16, h_uu, LOW, LO(a - b)) \
    _(v_subrev_u16, h_uu, LOW, LO(b - a)) \
    _(v_mul_lo_u16, h_uu, LOW, LO(LO(a) * LO(b))) \
    _(v_mad_u16, h_uuu, LOW, LO(LO(a) * LO(b) + c)) \
    _(v_mad_legacy_u16, h_uuu, LOW, LO(LO(a) * LO(b) + c)) \
    _(v_min_u16, h_uu, LOW, LO(a) < LO(b) ? LO(a) : LO(b)) \
    _(v_max_u16, h_uu, LOW, LO(a) > LO(b) ? LO(a) : LO(b)) \
    _(v_min_i16, h_uu, LOW, LO((i16)a < (i16)b ? a : b)) \
    _(v_max_i16, h_uu, LOW, LO((i16)a > (i16)b ? a : b)) \
    _(v_lshlrev_b16, h_uu, LOW, LO(b << (a & 15))) \
    _(v_lshrrev_b16, h_uu, LOW, LO(b) >> (a & 15)) \
    _(v_ashrrev_i16, h_uu, LOW, LO((u32)((i32)(i16)b >> (a & 15)))) \
    _(v_pack_b32_f16, v_uu, PACK, LO(a) | b << 16) \
    _(v_add_f32, v_ff, MIX, bits(a + b)) \
    _(v_sub_f32, v_ff, MIX, bits(a - b)) \
    _(v_subrev_f32, v_ff, MIX, bits(b - a)) \
    _(v_mul_f32, v_ff, MIX, bits(a * b)) \
    _(v_mul_legacy_f32, v_ff, MIX, bits(a == 0 || b == 0 ? 0.0f : a * b)) \
    _(v_fma_f32, v_fff, MIX, bits(fmaf(a, b, c))) \
    _(v_fmac_f32, v_ffd, MIX, bits(fmaf(a, b, flt(d)))) \
    _(v_fmamk_f32, v_fff, MIX, bits(fmaf(a, b, c))) \
    _(v_fmaak_f32, v_fff, MIX, bits(fmaf(a, b, c))) \
    _(v_max_f32, v_ff, MIX, bits(max_num(a, b))) \
    _(v_min_f32, v_ff, MIX, bits(min_num(a, b))) \
    _(v_max3_f32, v_fff, MIX, bits(max_num(max_num(a, b), c))) \
    _(v_min3_f32, v_fff, MIX, bits(min_num(min_num(a, b), c))) \
    _(v_maximum3_f32, v_fff, MIX, a != a || b != b || c != c ? 0x7FC00000u : bits(max_num(max_num(a, b), c))) \
    _(v_minimum3_f32, v_fff, MIX, a != a || b != b || c != c ? 0x7FC00000u : bits(min_num(min_num(a, b), c))) \
    _(v_med3_f32, v_fff, MIX, bits(med3(a, b, c))) \
    _(v_exp_f32, v_f, MIX, bits(flush(exp2f(flush(a))))) \
    _(v_log_f32, v_f, MIX, bits(log2f(flush(a)))) \
    _(v_rcp_f32, v_f, MIX, bits(flush(1 / flush(a)))) \
    _(v_rcp_iflag_f32, v_f, MIX, bits(flush(1 / flush(a)))) \
    _(v_rsq_f32, v_f, MIX, bits(1 / sqrtf(flush(a)))) \
    _(v_sqrt_f32, v_f, MIX, bits(sqrtf(flush(a)))) \
    _(v_sin_f32, v_f, MIX, bits((f32)sin(2 * M_PI * (f64)a))) \
    _(v_cos_f32, v_f, MIX, bits((f32)cos(2 * M_PI * (f64)a))) \
    _(v_floor_f32, v_f, MIX, bits(floorf(a))) \
    _(v_ceil_f32, v_f, MIX, bits(ceilf(a))) \
    _(v_trunc_f32, v_f, MIX, bits(truncf(a))) \
    _(v_rndne_f32, v_f, MIX, bits(rintf(a))) \
    _(v_fract_f32, v_f, MIX, bits(a - floorf(a) >= 1 ? 0x1.fffffep-1f : a - floorf(a))) \
    _(v_ldexp_f32, v_fi, MIX, bits(ldexpf(a, b))) \
    _(v_frexp_exp_i32_f32, v_f, MIX, a == 0 || !isfinite(a) ? 0u : (u32)(ilogbf(a) + 1)) \
    _(v_frexp_mant_f32, v_f, MIX, a == 0 || !isfinite(a) ? bits(a) : bits(ldexpf(a, -(ilogbf(a) + 1)))) \
    _(v_cvt_f32_u32, v_u, MIX, bits((f32)a)) \
    _(v_cvt_f32_i32, v_i, MIX, bits((f32)a)) \
    _(v_cvt_u32_f32, v_f, MIX, to_u32(a)) \
    _(v_cvt_i32_f32, v_f, MIX, to_i32(a)) \
    _(v_cvt_f32_ubyte0, v_u, MIX, bits((f32)(a & 255))) \
    _(v_cvt_f32_ubyte1, v_u, MIX, bits((f32)(a >> 8 & 255))) \
    _(v_cvt_f32_ubyte2, v_u, MIX, bits((f32)(a >> 16 & 255))) \
    _(v_cvt_f32_ubyte3, v_u, MIX, bits((f32)(a >> 24))) \
    _(v_cvt_f16_f32, h_f, LOW, F16(a)) \
    _(v_cvt_f32_f16, v_u, LOW_IN, bits(H(a))) \
    _(v_cvt_f32_bf16, v_u, LOW_IN, a << 16) \
    _(v_cvt_pk_bf16_f32, v_ff, PACK_FROM, to_bf16(a) | to_bf16(b) << 16) \
    _(v_cvt_pk_f16_f32, v_ff, PACK_FROM, F16(a) | F16(b) << 16) \
    _(v_cvt_pk_u16_u32, v_uu, PACK_FROM, (a > 65535 ? 65535 : a) | (b > 65535 ? 65535 : b) << 16) \
    _(v_add_f16, h_uu, LOW, F16(H(a) + H(b))) \
    _(v_sub_f16, h_uu, LOW, F16(H(a) - H(b))) \
    _(v_mul_f16, h_uu, LOW, F16(H(a) * H(b))) \
    _(v_max_f16, h_uu, LOW, F16(max_num(H(a), H(b)))) \
    _(v_min_f16, h_uu, LOW, F16(min_num(H(a), H(b)))) \
    _(v_fma_f16, h_uuu, LOW, F16((f32)((f64)H(a) * H(b) + H(c)))) \
    _(v_lshl_add_u64, V_quq, MIX, (a << (b & 7)) + c) \
    _(v_lshlrev_b64, V_uq, MIX, b << (a & 63)) \
    _(v_lshrrev_b64, V_uq, MIX, b >> (a & 63)) \
    _(v_ashrrev_i64, V_uq, MIX, (u64)((i64)b >> (a & 63))) \
    _(v_mov_b64, V_q, PAIR, a)

enum { HALVES = 1, V_AND, AND_OR, BFI, BFE, SHL, SHR, SHL_OR, PERM, LOW, LOW_IN, PACK, PACK_FROM, PAIR, MIX };

// Each row becomes a function over the 64 lanes of up to three sources.
typedef struct { const u32 *lo, *hi; } Lanes;
typedef void (*LaneFn)(const Lanes *s, const u32 *old, u32 *lo, u32 *hi);
#define AS_f(k) flt(s[k].lo[l])
#define AS_u(k) s[k].lo[l]
#define AS_i(k) sgn(s[k].lo[l])
#define AS_q(k) (s[k].lo[l] | (u64)s[k].hi[l] << 32)
#define TYPE_f f32
#define TYPE_u u32
#define TYPE_i i32
#define TYPE_q u64
#define TAKE(var, t, k) TYPE_##t var = AS_##t(k);
#define LANE_FN(name, takes, stores, ...) \
    static void fn_##name(const Lanes *s, const u32 *old, u32 *lo, u32 *hi) { (void)old; (void)hi; EACH_LANE(l) { takes stores(__VA_ARGS__) } }
#define STORE_32(...) lo[l] = (__VA_ARGS__);
#define STORE_64(...) { u64 r = (__VA_ARGS__); lo[l] = (u32)r; hi[l] = r >> 32; }
#define FORM_v_u(n, ...) LANE_FN(n, TAKE(a, u, 0), STORE_32, __VA_ARGS__)
#define FORM_v_f(n, ...) LANE_FN(n, TAKE(a, f, 0), STORE_32, __VA_ARGS__)
#define FORM_v_i(n, ...) LANE_FN(n, TAKE(a, i, 0), STORE_32, __VA_ARGS__)
#define FORM_v_uu(n, ...) LANE_FN(n, TAKE(a, u, 0) TAKE(b, u, 1), STORE_32, __VA_ARGS__)
#define FORM_v_ff(n, ...) LANE_FN(n, TAKE(a, f, 0) TAKE(b, f, 1), STORE_32, __VA_ARGS__)
#define FORM_v_fi(n, ...) LANE_FN(n, TAKE(a, f, 0) TAKE(b, i, 1), STORE_32, __VA_ARGS__)
#define FORM_v_ii(n, ...) LANE_FN(n, TAKE(a, i, 0) TAKE(b, i, 1), STORE_32, __VA_ARGS__)
#define FORM_v_ffd(n, ...) LANE_FN(n, TAKE(a, f, 0) TAKE(b, f, 1) u32 d = old[l];, STORE_32, __VA_ARGS__)
#define FORM_v_uuu(n, ...) LANE_FN(n, TAKE(a, u, 0) TAKE(b, u, 1) TAKE(c, u, 2), STORE_32, __VA_ARGS__)
#define FORM_v_fff(n, ...) LANE_FN(n, TAKE(a, f, 0) TAKE(b, f, 1) TAKE(c, f, 2), STORE_32, __VA_ARGS__)
#define FORM_v_iii(n, ...) LANE_FN(n, TAKE(a, i, 0) TAKE(b, i, 1) TAKE(c, i, 2), STORE_32, __VA_ARGS__)
#define FORM_h_f FORM_v_f
#define FORM_h_uu FORM_v_uu
#define FORM_h_uuu FORM_v_uuu
#define FORM_V_q(n, ...) LANE_FN(n, TAKE(a, q, 0), STORE_64, __VA_ARGS__)
#define FORM_V_uq(n, ...) LANE_FN(n, TAKE(a, u, 0) TAKE(b, q, 1), STORE_64, __VA_ARGS__)
#define FORM_V_quq(n, ...) LANE_FN(n, TAKE(a, q, 0) TAKE(b, u, 1) TAKE(c, q, 2), STORE_64, __VA_ARGS__)
#define AS_FUNCTION(name, form, rule, ...) FORM_##form(name, __VA_ARGS__)
LANE_OPS(AS_FUNCTION)
#undef AS_FUNCTION

// How undefinedness passes through: by 16-bit halves where an instruction moves halves, else any undefined source spoils the lane.
static Shadow both(u64 m) { return (Shadow){m, m}; }
static Shadow spoiled(Shadow s) { return both(s.lo | s.hi); }
static Shadow join(Shadow a, Shadow b) { return (Shadow){a.lo | b.lo, a.hi | b.hi}; }
static Shadow known_zero(Shadow s, u32 mask) { if (!(mask & 0xFFFF)) s.lo = 0; if (!(mask >> 16)) s.hi = 0; return s; }
static Shadow shifted(Shadow s, u32 by, int left, int arithmetic) {
    if (by == 16) return left ? (Shadow){0, s.lo} : (Shadow){s.hi, arithmetic ? s.hi : 0};
    if (by > 16) return left ? (Shadow){0, s.lo} : (Shadow){s.hi, arithmetic ? s.hi : 0};
    return left ? (Shadow){s.lo, s.lo | s.hi} : (Shadow){s.lo | s.hi, s.hi};
}

static Shadow lane_shadow(const Inst *i, int rule, const Lanes *s, const Shadow *t, int n) {
    Shadow all = DEFINED;
    for (int k = 0; k < n; k++) all = join(all, t[k]);
    if (!(all.lo | all.hi)) return DEFINED;
    const Operand *o = i->src;
#define KNOWN(k) (o[k].kind == CONST || (o[k].kind == SGPR && !(t[k].lo | t[k].hi)))
    switch (rule) {
    case HALVES: return all;
    case V_AND:
        if (KNOWN(0)) return known_zero(t[1], s[0].lo[0]);
        if (KNOWN(1)) return known_zero(t[0], s[1].lo[0]);
        return all;
    case AND_OR: return join(KNOWN(1) ? known_zero(t[0], s[1].lo[0]) : KNOWN(0) ? known_zero(t[1], s[0].lo[0]) : join(t[0], t[1]), t[2]);
    case BFI:
        if (KNOWN(0)) return join(known_zero(t[1], s[0].lo[0]), known_zero(t[2], ~s[0].lo[0]));
        return all;
    case BFE:
        if (KNOWN(1) && KNOWN(2)) {
            u32 at = s[1].lo[0] & 31, width = s[2].lo[0] & 31;
            return both(at >= 16 ? t[0].hi : at + width <= 16 ? t[0].lo : t[0].lo | t[0].hi);
        }
        break;
    case SHL: if (KNOWN(0)) return shifted(t[1], s[0].lo[0] & 31, 1, 0); break;
    case SHR: if (KNOWN(0)) return shifted(t[1], s[0].lo[0] & 31, 0, 1); break;
    case SHL_OR: if (KNOWN(1)) return join(shifted(t[0], s[1].lo[0] & 31, 1, 0), t[2]); break;
    case PERM:
        if (KNOWN(2)) {
            Shadow r = DEFINED;
            for (int k = 0; k < 4; k++) {
                u32 sel = s[2].lo[0] >> 8 * k & 255;
                u64 m = sel >= 12 ? 0 : sel >= 8 ? all.lo | all.hi : (sel & 2 ? t[sel < 4].hi : t[sel < 4].lo);
                if (k < 2) r.lo |= m; else r.hi |= m;
            }
            return r;
        }
        break;
    case LOW: return (Shadow){all.lo, 0};
    case LOW_IN: return both(all.lo);
    case PACK: return (Shadow){t[0].lo, t[1].lo};
    case PACK_FROM: return (Shadow){t[0].lo | t[0].hi, t[1].lo | t[1].hi};
    }
    return spoiled(all);
}

static f32 clamped(f32 x) { return x != x || x < 0 ? 0 : x > 1 ? 1 : x; }

// form[0] says how wide the result is, the rest how wide each source is.
static void run_lanes(Wave *w, const Inst *i, LaneFn fn, const char *form, int rule) {
    u32 buf[3][2][LANES], lo[LANES], hi[LANES];
    Lanes s[3]; Shadow t[4], u;
    int n = 0;
    u64 e = exec_of(w);
    for (const char *c = form + 2; *c && *c != 'd'; c++, n++) {
        s[n].lo = read_lanes(w, &i->src[n], 0, buf[n][0], &t[n]);
        if (*c == 'q') { s[n].hi = read_lanes(w, &i->src[n], 1, buf[n][1], &u); t[n] = both(t[n].lo | t[n].hi | u.lo | u.hi); }
    }
    if (i->flags & IS_DPP) {                    // the first source comes from another lane; lanes without one keep the old destination
        const LaneMap *m = &w->group->launch->maps[i->map];
        u32 moved[LANES]; Shadow from = t[0]; t[0] = DEFINED;
        u64 usable = 0, active = exec_of(w);
        EACH_LANE(l) {
            int at = m->source[l], ok = (m->valid >> l & 1) && (active >> at & 1);
            moved[l] = ok ? s[0].lo[at] : 0; usable |= (u64)ok << l;
            if (ok) { t[0].lo |= (from.lo >> at & 1) << l; t[0].hi |= (from.hi >> at & 1) << l; }
        }
        memcpy(buf[0][0], moved, sizeof moved); s[0].lo = buf[0][0];
        e &= m->enabled & (m->bound_ctrl ? ALL : usable);
    }
    const Operand *d = &i->dst[0];
    const u32 *old = NULL;
    if (form[2 + n] == 'd') { settled(w, d->index); old = w->V[d->index]; t[n++] = w->v_undef[d->index]; }
    fn(s, old, lo, hi);
    Shadow r = lane_shadow(i, rule, s, t, n);
    if (form[0] == 'V') {
        Shadow r2 = spoiled(r);
        if (rule == PAIR) { read_lanes(w, &i->src[0], 0, buf[0][0], &r); read_lanes(w, &i->src[0], 1, buf[0][1], &r2); }
        else r = r2;
        write_lanes(w, d->index, lo, r, e); write_lanes(w, d->index + 1, hi, r2, e);
        return;
    }
    if (i->flags & CLAMP) EACH_LANE(l) lo[l] = bits(clamped(flt(lo[l])));
    if (i->flags & IS_SDWA && d->sel) {      // only part of the destination; the rest is kept, or cleared under UNUSED_PAD
        u32 shift = d->sel >= 5 ? 16 * (d->sel - 5) : 8 * (d->sel - 1), m = (d->sel >= 5 ? 0xFFFFu : 0xFFu) << shift;
        int pad = i->flags & DST_PAD; Shadow k = w->v_undef[d->index];
        settled(w, d->index);
        EACH_LANE(l) lo[l] = (lo[l] << shift & m) | (pad ? 0 : w->V[d->index][l] & ~m);
        Shadow at = shift >= 16 ? (Shadow){0, r.lo} : (Shadow){r.lo, 0};
        if (!pad) at = m == 0xFFFF0000 ? (Shadow){k.lo, at.hi} : m == 0xFFFF ? (Shadow){at.lo, k.hi} : join(at, k);
        r = at;
    }
    write_lanes(w, d->index, lo, r, e);
}
