"""The cost model: from compiled code and the facts of a GPU to a predicted time, for ranking where nothing can be timed.

A loop iteration of the programs that share a compute unit takes the larger of two times. One is that of the busiest pipe (matrix, vector,
LDS, issue), which serves all programs one after another. The other is what a program takes alone: its dependent phases end to end
(products, then softmax, LDS traffic, barriers), and what memory latency is left after the tiles that are loaded ahead. Several programs
hide one another's phases but for a share of the smaller of the two times. Around the loop: the programs that fit, their rounds over the
compute units, uneven lengths, bandwidth, what a program takes before and after its loop, merging of splits, launches.

What is [fitted] was fitted, as one set of numbers for all kernels, to the figures that `tritonattn model --measure` took on an H200; it
is carried over to AMD, where nothing was ever timed. What is [assumed] has no measurement behind it. Facts of single GPUs are in `arch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .arch import Arch
from .cases import Case
from .codegen import Loop, Report

VERSION = "2"
KNOWN_ERROR = "on an H200, to which it was fitted, rank correlation 0.86 to 0.98 and the best of its top three within 1.02 of the best; no AMD GPU was timed"
NOT_HIDDEN = 0.45  # [fitted] of the shorter of the two times, where several programs share a unit
BARRIER_CYCLES = 40.0  # [fitted]
AROUND_CYCLES = 6500.0  # [fitted] of a program outside its loop: finding the sequence, queries, the first tile, the result
MERGE_CYCLES = 2400.0  # [fitted] of merging MERGE_AT_ONCE splits, one dependent load after the other
MERGE_AT_ONCE = 16
LAUNCH = 4e-6  # [fitted] seconds, of one kernel in a graph
FILL_BYTES = 64.0  # a clock from the L2 into one compute unit: chipsandcheese.com on both vendors' L1 and L2


@dataclass(frozen=True)
class Prediction:
    seconds: float
    bound: str  # what the time is made of: "matrix", "vector", "LDS", "issue", "chain", "latency", "bandwidth"


def pipes(loop: Loop, arch: Arch, num_warps: int) -> dict[str, float]:
    """Cycles that one program's iteration holds each pipe of a SIMD, or the LDS of the compute unit."""
    waves = num_warps / arch.simds
    if arch.backend == "cuda":  # three pipes side by side behind one issue port
        vector = float(max(loop.vector, 2 * loop.half_rate, arch.exp_cycles * loop.exponentials))
    else:
        vector = float(arch.vector_cycles * (loop.vector - loop.exponentials) + arch.exp_cycles * loop.exponentials)
    lds = loop.lds_bytes * arch.wave_size * num_warps / arch.lds_bytes_per_clock
    return {"matrix": waves * loop.matrix_cycles, "vector": waves * vector, "LDS": lds, "issue": waves * loop.instructions}


def iteration(
    loop: Loop, arch: Arch, num_warps: int, programs: float, latency: float, loaded_ahead: int = 1
) -> tuple[float, str]:
    """Cycles in which `programs` on one compute unit do an iteration each, and what bounds them.

    latency: of a tile's loads; loaded_ahead: tiles in flight while one is worked on, at least 1.
    """
    busy = pipes(loop, arch, num_warps)
    busiest = max(busy, key=lambda name: busy[name])
    together = programs * busy[busiest]
    waves = num_warps / arch.simds
    vector = max(arch.issue_cycles * loop.instructions, busy["vector"], busy["issue"])
    alone = busy["matrix"] + vector + busy["LDS"] + BARRIER_CYCLES * loop.barriers + arch.scratch_cycles * loop.scratch * waves
    bound, single = "chain", alone
    if (waiting := (alone + latency) / loaded_ahead) > alone:
        bound, single = "latency", waiting
    if together >= single:
        bound = busiest
    return max(together, single) + (NOT_HIDDEN * min(together, single) if programs > 1 else 0.0), bound


def predict(report: Report, arch: Arch, case: Case) -> Prediction:
    """Time of one launch of an attention kernel in a case. ValueError for kernels without matrix work."""
    main = report.main
    if main is None or not main.matrix:
        raise ValueError(f"{report.kernel}: no loop with matrix work to predict from")
    if case.kernel == "prefill":
        return _prefill(report, arch, case, main)
    return _decode(report, arch, case, main)


def _held(report: Report, arch: Arch) -> int:
    """Programs that a compute unit holds at once."""
    return max(1, int(report.occupancy * arch.simds / report.num_warps + 1e-6))


def _row_bytes(case: Case) -> int:
    """Of one key with its value, of one KV head."""
    shape, size = case.shape, {"": 2, "bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}[case.kv_dtype or case.dtype]
    if case.kernel == "mla_decode":
        return (shape.latent + shape.rope) * size
    return (shape.head_size + (shape.v_head_size or shape.head_size)) * size


def _loaded_ahead(report: Report) -> int:
    return max(1, report.constexprs.get("NUM_STAGES", 1) - 1)


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
    heads = case.batch * case.shape.num_heads
    held = min(_held(report, arch), max(1, -(-len(tiles) * heads // arch.compute_units)))
    latency = arch.cache_cycles + block_n * _row_bytes(case) / FILL_BYTES  # keys are read by many programs: the caches have them
    ahead = _loaded_ahead(report)
    per_main, bound = iteration(main, arch, report.num_warps, held, latency, ahead)
    per_masked, _ = iteration(masked, arch, report.num_warps, held, latency, ahead)
    cycles = [n * per_main + m * per_masked + AROUND_CYCLES for n, m in tiles]
    work = sum(cycles) * heads / (arch.compute_units * held)
    span = max(work, max(cycles)) + 0.5 * sum(cycles) / len(cycles)  # the last programs run with few beside them
    return Prediction(span / (arch.clock * arch.sustained) + LAUNCH, bound)


def _decode(report: Report, arch: Arch, case: Case, main: Loop) -> Prediction:
    shape, block_n = case.shape, report.constexprs["BLOCK_N"]
    programs, splits = math.prod(report.grid), report.grid[1]
    readers = report.grid[0] if case.kernel == "mla_decode" else 1  # programs that share one read from memory
    keys = min(case.kv_len, shape.window) if case.local and shape.window else case.kv_len
    iterations = -(-keys // (block_n * splits))
    tile = block_n * _row_bytes(case)
    latency = arch.memory_cycles + tile / FILL_BYTES
    bandwidth = arch.hbm_bandwidth * arch.hbm_efficiency
    held = _held(report, arch)
    seconds, rounds, left, bound = 0.0, 0, programs, ""
    while left > 0:
        now = min(left, held * arch.compute_units)
        cycles, limit = iteration(main, arch, report.num_warps, -(-now // arch.compute_units), latency, _loaded_ahead(report))
        reading = now * iterations * tile / readers / bandwidth
        working = iterations * cycles / arch.clock
        bound = bound or ("bandwidth" if reading > working else limit)
        seconds += max(reading, working)
        left, rounds = left - now, rounds + 1
    seconds += AROUND_CYCLES / arch.clock * (1 + (rounds - 1) / held)
    if splits > 1:
        parts = case.batch * case.query_len * shape.num_heads * splits * (shape.latent or shape.v_head_size or shape.head_size) * 4
        seconds += LAUNCH + 2 * parts / bandwidth + -(-splits // MERGE_AT_ONCE) * MERGE_CYCLES / arch.clock
    return Prediction(seconds + LAUNCH, bound)
