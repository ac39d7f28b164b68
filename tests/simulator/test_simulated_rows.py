"""Every shipped row of the gfx942 and gfx950 tables, as machine code against float64: full and ragged tiles, poison where nothing may look."""

import json
import os

import pytest

pytestmark = [pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs no machine code"), pytest.mark.timeout(1800)]

ARCHES = [os.environ["TRITONATTN_SIM"]] if os.environ.get("TRITONATTN_SIM") else ["gfx942", "gfx950"]
KERNELS = ["prefill", "decode", "decode_unaligned", "mla_decode", "mla_decode_unaligned", "combine", "cut", "merge", "cache_write", "gather"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ARCHES)
def test_every_row_is_right(name, kernel, record_property):
    from tritonattn.simulator.rows import case_of, execute
    from tritonattn.tuning import table
    from tritonattn.tuning.arch import by_name

    arch, wrong = by_name(name), []
    for row in table.rows(kernel, arch):
        case = case_of(kernel, row, arch)
        done = execute(case, arch, row)
        record_property(row.where, f"{done.instructions} instructions, error {done.error:.2g} of {done.allowed:.2g}")
        wrong += [f"{row.where}, {case}: {reason}" for reason in done.reasons]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "kernel, layout, kv_dtype", [("prefill", "dense", ""), ("decode", "nhd", "fp8"), ("decode", "preshuffled", ""), ("decode", "preshuffled", "fp8")]
)
@pytest.mark.parametrize("name", ARCHES)
def test_a_rest_of_sixteen_columns(name, kernel, layout, kv_dtype):
    """Heads of 80 are 64 + 16, and Triton 3.6 counts a contraction of 16 twice under kpack 2 on gfx942: the row that serves them has to be safe from it."""
    from tritonattn.simulator.rows import execute
    from tritonattn.tuning import cases
    from tritonattn.tuning.arch import by_name
    from tritonattn.tuning.models import MODELS

    case = cases.Case(kernel, MODELS["phi-2"], layout=layout, kv_dtype=kv_dtype)
    assert not execute(case, by_name(name), served_by(case, by_name(name))).reasons


@pytest.mark.parametrize("name", ARCHES)
def test_the_passes_of_mla_extend(name):
    """Chunks that hand on their state, and the new tokens after them."""
    from tritonattn.simulator.rows import execute
    from tritonattn.tuning import cases
    from tritonattn.tuning.arch import by_name

    [case] = [case for case in cases.cases("prefill") if case.layout == "latent"]
    assert not execute(case, by_name(name), served_by(case, by_name(name))).reasons


def served_by(case, arch):
    """The table row that a case finds."""
    from tritonattn.tuning import cases, codegen, table

    watched, found = table.watch(arch)
    with codegen.capture(watched, dry=True):
        cases.run(case, watched)
    [row] = {row for asked, row in found if asked == case.kernel}
    return row


@pytest.mark.parametrize("name", ARCHES)
def test_caches_at_odd_strides(name):
    """Without 16-byte strides loads are narrow and pass through LDS, in the form that the table names all the same."""
    import torch

    import tritonattn
    from tritonattn import reference
    from tritonattn.simulator.device import launches_go_to, simulated
    from tritonattn.tuning.arch import assume, by_name

    def run(program, arguments, memory, grid, metadata):
        program.run(arguments, memory, grid, metadata.num_warps, metadata.shared)

    lens = torch.tensor([37, 5], dtype=torch.int32)
    common = {"seqused_k": lens, "block_table": torch.tensor([[2, 0, 1], [3, 9, 9]], dtype=torch.int32), "max_seqlen_k": 37}
    k, v = (torch.randn(4, 16, 2, 65).bfloat16()[..., :64] for _ in range(2))
    q, latent, cache = torch.randn(2, 8, 64).bfloat16(), torch.randn(2, 16, 577).bfloat16()[..., :576], torch.randn(4, 16, 577).bfloat16()[..., :576]
    with simulated(name), assume(by_name(name)), launches_go_to(run):
        out = tritonattn.decode_attention(q, k, v, kv_layout="nhd", num_splits=1, **common)
        absorbed = tritonattn.mla_decode(latent, cache, softmax_scale=0.05, num_splits=1, **common)
    expected, _ = reference.decode_attention(q, k, v, kv_layout="nhd", **common)
    torch.testing.assert_close(out.double(), expected.double(), atol=2e-2, rtol=2e-2)
    expected, _ = reference.mla_decode(latent, cache, softmax_scale=0.05, **common)
    torch.testing.assert_close(absorbed.double(), expected.double(), atol=2e-2, rtol=2e-2)


@pytest.mark.skipif("gfx950" not in ARCHES, reason="the other arch copies nothing to LDS")
def test_copies_to_lds_wait_for_the_last_reads():
    """The masked loop copies into the LDS that the loop before it read from, whatever buffer that one ended on: any number of tiles before it."""
    import torch

    import tritonattn
    from tritonattn import reference
    from tritonattn.simulator.device import launches_go_to, simulated
    from tritonattn.tuning import table
    from tritonattn.tuning.arch import assume, by_name

    def run(program, arguments, memory, grid, metadata):
        program.run(arguments, memory, grid, metadata.num_warps, metadata.shared)

    arch, step = by_name("gfx950"), 64
    rows = [row for row in table.rows("prefill", arch) if row.config["async_copy"]]
    assert rows
    for row in rows:
        size = row.when.get("head_size", {"max": 256})["max"]
        lens = [step * tiles + 3 for tiles in range(8)]
        q, k, v = (torch.randn(n, 1, size, dtype=torch.bfloat16) for n in (8 * len(lens), sum(lens), sum(lens)))
        cu_q, cu_k = (torch.tensor([0, *part]).cumsum(0).int() for part in ([8] * len(lens), lens))
        bounds = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        with simulated(arch.name), assume(table.pin(arch, prefill=row.config)), launches_go_to(run):
            out = tritonattn.flash_attn_varlen_func(q, k, v, max_seqlen_q=8, max_seqlen_k=max(lens), **bounds)
        expected, _ = reference.flash_attn_varlen_func(q, k, v, **bounds)
        torch.testing.assert_close(out.double(), expected.double(), atol=2e-2, rtol=2e-2)


def test_check_executes_rows_and_refuses_wrong_ones(monkeypatch, capsys):
    """The command line on the smallest table; then the same with a simulator that always finds something."""
    from tritonattn import cli
    from tritonattn.simulator import rows

    monkeypatch.delenv("TRITONATTN_SIM", raising=False)
    command = ["check", "--arch", "gfx942", "--kernel", "merge", "--execute", "--json"]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert "executed" in err and "off by" in err and json.loads(out)
    monkeypatch.setattr(rows, "execute", lambda case, arch, row: rows.Execution(1.0, 0.1, 10, ["executed: wrong"]))
    assert cli.main(command) == 1
    assert "executed: wrong" in capsys.readouterr().out


def test_a_row_that_does_not_fit_is_refused_by_name(little_lds):
    from tritonattn.simulator.rows import case_of, execute
    from tritonattn.tuning import table
    from tritonattn.tuning.arch import by_name

    arch = by_name(ARCHES[0])
    shipped = table.rows("combine", arch)[-1]
    row = table.Row({}, {**shipped.config, "BLOCK_S": 8}, {}, "a row of its own")  # compiled for this test alone
    reasons = execute(case_of("combine", shipped, arch), arch, row).reasons
    assert reasons and "out of resource" in reasons[0]
