// Number formats: bf16, f16 and the four 8-bit floats (gfx942 FNUZ, gfx950 OCP), rounded to nearest even.

static f32 from_bf16(u32 h) { return flt(h << 16); }
static u32 to_bf16(f32 x) {
    u32 u = bits(x);
    if (x != x) return u >> 16 | 0x40;
    return (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}

static f32 from_f16(u32 h) {
    u32 sign = (h & 0x8000) << 16, mag = h & 0x7FFF;
    f32 x = flt(mag << 13) * 0x1p112f;
    u32 u = bits(x);
    if (mag >= 0x7C00) u = 0x7F800000 | mag << 13;
    return flt(u | sign);
}
static u32 to_f16(f32 x) {
    u32 u = bits(x), sign = u >> 16 & 0x8000, mag = u & 0x7FFFFFFF;
    if (mag > 0x7F800000) return sign | 0x7E00 | (mag >> 13 & 0x1FF);
    if (mag >= 0x477FF000) return sign | 0x7C00;
    if (mag < 0x38800000) {                                   // denormal: one unit is 2^-24
        f32 r = flt(mag) * 0x1p24f;
        return sign | (u32)rintf(r);
    }
    mag += 0xFFF + (mag >> 13 & 1);
    return sign | (mag - 0x38000000) >> 13;
}

// An 8-bit float: mantissa bits m, exponent bias; FNUZ has no infinity and no -0, 0x80 is its only NaN.
typedef struct { int m, bias, fnuz; f32 value[256]; } Small;
static Small SMALL[2][2];       // [fnuz][bf8]

static void make_small(Small *t, int m, int bias, int fnuz) {
    t->m = m; t->bias = bias; t->fnuz = fnuz;
    for (int c = 0; c < 256; c++) {
        int e = (c & 127) >> m, f = c & ((1 << m) - 1), top = (1 << (7 - m)) - 1;
        f64 v = e ? ldexp(1 + ldexp(f, -m), e - bias) : ldexp(f, 1 - bias - m);
        if (fnuz) { if (c == 128) v = NAN; }
        else if (m == 3) { if ((c & 127) == 127) v = NAN; }
        else if (e == top) v = f ? NAN : INFINITY;
        t->value[c] = c & 128 && !(fnuz && c == 128) ? -v : v;
    }
}
static void make_formats(void) {
    make_small(&SMALL[0][0], 3, 7, 0); make_small(&SMALL[0][1], 2, 15, 0);
    make_small(&SMALL[1][0], 3, 8, 1); make_small(&SMALL[1][1], 2, 16, 1);
}

// Beyond the largest finite value: the largest value where MODE.FP16_OVFL saturates, else infinity where the format has one, else NaN.
static u32 to_small(const Small *t, f32 x, int saturate) {
    u32 sign = bits(x) >> 31 << 7, nan = t->fnuz ? 0x80 : 0x7F | sign;
    u32 top = t->fnuz ? 0x7F : t->m == 3 ? 0x7E : 0x7B;
    if (x != x) return nan;
    f64 a = fabs((f64)x), max = t->value[top];
    if (isinf(x)) return saturate ? sign | top : !t->fnuz && t->m == 2 ? sign | 0x7C : nan;
    int e; frexp(a, &e);
    if (e - 1 < 1 - t->bias || a == 0) e = 2 - t->bias;
    f64 unit = ldexp(1, e - 1 - t->m), q = rint(a / unit) * unit;
    if (q > max) return saturate ? sign | top : !t->fnuz && t->m == 2 ? sign | 0x7C : nan;
    if (q == 0) return t->fnuz ? 0 : sign;
    frexp(q, &e);
    u32 code = e - 1 < 1 - t->bias ? (u32)ldexp(q, t->bias - 1 + t->m)
                                   : (u32)(e - 1 + t->bias) << t->m | ((u32)ldexp(q, t->m - (e - 1)) & ((1u << t->m) - 1));
    return sign | code;
}
