"""Run a few lines of assembly on chosen register contents."""

import ctypes
import struct

import numpy as np

from tritonattn.simulator import Memory, Program

U32 = np.uint32
TEMPLATE = """
	.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
	.amdhsa_kernel test
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_kernarg_size 32
		.amdhsa_private_segment_fixed_size {scratch}
	.end_amdhsa_kernel
test:
{body}
	s_endpgm
.Lfunc_end0:
"""


def program(body, arch="gfx942", scratch=0):
    return Program(TEMPLATE.format(arch=arch, body=body, scratch=scratch))


def memory(*arrays):
    return [Memory(a.ctypes.data, a.nbytes) for a in arrays]


def run(body, inputs=None, outputs=(), *, arch="gfx942", scalars=None, scalar_outputs=(), buffers=(), waves=1, lds=0, scratch=0, **options):
    """Execute `body` once and return the output registers, an array [64] of uint32 each (scalars: an int each).

    inputs: {vector register: 64 values} loaded before; scalars: {scalar register below 80: value}. buffers: arrays whose addresses are put in
    s[80:81], s[82:83], ... v254 and v255 and s[90:97] belong to the harness. With several waves the inputs are the same for each, and outputs are [waves, 64].
    """
    inputs, scalars = dict(inputs or {}), dict(scalars or {})
    data = np.zeros((max(1, len(inputs)), 64), U32)
    for row, values in zip(data, inputs.values(), strict=False):
        row[:] = np.broadcast_to(np.asarray(values).view(U32) if np.asarray(values).dtype.itemsize == 4 else values, 64)
    words = np.array([v & 0xFFFFFFFF for v in scalars.values()] + [0], U32)
    addresses = np.array([a.ctypes.data for a in buffers] + [0], np.uint64)
    results = np.zeros((waves, len(outputs) + len(scalar_outputs) + 1, 64), U32)
    lines = [
        "s_load_dwordx4 s[92:95], s[0:1], 0x0",
        "s_load_dwordx2 s[90:91], s[0:1], 0x10",
        "s_load_dwordx2 s[96:97], s[0:1], 0x18",
        "s_waitcnt lgkmcnt(0)",
        "v_lshlrev_b32_e32 v255, 2, v0",
        "v_and_b32_e32 v254, 0xff, v255",
    ]
    lines += [f"global_load_dword v{r}, v254, s[92:93] offset:{256 * k}" for k, r in enumerate(inputs)]
    lines += [f"s_load_dword s{r}, s[90:91], {4 * k}" for k, r in enumerate(scalars)]
    lines += [f"s_load_dwordx2 s[{80 + 2 * k}:{81 + 2 * k}], s[96:97], {8 * k}" for k in range(len(buffers))]
    lines += [
        "s_waitcnt vmcnt(0) lgkmcnt(0)",
        body,
        "s_waitcnt vmcnt(0) lgkmcnt(0)",
        "s_mov_b64 exec, -1",
        "v_lshrrev_b32_e32 v254, 8, v255",
        f"v_mul_u32_u24_e32 v254, {results[0].nbytes}, v254",
        "v_and_b32_e32 v255, 0xff, v255",
        "v_add_u32_e32 v254, v254, v255",
    ]
    for k, r in enumerate(outputs):
        name = r if isinstance(r, str) else f"v{r}"
        if name[0] == "a":
            lines += [f"v_accvgpr_read_b32 v255, {name}"]
            name = "v255"
        lines += [f"global_store_dword v254, {name}, s[94:95] offset:{256 * k}"]
    for k, r in enumerate(scalar_outputs, len(outputs)):
        lines += [f"v_mov_b32_e32 v255, {r if isinstance(r, str) else f's{r}'}", f"global_store_dword v254, v255, s[94:95] offset:{256 * k}"]
    arguments = struct.pack("<4Q", data.ctypes.data, results.ctypes.data, words.ctypes.data, addresses.ctypes.data)
    program("\n".join(lines), arch, scratch).run(arguments, memory(data, results, words, addresses, *buffers), (1, 1, 1), waves, lds, **options)
    shape = (lambda a: a[0]) if waves == 1 else (lambda a: a)
    return [shape(results[:, k]).copy() for k in range(len(outputs))] + [int(results[0, k, 0]) for k in range(len(outputs), len(outputs) + len(scalar_outputs))]


def read_bytes(address, size):
    return ctypes.string_at(address, size)
