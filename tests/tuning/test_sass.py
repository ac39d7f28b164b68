"""Reading NVIDIA machine code: loops, pipes and widths. The text is in the form that nvdisasm prints."""

import pytest

from tritonattn.tuning import codegen, sass
from tritonattn.tuning.arch import by_name

TEXT = """
.text.k:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_8:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0040*/                   MUFU.EX2 R3, R4 ;
        /*0050*/                   FFMA R5, R4, R6, R7 ;
        /*0060*/                   FMNMX R5, R4, R6, !PT ;
        /*0070*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*0080*/              @!P6 LDGSTS.E.BYPASS.128 [R76], desc[UR12][R22.64], !P6 ;
        /*0090*/                   LDG.E.64 R2, desc[UR12][R22.64] ;
        /*00a0*/                   LDSM.16.MT88.4 R8, [R3] ;
        /*00b0*/                   LDS R8, [R3] ;
        /*00c0*/                   STS.128 [R3], R8 ;
        /*00d0*/                   SHFL.BFLY PT, R5, R4, 0x2, 0x1f ;
        /*00e0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00f0*/                   LDL R8, [R1+0x10] ;
        /*0100*/               @P0 BRA `(.L_x_8) ;
        /*0110*/               @P1 BRA `(.L_x_1) ;
        /*0120*/                   EXIT ;
.L_x_9:
        /*0130*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR9], R3 ;
        /*0140*/              @!P4 BRA `(.L_x_9) ;
        /*0150*/                   BRA `(.L_x_8) ;
"""


def test_the_innermost_loop_is_counted():
    (loop,) = sass.hot_loops(TEXT)  # neither the outer one, nor the wait behind the end, nor its way back
    assert (loop.instructions, loop.matrix, loop.vector, loop.exponentials, loop.half_rate) == (15, 2, 3, 1, 1)
    assert loop.lds_copies == {16: 1} and loop.global_loads == {8: 1} and loop.lds_reads == {4: 1, 16: 1} and loop.lds_writes == {16: 1}
    assert (loop.lane_moves, loop.barriers, loop.scratch) == (1, 1, 1)
    assert loop.matrix_cycles == pytest.approx(64 + 4 / 0.62)


def test_matrix_cycles_are_those_of_the_peak():
    arch = by_name("H200")
    flops = 2 * 64 * 256 * 16 / sass.matrix_cycles("HGMMA.64x256x16.F32.BF16") * arch.compute_units * arch.clock
    assert flops == pytest.approx(arch.matrix_flops, rel=0.01)
    assert sass.matrix_cycles("QGMMA.64x128x32.F32.E4M3.E4M3") == sass.matrix_cycles("HGMMA.64x128x16.F32.BF16")
    with pytest.raises(ValueError, match="unknown shape"):
        sass.matrix_cycles("HMMA.884.F16")


def test_two_programs_share_a_multiprocessor():
    arch = by_name("sm_90")
    assert arch.occupancy(255, 98336, 4) == 2
    assert arch.occupancy(128, 115 << 10, 4) == 1  # 1 KiB of each program's share is the system's


def test_a_stack_is_refused_where_the_loop_lives_in_it():
    (loop,) = sass.hot_loops(TEXT)
    report = codegen.Report("k", "sm_90", 64, 0, 64, 0, 4, 0, 16, 0, 4, 4.0, (loop,), False)
    assert codegen.judge(report, by_name("sm_90")) == ["loop 1 of 1: 1 scratch accesses"]
    (loop,) = sass.hot_loops(TEXT.replace("LDL R8, [R1+0x10]", "FADD R8, R8, R9"))
    report = codegen.Report("k", "sm_90", 64, 0, 64, 0, 4, 0, 16, 0, 4, 4.0, (loop,), False)
    assert codegen.judge(report, by_name("sm_90")) == []
