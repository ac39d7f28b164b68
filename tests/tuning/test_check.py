"""`tritonattn check`: rows by their own words, verdicts, and what it says about them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tritonattn.tuning import arch, cases, check, codegen, schema, table
from tritonattn.tuning.models import MODELS

ROOT = Path(__file__).resolve().parents[2]


def run_check(*arguments, **env):
    path = os.pathsep.join([str(ROOT), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path, **env}
    return subprocess.run([sys.executable, "-m", "tritonattn", "check", *arguments], env=env, capture_output=True, text=True)


def test_verdicts_as_json():
    done = run_check("--arch", "gfx942,MI355X", "--kernel", "merge,combine", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["results"]
    assert set(found) == {"MI300X", "MI355X"}
    for verdicts in found.values():
        assert {verdict["kernel"] for verdict in verdicts} == {"merge", "combine"}
        assert all(verdict["reasons"] == [] and verdict["spills"] == 0 and verdict["occupancy"] >= 1 for verdict in verdicts)


def test_a_bad_row_is_refused_with_its_reason(tmp_path):
    row = {"BLOCK_M": 128, "BLOCK_N": 128, "NUM_STAGES": 1, "num_warps": 4, "num_stages": 1, "waves_per_eu": 2, "matrix_instr_nonkdim": 16}
    content = {"schema": 1, "arch": "gfx942", "kernel": "prefill",
               "rows": [{"when": {}, "config": row, "provenance": {"kind": "default", "note": "spills"}}]}  # fmt: skip
    (tmp_path / "gfx942").mkdir()
    (tmp_path / "gfx942" / "prefill.json").write_text(json.dumps(content))
    code = (
        "import json; from tritonattn.tuning import arch, cases, check; from tritonattn.tuning.models import MODELS;"
        "case = cases.Case('prefill', MODELS['llama-3-8b'], query_len=256, kv_len=256);"
        "(verdict,) = check.judge_case(arch.by_name('gfx942'), case); print(verdict.row, verdict.reasons); json.dumps(verdict.facts())"
    )
    path = os.pathsep.join([str(ROOT), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path, "TRITONATTN_TABLES": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "gfx942/prefill.json row 0" in done.stdout and "registers spilled" in done.stdout and done.returncode == 0, done.stderr


def test_what_a_row_owns_up_to_is_accepted_and_no_more(monkeypatch):
    row = table.Row({}, {}, {}, "a row", {"reason": "for want of registers", "limits": {"narrow_loads": 2}})
    monkeypatch.setattr(check.codegen, "judge", lambda report, arch, matrix, limits=None: ["3 loads"] if limits is None else report)
    facts = arch.by_name("gfx942")
    assert check._judge([], facts, "decode", row) == ([], ["3 loads (for want of registers)"])
    assert check._judge(["3 loads"], facts, "decode", row) == (["3 loads"], [])
    assert check._judge([], facts, "decode", table.Row({}, {}, {}, "another")) == (["3 loads"], [])


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_case_40_large_blocks_and_heads_compile_soon_and_fit(name, tmp_path):
    """Blocks of 1056 tokens, of heads of 256 and of latent rows of 512 + 64: no tile follows the block size. Every other row is held to the same."""
    code = f"""
import json
from tritonattn.tuning import arch, cases, check, codegen
from tritonattn.tuning.models import MODELS
facts, size, found = arch.by_name({name!r}), {{"block_size": 1056}}, []
calls = [cases.Case("decode", MODELS["qwen3-next"], layout=layout, kv_dtype=kv, **size) for layout in ("nhd", "preshuffled") for kv in ("", "fp8")]
calls += [cases.Case("mla_decode", MODELS["deepseek-r1"], layout="latent", **size)]
movers = (("cache_write", 64), ("gather", 0), ("prefill", 64))
calls += [cases.Case(kernel, MODELS["qwen3-next"], layout="preshuffled", query_len=new, **size) for kernel, new in movers]
for call in calls:
    for verdict in check.judge_case(facts, call):
        report = verdict.report
        found.append([str(call), verdict.reasons, report.compile_seconds, report.lds <= facts.lds_bytes])
print(json.dumps(found))
"""
    path = os.pathsep.join([str(ROOT), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 8, "a kernel each"
    for call, reasons, seconds, fits in found:
        assert fits and (reasons == [] or triton.__version__ >= "3.7"), call  # Triton 3.9 spills 20 registers: fp8 heads of 256 on gfx950
        assert 0.01 < seconds <= codegen.COMPILE_SECONDS, f"{call}: {seconds} s"


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_case_37_heads_of_72_cost_what_heads_of_80_do(name):
    """Instructions per key, in prefill and decode: the rest of 8 columns, and fp8 rows of 72 bytes, are no reason to load element by element."""
    code = f"""
import json, re
from tritonattn.tuning import arch, cases, check
from tritonattn.tuning.models import Model
facts, found = arch.by_name({name!r}), []
for kernel, layout, kv in (("prefill", "dense", ""), ("decode", "nhd", ""), ("decode", "preshuffled", ""), ("decode", "nhd", "fp8")):
    lengths = {{"query_len": 1024, "kv_len": 1024}} if kernel == "prefill" else {{}}
    narrow, wide = (check.judge_case(facts, cases.Case(kernel, Model(32, 8, size), layout=layout, kv_dtype=kv, **lengths))[0] for size in (72, 80))
    found.append([str(narrow.case), narrow.work[0] / wide.work[0], narrow.report.spills, kv or narrow.reasons])
for kernel in ("gather", "cache_write"):
    verdict = check.judge_case(facts, cases.Case(kernel, Model(32, 8, 72), layout="nhd", kv_dtype="fp8", query_len=64))[0]
    found.append([kernel, 1.0, verdict.report.spills, re.findall(r"(?:load_u?|store_)byte", verdict.launch.assembly)])
print(json.dumps(found))
"""
    path = os.pathsep.join([str(ROOT), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for call, ratio, spills, reasons in json.loads(done.stdout):
        most = 1.3 if reasons == [] or triton.__version__ < "3.7" else 2.2  # Triton 3.9 takes the last 8 columns of fp8 rows byte by byte, through LDS
        assert ratio <= most and spills == 0 and reasons in ([], "fp8"), call


def test_a_cache_whose_strides_are_no_16_bytes_has_rows_of_its_own():
    """Those of `decode` would spill to memory, and `check` would say so."""
    code = """
import json
from tritonattn.tuning import arch, cases, check, table
from tritonattn.tuning.models import MODELS
facts = arch.by_name("gfx942")
spilled = table.rows("decode", facts)[1].config
case = cases.Case("decode_unaligned", MODELS["llama-3-8b"], layout="nhd")
for each in (facts, table.pin(facts, decode_unaligned=spilled)):
    (verdict,) = check.judge_case(each, case)
    print(json.dumps([verdict.row, verdict.launch.constexprs["VEC"], verdict.report.scratch, verdict.reasons, verdict.accepted]))
"""
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    own, other = map(json.loads, done.stdout.splitlines())
    assert own[0].startswith("gfx942/decode_unaligned.json") and own[1:4] == [1, 0, []] and "elements that come one by one" in own[4][0]
    assert other[1] == 1 and other[2] > 0 and any("registers spilled" in reason for reason in other[3])


@pytest.mark.parametrize("arguments, reason", [(("--kernel", "attention"), "--kernel must be among"), (("--arch", "gfx"), "arch must be one of gfx942")])
def test_bad_arguments_are_named(arguments, reason):
    done = run_check(*arguments)
    assert done.returncode == 2 and reason in done.stderr


def test_interpreter_is_named():
    done = run_check("--kernel", "merge", TRITON_INTERPRET="1")
    assert done.returncode != 0 and "TRITON_INTERPRET=1 replaces the compiler" in done.stderr


@pytest.mark.parametrize("kernel", schema.tables()["properties"]["kernel"]["enum"])
def test_every_kernel_has_cases_that_say_what_they_are(kernel):
    made = list(cases.cases(kernel))
    assert made and len(set(made)) == len(made) and len({str(case) for case in made}) == len(made)
    assert all(case.kernel == kernel for case in made)


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kernel", ["prefill", "decode", "mla_decode"])
def test_cases_are_made_to_meet_a_row(name, kernel):
    facts = arch.by_name(name)
    first = next(iter(cases.cases(kernel)))
    for row in table.rows(kernel, facts):
        case = cases.meeting(first, row.when, facts)
        when = row.when
        if isinstance(when.get("dtype"), str):
            assert case.dtype == when["dtype"]
        if isinstance(when.get("head_size"), dict):
            assert when["head_size"].get("min", 0) <= case.shape.head_size <= when["head_size"].get("max", 1 << 20)


def test_a_call_reaches_every_row_of_the_h200():
    """Those of the other arches `make check` compiles."""
    code = (
        "from tritonattn.tuning import arch, check, schema, table; facts = arch.by_name('sm_90'); "
        "[check.case_for(facts, kernel, row) for kernel in schema.tables()['properties']['kernel']['enum'] for row in table.rows(kernel, facts)]"
    )
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_layout_names_of_a_case():
    assert str(cases.Case("decode", MODELS["gpt-oss-120b"], layout="hnd", kv_dtype="fp8", local=True)) == (
        "64/8x64, bf16, cache fp8, hnd 16, batch 4, 1 on 4096, window, sinks"
    )


def test_widths_read_as_counts_of_bytes():
    assert check._widths({16: 8, 4: 2}) == "8x16 2x4" and check._widths({}) == "0"
