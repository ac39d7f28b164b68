// Global, buffer, scalar and scratch memory: the launch's own tensors, checked to the byte for every lane.

static u8 *host(Wave *w, u64 at, u32 size, int write, int lane, const char *what) {
    Group *g = w->group; const Range *r = g->launch->ranges; u32 n = g->launch->range_count;
    const Range *hit = &r[g->last_range];
    if (!(at >= hit->start && at + size <= hit->end)) {
        u32 lo = 0, hi = n;
        while (hi - lo > 1) { u32 mid = (lo + hi) / 2; if (r[mid].start <= at) lo = mid; else hi = mid; }
        hit = &r[lo];
        if (!(at >= hit->start && at + size <= hit->end)) {
            u64 over = at + size - hit->end;                 // wraps far away when the access lies before the range
            if (at < hit->start || over > 1 << 20) fail(w, MEMORY, lane, "%s of %u bytes at %#llx, far from every tensor of this launch", what, size, (unsigned long long)at);
            fail(w, MEMORY, lane, "%s of %u bytes reaches %llu bytes past the end of a tensor of %llu bytes", what, size, (unsigned long long)over,
                 (unsigned long long)(hit->end - hit->start));
        }
        g->last_range = hit - r;
    }
    if (write && !hit->writable) fail(w, MEMORY, lane, "%s to read-only memory", what);
    return (u8 *)(uintptr_t)at;
}

// s_load: imm[0] dwords; offset is source 1.
static void run_scalar_load(Wave *w, const Inst *i) {
    u64 base = need_scalar(w, &i->src[0], "an address"), off = need_scalar(w, &i->src[1], "an address");
    u64 at = base + (i64)(i32)off + i->imm[1]; u32 n = (u32)i->imm[0], d = i->dst[0].index;
    u8 *p = host(w, at & ~(u64)3, 4 * n, 0, 0, "scalar load");
    Pending *q = enqueue(w, &w->lgkm);
    q->scalar = 1; q->reg = d; q->count = n;
    for (u32 k = 0; k < n; k++) { u32 v; memcpy(&v, p + 4 * k, 4); write_sgpr(w, d + k, v, 0); }
    for (u32 k = 0; k < n; k++) w->s_lgkm[d + k]++;
}

// Where each lane points. Buffers: base + scalar offset + lane offset + immediate; a component beyond num_records reads 0 and writes nothing.
enum { GLOBAL_VECTOR, GLOBAL_SCALAR, BUFFER, BUFFER_OFFSET };
typedef struct { u64 at[LANES]; u64 within[LANES]; u64 limit; } Addresses;
static void addresses(Wave *w, const Inst *i, int mode, i64 off, Addresses *x) {
    u64 e = exec_of(w);
    const Operand *v = &i->src[0], *s = &i->src[1];
    x->limit = ALL;
    if (mode == GLOBAL_VECTOR) {
        const u32 *lo = need_lanes(w, v->index, e, "an address"), *hi = need_lanes(w, v->index + 1, e, "an address");
        EACH_LANE(l) { x->at[l] = (lo[l] | (u64)hi[l] << 32) + off; x->within[l] = 0; }
    } else if (mode == GLOBAL_SCALAR) {
        u64 base = need_scalar(w, s, "an address"); const u32 *lo = need_lanes(w, v->index, e, "an address");
        EACH_LANE(l) { x->at[l] = base + lo[l] + off; x->within[l] = 0; }
    } else {
        Operand word = *s; u64 r[4];
        word.count = 1;
        for (int k = 0; k < 4; k++) { r[k] = need_scalar(w, &word, "a buffer descriptor"); word.index++; }
        if (r[1] >> 31) fail(w, TRAP, 0, "swizzled buffers are not modelled");
        u64 so = need_scalar(w, &i->src[2], "an address"), base = r[0] | (r[1] & 0xFFFF) << 32;
        const u32 *lo = mode == BUFFER_OFFSET ? need_lanes(w, v->index, e, "an address") : NULL;
        x->limit = r[2] > so ? r[2] - so : 0;
        EACH_LANE(l) { x->within[l] = (u64)(lo ? lo[l] : 0) + off; x->at[l] = base + so + x->within[l]; }
    }
}

static u32 fetch(Wave *w, const Addresses *x, int l, u32 size, u8 *to) {      // 0 where nothing lies within the buffer
    if (x->limit == ALL || x->within[l] + size <= x->limit) { memcpy(to, host(w, x->at[l], size, 0, l, "load"), size); return size; }
    memset(to, 0, size);
    for (u32 k = 0; k + 4 <= size && x->within[l] + k + 4 <= x->limit; k += 4) memcpy(to + k, host(w, x->at[l] + k, 4, 0, l, "load"), 4);
    return 0;
}

// imm: bytes, offset, address mode, extension.
static void run_load(Wave *w, const Inst *i) {
    u32 size = (u32)i->imm[0], words = (size + 3) / 4, d = i->dst[0].index; u64 e = exec_of(w);
    static __thread Addresses x; static __thread u32 data[LANES][4];
    addresses(w, i, (int)i->imm[2], i->imm[1], &x);
    memset(data, 0, sizeof data);
    EACH_LANE(l) if (e >> l & 1) fetch(w, &x, l, size, (u8 *)data[l]);
    may_load(w, d, words, w->v_lgkm);
    for (u32 k = 0; k < words; k++) {
        u32 r[LANES], n = d + k; u8 marks = w->v_vm[n];
        EACH_LANE(l) r[l] = data[l][k];
        if (i->imm[3] < LOW_HALF) w->v_vm[n] = 0;
        land(w, n, r, DEFINED, size, (int)i->imm[3]);
        w->v_vm[n] = marks;
    }
    load_vector(w, &w->vm, w->v_vm, d, words);
}

// The lanes of a store lie in source 3. imm: bytes, offset, address mode, store the high half.
static void run_store(Wave *w, const Inst *i) {
    u32 size = (u32)i->imm[0], words = (size + 3) / 4, s = i->src[3].index; u64 e = exec_of(w);
    static __thread Addresses x;
    addresses(w, i, (int)i->imm[2], i->imm[1], &x);
    EACH_LANE(l) if (e >> l & 1)
        for (u32 k = 0; k < words; k++) {
            u32 part = size < 4 ? size : 4;
            if (x.limit != ALL && x.within[l] + 4 * k + part > x.limit) continue;
            u32 v = w->V[s + k][l]; Shadow t = w->v_undef[s + k];
            settled(w, s + k);
            u64 bad = size < 4 ? (i->imm[3] ? t.hi : t.lo) : t.lo | t.hi; char name[8];
            if (bad >> l & 1) fail(w, UNDEFINED, l, "%s is undefined and stored to memory", vector_name(s + k, name));
            if (i->imm[3]) v >>= 16;
            memcpy(host(w, x.at[l] + 4 * k, part, 1, l, "store"), &v, part);
        }
    enqueue(w, &w->vm);
}

// Loads straight into LDS: at M0 + offset + lane x size; a lane outside its buffer writes 0, an inactive lane nothing.
static void run_load_lds(Wave *w, const Inst *i) {
    u32 size = (u32)i->imm[0], undef = w->s_undef[M0]; u64 e = exec_of(w);
    static __thread Addresses x; u8 data[16];
    if (undef) fail(w, UNDEFINED, 0, "m0 is undefined and used as an LDS address");
    addresses(w, i, (int)i->imm[2], i->imm[1], &x);
    Pending *p = enqueue(w, &w->vm);
    p->is_lds = 1; p->is_write = 2; p->size = size; p->exec = e; p->offset[0] = 0; p->offset[1] = -1;
    EACH_LANE(l) {
        i64 at = (i64)(w->S[M0] & 0x3FFFF) + i->imm[1] + l * size;
        p->address[l] = (u32)at;
        if (!(e >> l & 1)) continue;
        lds_bounds(w, at, size, l, "write");
        fetch(w, &x, l, size, data);
        lds_write(w, l, (u32)at, size, data, 0, SEEN_ARRIVING);
    }
}

// Scratch: a lane's own bytes, for spilled registers. imm: bytes, offset, address mode (unused), extension.
static u32 scratch_base(Wave *w, const Inst *i) {
    u32 at = (u32)i->imm[1];
    if (i->src[1].kind) at += (u32)need_scalar(w, &i->src[1], "a scratch address");
    if (at + i->imm[0] > w->scratch_size) fail(w, MEMORY, 0, "scratch bytes %u to %u, outside its %u bytes", at, at + (u32)i->imm[0] - 1, w->scratch_size);
    return at;
}
static void run_scratch_load(Wave *w, const Inst *i) {
    u32 size = (u32)i->imm[0], words = (size + 3) / 4, d = i->dst[0].index, at = scratch_base(w, i); u64 e = exec_of(w);
    may_load(w, d, words, w->v_lgkm);
    for (u32 k = 0; k < words; k++) {
        u32 r[LANES], undef[LANES], part = size < 4 ? size : 4; u8 marks = w->v_vm[d + k];
        EACH_LANE(l) {
            u32 from = l * w->scratch_size + at + 4 * k;
            r[l] = undef[l] = 0; memcpy(&r[l], w->scratch + from, part);
            for (u32 b = 0; b < part; b++) undef[l] |= w->scratch_undef[from + b] << b;
        }
        (void)e;
        w->v_vm[d + k] = 0; land(w, d + k, r, half_shadow(undef, 0), size, (int)i->imm[3]); w->v_vm[d + k] = marks;
    }
    load_vector(w, &w->vm, w->v_vm, d, words);
}
static void run_scratch_store(Wave *w, const Inst *i) {
    u32 size = (u32)i->imm[0], words = (size + 3) / 4, s = i->src[3].index, at = scratch_base(w, i); u64 e = exec_of(w);
    for (u32 k = 0; k < words; k++) {
        settled(w, s + k); Shadow t = w->v_undef[s + k]; u32 part = size < 4 ? size : 4;
        EACH_LANE(l) if (e >> l & 1) {
            u32 to = l * w->scratch_size + at + 4 * k, v = i->imm[3] ? w->V[s + k][l] >> 16 : w->V[s + k][l];
            memcpy(w->scratch + to, &v, part);
            for (u32 b = 0; b < part; b++) w->scratch_undef[to + b] = (((b >= 2) ^ (i->imm[3] != 0) ? t.hi : t.lo) >> l) & 1;
        }
    }
    enqueue(w, &w->vm);
}

// Atomics, lane by lane in lane order. imm: operation, offset, address mode, return the old value; flags bit 0 of map: 64-bit.
enum { AT_ADD, AT_SUB, AT_SMIN, AT_UMIN, AT_SMAX, AT_UMAX, AT_AND, AT_OR, AT_XOR, AT_SWAP, AT_CMPSWAP, AT_ADD_F32, AT_PK_ADD_F16, AT_PK_ADD_BF16 };
static u64 combine(int op, u64 old, u64 v, u64 compare, int wide) {
    i64 so = wide ? (i64)old : (i32)old, sv = wide ? (i64)v : (i32)v;
    switch (op) {
    case AT_ADD: return old + v;
    case AT_SUB: return old - v;
    case AT_SMIN: return so < sv ? old : v;
    case AT_UMIN: return old < v ? old : v;
    case AT_SMAX: return so > sv ? old : v;
    case AT_UMAX: return old > v ? old : v;
    case AT_AND: return old & v;
    case AT_OR: return old | v;
    case AT_XOR: return old ^ v;
    case AT_SWAP: return v;
    case AT_CMPSWAP: return old == compare ? v : old;
    case AT_ADD_F32: return bits(flt((u32)old) + flt((u32)v));
    case AT_PK_ADD_F16: return to_f16(H(old) + H(v)) | to_f16(H(old >> 16) + H(v >> 16)) << 16;
    default: return to_bf16(from_bf16(LO(old)) + from_bf16(LO(v))) | to_bf16(from_bf16(LO(old >> 16)) + from_bf16(LO(v >> 16))) << 16;
    }
}
static void run_atomic(Wave *w, const Inst *i) {
    int op = (int)i->imm[0], wide = i->map & 1, words = 1 + wide; u32 s = i->src[3].index, d = i->dst[0].index; u64 e = exec_of(w);
    static __thread Addresses x; u32 r[2][LANES] = {{0}};
    addresses(w, i, (int)i->imm[2], i->imm[1], &x);
    for (int k = 0; k < words * (op == AT_CMPSWAP ? 2 : 1); k++) need_lanes(w, s + k, e, "data of an atomic");
    EACH_LANE(l) if (e >> l & 1) {
        if (x.limit != ALL && x.within[l] + 4 * words > x.limit) continue;
        u8 *p = host(w, x.at[l], 4 * words, 1, l, "atomic"); u64 old = 0, v = w->V[s][l], c = 0;
        if (wide) v |= (u64)w->V[s + 1][l] << 32;
        if (op == AT_CMPSWAP) { c = w->V[s + words][l]; if (wide) c |= (u64)w->V[s + 3][l] << 32; }
        memcpy(&old, p, 4 * words);
        u64 n = combine(op, old, v, c, wide);
        memcpy(p, &n, 4 * words);
        r[0][l] = (u32)old; r[1][l] = old >> 32;
    }
    if (!i->imm[3]) { enqueue(w, &w->vm); return; }
    for (int k = 0; k < words; k++) write_lanes(w, d + k, r[k], DEFINED, e);
    load_vector(w, &w->vm, w->v_vm, d, words);
}
