// MFMA: D = A B + C on the whole wave, whatever exec says.
//
// With n = 16 or 32 rows and K = 64/n groups of k values: lane l holds row (column) l mod n of A (B) and the k values of group l / n; result register r of lane l is
// column l mod n, row 4 (l / 16) + r for n = 16 and 8 (r / 4) + 4 (l / 32) + r mod 4 for n = 32. The sum is taken in float64 and rounded once:
// the order and rounding inside the hardware's sum are not modelled.

enum { M_BF16, M_F16, M_F32, M_FP8, M_BF8, M_XF32 };

static void unpack_matrix(Wave *w, const Operand *o, int type, int values, f64 out[LANES][32], u64 *undef) {
    const u32 per = type == M_F32 || type == M_XF32 ? 1 : type <= M_F16 ? 2 : 4;
    u64 bad = 0;
    for (int j = 0; j < values; j += per) {
        u32 n = o->index + j / per;
        settled(w, n); bad |= any_undef(w, n);
        const u32 *v = w->V[n];
        if (type == M_F32) EACH_LANE(l) out[l][j] = flt(v[l]);
        else if (type == M_XF32) EACH_LANE(l) out[l][j] = isfinite(flt(v[l])) ? flt((v[l] + 0xFFF + (v[l] >> 13 & 1)) & ~0x1FFFu) : flt(v[l]);      // 10 mantissa bits
        else if (type == M_BF16) EACH_LANE(l) { out[l][j] = flt(v[l] << 16); out[l][j + 1] = flt(v[l] & 0xFFFF0000); }
        else if (type == M_F16) EACH_LANE(l) { out[l][j] = from_f16(v[l] & 0xFFFF); out[l][j + 1] = from_f16(v[l] >> 16); }
        else {
            const f32 *t = SMALL[w->group->launch->fnuz][type == M_BF8].value;
            EACH_LANE(l) for (int k = 0; k < 4; k++) out[l][j + k] = t[v[l] >> 8 * k & 255];
        }
    }
    *undef = bad;
}

static u32 rows_of(u64 m, int n) { return (u32)(n == 32 ? m | m >> 32 : (m | m >> 16 | m >> 32 | m >> 48) & 0xFFFF); }

// imm: n, K, type of A, type of B.
static void run_mfma(Wave *w, const Inst *i) {
    static __thread f64 A[LANES][32], B[LANES][32], right[128][32], sum[32][32];
    int n = (int)i->imm[0], K = (int)i->imm[1], groups = LANES / n, values = K / groups, regs = n * n / LANES;
    const Operand *c = &i->src[2]; u32 d = i->dst[0].index; u64 ua, ub;
    unpack_matrix(w, &i->src[0], (int)i->imm[2], values, A, &ua);
    unpack_matrix(w, &i->src[1], (int)i->imm[3], values, B, &ub);
    u32 bad_rows = rows_of(ua, n), bad_columns = rows_of(ub, n);
    for (int g = 0; g < groups; g++) for (int j = 0; j < values; j++) for (int q = 0; q < n; q++) right[g * values + j][q] = B[g * n + q][j];
    for (int row = 0; row < n; row++)
        for (int at = 0; at < n; at += 16) {             // sixteen columns at a time stay in registers; products of these formats are exact in f64
            f64 acc[16] = {0};
            for (int g = 0; g < groups; g++)
                for (int j = 0; j < values; j++) {
                    f64 a = A[g * n + row][j]; const f64 *b = right[g * values + j] + at;
                    for (int q = 0; q < 16; q++) acc[q] = __builtin_fma(a, b[q], acc[q]);
                }
            memcpy(sum[row] + at, acc, sizeof acc);
        }
    u32 out[16][LANES]; u64 bad[16];                     // all of C is read before any of D is written: they may overlap
    for (int r = 0; r < regs; r++) {
        const u32 *old = NULL;
        bad[r] = 0;
        if (c->kind == VGPR) { settled(w, c->index + r); old = w->V[c->index + r]; bad[r] = any_undef(w, c->index + r); }
        EACH_LANE(l) {
            int row = n == 32 ? 8 * (r / 4) + 4 * (l / 32) + r % 4 : 4 * (l / 16) + r, col = l % n;
            out[r][l] = bits((f32)(sum[row][col] + (old ? flt(old[l]) : flt((u32)c->value))));
            bad[r] |= (u64)((bad_rows >> row | bad_columns >> col) & 1) << l;
        }
    }
    for (int r = 0; r < regs; r++) write_lanes(w, d + r, out[r], both(bad[r]), ALL);
}
