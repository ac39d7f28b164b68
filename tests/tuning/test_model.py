"""The cost model orders what it must order; nothing here claims a time."""

from dataclasses import replace

import pytest

from tritonattn.tuning import codegen, model
from tritonattn.tuning.arch import by_name

BODY = ("v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]",)


def loop(**changes):
    sound = {
        "line": 0, "instructions": 500, "matrix": 64, "vector": 250, "exponentials": 34, "lds_reads": {16: 32}, "lds_writes": {16: 8},
        "lane_moves": 0, "global_loads": {16: 8}, "lds_copies": {}, "global_stores": {}, "barriers": 4, "waits": 30,
        "accumulator_moves": 0, "lane_accesses": 0, "scratch": 0, "matrix_cycles": 2048, "native_fp8": 0, "byte_arithmetic": 0, "body": BODY,
    }  # fmt: skip
    return codegen.Loop(**{**sound, **changes})


@pytest.mark.parametrize("name", ["MI300X", "MI308X", "MI355X"])
@pytest.mark.parametrize(
    "worse",
    [{"vector": 900}, {"scratch": 30}, {"matrix_cycles": 4096}, {"instructions": 3000}, {"lds_reads": {16: 400}}, {"barriers": 40}],
    ids=str,
)
def test_more_work_takes_longer(name, worse):
    arch = by_name(name)
    assert model.loop_cycles(loop(**worse), arch, 2)[0] > model.loop_cycles(loop(), arch, 2)[0]


def test_bound_names_the_busiest_pipe():
    arch = by_name("gfx942")
    assert model.loop_cycles(loop(), arch, 2)[1] == "matrix"
    assert model.loop_cycles(loop(vector=1500), arch, 2)[1] == "vector"
    assert model.loop_cycles(loop(lds_reads={16: 900}), arch, 2)[1] == "LDS"
    assert model.loop_cycles(loop(), arch, 0.5)[1] == "issue"


def test_two_waves_overlap():
    arch = by_name("gfx942")
    one, two = (model.loop_cycles(loop(), arch, waves)[0] for waves in (1, 2))
    assert two < 2 * one


def test_a_helper_kernel_has_no_prediction():
    report = codegen.Report("merge", "gfx942", 8, 0, 8, 8, 0, 0, 0, 0, 4, 8, (), False)
    with pytest.raises(ValueError, match="no loop with matrix work"):
        model.predict(report, by_name("gfx942"), None)


def test_facts_scale():
    slow = replace(by_name("MI300X"), exp_cycles=64)
    assert model.loop_cycles(loop(vector=600), slow, 2)[0] > model.loop_cycles(loop(vector=600), by_name("MI300X"), 2)[0]
