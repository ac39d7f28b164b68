"""The cost model orders what it must order."""

from dataclasses import replace

import pytest

from tritonattn.tuning import codegen, model
from tritonattn.tuning.arch import by_name
from tritonattn.tuning.cases import Case
from tritonattn.tuning.models import MODELS

BODY = ("v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]",)


def loop(**changes):
    sound = {
        "line": 0, "instructions": 500, "matrix": 64, "vector": 250, "exponentials": 34, "lds_reads": {16: 32}, "lds_writes": {16: 8},
        "lane_moves": 0, "global_loads": {16: 8}, "lds_copies": {}, "global_stores": {}, "barriers": 4, "waits": 30,
        "accumulator_moves": 0, "lane_accesses": 0, "scratch": 0, "matrix_cycles": 2048, "native_fp8": 0, "byte_arithmetic": 0, "body": BODY,
    }  # fmt: skip
    return codegen.Loop(**{**sound, **changes})


def time_of(arch, programs=2, num_warps=4, latency=0.0, ahead=1, **changes):
    return model.iteration(loop(**changes), arch, num_warps, programs, latency, ahead)


@pytest.mark.parametrize("name", ["MI300X", "MI308X", "MI355X", "H200"])
@pytest.mark.parametrize(
    "worse",
    [{"vector": 1900}, {"scratch": 30}, {"matrix_cycles": 4096}, {"instructions": 3000}, {"lds_reads": {16: 400}}, {"barriers": 40}],
    ids=str,
)
def test_more_work_takes_longer(name, worse):
    arch = by_name(name)
    assert time_of(arch, **worse)[0] > time_of(arch)[0]


def test_bound_names_what_takes_the_time():
    arch = by_name("gfx942")
    many = {"programs": 4}
    assert time_of(arch, **many)[1] == "matrix"
    assert time_of(arch, vector=1500, **many)[1] == "vector"
    assert time_of(arch, lds_reads={16: 900}, **many)[1] == "LDS"
    assert time_of(arch, programs=1)[1] == "chain"
    assert time_of(arch, programs=1, latency=9000)[1] == "latency"


def test_programs_hide_one_another():
    arch = by_name("gfx942")
    assert time_of(arch, programs=2)[0] < 2 * time_of(arch, programs=1)[0]


def test_tiles_loaded_ahead_hide_latency():
    arch = by_name("H200")
    waits = [time_of(arch, programs=1, latency=9000, ahead=n)[0] for n in (1, 2, 3, 9)]
    assert waits == sorted(waits, reverse=True) and waits[0] - waits[1] > 4000
    assert waits[-1] == time_of(arch, programs=1)[0]


def test_a_part_of_a_round_costs_a_round():
    """512 sequences on 132 units: four programs each finish at once, three leave a rest that runs alone (seen on an H200: 494 and 584 us)."""
    arch = by_name("H200")
    case = Case("decode", MODELS["llama-3-8b"], layout="nhd", batch=64, kv_len=8192)
    work = {"instructions": 470, "matrix_cycles": 206.0, "lds_reads": {16: 28}, "lds_writes": {}, "barriers": 9, "global_loads": {}}
    fixed = {"grid": (8, 1, 64), "constexprs": {"BLOCK_N": 64, "NUM_STAGES": 2}}

    def seconds(occupancy):
        report = codegen.Report("decode", "sm_90", 128, 0, 128, 0, 0, 0, 0, 38912, 4, occupancy, (loop(**work),), False, **fixed)
        return model.predict(report, arch, case).seconds

    assert seconds(3.0) > 1.1 * seconds(4.0)


def test_a_helper_kernel_has_no_prediction():
    report = codegen.Report("merge", "gfx942", 8, 0, 8, 8, 0, 0, 0, 0, 4, 8, (), False)
    with pytest.raises(ValueError, match="no loop with matrix work"):
        model.predict(report, by_name("gfx942"), None)


def test_facts_scale():
    slow = replace(by_name("MI300X"), exp_cycles=64)
    assert time_of(slow, vector=600)[0] > time_of(by_name("MI300X"), vector=600)[0]
