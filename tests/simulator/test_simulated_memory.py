"""Global, buffer, scalar and scratch memory, LDS, and atomics: every width, and exactly which bytes move."""

import numpy as np
import pytest
from machine import U32, run

from tritonattn.simulator import SimulatorError

LANES = np.arange(64)
WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
NARROW = {"ubyte": (1, np.uint8), "sbyte": (1, np.int8), "ushort": (2, np.uint16), "sshort": (2, np.int16)}


def noise(size):
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def words(data, offsets, size):
    """[64, size / 4] of uint32 found at byte offsets."""
    return np.stack([data[o : o + size] for o in offsets]).copy().view(U32)


@pytest.mark.parametrize("mode", ["pointer", "base", "buffer"])
@pytest.mark.parametrize("name", WIDTHS)
def test_load_and_store(mode, name):
    size, data = WIDTHS[name], noise(64 * 24 + 64)
    out = np.zeros_like(data)
    offsets = np.random.default_rng(1).permutation(64).astype(U32) * 24
    n = size // 4
    regs = f"v[10:{9 + n}]" if n > 1 else "v10"
    load, store = {
        "pointer": (f"global_load_{name} {regs}, v[4:5], off offset:8", f"global_store_{name} v[6:7], {regs}, off offset:8"),
        "base": (f"global_load_{name} {regs}, v1, s[80:81] offset:8", f"global_store_{name} v1, {regs}, s[82:83] offset:8"),
        "buffer": (f"buffer_load_{name} {regs}, v1, s[20:23], 0 offen offset:8", f"buffer_store_{name} {regs}, v1, s[24:27], s30 offen offset:4"),
    }[mode]
    got = run(
        f"""v_mov_b32_e32 v2, s80
        v_add_co_u32_e32 v4, vcc, v2, v1
        v_mov_b32_e32 v3, s81
        v_addc_co_u32_e32 v5, vcc, 0, v3, vcc
        v_mov_b32_e32 v2, s82
        v_add_co_u32_e32 v6, vcc, v2, v1
        v_mov_b32_e32 v3, s83
        v_addc_co_u32_e32 v7, vcc, 0, v3, vcc
        s_mov_b64 s[20:21], s[80:81]
        s_mov_b32 s22, 0x7ffffffe
        s_mov_b32 s23, 0x27000
        s_mov_b64 s[24:25], s[82:83]
        s_mov_b64 s[26:27], s[22:23]
        s_mov_b32 s30, 4
        {load}
        s_waitcnt vmcnt(0)
        {store}""",
        {1: offsets},
        list(range(10, 10 + n)),
        buffers=[data, out],
    )
    np.testing.assert_array_equal(np.stack(got, 1), words(data, offsets + 8, size))
    want = np.zeros_like(out)
    for o in offsets + 8:
        want[o : o + size] = data[o : o + size]
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_load(name):
    size, dtype = NARROW[name]
    data = noise(128)
    offsets = (LANES[::-1] * size).astype(U32)
    [a, b] = run(
        f"global_load_{name} v2, v1, s[80:81]\nbuffer_load_{name} v3, v1, s[20:23], 0 offen".replace(
            "buffer",
            """s_mov_b64 s[20:21], s[80:81]
        s_movk_i32 s22, 0x80
        s_mov_b32 s23, 0x27000
        buffer""",
        ),
        {1: offsets},
        [2, 3],
        buffers=[data],
    )
    want = data.view(dtype)[offsets // size].astype(np.int64) & 0xFFFFFFFF
    np.testing.assert_array_equal(a, want)
    np.testing.assert_array_equal(b, want)


def test_half_register_loads_keep_the_other_half():
    data = noise(128)
    a, b = run(
        "v_mov_b32_e32 v2, -1\nv_mov_b32_e32 v3, -1\nglobal_load_short_d16 v2, v1, s[80:81]\nglobal_load_short_d16_hi v3, v1, s[80:81]",
        {1: (LANES * 2).astype(U32)},
        [2, 3],
        buffers=[data],
    )
    h = data.view(np.uint16).astype(U32)
    np.testing.assert_array_equal(a, h | U32(0xFFFF0000))
    np.testing.assert_array_equal(b, h << U32(16) | U32(0xFFFF))


@pytest.mark.parametrize("name, part", [("byte", slice(0, 1)), ("byte_d16_hi", slice(2, 3)), ("short", slice(0, 2)), ("short_d16_hi", slice(2, 4))])
def test_narrow_store(name, part):
    out = np.full(64 * 2, 7, np.uint8)
    values = np.random.default_rng(0).integers(0, 1 << 32, 64, dtype=U32)
    run(f"global_store_{name} v1, v2, s[80:81]", {1: (LANES * 2).astype(U32), 2: values}, buffers=[out])
    want = np.full((64, 2), 7, np.uint8)
    chosen = values.view(np.uint8).reshape(64, 4)[:, part]
    want[:, : chosen.shape[1]] = chosen
    np.testing.assert_array_equal(out.reshape(64, 2), want)


BUFFER = "s_mov_b64 s[20:21], s[80:81]\ns_movk_i32 s22, {records}\ns_mov_b32 s23, 0x27000\n"


def test_a_buffer_reads_zero_and_drops_stores_beyond_its_records():
    data = np.arange(1, 65, dtype=U32)
    offsets = np.where(LANES % 2 == 0, LANES * 4, 0x80000000).astype(U32)
    [got] = run(BUFFER.format(records=160) + "buffer_load_dword v2, v1, s[20:23], 0 offen", {1: offsets}, [2], buffers=[data])
    np.testing.assert_array_equal(got, np.where((LANES % 2 == 0) & (LANES < 40), data, 0))
    run(BUFFER.format(records=160) + "buffer_store_dword v2, v1, s[20:23], 0 offen", {1: offsets, 2: np.zeros(64, U32)}, buffers=[data])
    np.testing.assert_array_equal(data, np.where((LANES % 2 == 0) & (LANES < 40), 0, LANES + 1))


def test_a_wide_buffer_load_is_checked_by_component():
    data = np.arange(1, 69, dtype=U32)
    got = run(BUFFER.format(records=4 * 62) + "buffer_load_dwordx4 v[2:5], v1, s[20:23], 0 offen", {1: (LANES * 4).astype(U32)}, [2, 3, 4, 5], buffers=[data])
    for k in range(4):
        np.testing.assert_array_equal(got[k], np.where(LANES + k < 62, LANES + k + 1, 0))


def test_inactive_lanes_neither_load_nor_store():
    data, out = np.arange(64, dtype=U32), np.full(64, 9, U32)
    [got] = run(
        "v_mov_b32_e32 v2, 5\ns_mov_b64 exec, 0xf0\nglobal_load_dword v2, v1, s[80:81]\ns_waitcnt vmcnt(0)\nglobal_store_dword v1, v2, s[82:83]",
        {1: (LANES * 4).astype(U32)},
        [2],
        buffers=[data, out],
    )
    active = (LANES >= 4) & (LANES < 8)
    np.testing.assert_array_equal(got, np.where(active, LANES, 5))
    np.testing.assert_array_equal(out, np.where(active, LANES, 9))


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_scalar_load(n):
    data = np.arange(100, 132, dtype=U32)
    regs = f"s[32:{31 + n}]" if n > 1 else "s32"
    got = run(f"s_load_dword{'x' + str(n) if n > 1 else ''} {regs}, s[80:81], 0x10\ns_waitcnt lgkmcnt(0)", scalar_outputs=range(32, 32 + n), buffers=[data])
    assert got == list(range(104, 104 + n))


@pytest.mark.parametrize("name, size", [("dword", 4), ("dwordx2", 8), ("dwordx3", 12), ("dwordx4", 16), ("byte", 1), ("short", 2)])
def test_scratch_is_private_to_each_lane(name, size):
    n = max(1, size // 4)
    values = np.random.default_rng(2).integers(0, 1 << 32, (n, 64), dtype=U32)
    source, target = (f"v[2:{1 + n}]", f"v[12:{11 + n}]") if n > 1 else ("v2", "v12")
    load = {"byte": "ubyte", "short": "ushort"}.get(name, name)
    got = run(
        f"scratch_store_{name} off, {source}, off offset:20\ns_waitcnt vmcnt(0)\nscratch_load_{load} {target}, off, off offset:20",
        {2 + k: v for k, v in enumerate(values)},
        list(range(12, 12 + n)),
        scratch=36,
    )
    for k in range(n):
        np.testing.assert_array_equal(got[k], values[k] & U32((1 << 8 * min(size, 4)) - 1))
    with pytest.raises(SimulatorError, match="scratch bytes"):
        run(f"scratch_store_{name} off, {source}, off offset:20", {2 + k: v for k, v in enumerate(values)}, scratch=20 + size - 1)


ATOMICS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "smin": lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(U32),
    "umin": np.minimum,
    "smax": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(U32),
    "umax": np.maximum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "swap": lambda a, b: b,
    "add_f32": lambda a, b: (a.view(np.float32) + b.view(np.float32)).view(U32),
}


@pytest.mark.parametrize("name", ATOMICS)
def test_atomic(name):
    data = np.random.default_rng(3).standard_normal(64).astype(np.float32).view(U32)
    value = np.random.default_rng(4).standard_normal(64).astype(np.float32).view(U32)
    before = data.copy()
    [old] = run(f"global_atomic_{name} v3, v1, v2, s[80:81] sc0", {1: (LANES * 4).astype(U32), 2: value}, [3], buffers=[data])
    np.testing.assert_array_equal(old, before)
    np.testing.assert_array_equal(data, ATOMICS[name](before, value))


def test_atomics_of_all_lanes_on_one_word_add_up():
    data = np.zeros(2, U32)
    run(
        "v_mov_b32_e32 v1, 0\nv_mov_b32_e32 v3, 0\nglobal_atomic_add v1, v2, s[80:81]\nglobal_atomic_add_x2 v1, v[2:3], s[80:81]",
        {2: np.full(64, 3, U32)},
        buffers=[data],
    )
    assert data.tolist() == [64 * 6, 0]


def test_compare_and_swap():
    data = np.arange(64, dtype=U32)
    [old] = run(
        "global_atomic_cmpswap v5, v1, v[2:3], s[80:81] sc0",
        {1: (LANES * 4).astype(U32), 2: np.full(64, 99, U32), 3: (LANES // 2 * 2).astype(U32)},
        [5],
        buffers=[data],
    )
    np.testing.assert_array_equal(old, LANES)
    np.testing.assert_array_equal(data, np.where(LANES % 2 == 0, 99, LANES))


# ---- LDS


@pytest.mark.parametrize("name, size", [("b8", 1), ("b16", 2), ("b32", 4), ("b64", 8), ("b96", 12), ("b128", 16)])
def test_lds_write_and_read(name, size):
    n = max(1, size // 4)
    values = np.random.default_rng(5).integers(0, 1 << 32, (n, 64), dtype=U32)
    source, target = (f"v[2:{1 + n}]", f"v[12:{11 + n}]") if n > 1 else ("v2", "v12")
    read = {"b8": "u8", "b16": "u16"}.get(name, name)
    address = np.random.default_rng(6).permutation(64).astype(U32) * size
    got = run(
        f"ds_write_{name} v1, {source} offset:64\ns_waitcnt lgkmcnt(0)\nds_read_{read} {target}, v1 offset:64",
        {1: address, **{2 + k: v for k, v in enumerate(values)}},
        list(range(12, 12 + n)),
        lds=64 + 64 * size,
    )
    for k in range(n):
        np.testing.assert_array_equal(got[k], values[k] & U32((1 << 8 * min(size, 4)) - 1))


def test_lds_sign_extension_and_halves():
    x = np.random.default_rng(7).integers(0, 1 << 32, 64, dtype=U32)
    a, b, c, d, e = run(
        """ds_write_b16 v1, v2
        ds_write_b16_d16_hi v1, v2 offset:128
        ds_write_b8_d16_hi v1, v2 offset:256
        v_mov_b32_e32 v5, -1
        v_mov_b32_e32 v6, -1
        s_waitcnt lgkmcnt(0)
        ds_read_i16 v3, v1
        ds_read_u16 v4, v1 offset:128
        ds_read_u16_d16 v5, v1
        ds_read_u16_d16_hi v6, v1
        ds_read_u8 v7, v1 offset:256""",
        {1: (LANES * 2).astype(U32), 2: x},
        [3, 4, 5, 6, 7],
        lds=512,
    )
    low = (x & U32(0xFFFF)).astype(np.uint16)
    np.testing.assert_array_equal(a.view(np.int32), low.view(np.int16))
    np.testing.assert_array_equal(b, x >> U32(16))
    np.testing.assert_array_equal(c, low | U32(0xFFFF0000))
    np.testing.assert_array_equal(d, low.astype(U32) << U32(16) | U32(0xFFFF))
    np.testing.assert_array_equal(e, x >> U32(16) & U32(255))


@pytest.mark.parametrize("form, unit", [("2_b32", 4), ("2_b64", 8), ("2st64_b32", 256), ("2st64_b64", 512)])
def test_lds_pairs(form, unit):
    size = 8 if "b64" in form else 4
    n = size // 4
    values = np.random.default_rng(8).integers(0, 1 << 32, (2 * n, 64), dtype=U32)
    one, two = (f"v[2:{1 + n}]", f"v[{2 + n}:{1 + 2 * n}]") if n > 1 else ("v2", "v3")
    lane_step = size if unit >= 256 else 2 * unit
    address = (LANES * lane_step).astype(U32)
    second = 2 if unit >= 256 else 1
    got = run(
        f"ds_write{form} v1, {one}, {two} offset1:{second}\ns_waitcnt lgkmcnt(0)\nds_read{form} v[12:{11 + 2 * n}], v1 offset0:{second} offset1:0",
        {1: address, **{2 + k: v for k, v in enumerate(values)}},
        list(range(12, 12 + 2 * n)),
        lds=64 * lane_step + second * unit,
    )
    for k in range(n):
        np.testing.assert_array_equal(got[k], values[n + k])
        np.testing.assert_array_equal(got[n + k], values[k])


@pytest.mark.parametrize("bits", [16, 8])
def test_transposed_lds_read(bits):
    """In each group of 16 lanes: with p = 64 / bits elements a row, lane i gets element i mod p of the rows of lanes (16 / p) j + i / p."""
    values = np.random.default_rng(9).integers(0, 1 << 32, (2, 64), dtype=U32)
    low, high = run(
        f"ds_write_b64 v1, v[2:3]\ns_waitcnt lgkmcnt(0)\nds_read_b64_tr_b{bits} v[4:5], v1",
        {1: (LANES * 8).astype(U32), 2: values[0], 3: values[1]},
        [4, 5],
        arch="gfx950",
        lds=512,
    )
    rows = values.T.copy().view(np.uint8 if bits == 8 else np.uint16)
    got = np.stack([low, high], 1).copy().view(rows.dtype)
    p = 64 // bits
    for lane in range(64):
        group, i = lane & 48, lane & 15
        assert got[lane].tolist() == [rows[group + 16 // p * j + i // p, i % p] for j in range(p)]


@pytest.mark.parametrize(
    "name, arch",
    [("global_load_lds_dword", "gfx942"), ("global_load_lds_dwordx4", "gfx950"), ("buffer_load_dword", "gfx942"), ("buffer_load_dwordx4", "gfx950")],
)
def test_loads_straight_into_lds(name, arch):
    size = 16 if name.endswith("x4") else 4
    data = np.random.default_rng(10).integers(0, 1 << 32, 64 * size // 4, dtype=U32)
    offsets = np.random.default_rng(11).permutation(64).astype(U32) * size
    load = f"{name} v1, s[80:81]" if "lds" in name else f"{name} v1, s[20:23], 0 offen lds"
    n = size // 4
    out = f"v[2:{1 + n}]" if n > 1 else "v2"
    got = run(
        BUFFER.format(records=4 * len(data)) + f"s_movk_i32 m0, 0x100\n{load}\ns_waitcnt vmcnt(0)\nds_read_b{8 * size} {out}, v3 offset:256",
        {1: offsets, 3: (LANES * size).astype(U32)},
        list(range(2, 2 + n)),
        buffers=[data],
        arch=arch,
        lds=256 + 64 * size,
    )
    np.testing.assert_array_equal(np.stack(got, 1), words(data.view(np.uint8), offsets, size))
