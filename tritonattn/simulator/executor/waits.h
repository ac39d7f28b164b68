// Counters vmcnt and lgkmcnt: a load's destination may be read or overwritten only after an s_waitcnt that covers the load.
//
// Loads deliver their values at once but leave the register marked until the wait. vmcnt retires in issue order (vector loads, stores
// and LDS-direct loads). lgkmcnt retires in issue order while only LDS operations are outstanding; scalar loads return out of order, so
// with one outstanding only lgkmcnt(0) retires anything. An LDS access still outstanding when its wave passes a barrier counts as
// made after that barrier: the barrier alone does not order it.
//
// vmcnt has six bits, so no vector operation is issued while 63 are outstanding: a 64th means that the first is done. LLVM counts on it.

static void stamp(Wave *w, const Pending *p);      // lds.h

enum { VM_MOST = 63 };

static void retire(Wave *w, Queue *q, u8 *vector_marks);

static Pending *enqueue(Wave *w, Queue *q) {
    if (q == &w->vm && q->tail - q->head == VM_MOST) retire(w, q, w->v_vm);
    if (q->tail - q->head == QUEUE) fail(w, RUNAWAY, 0, "more than %d memory operations outstanding", QUEUE);
    Pending *p = &q->item[q->tail++ % QUEUE];
    p->reg = p->count = 0; p->scalar = p->is_lds = p->is_write = p->size = 0;
    return p;
}

static void retire(Wave *w, Queue *q, u8 *vector_marks) {
    Pending *p = &q->item[q->head++ % QUEUE];
    u8 *marks = p->scalar ? w->s_lgkm : vector_marks;
    for (int k = 0; k < p->count; k++) marks[p->reg + k]--;
    if (p->is_lds && p->is_write == 2) stamp(w, p);
}

static void wait_counters(Wave *w, u32 vm, u32 lgkm) {
    while (w->vm.tail - w->vm.head > vm) retire(w, &w->vm, w->v_vm);
    if (lgkm > 0)
        for (u32 k = w->lgkm.head; k != w->lgkm.tail; k++)
            if (w->lgkm.item[k % QUEUE].scalar) return;
    while (w->lgkm.tail - w->lgkm.head > lgkm) retire(w, &w->lgkm, w->v_lgkm);
}

static void run_waitcnt(Wave *w, const Inst *i) { wait_counters(w, i->imm[0], i->imm[1]); }

static void load_vector(Wave *w, Queue *q, u8 *marks, u32 reg, u32 count) {
    Pending *p = enqueue(w, q);
    p->reg = reg; p->count = count;
    for (u32 k = 0; k < count; k++) marks[reg + k]++;
}

static const char *vector_name(u32 n, char *text) { sprintf(text, "%c%u", n < 256 ? 'v' : 'a', n & 255); return text; }

static inline void settled(Wave *w, u32 n) {
    if (__builtin_expect(w->v_vm[n] | w->v_lgkm[n], 0)) {
        char t[8];
        fail(w, MISSING_WAIT, 0, "%s is the destination of an outstanding %s: no s_waitcnt %s covers it", vector_name(n, t),
             w->v_vm[n] ? "memory load" : "LDS read", w->v_vm[n] ? "vmcnt" : "lgkmcnt");
    }
}

static inline void settled_scalar(Wave *w, u32 n) {
    if (__builtin_expect(w->s_lgkm[n], 0)) fail(w, MISSING_WAIT, 0, "s%u is the destination of an outstanding scalar load: no s_waitcnt lgkmcnt(0) covers it", n);
}
