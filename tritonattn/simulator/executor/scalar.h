// Scalar instructions: one value a wave, in a 32-bit register or a 64-bit pair; SCC is the carry, the comparison, or "result is not 0".
//
// A row: name, form (destination = sources; s 32-bit, S 64-bit), shadow rule, and statements over a, b (zero-extended sources),
// d (the old destination), r (result) and scc.

typedef struct { u64 a, b, d; u64 r; int scc, set; } Sc;
#define A32 ((i32)x->a)
#define B32 ((i32)x->b)
#define SCALARS(_) \
    _(s_mov_b32, "s=s", COPY, r = a) \
    _(s_mov_b64, "S=S", COPY, r = a) \
    _(s_movk_i32, "s=s", COPY, r = (u32)(i32)(i16)a) \
    _(s_cmov_b32, "s=s", ANY, r = x->scc ? a : x->d) \
    _(s_not_b32, "s=s", COPY, r = (u32)~a; NONZERO) \
    _(s_not_b64, "S=S", COPY, r = ~a; NONZERO) \
    _(s_and_b32, "s=ss", AND, r = a & b; NONZERO) \
    _(s_and_b64, "S=SS", AND, r = a & b; NONZERO) \
    _(s_or_b32, "s=ss", OR_, r = a | b; NONZERO) \
    _(s_or_b64, "S=SS", OR_, r = a | b; NONZERO) \
    _(s_xor_b32, "s=ss", XOR, r = a ^ b; NONZERO) \
    _(s_xor_b64, "S=SS", XOR, r = a ^ b; NONZERO) \
    _(s_xnor_b32, "s=ss", XOR, r = (u32)~(a ^ b); NONZERO) \
    _(s_xnor_b64, "S=SS", XOR, r = ~(a ^ b); NONZERO) \
    _(s_nand_b32, "s=ss", XOR, r = (u32)~(a & b); NONZERO) \
    _(s_nand_b64, "S=SS", XOR, r = ~(a & b); NONZERO) \
    _(s_nor_b32, "s=ss", XOR, r = (u32)~(a | b); NONZERO) \
    _(s_nor_b64, "S=SS", XOR, r = ~(a | b); NONZERO) \
    _(s_andn2_b32, "s=ss", ANDN, r = a & ~b; NONZERO) \
    _(s_andn2_b64, "S=SS", ANDN, r = a & ~b; NONZERO) \
    _(s_orn2_b32, "s=ss", XOR, r = (u32)(a | ~b); NONZERO) \
    _(s_orn2_b64, "S=SS", XOR, r = a | ~b; NONZERO) \
    _(s_lshl_b32, "s=ss", ANY, r = (u32)(a << (b & 31)); NONZERO) \
    _(s_lshl_b64, "S=Ss", ANY, r = a << (b & 63); NONZERO) \
    _(s_lshr_b32, "s=ss", ANY, r = a >> (b & 31); NONZERO) \
    _(s_lshr_b64, "S=Ss", ANY, r = a >> (b & 63); NONZERO) \
    _(s_ashr_i32, "s=ss", ANY, r = (u32)(A32 >> (b & 31)); NONZERO) \
    _(s_ashr_i64, "S=Ss", ANY, r = (u64)((i64)a >> (b & 63)); NONZERO) \
    _(s_bfe_u32, "s=ss", ANY, r = field(a, b); NONZERO) \
    _(s_bfe_i32, "s=ss", ANY, r = sign_field(a, b); NONZERO) \
    _(s_bfe_u64, "S=Ss", ANY, r = field64(a, b); NONZERO) \
    _(s_bfe_i64, "S=Ss", ANY, r = sign_field64(a, b); NONZERO) \
    _(s_bfm_b64, "S=ss", ANY, r = (((u64)1 << (a & 63)) - 1) << (b & 63)) \
    _(s_bfm_b32, "s=ss", ANY, r = (u32)(((1u << (a & 31)) - 1) << (b & 31))) \
    _(s_bitset0_b32, "s=s", ANY, r = x->d & ~(1u << (a & 31))) \
    _(s_bitset1_b32, "s=s", ANY, r = x->d | 1u << (a & 31)) \
    _(s_brev_b32, "s=s", ANY, r = reverse_bits(a)) \
    _(s_bcnt1_i32_b32, "s=s", ANY, r = __builtin_popcount(a); NONZERO) \
    _(s_bcnt1_i32_b64, "s=S", ANY, r = __builtin_popcountll(a); NONZERO) \
    _(s_ff1_i32_b32, "s=s", ANY, r = (u32)(a ? __builtin_ctz(a) : -1)) \
    _(s_ff1_i32_b64, "s=S", ANY, r = (u32)(a ? __builtin_ctzll(a) : -1)) \
    _(s_flbit_i32_b32, "s=s", ANY, r = (u32)(a ? __builtin_clz(a) : -1)) \
    _(s_flbit_i32_b64, "s=S", ANY, r = (u32)(a ? __builtin_clzll(a) : -1)) \
    _(s_sext_i32_i8, "s=s", ANY, r = (u32)(int8_t)a) \
    _(s_sext_i32_i16, "s=s", ANY, r = (u32)(i16)a) \
    _(s_abs_i32, "s=s", ANY, r = A32 < 0 ? (u32)-a : a; NONZERO) \
    _(s_add_i32, "s=ss", ANY, r = (u32)(a + b); SCC = (i64)A32 + B32 != (i32)r) \
    _(s_sub_i32, "s=ss", ANY, r = (u32)(a - b); SCC = (i64)A32 - B32 != (i32)r) \
    _(s_add_u32, "s=ss", ANY, r = (u32)(a + b); SCC = (a + b) >> 32) \
    _(s_sub_u32, "s=ss", ANY, r = (u32)(a - b); SCC = a < b) \
    _(s_addc_u32, "s=ss", CARRY, u64 t = a + b + x->scc; r = (u32)t; SCC = t >> 32) \
    _(s_subb_u32, "s=ss", CARRY, u64 t = a - b - x->scc; r = (u32)t; SCC = b + x->scc > a) \
    _(s_addk_i32, "s=s", INPLACE, i64 t = (i64)(i32)x->d + (i16)a; r = (u32)t; SCC = t != (i32)r) \
    _(s_mulk_i32, "s=s", INPLACE, r = (u32)((i64)(i32)x->d * (i16)a)) \
    _(s_mul_i32, "s=ss", ANY, r = (u32)(a * b)) \
    _(s_mul_hi_u32, "s=ss", ANY, r = a * b >> 32) \
    _(s_mul_hi_i32, "s=ss", ANY, r = (u32)((i64)A32 * B32 >> 32)) \
    _(s_lshl1_add_u32, "s=ss", ANY, u64 t = (a << 1) + b; r = (u32)t; SCC = t >> 32 != 0) \
    _(s_lshl2_add_u32, "s=ss", ANY, u64 t = (a << 2) + b; r = (u32)t; SCC = t >> 32 != 0) \
    _(s_lshl3_add_u32, "s=ss", ANY, u64 t = (a << 3) + b; r = (u32)t; SCC = t >> 32 != 0) \
    _(s_lshl4_add_u32, "s=ss", ANY, u64 t = (a << 4) + b; r = (u32)t; SCC = t >> 32 != 0) \
    _(s_min_i32, "s=ss", ANY, SCC = A32 <= B32; r = x->scc ? a : b) \
    _(s_max_i32, "s=ss", ANY, SCC = A32 >= B32; r = x->scc ? a : b) \
    _(s_min_u32, "s=ss", ANY, SCC = a <= b; r = x->scc ? a : b) \
    _(s_max_u32, "s=ss", ANY, SCC = a >= b; r = x->scc ? a : b) \
    _(s_pack_ll_b32_b16, "s=ss", ANY, r = (a & 0xFFFF) | (u32)(b << 16)) \
    _(s_pack_lh_b32_b16, "s=ss", ANY, r = (a & 0xFFFF) | (b & 0xFFFF0000)) \
    _(s_pack_hh_b32_b16, "s=ss", ANY, r = (a >> 16) | (b & 0xFFFF0000)) \
    _(s_cselect_b32, "s=ss", SELECT, r = x->scc ? a : b) \
    _(s_cselect_b64, "S=SS", SELECT, r = x->scc ? a : b) \
    _(s_cmp_eq_i32, "=ss", ANY, SCC = a == b) \
    _(s_cmp_lg_i32, "=ss", ANY, SCC = a != b) \
    _(s_cmp_lt_i32, "=ss", ANY, SCC = A32 < B32) \
    _(s_cmp_le_i32, "=ss", ANY, SCC = A32 <= B32) \
    _(s_cmp_gt_i32, "=ss", ANY, SCC = A32 > B32) \
    _(s_cmp_ge_i32, "=ss", ANY, SCC = A32 >= B32) \
    _(s_cmp_eq_u32, "=ss", ANY, SCC = a == b) \
    _(s_cmp_lg_u32, "=ss", ANY, SCC = a != b) \
    _(s_cmp_lt_u32, "=ss", ANY, SCC = a < b) \
    _(s_cmp_le_u32, "=ss", ANY, SCC = a <= b) \
    _(s_cmp_gt_u32, "=ss", ANY, SCC = a > b) \
    _(s_cmp_ge_u32, "=ss", ANY, SCC = a >= b) \
    _(s_cmp_eq_u64, "=SS", ANY, SCC = a == b) \
    _(s_cmp_lg_u64, "=SS", ANY, SCC = a != b) \
    _(s_bitcmp0_b32, "=ss", ANY, SCC = !(a >> (b & 31) & 1)) \
    _(s_bitcmp1_b32, "=ss", ANY, SCC = a >> (b & 31) & 1) \
    _(s_cmpk_eq_i32, "=sk", ANY, SCC = A32 == (i16)b) \
    _(s_cmpk_lg_i32, "=sk", ANY, SCC = A32 != (i16)b) \
    _(s_cmpk_lt_i32, "=sk", ANY, SCC = A32 < (i16)b) \
    _(s_cmpk_le_i32, "=sk", ANY, SCC = A32 <= (i16)b) \
    _(s_cmpk_gt_i32, "=sk", ANY, SCC = A32 > (i16)b) \
    _(s_cmpk_ge_i32, "=sk", ANY, SCC = A32 >= (i16)b) \
    _(s_cmpk_eq_u32, "=sk", ANY, SCC = a == (u16)b) \
    _(s_cmpk_lg_u32, "=sk", ANY, SCC = a != (u16)b) \
    _(s_cmpk_lt_u32, "=sk", ANY, SCC = a < (u16)b) \
    _(s_cmpk_le_u32, "=sk", ANY, SCC = a <= (u16)b) \
    _(s_cmpk_gt_u32, "=sk", ANY, SCC = a > (u16)b) \
    _(s_cmpk_ge_u32, "=sk", ANY, SCC = a >= (u16)b)

#define SCC x->set = 1, x->scc
#define NONZERO SCC = r != 0
static u32 field(u64 a, u64 b) { u32 at = b & 31, n = b >> 16 & 127; return n == 0 ? 0 : (u32)a >> at & (n >= 32 ? ~0u : (1u << n) - 1); }
static u32 sign_field(u64 a, u64 b) {
    u32 at = b & 31, n = b >> 16 & 127;
    if (n == 0) return 0;
    if (n + at >= 32) return (u32)((i32)(u32)a >> at);
    return (u32)((i32)((u32)a << (32 - n - at)) >> (32 - n));
}
static u64 field64(u64 a, u64 b) { u32 at = b & 63, n = b >> 16 & 127; return n == 0 ? 0 : a >> at & (n >= 64 ? ALL : ((u64)1 << n) - 1); }
static u64 sign_field64(u64 a, u64 b) {
    u32 at = b & 63, n = b >> 16 & 127;
    if (n == 0) return 0;
    if (n + at >= 64) return (u64)((i64)a >> at);
    return (u64)((i64)(a << (64 - n - at)) >> (64 - n));
}
static u32 reverse_bits(u32 a) { u32 r = 0; for (int k = 0; k < 32; k++) r |= (a >> k & 1) << (31 - k); return r; }

enum ScalarShadow { COPY, AND, ANDN, OR_, XOR, ANY, CARRY, SELECT, INPLACE };
#define AS_FUNCTION(name, form, rule, ...) \
    static void fn_##name(Sc *x) { u64 a = x->a, b = x->b, r = 0; (void)a; (void)b; __VA_ARGS__; x->r = r; }
SCALARS(AS_FUNCTION)
#undef AS_FUNCTION

static u64 scalar_shadow(int rule, u64 a, u64 b, u64 ua, u64 ub, int scc, int scc_undef) {
    switch (rule) {
    case COPY: return ua;
    case AND: return (ua | ub) & (a | ua) & (b | ub);
    case ANDN: return (ua | ub) & (a | ua) & (~b | ub);
    case OR_: return (ua | ub) & (~a | ua) & (~b | ub);
    case XOR: return ua | ub;
    case SELECT: return scc_undef ? ALL : scc ? ua : ub;
    default: return ua | ub | ((rule == CARRY && scc_undef)) ? ALL : 0;
    }
}

static void run_scalar(Wave *w, const Inst *i, void (*fn)(Sc *), int rule) {
    u64 ua = 0, ub = 0, ud = 0;
    Sc x = {0, 0, 0, 0, w->scc, 0};
    if (i->src[0].kind) x.a = read_scalar(w, &i->src[0], &ua);
    if (i->src[1].kind) x.b = read_scalar(w, &i->src[1], &ub);
    if (i->dst[0].kind && !i->src[1].kind) x.d = read_scalar(w, &i->dst[0], &ud);
    fn(&x);
    u64 u = scalar_shadow(rule, x.a, x.b, ua, ub, w->scc, w->scc_undef);
    if (rule == INPLACE && ud) u = ALL;
    if (i->dst[0].kind) write_scalar(w, &i->dst[0], x.r, u);
    if (x.set) w->scc_undef = u != 0;
    w->scc = x.scc;
}

// s_and_saveexec_b64 and its kind: destination = exec, exec = source OP exec, SCC = exec is not 0.
enum { SAVE_AND, SAVE_OR, SAVE_XOR, SAVE_ANDN2, SAVE_ORN2, SAVE_ANDN1 };
static void run_saveexec(Wave *w, const Inst *i) {
    u64 s = need_scalar(w, &i->src[0], "an exec mask"), e = exec_of(w), r = 0;
    switch (i->imm[0]) {
    case SAVE_AND: r = s & e; break;
    case SAVE_OR: r = s | e; break;
    case SAVE_XOR: r = s ^ e; break;
    case SAVE_ANDN2: r = s & ~e; break;
    case SAVE_ORN2: r = s | ~e; break;
    case SAVE_ANDN1: r = ~s & e; break;
    }
    write_scalar(w, &i->dst[0], e, 0);
    write_sgpr(w, EXEC, (u32)r, 0); write_sgpr(w, EXEC + 1, r >> 32, 0);
    w->scc = r != 0; w->scc_undef = 0;
}

// Branches: the target is an instruction index.
enum { ALWAYS, SCC0, SCC1, VCCZ, VCCNZ, EXECZ, EXECNZ };
static void run_branch(Wave *w, const Inst *i) {
    int take = 1, c = i->imm[1];
    u64 vcc = w->S[VCC] | (u64)w->S[VCC + 1] << 32;
    if ((c == SCC0 || c == SCC1) && w->scc_undef) fail(w, UNDEFINED, 0, "SCC is undefined and decides a branch");
    if ((c == VCCZ || c == VCCNZ) && (w->s_undef[VCC] | w->s_undef[VCC + 1])) fail(w, UNDEFINED, 0, "vcc is undefined and decides a branch");
    switch (c) {
    case SCC0: take = !w->scc; break;
    case SCC1: take = w->scc; break;
    case VCCZ: take = vcc == 0; break;
    case VCCNZ: take = vcc != 0; break;
    case EXECZ: take = exec_of(w) == 0; break;
    case EXECNZ: take = exec_of(w) != 0; break;
    }
    if (take) w->pc = i->imm[0];
}

static void run_nothing(Wave *w, const Inst *i) { (void)w; (void)i; }
static void run_end(Wave *w, const Inst *i) { (void)i; w->done = 1; }
static void run_trap(Wave *w, const Inst *i) { fail(w, TRAP, 0, "s_trap %d", (int)i->imm[0]); }
static void run_setreg(Wave *w, const Inst *i) { w->saturate = i->imm[0]; }      // decode.py admits the FP16_OVFL bit of MODE alone
