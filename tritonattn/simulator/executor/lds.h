// LDS: bytes shared by the waves of a workgroup, checked per lane and per byte.
//
// Faults: outside the kernel's LDS; a byte nothing has written, used as defined later; two waves touching a byte, one of them writing a
// different value, with no barrier (and no wait before it) in between. Each byte remembers the waves that wrote and read it in the
// current epoch, so one run in one wave order finds a race whatever the order.

enum { SEEN_UNDEFINED = 1, SEEN_ARRIVING = 2 };      // a byte's state: 0 defined, 1 never written, 2 an LDS-direct load still on its way

static void lds_bounds(Wave *w, i64 at, u32 size, int lane, const char *what) {
    u32 n = w->group->launch->lds_size;
    if (at < 0 || at + size > n) fail(w, LDS_BOUNDS, lane, "LDS %s of bytes %lld to %lld, outside its %u bytes", what, (long long)at, (long long)at + size - 1, n);
}

static inline u64 in_epoch(u64 s, u32 epoch) { return (u32)(s >> 16) == epoch ? s & 0xFFFF : 0; }

__attribute__((noinline, noreturn))
static void race(Wave *w, int lane, u32 at, const char *what, u64 others) {
    fail(w, RACE, lane, "LDS byte %u: %s with no barrier (after a wait) between this wave and wave %d", at, what, __builtin_ctzll(others));
}

static u32 lds_read(Wave *w, int lane, u32 at, u32 size, u8 *to) {      // returns the undefined bytes as a bit each
    Group *g = w->group; u64 me = (u64)1 << w->id, stamp = (u64)g->epoch << 16; u32 undef = 0; u64 others = 0; u8 arriving = 0;
    for (u32 k = 0; k < size; k++) {
        u64 wr = in_epoch(g->writers[at + k], g->epoch);
        others |= wr & me ? 0 : wr;
        g->readers[at + k] = stamp | in_epoch(g->readers[at + k], g->epoch) | me;
        undef |= (u32)(g->lds_undef[at + k] & 1) << k; arriving |= g->lds_undef[at + k];
    }
    if (others) race(w, lane, at, "read of what another wave wrote", others);
    if (arriving & SEEN_ARRIVING) fail(w, MISSING_WAIT, lane, "LDS byte %u is the destination of an outstanding LDS-direct load", at);
    memcpy(to, g->lds + at, size);
    return undef;
}

static void lds_write(Wave *w, int lane, u32 at, u32 size, const u8 *from, u32 undef, int state) {
    Group *g = w->group; u64 me = (u64)1 << w->id, stamp = (u64)g->epoch << 16;
    for (u32 k = 0; k < size; k++) {
        u64 wr = in_epoch(g->writers[at + k], g->epoch), rd = in_epoch(g->readers[at + k], g->epoch);
        if (((wr | rd) & ~me) && (g->lds[at + k] != from[k] || g->lds_undef[at + k] & 1))
            race(w, lane, at + k, rd & ~me ? "write of what another wave read" : "write of what another wave wrote", (wr | rd) & ~me);
        g->writers[at + k] = stamp | wr | me;
        g->lds[at + k] = from[k]; g->lds_undef[at + k] = undef >> k & 1 ? SEEN_UNDEFINED : state;
    }
}

// An access that is still outstanding at a barrier, or an LDS-direct load at its wait, counts as made now.
static void stamp(Wave *w, const Pending *p) {
    Group *g = w->group; u64 now = (u64)g->epoch << 16, me = (u64)1 << w->id;
    EACH_LANE(l) if (p->exec >> l & 1)
        for (int part = 0; part < 2; part++) {
            if (p->offset[part] < 0) continue;
            for (u32 k = 0; k < p->size; k++) {
                u64 *s = (p->is_write ? g->writers : g->readers) + p->address[l] + p->offset[part] + k;
                *s = now | in_epoch(*s, g->epoch) | me;
                if (p->is_write == 2) g->lds_undef[p->address[l] + p->offset[part] + k] = 0;
            }
        }
}
static void restamp_outstanding(Wave *w) {
    for (u32 k = w->lgkm.head; k != w->lgkm.tail; k++) if (w->lgkm.item[k % QUEUE].is_lds) stamp(w, &w->lgkm.item[k % QUEUE]);
}

static Pending *lds_pending(Wave *w, int is_write, u32 size, const u32 *address, i32 offset0, i32 offset1) {
    Pending *p = enqueue(w, &w->lgkm);
    p->is_lds = 1; p->is_write = is_write; p->size = size; p->exec = exec_of(w); p->offset[0] = offset0; p->offset[1] = offset1;
    memcpy(p->address, address, sizeof p->address);
    return p;
}

static Shadow half_shadow(const u32 *undef, int word) {     // byte bits of each lane to half bits
    Shadow s = DEFINED;
    EACH_LANE(l) { u32 b = undef[l] >> 4 * word & 15; s.lo |= (u64)((b & 3) != 0) << l; s.hi |= (u64)((b >> 2) != 0) << l; }
    return s;
}

// A narrow value lands in the register: zero- or sign-extended, or in one half with the other kept.
enum { EXTEND_ZERO, EXTEND_SIGN, LOW_HALF, HIGH_HALF };
static void land(Wave *w, u32 d, u32 *r, Shadow s, u32 size, int how) {
    if (size < 4) {
        Shadow keep = w->v_undef[d];
        if (how >= LOW_HALF) { u8 vm = w->v_vm[d], lg = w->v_lgkm[d]; if (vm | lg) settled(w, d); }
        EACH_LANE(l) {
            u32 x = r[l] & (size == 1 ? 0xFF : 0xFFFF);
            if (how == EXTEND_SIGN) x = size == 1 ? (u32)(i32)(int8_t)x : (u32)(i32)(i16)x;
            if (how == LOW_HALF) x = (w->V[d][l] & 0xFFFF0000) | x;
            if (how == HIGH_HALF) x = (w->V[d][l] & 0xFFFF) | x << 16;
            r[l] = x;
        }
        s = how == LOW_HALF ? (Shadow){s.lo, keep.hi} : how == HIGH_HALF ? (Shadow){keep.lo, s.lo} : how == EXTEND_SIGN ? both(s.lo) : (Shadow){s.lo, 0};
    }
    write_lanes(w, d, r, s, exec_of(w));
}

// A load may follow another of its own queue into the same register (they return in order); any other outstanding write to it is a fault.
static void may_load(Wave *w, u32 d, u32 count, const u8 *other) {
    for (u32 k = 0; k < count; k++) if (other[d + k]) settled(w, d + k);
}

// imm: bytes, offset 0, offset 1 (-1: a single access), extension.
static void run_lds_read(Wave *w, const Inst *i) {
    u32 size = (u32)i->imm[0], words = (size + 3) / 4, parts = i->imm[2] >= 0 ? 2 : 1, d = i->dst[0].index; u64 e = exec_of(w);
    const u32 *a = need_lanes(w, i->src[0].index, e, "an LDS address");
    u32 address[LANES]; memcpy(address, a, sizeof address);
    static __thread u32 data[2][LANES][4]; u32 undef[2][LANES];
    memset(data, 0, sizeof data); memset(undef, 0, sizeof undef);
    may_load(w, d, words * parts, w->v_vm);
    for (u32 part = 0; part < parts; part++)
        EACH_LANE(l) if (e >> l & 1) {
            i64 at = (i64)address[l] + i->imm[1 + part];
            lds_bounds(w, at, size, l, "read");
            undef[part][l] = lds_read(w, l, (u32)at, size, (u8 *)data[part][l]);
        }
    for (u32 part = 0; part < parts; part++)
        for (u32 k = 0; k < words; k++) {
            u32 r[LANES], n = d + part * words + k; u8 marks = w->v_lgkm[n];
            EACH_LANE(l) r[l] = data[part][l][k];
            if (i->imm[3] < LOW_HALF) w->v_lgkm[n] = 0;
            land(w, n, r, half_shadow(undef[part], k), size, (int)i->imm[3]);
            w->v_lgkm[n] = marks;
        }
    Pending *p = lds_pending(w, 0, size, address, (i32)i->imm[1], (i32)i->imm[2]);
    p->reg = d; p->count = words * parts;
    for (u32 k = 0; k < p->count; k++) w->v_lgkm[d + k]++;
}

// imm: bytes, offset 0, offset 1, store the high half.
static void run_lds_write(Wave *w, const Inst *i) {
    u32 size = (u32)i->imm[0], words = (size + 3) / 4, parts = i->imm[2] >= 0 ? 2 : 1; u64 e = exec_of(w);
    const u32 *address = need_lanes(w, i->src[0].index, e, "an LDS address");
    for (u32 part = 0; part < parts; part++) {
        u32 s = i->src[1 + part].index;
        for (u32 k = 0; k < words; k++) settled(w, s + k);
        EACH_LANE(l) if (e >> l & 1) {
            i64 at = (i64)address[l] + i->imm[1 + part]; u32 data[4], undef = 0;
            lds_bounds(w, at, size, l, "write");
            for (u32 k = 0; k < words; k++) {
                Shadow t = w->v_undef[s + k];
                u32 lo = t.lo >> l & 1 ? 3 : 0, hi = t.hi >> l & 1 ? 3 : 0;
                data[k] = i->imm[3] ? w->V[s + k][l] >> 16 : w->V[s + k][l];
                undef |= (i->imm[3] ? hi : lo | hi << 2) << 4 * k;
            }
            lds_write(w, l, (u32)at, size, (u8 *)data, undef, 0);
        }
    }
    lds_pending(w, 1, size, address, (i32)i->imm[1], (i32)i->imm[2]);
}

// ds_read_b64_tr_b16 / b8 (gfx950): in each group of 16 lanes the 8-byte rows of the lanes are read as a matrix and its transpose returned:
// with p elements a row, lane i receives element i mod p of the rows of lanes (16/p) j + i / p, j = 0 .. p-1.
static void run_lds_read_transposed(Wave *w, const Inst *i) {
    u32 eb = (u32)i->imm[0], p = 8 / eb, stride = 16 / p, d = i->dst[0].index; i64 off = i->imm[1]; u64 e = exec_of(w);
    if (e != ALL) fail(w, TRAP, 0, "a transposed LDS read with inactive lanes is not modelled");
    const u32 *a = need_lanes(w, i->src[0].index, e, "an LDS address");
    u32 address[LANES], undef[LANES], r[2][LANES]; u8 row[LANES][8];
    memcpy(address, a, sizeof address);
    may_load(w, d, 2, w->v_vm);
    EACH_LANE(l) { lds_bounds(w, address[l] + off, 8, l, "read"); undef[l] = lds_read(w, l, (u32)(address[l] + off), 8, row[l]); }
    u32 out_undef[LANES] = {0};
    EACH_LANE(l) {
        u8 v[8];
        for (u32 j = 0; j < p; j++) {
            u32 from = (l & 48) + stride * j + (l & 15) / p, el = l % p;
            memcpy(v + j * eb, row[from] + el * eb, eb);
            out_undef[l] |= (undef[from] >> el * eb & ((1 << eb) - 1)) << j * eb;
        }
        memcpy(&r[0][l], v, 4); memcpy(&r[1][l], v + 4, 4);
    }
    for (int k = 0; k < 2; k++) { u8 m = w->v_lgkm[d + k]; w->v_lgkm[d + k] = 0; write_lanes(w, d + k, r[k], half_shadow(out_undef, k), e); w->v_lgkm[d + k] = m; }
    Pending *q = lds_pending(w, 0, 8, address, (i32)off, -1);
    q->reg = d; q->count = 2;
    w->v_lgkm[d]++; w->v_lgkm[d + 1]++;
}

// Cross-lane moves through the LDS unit (no memory): bpermute pulls from lane address/4, permute pushes to it, swizzle uses a fixed pattern.
static void deliver(Wave *w, u32 d, const u32 *r, Shadow s) {
    may_load(w, d, 1, w->v_vm);
    u8 m = w->v_lgkm[d]; w->v_lgkm[d] = 0; write_lanes(w, d, r, s, exec_of(w)); w->v_lgkm[d] = m;
    load_vector(w, &w->lgkm, w->v_lgkm, d, 1);
}
static void run_bpermute(Wave *w, const Inst *i) {
    u32 r[LANES]; u64 e = exec_of(w); Shadow s = DEFINED; u32 n = i->src[1].index;
    const u32 *a = need_lanes(w, i->src[0].index, e, "a lane number");
    settled(w, n); Shadow t = w->v_undef[n];
    EACH_LANE(l) {
        u32 from = (a[l] + (u32)i->imm[0]) >> 2 & 63; u64 on = e >> from & 1;
        r[l] = on ? w->V[n][from] : 0;
        s.lo |= (t.lo >> from & on) << l; s.hi |= (t.hi >> from & on) << l;
    }
    deliver(w, i->dst[0].index, r, s);
}
static void run_permute(Wave *w, const Inst *i) {
    u32 r[LANES] = {0}; u64 e = exec_of(w); Shadow s = DEFINED; u32 n = i->src[1].index;
    const u32 *a = need_lanes(w, i->src[0].index, e, "a lane number");
    settled(w, n); Shadow t = w->v_undef[n];
    EACH_LANE(l) if (e >> l & 1) {
        u32 to = (a[l] + (u32)i->imm[0]) >> 2 & 63; u64 bit = (u64)1 << to;
        r[to] = w->V[n][l];
        s.lo = t.lo >> l & 1 ? s.lo | bit : s.lo & ~bit; s.hi = t.hi >> l & 1 ? s.hi | bit : s.hi & ~bit;
    }
    deliver(w, i->dst[0].index, r, s);
}
static void run_swizzle(Wave *w, const Inst *i) {
    u32 r[LANES]; u64 e = exec_of(w); Shadow s = DEFINED; u32 n = i->src[0].index; const LaneMap *m = &w->group->launch->maps[i->map];
    settled(w, n); Shadow t = w->v_undef[n];
    EACH_LANE(l) {
        u32 from = m->source[l]; u64 on = e >> from & 1;
        r[l] = on ? w->V[n][from] : 0;
        s.lo |= (t.lo >> from & on) << l; s.hi |= (t.hi >> from & on) << l;
    }
    deliver(w, i->dst[0].index, r, s);
}
