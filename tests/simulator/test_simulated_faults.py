"""The faults that only machine code has, one by one; and what is refused by name."""

import numpy as np
import pytest
from machine import U32, program, run

from tritonattn.simulator import SimulatorError, Unsupported

LANES = np.arange(64)
ADDRESS = (LANES * 4).astype(U32)


def fault(kind, text):
    return pytest.raises(SimulatorError, match=f"(?s){kind} at .*{text}")


# ---- memory


@pytest.mark.parametrize(
    "code, size",
    [
        ("global_load_dword v2, v1, s[80:81] offset:{0}", 4),
        ("global_load_ubyte v2, v1, s[80:81] offset:{0}", 1),
        ("global_store_dwordx4 v1, v[10:13], s[80:81] offset:{0}", 16),
        ("global_atomic_add v1, v10, s[80:81] offset:{0}", 4),
    ],
)
def test_one_byte_past_the_end(code, size):
    data = np.zeros(1024, np.uint8)
    inputs = {1: (LANES * 0 + 1000).astype(U32), **{10 + k: LANES.astype(U32) for k in range(4)}}
    run(code.format(24 - size), inputs, buffers=[data])
    with fault("memory", "reaches 1 bytes past the end of a tensor of 1024 bytes"):
        run(code.format(25 - size), inputs, buffers=[data])


def test_the_lane_is_named():
    data = np.zeros(64, U32)
    with pytest.raises(SimulatorError) as caught:
        run("global_load_dword v2, v1, s[80:81] offset:4", {1: ADDRESS}, buffers=[data])
    assert (caught.value.fault, caught.value.lane, caught.value.instruction) == ("memory", 63, "global_load_dword v2, v1, s[80:81] offset:4")


def test_arguments_are_read_only():
    with fault("memory", "read-only"):
        run("v_mov_b32_e32 v1, 0\nglobal_store_dword v1, v1, s[0:1]", {})


def test_lds_bounds():
    run("ds_write_b32 v1, v1 offset:4", {1: ADDRESS}, lds=260)
    with fault("lds bounds", "bytes 256 to 259, outside its 259 bytes"):
        run("ds_write_b32 v1, v1 offset:4", {1: ADDRESS}, lds=259)


# ---- undefined values: they may travel, they may not decide or leave


def test_undefined_register_as_an_address_or_data():
    data = np.zeros(64, U32)
    with fault("undefined value", "v7 is undefined and used as an address"):
        run("global_load_dword v2, v7, s[80:81]", buffers=[data])
    with fault("undefined value", "v8 is undefined and stored to memory"):
        run("v_mov_b32_e32 v8, v7\nglobal_store_dword v1, v8, s[80:81]", {1: ADDRESS}, buffers=[data])


def test_undefined_register_in_a_branch_or_mask():
    with fault("undefined value", "decides a branch"):
        run("v_readfirstlane_b32 s10, v7\ns_cmp_eq_u32 s10, 0\ns_cbranch_scc1 .LBB0_1\n.LBB0_1:")
    with fault("undefined value", "exec mask"):
        run("v_cmp_eq_u32_e32 vcc, 0, v7\ns_and_saveexec_b64 s[10:11], vcc")
    with fault("undefined value", "decides a branch"):
        run("s_cmp_eq_u32 s50, 0\ns_cbranch_scc1 .LBB0_1\n.LBB0_1:")


def test_undefined_lanes_and_halves_are_told_apart():
    out = np.zeros(64, U32)
    partial = "s_mov_b64 exec, 0xff\nv_mov_b32_e32 v8, 1\n"
    run(partial + "global_store_dword v1, v8, s[80:81]", {1: ADDRESS}, buffers=[out])
    with fault("undefined value", "v8"):
        run(partial + "s_mov_b64 exec, 0x1ff\nglobal_store_dword v1, v8, s[80:81]", {1: ADDRESS}, buffers=[out])
    run("v_and_b32_e32 v8, 0xffff0000, v7\nglobal_store_short v1, v8, s[80:81]", {1: ADDRESS}, buffers=[out])
    with fault("undefined value", "v8"):
        run("v_and_b32_e32 v8, 0xffff0000, v7\nglobal_store_dword v1, v8, s[80:81]", {1: ADDRESS}, buffers=[out])


def test_an_undefined_value_masked_away_is_fine():
    out = np.zeros(64, U32)
    run(
        """v_cmp_gt_f32_e32 vcc, 0, v7
        s_and_b64 vcc, vcc, 0
        v_cndmask_b32_e32 v8, v1, v7, vcc
        global_store_dword v1, v8, s[80:81]""",
        {1: ADDRESS},
        buffers=[out],
    )
    np.testing.assert_array_equal(out, ADDRESS)


def test_unwritten_lds_travels_to_a_store():
    out = np.zeros(64, U32)
    body = """v_mov_b32_e32 v2, 1
        {}ds_write_b32 v1, v2
        s_mov_b64 exec, -1
        s_waitcnt lgkmcnt(0)
        ds_read_b32 v3, v1
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v3, s[80:81]"""
    run(body.format(""), {1: ADDRESS}, buffers=[out], lds=256)
    with fault("undefined value", "v3 is undefined and stored"):
        run(body.format("s_mov_b64 exec, 0xffffffff\n"), {1: ADDRESS}, buffers=[out], lds=256)


def test_undefined_rows_and_columns_of_a_matrix_product():
    out = np.zeros(64, U32)
    body = """s_mov_b64 exec, {}
        v_mov_b32_e32 v2, 0
        v_mov_b32_e32 v3, 0
        s_mov_b64 exec, -1
        v_mov_b32_e32 v4, 0
        v_mov_b32_e32 v5, 0
        v_mfma_f32_16x16x16_bf16 v[10:13], v[2:3], v[4:5], 0
        s_mov_b64 exec, 0xffff
        global_store_dword v1, v{}, s[80:81]"""
    defined_but_row_1 = hex(sum(1 << lane for lane in LANES.tolist() if lane % 16 != 1))
    run(
        "s_mov_b32 s10, {0}\ns_mov_b32 s11, {0}\n".format(hex(int(defined_but_row_1, 16) & 0xFFFFFFFF)) + body.format("s[10:11]", 10),
        {1: ADDRESS},
        buffers=[out],
    )
    with fault("undefined value", "v11"):
        run(
            "s_mov_b32 s10, {0}\ns_mov_b32 s11, {0}\n".format(hex(int(defined_but_row_1, 16) & 0xFFFFFFFF)) + body.format("s[10:11]", 11),
            {1: ADDRESS},
            buffers=[out],
        )


# ---- waits


@pytest.mark.parametrize(
    "load, wait, use",
    [
        ("global_load_dword v2, v1, s[80:81]", "s_waitcnt vmcnt(0)", "v_add_u32_e32 v3, v2, v2"),
        ("global_load_dword v2, v1, s[80:81]", "s_waitcnt vmcnt(0)", "v_mov_b32_e32 v2, 0"),
        ("global_load_dwordx4 v[2:5], v1, s[80:81]", "s_waitcnt vmcnt(0)", "v_mfma_f32_16x16x16_bf16 v[10:13], v[6:7], v[4:5], 0"),
        ("ds_read_b32 v2, v1", "s_waitcnt lgkmcnt(0)", "v_add_u32_e32 v3, v2, v2"),
        ("ds_bpermute_b32 v2, v1, v6", "s_waitcnt lgkmcnt(0)", "ds_write_b32 v1, v2"),
        ("s_load_dword s10, s[80:81], 0x0", "s_waitcnt lgkmcnt(0)", "s_add_i32 s11, s10, 1"),
        ("s_load_dwordx4 s[12:15], s[80:81], 0x0", "s_waitcnt lgkmcnt(0)", "v_add_u32_e32 v3, s14, v1"),
        ("global_atomic_add v2, v1, v6, s[80:81] sc0", "s_waitcnt vmcnt(0)", "v_mov_b32_e32 v3, v2"),
        ("s_movk_i32 m0, 0x0\nglobal_load_lds_dword v1, s[80:81]", "s_waitcnt vmcnt(0)", "ds_read_b32 v3, v1"),
    ],
)
def test_use_before_the_wait(load, wait, use):
    data = np.zeros(256, U32)
    inputs = {1: ADDRESS, 6: LANES.astype(U32), 7: LANES.astype(U32)}
    run(f"{load}\n{wait}\n{use}", inputs, buffers=[data], lds=256)
    with fault("missing wait", "outstanding"):
        run(f"{load}\ns_nop 0\n{use}", inputs, buffers=[data], lds=256)


def test_counted_waits_retire_the_oldest_first():
    data = np.zeros(64, U32)
    two = "global_load_dword v2, v1, s[80:81]\nglobal_load_dword v3, v1, s[80:81]\ns_waitcnt vmcnt(1)\n"
    run(two + "v_mov_b32_e32 v4, v2", {1: ADDRESS}, buffers=[data])
    with fault("missing wait", "v3"):
        run(two + "v_mov_b32_e32 v4, v3", {1: ADDRESS}, buffers=[data])
    stores_count = "global_load_dword v2, v1, s[80:81]\nglobal_store_dword v1, v1, s[80:81]\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v4, v2"
    run(stores_count, {1: ADDRESS}, buffers=[data])


def test_no_more_than_63_vector_operations_are_outstanding():
    """What is 64 operations old has been waited for by the issue of the last."""
    data = np.zeros(64, U32)

    def loads(later):
        return "global_load_dword v2, v1, s[80:81]\n" + "global_load_dword v3, v1, s[80:81]\n" * later + "v_mov_b32_e32 v4, v2"

    run(loads(63), {1: ADDRESS}, buffers=[data])
    with fault("missing wait", "v2"):
        run(loads(62), {1: ADDRESS}, buffers=[data])


def test_scalar_loads_return_out_of_order():
    data = np.zeros(64, U32)
    with fault("missing wait", "s10"):
        run("s_load_dword s10, s[80:81], 0x0\ns_load_dword s11, s[80:81], 0x0\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s12, s10", buffers=[data])
    with fault("missing wait", "v2"):
        run("ds_read_b32 v2, v1\ns_load_dword s11, s[80:81], 0x0\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v3, v2", {1: ADDRESS}, buffers=[data], lds=256)


# ---- barriers

EXCHANGE = """v_lshlrev_b32_e32 v2, 2, v0
    v_xor_b32_e32 v3, 0x100, v2
    ds_write_b32 v2, v0
    {wait}
    {barrier}
    ds_read_b32 v4, v3
    s_waitcnt lgkmcnt(0)
    {barrier2}
    ds_write_b32 v2, v4"""


@pytest.mark.parametrize("reverse", [False, True])
def test_exchange_between_waves(reverse):
    """Two waves swap values through LDS. Without the first barrier a read races, without the second a write does, in either order of the waves."""
    good = {"wait": "s_waitcnt lgkmcnt(0)", "barrier": "s_barrier", "barrier2": "s_barrier"}
    [got] = run(EXCHANGE.format(**good), {}, [4], waves=2, lds=512, reverse=reverse)
    np.testing.assert_array_equal(got, np.stack([LANES + 64, LANES]))
    for missing, what in (
        ("barrier", "read of what another wave wrote|write of what another wave read"),
        ("barrier2", "write of what another wave read|read of what another"),
    ):
        with fault("race", what):
            run(EXCHANGE.format(**good | {missing: ""}), {}, [4], waves=2, lds=512, reverse=reverse)
    with fault("race", "wrote|read"):  # the barrier alone does not wait for the LDS
        run(EXCHANGE.format(**good | {"wait": ""}), {}, [4], waves=2, lds=512, reverse=reverse)


def test_waves_may_write_the_same_value_to_one_place():
    run("v_and_b32_e32 v2, 63, v0\nv_lshlrev_b32_e32 v3, 2, v2\nds_write_b32 v3, v2\ns_waitcnt lgkmcnt(0)\nds_read_b32 v4, v3", {}, [4], waves=4, lds=256)


def test_direct_loads_need_the_wait_and_then_the_barrier():
    data = np.arange(64, dtype=U32)
    body = """s_movk_i32 m0, 0x0
        v_cmp_gt_u32_e32 vcc, 64, v0
        s_and_saveexec_b64 s[10:11], vcc
        s_cbranch_execz .LBB0_1
        global_load_lds_dword v1, s[80:81]
        {}
        .LBB0_1:
        s_mov_b64 exec, -1
        {}
        ds_read_b32 v3, v1"""
    run(body.format("s_waitcnt vmcnt(0)", "s_barrier"), {1: ADDRESS}, [3], waves=2, buffers=[data], lds=256)
    with fault("race", "wrote"):
        run(body.format("s_waitcnt vmcnt(0)", ""), {1: ADDRESS}, waves=2, buffers=[data], lds=256)
    with fault("missing wait", "LDS-direct"):
        run(body.format("", "s_barrier"), {1: ADDRESS}, waves=2, buffers=[data], lds=256)


def test_runaway():
    with fault("runaway", "1000 instructions"):
        run(".LBB0_1:\ns_branch .LBB0_1", budget=1000)


# ---- refusals


@pytest.mark.parametrize(
    "line",
    [
        "v_frobnicate_b32 v1, v2",
        "v_add_f32_e64 v1, v2, v3 mul:2",
        "buffer_load_dword v1, v2, s[4:7], 0 idxen",
        "v_mfma_f32_4x4x4_16b_f16 a[0:3], v[0:1], v[2:3], 0",
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21",
        "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:9], v[12:17], v[0:3] cbsz:2 blgp:2",
        "flat_load_dword v1, v[2:3]",
        "ds_add_u32 v1, v2",
        "s_getreg_b32 s1, hwreg(HW_REG_MODE)",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 1",
        "v_add_u32_e32 v1, ttmp1, v2",
        "v_add_u32_e64 v1, v2, v3 clamp",
        "image_load v1, v2, s[0:7]",
        "v_mov_b32_dpp v1, v2 wave_shl:1 row_mask:0xf bank_mask:0xf",
        "v_add_f64 v[0:1], v[2:3], v[4:5]",
    ],
)
def test_refused_by_name(line):
    with pytest.raises(Unsupported, match="not modelled") as caught:
        program(line)
    assert line in str(caught.value)


def test_every_refusal_is_listed_at_once():
    with pytest.raises(Unsupported) as caught:
        program("v_frobnicate_b32 v1, v2\nv_mov_b32_e32 v1, v2\nimage_load v1, v2, s[0:7]")
    assert "v_frobnicate" in str(caught.value) and "image_load" in str(caught.value)


def test_other_arches_are_refused():
    with pytest.raises(Unsupported, match="gfx90a"):
        program("s_nop 0", arch="gfx90a")
