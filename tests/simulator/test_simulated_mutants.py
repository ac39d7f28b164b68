"""Would a test notice? Drop one instruction of a shipped kernel at a time and see whether the simulator or the result gives it away.

Every memory, LDS, wait and barrier instruction that the case executes is tried, and every fifth matrix instruction.
"""

import collections
import math
import os

import pytest
import torch

import tritonattn
from tritonattn import layouts, reference

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs no machine code"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]

SIMULATED = os.environ.get("TRITONATTN_SIM")
TRIED = ("global_", "buffer_", "scratch_", "ds_", "s_load", "s_waitcnt", "s_barrier", "v_mfma")


@pytest.fixture(params=[SIMULATED] if SIMULATED else ["gfx942", "gfx950"])
def arch(request):
    from tritonattn.simulator import simulated

    with simulated(request.param):
        yield request.param


@pytest.fixture
def poisoned_scratch():
    """What torch.empty hands out is NaN, so that a result left over from the run before cannot pass for a new one."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def decode():
    """16 query heads a KV head, a full and a ragged step in each of two splits."""
    torch.manual_seed(0)
    k, v = (torch.randn(60, 16, 1, 128).bfloat16() for _ in range(2))
    caches = layouts.from_nhd(k, v, "preshuffled")
    q = torch.randn(1, 16, 128).bfloat16()
    args = {
        "seqused_k": torch.tensor([712], dtype=torch.int32),
        "block_table": torch.randperm(60)[None, :48].int(),
        "max_seqlen_k": 712,
        "kv_layout": "preshuffled",
        "return_lse": True,
    }
    return lambda: tritonattn.decode_attention(q, *caches, num_splits=2, **args), reference.decode_attention(
        q, *caches, **{k: v for k, v in args.items() if k != "return_lse"}
    )


def prefill():
    """Causal, full and ragged tiles of queries and keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, 1, 128).bfloat16() for _ in range(3))
    cu = torch.tensor([0, 300], dtype=torch.int32)
    args = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 300, "max_seqlen_k": 300, "causal": True}
    return lambda: tritonattn.flash_attn_varlen_func(q, k, v, return_lse=True, **args), reference.flash_attn_varlen_func(q, k, v, **args)


def distance(got, want):
    return max(float((g.double() - w.double()).abs().nan_to_num(math.inf).max()) for g, w in zip(got, want, strict=True))


def redundant(lines, k):
    """Why nothing can notice that instruction `k` is gone, or None."""
    name, before, near = lines[k].name, lines[max(0, k - 16) : k], lines[max(0, k - 16) : k + 16]
    if name == "s_waitcnt":
        return "another wait comes before every use"
    if name.startswith("s_load"):
        return "a length or argument that decides nothing in this case"
    if name == "s_barrier":
        return "waves exchange nothing across it: each reads back what it wrote itself"
    if name.startswith("ds_") and any(line.name.startswith(("v_max_f32", "v_max3_f32")) for line in near):
        return "the running maximum: any value near it gives the same result"
    if name == "ds_bpermute_b32" and any(line.name == "v_cndmask_b32" and line.operands[1:3] == ["0", "-1"] for line in before):
        return "which heads exist, moved to other lanes: here all do"
    return None


@pytest.mark.parametrize("case, kernel", [(decode, "decode"), (prefill, "attend")], ids=["decode", "prefill"])
def test_a_dropped_instruction_is_noticed(arch, poisoned_scratch, case, kernel):
    from tritonattn.simulator import SimulatorError
    from tritonattn.simulator.device import launches_go_to

    call, want = case()
    programs, counts, dropped = {}, [], None

    def run(program, arguments, memory, grid, metadata):
        mine = program.kernel.name.startswith(kernel)
        if mine:
            programs[program.kernel.name] = program
            counts[:] = counts or [0] * len(program.code)
            if dropped is not None:
                program = program.without(dropped)
        program.run(arguments, memory, grid, metadata.num_warps, metadata.shared, counts=counts if mine and dropped is None else None, budget=100_000)

    with launches_go_to(run):
        allowed = 3 * distance(call(), want) + 1e-3
        [program] = programs.values()
        lines = program.kernel.lines
        tried = [k for k, line in enumerate(lines) if line.name.startswith(TRIED) and counts[k]]
        matrix = [k for k in tried if lines[k].name.startswith("v_mfma")]
        tried = sorted({*tried} - {*matrix} | {*matrix[::5]})
        noticed, survivors = collections.Counter(), collections.defaultdict(list)
        for dropped in tried:
            try:
                if distance(call(), want) > allowed:
                    noticed["wrong result"] += 1
                    continue
            except SimulatorError as error:
                noticed[error.fault] += 1
                continue
            survivors[redundant(lines, dropped)].append(f"{dropped}: {lines[dropped].text}")
    print(arch, program.kernel.name, len(tried), dict(noticed), dict(survivors))
    assert not survivors[None], "unnoticed and unexplained"
    explained = sum(map(len, survivors.values()))
    assert explained <= 0.1 * len(tried), f"{explained} of {len(tried)} went unnoticed: {dict(survivors)}"
