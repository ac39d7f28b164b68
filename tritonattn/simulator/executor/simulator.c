// The executor. Python (core.py) compiles this one file and calls simulate().
#include "machine.h"
#include "waits.h"
#include "operands.h"
#include "scalar.h"
#include "convert.h"
#include "vector.h"
#include "lanes.h"
#include "matrix.h"
#include "lds.h"
#include "memory.h"

static void run_barrier(Wave *w, const Inst *i) { (void)w; (void)i; }

// Instructions whose handler needs no table of its own: name, handler. decode.py fills in their operands and immediates.
#define HANDLERS(_) \
    _(nothing) _(end) _(trap) _(setreg) _(waitcnt) _(barrier) _(branch) _(saveexec) _(select) _(carry) _(mad64) _(div_scale) _(div_fmas) _(div_fixup) \
    _(packed32) _(packed16) _(fma_mix) _(bitop3) _(readlane) _(writelane) _(mbcnt) _(swap) _(permlane_swap) _(unpack_small) _(unpack_one) _(pack_small) _(mfma) \
    _(lds_read) _(lds_write) _(lds_read_transposed) _(bpermute) _(permute) _(swizzle) _(scalar_load) _(load) _(store) _(load_lds) _(scratch_load) \
    _(scratch_store) _(atomic)

typedef enum { F_SCALAR, F_LANES, F_COMPARE, F_HANDLER } Family;
typedef struct { const char *name, *form; Family family; void *fn; int rule; } Op;
static const Op OPS[] = {
#define ROW(name, form, rule, ...) {#name, form, F_SCALAR, (void *)fn_##name, rule},
    SCALARS(ROW)
#undef ROW
#define ROW(name, form, rule, ...) {#name, #form, F_LANES, (void *)fn_##name, rule},
    LANE_OPS(ROW)
#undef ROW
#define ROW(name, form, ...) {#name, #form, F_COMPARE, (void *)fn_##name, 0},
    COMPARES(ROW)
#undef ROW
#define ROW(name) {#name, "", F_HANDLER, (void *)run_##name, 0},
    HANDLERS(ROW)
};
enum { OP_COUNT = sizeof OPS / sizeof *OPS };

int op_count(void) { return OP_COUNT; }
const char *op_name(int k) { return OPS[k].name; }
const char *op_form(int k) { return OPS[k].form; }
int op_family(int k) { return OPS[k].family; }
int sizes(int k) { return k == 0 ? sizeof(Inst) : k == 1 ? sizeof(Launch) : k == 2 ? sizeof(LaneMap) : sizeof(Outcome); }

static inline void step(Wave *w, const Inst *i) {
    const Op *op = &OPS[i->op];
    switch (op->family) {
    case F_SCALAR: run_scalar(w, i, (void (*)(Sc *))op->fn, op->rule); break;
    case F_LANES: run_lanes(w, i, (LaneFn)op->fn, op->form, op->rule); break;
    case F_COMPARE: run_compare(w, i, (LaneFn)op->fn, op->form); break;
    case F_HANDLER: ((void (*)(Wave *, const Inst *))op->fn)(w, i); break;
    }
}

static int is_barrier(const Inst *i) { return OPS[i->op].fn == (void *)run_barrier; }

static void start_wave(Wave *w, Group *g, int id) {
    const Launch *L = g->launch;
    for (u32 n = 0; n < VGPRS; n++) { EACH_LANE(l) w->V[n][l] = L->poison; w->v_undef[n] = both(ALL); }
    for (u32 n = 0; n < SGPRS; n++) { w->S[n] = L->poison; w->s_undef[n] = ~0u; }
    memset(w->v_vm, 0, sizeof w->v_vm); memset(w->v_lgkm, 0, sizeof w->v_lgkm); memset(w->s_lgkm, 0, sizeof w->s_lgkm);
    w->vm.head = w->vm.tail = w->lgkm.head = w->lgkm.tail = 0;
    w->scc = 0; w->scc_undef = 1; w->done = w->saturate = 0; w->id = id; w->pc = 1; w->group = g;
    w->scratch_size = L->scratch_size;
    if (L->scratch_size) { memset(w->scratch, L->poison & 255, LANES * L->scratch_size); memset(w->scratch_undef, 1, LANES * L->scratch_size); }
    for (int k = 0; k < 2; k++) { w->S[EXEC + k] = ~0u; w->s_undef[EXEC + k] = 0; }
    exec_changed(w);
    u32 a = L->kernarg_sgpr;
    w->S[a] = (u32)L->kernarg; w->S[a + 1] = L->kernarg >> 32; w->s_undef[a] = w->s_undef[a + 1] = 0;
    u32 n = L->user_sgprs;
    for (int k = 0; k < 3; k++) if (L->workgroup_ids >> k & 1) { w->S[n] = g->id[k]; w->s_undef[n++] = 0; }
    EACH_LANE(l) w->V[0][l] = id * LANES + l;
    w->v_undef[0] = DEFINED;
    w->pc = 0;
}

// One workgroup: each wave runs to its next barrier or end, in ascending or descending order; then the barrier opens for all.
static void run_group(Group *g) {
    const Launch *L = g->launch;
    memset(g->lds, L->poison & 255, L->lds_size); memset(g->lds_undef, SEEN_UNDEFINED, L->lds_size);
    memset(g->writers, 0xFF, 8 * L->lds_size); memset(g->readers, 0xFF, 8 * L->lds_size);
    g->epoch = 1;
    for (u32 k = 0; k < L->waves; k++) start_wave(g->wave[k], g, k);
    for (int live = 1; live;) {
        live = 0;
        for (u32 k = 0; k < L->waves; k++) {
            Wave *w = g->wave[L->order ? L->waves - 1 - k : k];
            while (!w->done) {
                if (w->pc >= L->length) { w->pc = L->length; fail(w, TRAP, 0, "ran past the end of the code"); }
                const Inst *i = &L->code[w->pc++];
                if (++w->executed > L->budget) fail(w, RUNAWAY, 0, "more than %llu instructions in one wave", (unsigned long long)L->budget);
                if (L->counts && exec_of(w)) __atomic_fetch_add(&L->counts[i - L->code], 1, __ATOMIC_RELAXED);
                if (is_barrier(i)) break;
                step(w, i);
            }
            live |= !w->done;
        }
        g->epoch++;
        for (u32 k = 0; k < L->waves; k++) if (!g->wave[k]->done) restamp_outstanding(g->wave[k]);
    }
}

// Workgroups first to last (exclusive, in x, y, z order). Returns the fault, 0 if none.
int simulate(const Launch *L, u64 first, u64 last, Outcome *out) {
    static int ready;
    if (!ready) { make_formats(); ready = 1; }
    Group *g = calloc(1, sizeof *g);
    g->launch = L; g->out = out; memset(out, 0, sizeof *out);
    g->lds = malloc(L->lds_size + 1); g->lds_undef = malloc(L->lds_size + 1); g->writers = malloc(8 * L->lds_size + 8); g->readers = malloc(8 * L->lds_size + 8);
    for (u32 k = 0; k < L->waves; k++) {
        Wave *w = g->wave[k] = calloc(1, sizeof *w);
        w->vm.item = malloc(QUEUE * sizeof(Pending)); w->lgkm.item = malloc(QUEUE * sizeof(Pending));
        w->scratch = malloc(LANES * L->scratch_size + 1); w->scratch_undef = malloc(LANES * L->scratch_size + 1);
    }
    if (!setjmp(g->escape))
        for (u64 n = first; n < last; n++) {
            g->id[0] = n % L->grid[0]; g->id[1] = n / L->grid[0] % L->grid[1]; g->id[2] = n / L->grid[0] / L->grid[1];
            for (u32 k = 0; k < L->waves; k++) { out->executed += g->wave[k]->executed; g->wave[k]->executed = 0; }
            run_group(g);
        }
    for (u32 k = 0; k < L->waves; k++) {
        Wave *w = g->wave[k];
        out->executed += w->executed;
        free(w->vm.item); free(w->lgkm.item); free(w->scratch); free(w->scratch_undef); free(w);
    }
    free(g->lds); free(g->lds_undef); free(g->writers); free(g->readers); free(g);
    return out->fault;
}
