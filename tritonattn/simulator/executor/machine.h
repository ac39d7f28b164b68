// The machine: one workgroup of 64-lane waves, their registers, and what is known about every value.
//
// Every register lane half, scalar bit and LDS byte carries one shadow bit, "undefined": nothing has written it, or it was computed
// from something undefined. Undefined values may travel; using one as an address, a branch, an exec mask or a stored result is a fault.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
typedef int16_t i16; typedef int32_t i32; typedef int64_t i64; typedef float f32; typedef double f64;

#define LANES 64
#define ALL (~(u64)0)
#define EACH_LANE(l) for (int l = 0; l < LANES; l++)

enum { VCC = 106, M0 = 124, EXEC = 126, SGPRS = 128, VGPRS = 512 /* v0-v255, then a0-a255 */ };
enum { MAX_WAVES = 16, QUEUE = 256 };
enum Fault { OK, MEMORY, LDS_BOUNDS, UNDEFINED, MISSING_WAIT, RACE, RUNAWAY, TRAP };

static inline u32 bits(f32 x) { u32 u; memcpy(&u, &x, 4); return u; }
static inline f32 flt(u32 u) { f32 x; memcpy(&x, &u, 4); return x; }
static inline i32 sgn(u32 u) { return (i32)u; }

// ---- an instruction, decoded by decode.py (the layout there mirrors this one)

enum Kind { NONE, SGPR, VGPR, CONST };
typedef struct { u8 kind, count, neg, abs, half /* 16-bit modifiers */, sel, sext, hi /* op_sel_hi */; u32 index; u32 pad; u64 value; } Operand;
typedef struct { u8 source[LANES]; u64 valid, enabled; u32 bound_ctrl, pad; } LaneMap;   // DPP and swizzle: lane l reads lane source[l]
typedef struct Inst Inst;
struct Inst { i32 op; u32 flags; Operand dst[2]; Operand src[4]; i64 imm[4]; i32 map, line; };
enum Flag { CLAMP = 1, IS_SDWA = 2, IS_DPP = 4, DST_PAD = 8 };

typedef struct { u64 lo, hi; } Shadow;      // one bit a lane: the low / high 16 bits of that lane are undefined
static const Shadow DEFINED = {0, 0};

// ---- a wave

typedef struct { u16 reg, count; u8 scalar, is_lds, is_write, size; u64 exec; i32 offset[2]; u32 address[LANES]; } Pending;
typedef struct { Pending *item; u32 head, tail; } Queue;     // in issue order: head retires first

typedef struct Group Group;
typedef struct {
    u32 V[VGPRS][LANES]; Shadow v_undef[VGPRS];
    u32 S[SGPRS], s_undef[SGPRS];
    u32 mask[LANES];                        // exec, one word a lane, for blending
    u8 v_vm[VGPRS], v_lgkm[VGPRS], s_lgkm[SGPRS];     // outstanding loads that will write the register
    Queue vm, lgkm;
    int scc, scc_undef, done, saturate, id;
    u32 pc; u64 executed;
    u8 *scratch, *scratch_undef; u32 scratch_size;
    Group *group;
} Wave;

typedef struct { u64 start, end; i32 writable, pad; } Range;
typedef struct {
    const Inst *code; u32 length; const LaneMap *maps;
    const Range *ranges; u32 range_count;
    u64 kernarg; u32 lds_size, waves, user_sgprs, workgroup_ids /* bit 0-2: x, y, z are passed */, scratch_size, poison, order;
    u32 fnuz, kernarg_sgpr; u64 budget;
    u32 grid[3], pad2;
    u64 *counts;                            // where not null: executions of each instruction with a lane active, summed over waves
} Launch;

typedef struct { i32 fault, line, wave, lane, group[3]; u32 pad; u64 executed; char text[192]; } Outcome;

struct Group {
    const Launch *launch; Outcome *out; jmp_buf escape;
    u32 id[3]; u32 epoch;                   // the epoch counts barriers that every wave has passed
    u8 *lds, *lds_undef; u64 *writers, *readers;     // per LDS byte: epoch << 16 | waves that wrote (read) it in that epoch
    u32 last_range;
    Wave *wave[MAX_WAVES];
};

__attribute__((noreturn, format(printf, 4, 5)))
static void fail(Wave *w, enum Fault fault, int lane, const char *text, ...) {
    Outcome *out = w->group->out;
    out->fault = fault; out->wave = w->id; out->lane = lane; out->line = w->group->launch->code[w->pc - 1].line;
    for (int k = 0; k < 3; k++) out->group[k] = w->group->id[k];
    va_list list; va_start(list, text); vsnprintf(out->text, sizeof out->text, text, list); va_end(list);
    longjmp(w->group->escape, 1);
}

static inline int first_lane(u64 m) { return m ? __builtin_ctzll(m) : 0; }
static inline u64 exec_of(Wave *w) { return w->S[EXEC] | (u64)w->S[EXEC + 1] << 32; }
static void exec_changed(Wave *w) { u64 e = exec_of(w); EACH_LANE(l) w->mask[l] = -(u32)(e >> l & 1); }
