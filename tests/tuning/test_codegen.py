"""Compile without a GPU and read the code: small kernels with known faults, judged on both arches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tritonattn.tuning import codegen
from tritonattn.tuning.arch import by_name

HERE = Path(__file__).parent


def report_of(*loops, **changes):
    """A faultless report but for what the arguments say."""
    sound = {
        "kernel": "k", "arch": "gfx942", "vector_registers": 64, "accumulator_registers": 0, "registers": 64, "scalar_registers": 8,
        "spills": 0, "scalar_spills": 0, "scratch": 0, "lds": 0, "num_warps": 4, "occupancy": 8, "loops": loops, "fp8_input": False,
    }  # fmt: skip
    return codegen.Report(**{**sound, **changes})


@pytest.fixture(scope="module", params=["gfx942", "gfx950"])
def compiled(request):
    """Reports of `small_kernels.py` by case, made in a process where Triton compiles."""
    path = os.pathsep.join([str(HERE.parents[1]), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(HERE / "small_kernels.py"), request.param], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {"arch": by_name(request.param), "triton": tuple(map(int, found["triton"].split(".")[:2])), **found["cases"]}


def test_clean_kernel(compiled):
    report, loop = compiled["clean"], compiled["clean"]["main"]
    assert report["reasons"] == [] and len(report["loops"]) == 1
    # a 64x64x64 product over 4 waves, each wave 16 or 32 rows: the cycles are those of the FLOPs, whatever the instruction
    rate = 2048 / 4 if compiled["arch"].name == "gfx942" else 4096 / 4
    assert loop["matrix_cycles"] == 2 * 64 * 64 * 64 / 4 / rate
    assert loop["vector"] < loop["instructions"] and loop["barriers"] >= 1
    assert sum(int(w) * n for w, n in loop["global_loads"].items()) == 2 * 64 * 64 * 2 / 256
    assert loop["lds_reads"] and loop["lds_writes"]


def test_what_was_captured(compiled):
    assert compiled["clean"]["constexprs"] == {"BM": 64, "BN": 64, "BK": 64}
    assert compiled["clean"]["grid"] == [1]
    assert compiled["clean"]["arch"] == compiled["arch"].name


def test_occupancy_is_recomputed(compiled):
    for case in ("clean", "piped", "fp8"):
        report = compiled[case]
        assert report["occupancy"] == compiled["arch"].occupancy(report["registers"], report["lds"], report["num_warps"]) > 0


def test_spills_are_rejected(compiled):
    report = compiled["spills"]
    assert report["spills"] > 0 and report["scratch"] > 0
    assert any("registers spilled" in reason for reason in report["reasons"])


def test_lds_over_the_limit_is_rejected(compiled):
    report, arch = compiled["too much LDS"], compiled["arch"]
    assert (report["lds"] > arch.lds_bytes) == any("bytes of LDS" in reason for reason in report["reasons"])
    assert report["lds"] > 64 * 1024


def test_narrow_loads_are_rejected(compiled):
    assert any("loads of 2 bytes" in reason for reason in compiled["narrow"]["reasons"])


def test_no_matrix_instructions_is_a_reason():
    report = report_of()
    assert codegen.judge(report, by_name("gfx942")) == ["no matrix instructions in a loop"]
    assert codegen.judge(report, by_name("gfx942"), needs_matrix=False) == []


def test_a_long_compilation_is_a_reason(compiled):
    assert 0 < compiled["clean"]["compile_seconds"] < codegen.COMPILE_SECONDS
    facts = by_name("gfx942")
    assert codegen.judge(report_of(compile_seconds=31.2), facts, needs_matrix=False) == ["31 s to compile, at most 20 s"]
    assert codegen.judge(report_of(compile_seconds=19.9), facts, needs_matrix=False) == []


def test_software_fp8_is_rejected(compiled):
    # e4m3fn is foreign to gfx942 everywhere; e5m2fnuz on gfx950 is told from its native kin by Triton from 3.7 on
    reasons = compiled["foreign fp8"]["reasons"]
    if compiled["arch"].name == "gfx942" or compiled["triton"] >= (3, 7):
        assert any("fp8 converted in software" in reason for reason in reasons)


def test_native_fp8_passes(compiled):
    assert compiled["fp8"]["main"]["native_fp8"] > 0
    assert not any("fp8" in reason for reason in compiled["fp8"]["reasons"])


@pytest.mark.parametrize(
    "op, width",
    [
        ("ds_read_b128", 16),
        ("ds_read2_b64", 16),
        ("ds_read2st64_b32", 8),
        ("ds_read_b64_tr_b16", 8),
        ("ds_read_u16_d16_hi", 2),
        ("ds_read_u8", 1),
        ("ds_write_b16_d16_hi", 2),
        ("ds_write2st64_b64", 16),
        ("ds_read_b96", 12),
        ("ds_read_i8", 1),
    ],
)
def test_lds_width(op, width):
    assert codegen._lds_width(op) == width


ASSEMBLY = """
.LBB0_0:
	s_cbranch_scc1 .LBB0_4
.LBB0_1:                                ; outer
	v_add_u32_e32 v1, v2, v3
.LBB0_2:                                ; inner
	buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen
	buffer_load_dword v4, s[0:3], 0 offen lds
	v_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], v[0:15]
	v_accvgpr_read_b32 v1, a2
	ds_bpermute_b32 v1, v2, v3
	s_waitcnt lgkmcnt(0)
	s_barrier
	s_cbranch_scc1 .LBB0_2
	s_cbranch_vccnz .LBB0_1
.LBB0_3:                                ; no matrix work here
	v_add_u32_e32 v1, v2, v3
	s_cbranch_scc0 .LBB0_3
.LBB0_4:
	s_endpgm
"""


def test_loops_of_a_text():
    (loop,) = codegen.hot_loops(ASSEMBLY)
    assert (loop.instructions, loop.matrix, loop.matrix_cycles, loop.vector, loop.accumulator_moves) == (8, 1, 32, 1, 1)
    assert loop.global_loads == {16: 1} and loop.lds_copies == {4: 1} and loop.lane_moves == 1 and not loop.lds_reads
    assert (loop.barriers, loop.waits) == (1, 1)


def test_accumulator_moves_are_rejected():
    (loop,) = codegen.hot_loops(ASSEMBLY)
    report = report_of(loop)
    assert codegen.judge(report, by_name("gfx942")) == ["loop 1 of 1: 1 of 8 instructions only move accumulators"]


def test_a_row_may_set_its_own_limits():
    (loop,) = codegen.hot_loops(ASSEMBLY.replace("ds_bpermute_b32 v1, v2, v3", "ds_read_u16 v1, v2"))
    moves, narrow = (f"loop 1 of 1: 1 of {loop.instructions} instructions only move accumulators", "loop 1 of 1: 1 LDS reads of 2 bytes")
    arch, report = by_name("gfx942"), report_of(loop)
    assert codegen.judge(report, arch) == [narrow, moves]
    assert codegen.judge(report, arch, limits={"narrow_lds_reads": 1}) == [moves]
    assert codegen.judge(report, arch, limits={"narrow_lds_reads": 0, "accumulator_move_share": 0.2}) == [narrow]


def test_only_gpus_are_captured():
    with pytest.raises(ValueError, match="arch must be a GPU"):
        with codegen.capture("interpreter"):
            pass


def test_unknown_text_is_named():
    with pytest.raises(ValueError, match="a compiler this reader does not know"):
        codegen._figure("; nothing", r"; TotalNumVgprs: (\d+)")


def test_scalar_spills_count_where_the_loop_pays():
    (loop,) = codegen.hot_loops(ASSEMBLY.replace("v_accvgpr_read_b32 v1, a2", "v_add_u32_e32 v1, v2, v3"))
    (paying,) = codegen.hot_loops(ASSEMBLY.replace("v_accvgpr_read_b32 v1, a2", "v_readlane_b32 s4, v40, 2"))
    assert codegen.judge(report_of(loop, scalar_spills=2), by_name("gfx942")) == []
    reasons = codegen.judge(report_of(paying, scalar_spills=2), by_name("gfx942"))
    assert reasons == ["loop 1 of 1: 1 accesses to spilled scalar registers"]
    assert codegen.judge(report_of(paying, scalar_spills=2), by_name("gfx942"), limits={"scalar_spill_accesses": 1}) == []


def test_what_is_spilled_to_accumulators_may_be_accepted_and_scratch_never():
    arch, (loop,) = by_name("gfx942"), codegen.hot_loops(ASSEMBLY.replace("v_accvgpr_read_b32 v1, a2", "v_add_u32_e32 v1, v2, v3"))
    spilled, scratch = report_of(loop, spills=2, scratch=0), report_of(loop, spills=2, scratch=8)
    assert codegen.judge(spilled, arch) == ["2 registers spilled, 0 bytes of scratch a lane"]
    assert codegen.judge(spilled, arch, limits={"accumulator_spills": 2}) == []
    assert codegen.judge(spilled, arch, limits={"accumulator_spills": 1}) == ["2 registers spilled, 0 bytes of scratch a lane"]
    assert codegen.judge(scratch, arch, limits={"accumulator_spills": 2}) == ["2 registers spilled, 8 bytes of scratch a lane"]
