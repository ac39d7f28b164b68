"""The cost model: from compiled code and the facts of a GPU to a predicted time, for ranking where nothing can be timed.

A loop iteration of w waves on a SIMD takes between the time of its busiest pipe (matrix, vector, LDS, or the instruction issue of a
single wave) and the sum of matrix and vector time, as if nothing overlapped. How far towards the sum is one number, larger where
barriers hold waves together. Around it: waves that fit, the rounds of programs over the compute units and their uneven lengths,
bytes in flight against the memory's latency, bandwidth, launches.

The coefficients marked [assumed] were never fitted to a GPU of these arches; published figures of other kernels put absolute times
within about a factor of two (plain Triton prefill on MI300X at 360 to 490 TFLOP/s, on MI355X at 608 to 772). Use the ratio of two
predictions, not a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arch import Arch
from .cases import Case
from .codegen import Loop, Report

VERSION = "1"
OVERLAP_LOST = 0.2  # [assumed] share of the non-overlapped time that two waves still pay without barriers
OVERLAP_LOST_BARRIER = 0.35  # [assumed] with barriers
BARRIER_CYCLES = 60  # [assumed]
SCRATCH_CYCLES = 120  # [assumed] of an access to spilled registers, beyond its issue: it goes through the caches
MEMORY_LATENCY = 1.5e-6  # [assumed] of a load from HBM under load, seconds
NEAR_LATENCY = 600  # [assumed] cycles to a cache that holds the line already
SUSTAINED_CLOCK = 0.6  # of the peak, under matrix load: published kernels against the data sheet
LAUNCH = 4e-6  # seconds, of one kernel in a stream
PROLOGUE_CYCLES = 3000  # [assumed] loading queries, finding the sequence, storing the result


@dataclass(frozen=True)
class Prediction:
    seconds: float
    bound: str  # what the time is made of: "matrix", "vector", "LDS", "issue", "latency", "bandwidth"


def loop_cycles(loop: Loop, arch: Arch, waves: float) -> tuple[float, str]:
    """Cycles in which a SIMD with `waves` resident waves does one iteration of each, and the pipe that takes most of it."""
    matrix = float(loop.matrix_cycles)
    if arch.backend == "cuda":  # three pipes side by side behind one issue port
        vector = float(max(loop.vector, 2 * loop.half_rate, arch.exp_cycles * loop.exponentials))
    else:
        vector = float(arch.vector_cycles * (loop.vector - loop.exponentials) + arch.exp_cycles * loop.exponentials)
    lds = arch.simds * arch.wave_size * loop.lds_bytes / arch.lds_bytes_per_clock  # one LDS serves all SIMDs
    alone = arch.issue_cycles * loop.instructions + BARRIER_CYCLES * loop.barriers + SCRATCH_CYCLES * loop.scratch
    pipes = {"matrix": waves * matrix, "vector": waves * vector, "LDS": waves * lds, "issue": alone}
    bound = max(pipes, key=lambda name: pipes[name])
    low, high = pipes[bound], max(pipes[bound], waves * (matrix + vector) + BARRIER_CYCLES * loop.barriers)
    lost = OVERLAP_LOST_BARRIER if loop.barriers else OVERLAP_LOST
    return low + lost * (high - low) + waves * SCRATCH_CYCLES * loop.scratch, bound


def predict(report: Report, arch: Arch, case: Case) -> Prediction:
    """Time of one launch of an attention kernel in a case. ValueError for kernels without matrix work."""
    main = report.main
    if main is None or not main.matrix:
        raise ValueError(f"{report.kernel}: no loop with matrix work to predict from")
    if case.kernel == "prefill":
        return _prefill(report, arch, case, main)
    return _decode(report, arch, case, main)


def _waves(report: Report, arch: Arch, programs: float) -> tuple[float, float]:
    """Programs that a compute unit holds at once, and the waves they put on a SIMD."""
    held = max(1.0, report.occupancy * arch.simds / report.num_warps)
    held = min(held, max(1.0, programs / arch.compute_units))
    return held, max(held * report.num_warps / arch.simds, 0.25)


def _prefill(report: Report, arch: Arch, case: Case, main: Loop) -> Prediction:
    block_m, block_n = report.constexprs["BLOCK_M"], report.constexprs["BLOCK_N"]
    masked = max((loop for loop in report.loops if loop.matrix), key=lambda loop: loop.instructions)
    context = case.kv_len - case.query_len
    window = case.shape.window if case.local else 0
    tiles = []  # (unmasked, masked) iterations of the programs of one head and sequence
    for row in range(0, case.query_len, block_m):
        last = min(row + block_m, case.query_len)
        keys = context + last
        seen = min(keys, window + block_m) if window else keys
        edge = -(-block_m // block_n) + (1 + block_m // block_n if window else 0)
        total = -(-seen // block_n)
        tiles.append((max(0, total - edge), min(total, edge)))
    programs = len(tiles) * case.batch * case.shape.num_heads
    held, waves = _waves(report, arch, programs)
    per_main, bound = loop_cycles(main, arch, waves)
    per_masked, _ = loop_cycles(masked, arch, waves)
    # A load that is not issued an iteration ahead is waited for; other waves cover their share of it.
    exposed = 0.0 if main.lds_copies else NEAR_LATENCY / max(waves, 1.0)
    cycles = [n * (per_main + exposed) + m * (per_masked + exposed) + PROLOGUE_CYCLES for n, m in tiles]
    slots = arch.compute_units * held
    work = sum(cycles) * case.batch * case.shape.num_heads / slots
    span = max(work, max(cycles)) + 0.5 * sum(cycles) / len(cycles)  # the last programs run alone
    return Prediction(span / (arch.clock * SUSTAINED_CLOCK) + LAUNCH, bound)


def _decode(report: Report, arch: Arch, case: Case, main: Loop) -> Prediction:
    shape, block_n = case.shape, report.constexprs["BLOCK_N"]
    programs = 1
    for size in report.grid:
        programs *= size
    splits = report.grid[1] if len(report.grid) > 1 else 1
    keys = min(case.kv_len, shape.window) if case.local and shape.window else case.kv_len
    iterations = -(-keys // (block_n * splits))
    held, waves = _waves(report, arch, programs)
    per_iteration, bound = loop_cycles(main, arch, waves)
    loaded = float(arch.wave_size) * sum(width * n for widths in (main.global_loads, main.lds_copies) for width, n in widths.items())  # bytes a wave
    in_flight = loaded * waves * arch.simds * (report.constexprs.get("NUM_STAGES", 1) if main.lds_copies else 1)
    latency = MEMORY_LATENCY * arch.clock + arch.issue_cycles * main.instructions
    if latency > per_iteration:
        per_iteration, bound = latency, "latency"
    rounds = -(-programs // int(arch.compute_units * held))
    seconds = rounds * (iterations * per_iteration + PROLOGUE_CYCLES) / arch.clock
    size = 1 if case.kv_dtype == "fp8" else 2
    if shape.is_mla:
        heads_a_pass = report.constexprs["ROWS"]
        traffic = case.batch * keys * (shape.latent + shape.rope) * size * max(1, shape.num_heads * case.query_len // heads_a_pass)
    else:
        traffic = case.batch * keys * shape.num_kv_heads * (shape.head_size + (shape.v_head_size or shape.head_size)) * size
    # Little's law: what is in flight on all units over the latency bounds the bandwidth reached.
    reached = min(arch.hbm_bandwidth * arch.hbm_efficiency, in_flight * min(arch.compute_units, programs) / MEMORY_LATENCY)
    if traffic / reached > seconds:
        seconds, bound = traffic / reached, "bandwidth"
    return Prediction(seconds + LAUNCH * (2 if splits > 1 else 1), bound)
