// Instructions between lanes, masks and scalars: comparisons, selection, carries, division steps, packed pairs, lane moves.

#define COMPARES(_) \
    _(v_cmp_lt_f32, v_ff, a < b) _(v_cmp_le_f32, v_ff, a <= b) _(v_cmp_gt_f32, v_ff, a > b) _(v_cmp_ge_f32, v_ff, a >= b) \
    _(v_cmp_eq_f32, v_ff, a == b) _(v_cmp_lg_f32, v_ff, a < b || a > b) _(v_cmp_neq_f32, v_ff, !(a == b)) \
    _(v_cmp_nlt_f32, v_ff, !(a < b)) _(v_cmp_nle_f32, v_ff, !(a <= b)) _(v_cmp_ngt_f32, v_ff, !(a > b)) _(v_cmp_nge_f32, v_ff, !(a >= b)) \
    _(v_cmp_nlg_f32, v_ff, !(a < b || a > b)) _(v_cmp_o_f32, v_ff, a == a && b == b) _(v_cmp_u_f32, v_ff, a != a || b != b) \
    _(v_cmp_lt_u32, v_uu, a < b) _(v_cmp_le_u32, v_uu, a <= b) _(v_cmp_gt_u32, v_uu, a > b) _(v_cmp_ge_u32, v_uu, a >= b) \
    _(v_cmp_eq_u32, v_uu, a == b) _(v_cmp_ne_u32, v_uu, a != b) \
    _(v_cmp_lt_i32, v_ii, a < b) _(v_cmp_le_i32, v_ii, a <= b) _(v_cmp_gt_i32, v_ii, a > b) _(v_cmp_ge_i32, v_ii, a >= b) \
    _(v_cmp_eq_i32, v_ii, a == b) _(v_cmp_ne_i32, v_ii, a != b) \
    _(v_cmp_lt_u16, v_uu, LO(a) < LO(b)) _(v_cmp_le_u16, v_uu, LO(a) <= LO(b)) _(v_cmp_gt_u16, v_uu, LO(a) > LO(b)) \
    _(v_cmp_ge_u16, v_uu, LO(a) >= LO(b)) _(v_cmp_eq_u16, v_uu, LO(a) == LO(b)) _(v_cmp_ne_u16, v_uu, LO(a) != LO(b)) \
    _(v_cmp_lt_i16, v_uu, (i16)a < (i16)b) _(v_cmp_le_i16, v_uu, (i16)a <= (i16)b) _(v_cmp_gt_i16, v_uu, (i16)a > (i16)b) \
    _(v_cmp_ge_i16, v_uu, (i16)a >= (i16)b) _(v_cmp_eq_i16, v_uu, LO(a) == LO(b)) _(v_cmp_ne_i16, v_uu, LO(a) != LO(b)) \
    _(v_cmp_lt_f16, v_uu, H(a) < H(b)) _(v_cmp_gt_f16, v_uu, H(a) > H(b)) _(v_cmp_eq_f16, v_uu, H(a) == H(b)) \
    _(v_cmp_neq_f16, v_uu, !(H(a) == H(b))) _(v_cmp_o_f16, v_uu, H(a) == H(a) && H(b) == H(b)) _(v_cmp_u_f16, v_uu, H(a) != H(a) || H(b) != H(b)) \
    _(v_cmp_class_f32, v_fu, (class_of(a) & b) != 0) \
    _(v_cmp_lt_u64, v_qq, a < b) _(v_cmp_le_u64, v_qq, a <= b) _(v_cmp_gt_u64, v_qq, a > b) _(v_cmp_ge_u64, v_qq, a >= b) \
    _(v_cmp_eq_u64, v_qq, a == b) _(v_cmp_ne_u64, v_qq, a != b) \
    _(v_cmp_lt_i64, v_qq, (i64)a < (i64)b) _(v_cmp_le_i64, v_qq, (i64)a <= (i64)b) _(v_cmp_gt_i64, v_qq, (i64)a > (i64)b) \
    _(v_cmp_ge_i64, v_qq, (i64)a >= (i64)b) _(v_cmp_eq_i64, v_qq, a == b) _(v_cmp_ne_i64, v_qq, a != b)
#define FORM_v_qq(n, ...) LANE_FN(n, TAKE(a, q, 0) TAKE(b, q, 1), STORE_32, __VA_ARGS__)
#define FORM_v_fu(n, ...) LANE_FN(n, TAKE(a, f, 0) TAKE(b, u, 1), STORE_32, __VA_ARGS__)
#define AS_FUNCTION(name, form, ...) FORM_##form(name, __VA_ARGS__)
COMPARES(AS_FUNCTION)
#undef AS_FUNCTION

static Shadow read_wide(Wave *w, const Operand *o, char type, Lanes *s, u32 buf[2][LANES]) {
    Shadow t, u;
    s->lo = read_lanes(w, o, 0, buf[0], &t);
    if (type == 'q') { s->hi = read_lanes(w, o, 1, buf[1], &u); t = join(t, u); }
    return t;
}

// A comparison writes one bit a lane; inactive lanes get 0. imm[0]: 16 where only the low halves are compared.
static void run_compare(Wave *w, const Inst *i, LaneFn fn, const char *form) {
    u32 buf[2][2][LANES], r[LANES]; Lanes s[2];
    Shadow t = join(read_wide(w, &i->src[0], form[2], &s[0], buf[0]), read_wide(w, &i->src[1], form[3], &s[1], buf[1]));
    fn(s, NULL, r, NULL);
    u64 m = 0, e = exec_of(w);
    EACH_LANE(l) m |= (u64)(r[l] & 1) << l;
    u64 used = i->imm[0] == 16 ? t.lo : t.lo | t.hi;
    write_mask(w, &i->dst[0], m & e, used & e);
}

// v_cndmask: the mask picks the second source where its bit is set.
static void run_select(Wave *w, const Inst *i) {
    u32 ba[LANES], bb[LANES], r[LANES]; Shadow ta, tb, s; u64 undef;
    const u32 *a = read_lanes(w, &i->src[0], 0, ba, &ta), *b = read_lanes(w, &i->src[1], 0, bb, &tb);
    u64 m = read_mask(w, &i->src[2], &undef);
    EACH_LANE(l) r[l] = m >> l & 1 ? b[l] : a[l];
    s.lo = (m & tb.lo) | (~m & ta.lo) | undef; s.hi = (m & tb.hi) | (~m & ta.hi) | undef;
    u64 e = exec_of(w);
    if (i->flags & IS_SDWA && i->dst[0].sel) fail(w, TRAP, 0, "v_cndmask with a part destination is not modelled");
    write_lanes(w, i->dst[0].index, r, s, e);
}

// Adds and subtracts with a carry mask out, and in where a third source is given.
enum { CARRY_ADD, CARRY_SUB, CARRY_SUBREV };
static void run_carry(Wave *w, const Inst *i) {
    u32 ba[LANES], bb[LANES], r[LANES]; Shadow ta, tb; u64 undef = 0, in = 0, out = 0, e = exec_of(w);
    const u32 *a = read_lanes(w, &i->src[0], 0, ba, &ta), *b = read_lanes(w, &i->src[1], 0, bb, &tb);
    if (i->src[2].kind) in = read_mask(w, &i->src[2], &undef);
    EACH_LANE(l) {
        u64 x = a[l], y = b[l], c = in >> l & 1;
        u64 v = i->imm[0] == CARRY_ADD ? x + y + c : i->imm[0] == CARRY_SUB ? x - y - c : y - x - c;
        r[l] = (u32)v; out |= (v >> 32 & 1) << l;
    }
    Shadow t = spoiled(join(ta, tb)); t = join(t, both(undef));
    write_lanes(w, i->dst[0].index, r, t, e);
    write_mask(w, &i->dst[1], out & e, t.lo & e);
}

// 32 x 32 + 64 -> 64 bits, carry mask out.
static void run_mad64(Wave *w, const Inst *i) {
    u32 buf[4][LANES], lo[LANES], hi[LANES]; Shadow t[4]; u64 out = 0, e = exec_of(w);
    const u32 *a = read_lanes(w, &i->src[0], 0, buf[0], &t[0]), *b = read_lanes(w, &i->src[1], 0, buf[1], &t[1]);
    const u32 *cl = read_lanes(w, &i->src[2], 0, buf[2], &t[2]), *ch = read_lanes(w, &i->src[2], 1, buf[3], &t[3]);
    EACH_LANE(l) {
        u64 c = cl[l] | (u64)ch[l] << 32, p = i->imm[0] ? (u64)((i64)sgn(a[l]) * sgn(b[l])) : (u64)a[l] * b[l], r = p + c;
        lo[l] = (u32)r; hi[l] = r >> 32; out |= (u64)(r < c) << l;
    }
    Shadow low = spoiled(join(join(t[0], t[1]), t[2])), all = join(low, spoiled(t[3]));
    write_lanes(w, i->dst[0].index, lo, low, e); write_lanes(w, i->dst[0].index + 1, hi, all, e);
    write_mask(w, &i->dst[1], out & e, all.lo & e);
}

// Division in three steps: scale by 2^64 where the quotient would leave the normal range, fused steps, then the special cases.
static int is_denormal(f32 x) { return x != 0 && fabsf(x) < 0x1p-126f; }
static void run_div_scale(Wave *w, const Inst *i) {
    u32 buf[3][LANES], r[LANES]; Shadow t[3]; u64 flag = 0, e = exec_of(w);
    const u32 *s[3];
    for (int k = 0; k < 3; k++) s[k] = read_lanes(w, &i->src[k], 0, buf[k], &t[k]);
    EACH_LANE(l) {
        f32 x = flt(s[0][l]), den = flt(s[1][l]), num = flt(s[2][l]); int f = 0;
        int ed = s[1][l] >> 23 & 255, en = s[2][l] >> 23 & 255;
        if (num == 0 || den == 0) x = NAN;
        else if (en - ed >= 96) { f = 1; if (x == den) x = ldexpf(x, 64); }
        else if (ed == 0) x = ldexpf(x, 64);
        else {
            int small_inverse = is_denormal(1 / den), small_quotient = is_denormal(num / den);
            if (small_inverse && small_quotient) { f = 1; if (x == den) x = ldexpf(x, -64); }   // published as +64, which overflows
            else if (small_inverse) x = ldexpf(x, -64);
            else if (small_quotient) { f = 1; if (x == num) x = ldexpf(x, 64); }
            else if (en <= 23) x = ldexpf(x, 64);
        }
        r[l] = bits(x); flag |= (u64)f << l;
    }
    Shadow u = spoiled(join(join(t[0], t[1]), t[2]));
    write_lanes(w, i->dst[0].index, r, u, e); write_mask(w, &i->dst[1], flag & e, u.lo & e);
}
static void run_div_fmas(Wave *w, const Inst *i) {
    u32 buf[3][LANES], r[LANES]; Shadow t[3]; const u32 *s[3];
    for (int k = 0; k < 3; k++) s[k] = read_lanes(w, &i->src[k], 0, buf[k], &t[k]);
    u64 m = w->S[VCC] | (u64)w->S[VCC + 1] << 32, undef = w->s_undef[VCC] | (u64)w->s_undef[VCC + 1] << 32;
    EACH_LANE(l) {
        f32 x = fmaf(flt(s[0][l]), flt(s[1][l]), flt(s[2][l]));
        if (m >> l & 1) x = ldexpf(x, (s[2][l] >> 23 & 255) > 127 ? 64 : -64);
        r[l] = bits(x);
    }
    write_lanes(w, i->dst[0].index, r, join(both(undef), spoiled(join(join(t[0], t[1]), t[2]))), exec_of(w));
}
static void run_div_fixup(Wave *w, const Inst *i) {
    u32 buf[3][LANES], r[LANES]; Shadow t[3]; const u32 *s[3];
    for (int k = 0; k < 3; k++) s[k] = read_lanes(w, &i->src[k], 0, buf[k], &t[k]);
    EACH_LANE(l) {
        f32 q = flt(s[0][l]), den = flt(s[1][l]), num = flt(s[2][l]);
        if (!isfinite(den) || !isfinite(num) || den == 0 || num == 0) r[l] = bits(num / den);
        else {
            u32 sign = (s[1][l] ^ s[2][l]) & 0x80000000, mag = bits(q) & 0x7FFFFFFF;
            if ((int)(s[2][l] >> 23 & 255) - (int)(s[1][l] >> 23 & 255) < -150) mag = 0;
            else if (mag >= 0x7F800000) mag = 0x7F800000;         // the steps overflowed
            r[l] = mag | sign;
        }
    }
    write_lanes(w, i->dst[0].index, r, spoiled(join(join(t[0], t[1]), t[2])), exec_of(w));
}

// Packed pairs (v_pk_*_f32, v_pk_mov_b32): each result register takes one register of each source pair, chosen by op_sel and op_sel_hi.
enum { PK_MUL, PK_ADD, PK_FMA, PK_MOV };
static void run_packed32(Wave *w, const Inst *i) {
    u32 r[2][LANES]; Shadow out[2];
    int n = i->imm[0] == PK_FMA ? 3 : 2;
    for (int part = 0; part < 2; part++) {
        u32 buf[3][LANES]; const u32 *s[3]; Shadow t[3], all = DEFINED;
        for (int k = 0; k < n; k++) {
            Operand o = i->src[k];                    // sel, hi: the register for the low, high result; neg, abs: negate low, high
            u32 pick = part ? o.hi : o.sel;
            o.neg = part ? o.abs : o.neg; o.abs = o.sel = o.sext = 0;
            s[k] = read_lanes(w, &o, o.kind == CONST ? 0 : pick, buf[k], &t[k]);
            all = join(all, t[k]);
        }
        out[part] = spoiled(all);
        switch (i->imm[0]) {
        case PK_MUL: EACH_LANE(l) r[part][l] = bits(flt(s[0][l]) * flt(s[1][l])); break;
        case PK_ADD: EACH_LANE(l) r[part][l] = bits(flt(s[0][l]) + flt(s[1][l])); break;
        case PK_FMA: EACH_LANE(l) r[part][l] = bits(fmaf(flt(s[0][l]), flt(s[1][l]), flt(s[2][l]))); break;
        case PK_MOV: memcpy(r[part], s[part], sizeof r[part]); out[part] = t[part]; break;
        }
    }
    for (int part = 0; part < 2; part++) write_lanes(w, i->dst[0].index + part, r[part], out[part], exec_of(w));
}

// Packed halves (v_pk_*_f16, v_pk_*_u16): the same with the two halves of one register.
enum { PK16_ADD_F, PK16_MUL_F, PK16_FMA_F, PK16_MAX_F, PK16_MIN_F, PK16_ADD_U, PK16_SUB_U, PK16_MUL_U, PK16_MAD_U, PK16_MAX_I, PK16_MIN_I, PK16_MAX_U,
       PK16_MIN_U, PK16_SHL, PK16_SHR, PK16_SAR };
static u32 packed16(int op, u32 a, u32 b, u32 c) {
    switch (op) {
    case PK16_ADD_F: return to_f16(H(a) + H(b));
    case PK16_MUL_F: return to_f16(H(a) * H(b));
    case PK16_FMA_F: return to_f16((f32)((f64)H(a) * H(b) + H(c)));
    case PK16_MAX_F: return to_f16(max_num(H(a), H(b)));
    case PK16_MIN_F: return to_f16(min_num(H(a), H(b)));
    case PK16_ADD_U: return LO(a + b);
    case PK16_SUB_U: return LO(a - b);
    case PK16_MUL_U: return LO(a * b);
    case PK16_MAD_U: return LO(a * b + c);
    case PK16_MAX_I: return LO((i16)a > (i16)b ? a : b);
    case PK16_MIN_I: return LO((i16)a < (i16)b ? a : b);
    case PK16_MAX_U: return a > b ? a : b;
    case PK16_MIN_U: return a < b ? a : b;
    case PK16_SHL: return LO(b << (a & 15));
    case PK16_SHR: return b >> (a & 15);
    default: return LO((u32)((i32)(i16)b >> (a & 15)));
    }
}
static void run_packed16(Wave *w, const Inst *i) {
    u32 buf[3][LANES], r[LANES]; const u32 *s[3]; Shadow t[3], out = DEFINED; u64 *side[2] = {&out.lo, &out.hi};
    int n = i->imm[0] == PK16_FMA_F || i->imm[0] == PK16_MAD_U ? 3 : 2;
    for (int k = 0; k < n; k++) { Operand o = i->src[k]; o.neg = o.abs = o.sel = 0; s[k] = read_lanes(w, &o, 0, buf[k], &t[k]); }
    memset(r, 0, sizeof r);
    for (int part = 0; part < 2; part++) {
        u32 shift[3] = {0}, flip[3] = {0};
        for (int k = 0; k < n; k++) {
            const Operand *o = &i->src[k]; u32 pick = part ? o->hi : o->sel;
            shift[k] = 16 * pick; flip[k] = (part ? o->abs : o->neg) ? 0x8000 : 0;
            *side[part] |= pick ? t[k].hi : t[k].lo;
        }
        EACH_LANE(l) r[l] |= packed16(i->imm[0], LO(s[0][l] >> shift[0]) ^ flip[0], LO(s[1][l] >> shift[1]) ^ flip[1],
                                      n == 3 ? LO(s[2][l] >> shift[2]) ^ flip[2] : 0) << 16 * part;
    }
    write_lanes(w, i->dst[0].index, r, out, exec_of(w));
}

// v_fma_mix: each source is an f32 register or one half of an f16 pair (hi: it is a pair; sel: which half). imm[0]: f32, low f16 or high f16 result.
static void run_fma_mix(Wave *w, const Inst *i) {
    u32 buf[3][LANES], r[LANES], d = i->dst[0].index; Shadow t[3], all = DEFINED, keep = w->v_undef[d]; const u32 *s[3];
    settled(w, d);
    for (int k = 0; k < 3; k++) {
        Operand o = i->src[k]; o.neg = o.abs = o.sel = 0;
        const u32 *v = read_lanes(w, &o, 0, buf[k], &t[k]); u32 shift = i->src[k].sel ? 16 : 0;
        u32 flip = i->src[k].neg ? 0x80000000 : 0, mask = i->src[k].abs ? 0x7FFFFFFF : ~0u;
        if (i->src[k].hi) { EACH_LANE(l) buf[k][l] = bits(from_f16(v[l] >> shift & 0xFFFF)); t[k] = both(shift ? t[k].hi : t[k].lo); }
        else if (v != buf[k]) memcpy(buf[k], v, sizeof buf[k]);
        EACH_LANE(l) buf[k][l] = (buf[k][l] & mask) ^ flip;
        s[k] = buf[k]; all = join(all, spoiled(t[k]));
    }
    EACH_LANE(l) {
        u32 x = bits(fmaf(flt(s[0][l]), flt(s[1][l]), flt(s[2][l])));
        r[l] = i->imm[0] == 0 ? x : i->imm[0] == 1 ? (w->V[d][l] & 0xFFFF0000) | to_f16(flt(x)) : (w->V[d][l] & 0xFFFF) | to_f16(flt(x)) << 16;
    }
    if (i->imm[0] == 1) all.hi = keep.hi;
    if (i->imm[0] == 2) all.lo = keep.lo;
    write_lanes(w, d, r, all, exec_of(w));
}

// v_bitop3: a truth table over three sources, bit 4a+2b+c of the table.
static void run_bitop3(Wave *w, const Inst *i) {
    u32 buf[3][LANES], r[LANES]; Shadow t[3], all = DEFINED; const u32 *s[3]; u32 table = i->imm[0];
    for (int k = 0; k < 3; k++) { s[k] = read_lanes(w, &i->src[k], 0, buf[k], &t[k]); all = join(all, t[k]); }
    u32 term[8];
    for (int k = 0; k < 8; k++) term[k] = table >> k & 1 ? ~0u : 0;
    EACH_LANE(l) {
        u32 a = s[0][l], b = s[1][l], c = s[2][l], v = 0;
        for (int k = 0; k < 8; k++) v |= term[k] & (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
        r[l] = v;
    }
    if (all.lo | all.hi) {          // a known-constant source may decide a half regardless of an undefined one
        all = DEFINED;
        for (int half = 0; half < 2; half++) {
            u64 bad = 0;
            EACH_LANE(l) for (int bit = 16 * half; bit < 16 * half + 16; bit++) {
                u32 seen = 0;
                for (int k = 0; k < 8; k++) {
                    int fits = 1;
                    for (int q = 0; q < 3; q++) {
                        u64 u = half ? t[q].hi : t[q].lo;
                        if (!(u >> l & 1) && (s[q][l] >> bit & 1) != (u32)(k >> (2 - q) & 1)) fits = 0;
                    }
                    if (fits) seen |= 1 << (table >> k & 1);
                }
                if (seen == 3) { bad |= (u64)1 << l; break; }
            }
            if (half) all.hi = bad; else all.lo = bad;
        }
    }
    if (i->imm[1] == 16) { EACH_LANE(l) r[l] &= 0xFFFF; all.hi = 0; }
    write_lanes(w, i->dst[0].index, r, all, exec_of(w));
}

// Lane moves. Reading a lane into a scalar makes its definedness a scalar's.
static void run_readlane(Wave *w, const Inst *i) {
    u32 n = i->src[0].index, l = i->src[1].kind ? (u32)need_scalar(w, &i->src[1], "a lane number") & 63 : (u32)first_lane(exec_of(w));
    settled(w, n);
    u32 u = (w->v_undef[n].lo >> l & 1 ? 0xFFFF : 0) | (w->v_undef[n].hi >> l & 1 ? 0xFFFF0000 : 0);
    write_scalar(w, &i->dst[0], w->V[n][l], u);
}
static void run_writelane(Wave *w, const Inst *i) {
    u64 undef, v = read_scalar(w, &i->src[0], &undef), l = need_scalar(w, &i->src[1], "a lane number") & 63, m = (u64)1 << l;
    u32 n = i->dst[0].index;
    settled(w, n);
    w->V[n][l] = (u32)v;
    Shadow *t = &w->v_undef[n];
    t->lo = undef & 0xFFFF ? t->lo | m : t->lo & ~m; t->hi = undef >> 16 & 0xFFFF ? t->hi | m : t->hi & ~m;
}
static void run_mbcnt(Wave *w, const Inst *i) {           // bits of the mask below this lane, plus the second source
    u32 ba[LANES], bb[LANES], r[LANES]; Shadow ta, tb; int high = i->imm[0];
    const u32 *a = read_lanes(w, &i->src[0], 0, ba, &ta), *b = read_lanes(w, &i->src[1], 0, bb, &tb);
    EACH_LANE(l) {
        u32 below = high ? (l < 32 ? 0 : (u32)(((u64)1 << (l - 32)) - 1)) : (l >= 32 ? ~0u : (u32)(((u64)1 << l) - 1));
        r[l] = (u32)__builtin_popcount(a[l] & below) + b[l];
    }
    write_lanes(w, i->dst[0].index, r, spoiled(join(ta, tb)), exec_of(w));
}
static void run_swap(Wave *w, const Inst *i) {            // v_swap_b32
    u32 a[LANES], d = i->dst[0].index, s = i->src[0].index; Shadow t = w->v_undef[d];
    settled(w, d); settled(w, s);
    memcpy(a, w->V[d], sizeof a);
    write_lanes(w, d, w->V[s], w->v_undef[s], exec_of(w)); write_lanes(w, s, a, t, exec_of(w));
}
// v_permlane32_swap / 16_swap: the odd 32 (16) lanes of the first register change places with the even ones of the second.
static u64 swap_shadow(u64 own, u64 other, int n, int take_odd) {
    u64 r = 0;
    EACH_LANE(l) { int odd = (l & n) != 0; r |= (odd == take_odd ? other >> (l ^ n) & 1 : own >> l & 1) << l; }
    return r;
}
static void run_permlane_swap(Wave *w, const Inst *i) {
    u32 a[LANES], b[LANES], d = i->dst[0].index, s = i->src[0].index; int n = (int)i->imm[0];
    settled(w, d); settled(w, s);
    Shadow td = w->v_undef[d], ts = w->v_undef[s];
    EACH_LANE(l) { int odd = (l & n) != 0; a[l] = odd ? w->V[s][l ^ n] : w->V[d][l]; b[l] = odd ? w->V[s][l] : w->V[d][l ^ n]; }
    Shadow ra = {swap_shadow(td.lo, ts.lo, n, 1), swap_shadow(td.hi, ts.hi, n, 1)}, rb = {swap_shadow(ts.lo, td.lo, n, 0), swap_shadow(ts.hi, td.hi, n, 0)};
    write_lanes(w, d, a, ra, exec_of(w)); write_lanes(w, s, b, rb, exec_of(w));
}

// 8-bit floats. imm[0]: the high half of the packed register; imm[1]: bf8; imm[2]: the wide type; source 1 of the scalef32 forms is the scale.
enum { WIDE_F32, WIDE_F16, WIDE_BF16 };
static const Small *small_format(Wave *w, const Inst *i) { return &SMALL[w->group->launch->fnuz][i->imm[1]]; }
static f32 scale_of(u32 u) { return flt(u & 0x7F800000); }       // the exponent alone counts

static void run_unpack_small(Wave *w, const Inst *i) {
    u32 ba[LANES], bs[LANES], lo[LANES], hi[LANES]; Shadow t, ts = DEFINED; const u32 *scale = NULL; const Small *f = small_format(w, i);
    const u32 *a = read_lanes(w, &i->src[0], 0, ba, &t);
    if (i->src[1].kind) { scale = read_lanes(w, &i->src[1], 0, bs, &ts); ts = spoiled(ts); }
    u32 shift = i->imm[0] ? 16 : 0; u64 m = (shift ? t.hi : t.lo) | ts.lo, e = exec_of(w);
    EACH_LANE(l) {
        f32 x = f->value[a[l] >> shift & 255], y = f->value[a[l] >> (shift + 8) & 255], k = scale ? scale_of(scale[l]) : 1;
        x *= k; y *= k;
        if (i->imm[2] == WIDE_F32) { lo[l] = bits(x); hi[l] = bits(y); }
        else lo[l] = i->imm[2] == WIDE_F16 ? to_f16(x) | to_f16(y) << 16 : to_bf16(x) | to_bf16(y) << 16;
    }
    write_lanes(w, i->dst[0].index, lo, both(m), e);
    if (i->imm[2] == WIDE_F32) write_lanes(w, i->dst[0].index + 1, hi, both(m), e);
}
static void run_unpack_one(Wave *w, const Inst *i) {              // v_cvt_f32_fp8 / bf8: byte imm[0]
    u32 ba[LANES], lo[LANES]; Shadow t; const Small *f = small_format(w, i);
    const u32 *a = read_lanes(w, &i->src[0], 0, ba, &t);
    EACH_LANE(l) lo[l] = bits(f->value[a[l] >> 8 * i->imm[0] & 255]);
    write_lanes(w, i->dst[0].index, lo, both(i->imm[0] >= 2 ? t.hi : t.lo), exec_of(w));
}
static void run_pack_small(Wave *w, const Inst *i) {
    u32 ba[LANES], bb[LANES], bs[LANES], r[LANES]; Shadow ta, tb = DEFINED, ts = DEFINED; const Small *f = small_format(w, i);
    u32 d = i->dst[0].index; int wide = (int)i->imm[2];
    const u32 *a = read_lanes(w, &i->src[0], 0, ba, &ta), *b = a, *scale = NULL;
    if (wide == WIDE_F32) b = read_lanes(w, &i->src[1], 0, bb, &tb);
    const Operand *so = &i->src[wide == WIDE_F32 ? 2 : 1];
    if (so->kind) scale = read_lanes(w, so, 0, bs, &ts);
    settled(w, d);
    EACH_LANE(l) {
        f32 x = wide == WIDE_F32 ? flt(a[l]) : wide == WIDE_F16 ? from_f16(a[l] & 0xFFFF) : from_bf16(a[l] & 0xFFFF);
        f32 y = wide == WIDE_F32 ? flt(b[l]) : wide == WIDE_F16 ? from_f16(a[l] >> 16) : from_bf16(a[l] >> 16);
        f32 k = scale ? scale_of(scale[l]) : 1;
        u32 p = to_small(f, x / k, w->saturate) | to_small(f, y / k, w->saturate) << 8;
        r[l] = i->imm[0] ? (w->V[d][l] & 0xFFFF) | p << 16 : (w->V[d][l] & 0xFFFF0000) | p;
    }
    Shadow t = w->v_undef[d]; u64 m = ta.lo | ta.hi | tb.lo | tb.hi | ts.lo | ts.hi;
    if (i->imm[0]) t.hi = m; else t.lo = m;
    write_lanes(w, d, r, t, exec_of(w));
}
