// Operands: how a source is read (register, constant, modifiers, sub-word and cross-lane selection) and a result is written under exec.

static u64 read_scalar(Wave *w, const Operand *o, u64 *undef) {
    if (o->kind == CONST) { *undef = 0; return o->value; }
    u32 n = o->index;
    settled_scalar(w, n);
    u64 v = w->S[n]; *undef = w->s_undef[n];
    if (o->count == 2) { settled_scalar(w, n + 1); v |= (u64)w->S[n + 1] << 32; *undef |= (u64)w->s_undef[n + 1] << 32; }
    return v;
}

static u64 need_scalar(Wave *w, const Operand *o, const char *use) {
    u64 undef, v = read_scalar(w, o, &undef);
    if (undef) fail(w, UNDEFINED, 0, "s%u is undefined and used as %s", o->index, use);
    return v;
}

static void write_sgpr(Wave *w, u32 n, u32 v, u32 undef) {
    settled_scalar(w, n);
    w->S[n] = v; w->s_undef[n] = undef;
    if (n >= EXEC) {
        if (undef) fail(w, UNDEFINED, first_lane(undef), "an undefined value reaches the exec mask");
        exec_changed(w);
    }
}

static void write_scalar(Wave *w, const Operand *o, u64 v, u64 undef) {
    write_sgpr(w, o->index, (u32)v, (u32)undef);
    if (o->count == 2) write_sgpr(w, o->index + 1, v >> 32, undef >> 32);
}

static u32 select_part(u32 v, u32 sel, u32 sext) {       // SDWA: 1-4 byte 0-3, 5-6 word 0-1
    if (sel >= 5) { v = v >> 16 * (sel - 5) & 0xFFFF; return sext ? (u32)(i32)(i16)v : v; }
    if (sel >= 1) { v = v >> 8 * (sel - 1) & 0xFF; return sext ? (u32)(i32)(int8_t)v : v; }
    return v;
}

static Shadow shadow_part(Shadow s, u32 sel) {
    if (sel == 0) return s;
    u64 m = sel >= 5 ? (sel == 5 ? s.lo : s.hi) : sel <= 2 ? s.lo : s.hi;
    return (Shadow){m, 0};
}

// The 64 lanes of a 32-bit source: a pointer into the register file, or into buf where anything must be computed.
static const u32 *read_lanes(Wave *w, const Operand *o, u32 part, u32 *buf, Shadow *s) {
    const u32 *v;
    if (o->kind == VGPR) {
        u32 n = o->index + part;
        settled(w, n); v = w->V[n]; *s = w->v_undef[n];
        if (!(o->neg | o->abs | o->sel)) return v;
        memcpy(buf, v, sizeof w->V[0]);
    } else {
        u32 x;
        if (o->kind == SGPR) {
            settled_scalar(w, o->index + part); x = w->S[o->index + part];
            u32 u = w->s_undef[o->index + part];
            s->lo = u & 0xFFFF ? ALL : 0; s->hi = u >> 16 ? ALL : 0;
        } else { x = (u32)(o->value >> 32 * part); *s = DEFINED; }
        EACH_LANE(l) buf[l] = x;
        if (!(o->neg | o->abs | o->sel)) return buf;
    }
    if (o->sel) { EACH_LANE(l) buf[l] = select_part(buf[l], o->sel, o->sext); *s = shadow_part(*s, o->sel); }
    u32 sign = o->half ? 0x8000u : 0x80000000u;
    if (o->abs) EACH_LANE(l) buf[l] &= ~sign;
    if (o->neg) EACH_LANE(l) buf[l] ^= sign;
    return buf;
}

static void write_lanes(Wave *w, u32 n, const u32 *r, Shadow s, u64 e) {
    settled(w, n);
    if (e == ALL) { memcpy(w->V[n], r, sizeof w->V[0]); w->v_undef[n] = s; return; }
    u32 *d = w->V[n];
    if (e == exec_of(w)) EACH_LANE(l) d[l] = (r[l] & w->mask[l]) | (d[l] & ~w->mask[l]);
    else EACH_LANE(l) if (e >> l & 1) d[l] = r[l];
    Shadow *t = &w->v_undef[n];
    t->lo = (s.lo & e) | (t->lo & ~e); t->hi = (s.hi & e) | (t->hi & ~e);
}

static u64 any_undef(Wave *w, u32 n) { return w->v_undef[n].lo | w->v_undef[n].hi; }

// Registers used as an address, or as data that leaves the wave for memory.
static const u32 *need_lanes(Wave *w, u32 n, u64 lanes, const char *use) {
    settled(w, n);
    u64 u = any_undef(w, n) & lanes; char t[8];
    if (u) fail(w, UNDEFINED, first_lane(u), "%s is undefined and used as %s", vector_name(n, t), use);
    return w->V[n];
}

// A lane mask operand (a 64-bit scalar pair): bit l belongs to lane l.
static u64 read_mask(Wave *w, const Operand *o, u64 *undef) { return read_scalar(w, o, undef); }
static void write_mask(Wave *w, const Operand *o, u64 v, u64 undef) { write_scalar(w, o, v, undef); }
