"""The sweep: its space is sound, a bad candidate is refused and alone in that, an interrupted sweep goes on, tables are replaced whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tritonattn.tuning import arch, schema, search, table, trial
from tritonattn.tuning.cases import Case
from tritonattn.tuning.models import MODELS, Model

ROOT = Path(__file__).resolve().parents[2]
SMALL = Case("prefill", Model(2, 1, 32), query_len=16, kv_len=16)


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm_90", "interpreter", "gfx999"])
@pytest.mark.parametrize("kernel", search.KERNELS)
def test_every_candidate_could_stand_in_a_table(name, kernel):
    facts = arch.by_name(name)
    rows = [{"when": {}, "config": config, "provenance": {"kind": "default", "note": ""}} for config in search.space(kernel, facts)]
    assert len(rows) > 1
    assert schema.errors({"schema": 1, "arch": name, "kernel": kernel, "rows": rows}) == []


@pytest.mark.parametrize("text", ["64x128", "64/5x128", "a/bxc", "0/0x0", "8/8x64/64/64", ""])
def test_bad_shapes_are_named(text):
    with pytest.raises(ValueError, match="--shape must look like 64/4x128"):
        search.parse_shape(text)


def test_shapes():
    assert search.parse_shape("64/4x128") == Model(64, 4, 128)
    assert search.parse_shape("16/16x192/128") == Model(16, 16, 192, 128)


def winner(case=SMALL, config=None):
    config = config or {"BLOCK_M": 128, "BLOCK_N": 64, "NUM_STAGES": 1, "num_warps": 4, "num_stages": 1}
    provenance = {"kind": "modelled", "model": "test", "triton": "3.6.0", "note": "test"}
    return search.Winner(case, config, provenance, [(1e-3, config), (1.01e-3, config), (2e-3, config)], 2)


def test_tables_of_a_new_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(arch, "_warned", {"gfx999"})
    monkeypatch.setenv("TRITONATTN_TABLES", str(tmp_path))
    table.forget()
    new = arch.by_name("gfx999")
    path = search.write(search.Sweep(new, None, tmp_path), "prefill", [winner()])
    rows = table.load(path)
    assert rows[0].provenance["kind"] == "modelled" and rows[0].when["head_size"] == 32
    assert rows[-1].when == {} and rows[-1].provenance["note"].startswith("taken over from gfx950, untuned here")
    key = {"head_size": 32, "v_head_size": 32, "dtype": "bf16", "kv_dtype": "bf16", "kv_layout": "dense"}
    assert table.lookup("prefill", new, **key).where == "gfx999/prefill.json row 0"
    search.write(search.Sweep(new, None, tmp_path), "prefill", [winner()])  # once more: replaced, not repeated
    assert len(table.load(path)) == len(rows)
    assert [p.name for p in path.parent.iterdir()] == ["prefill.json"]
    table.forget()


def test_a_table_that_would_be_invalid_is_not_written(tmp_path):
    with pytest.raises(table.TableError, match="unknown key 'BLOK_M'"):
        search.write(search.Sweep(arch.by_name("gfx942"), None, tmp_path), "prefill", [winner(config={"BLOK_M": 1})])
    assert not list(tmp_path.rglob("*.json"))


def test_rows_say_what_they_hold_for():
    decode = winner(Case("decode", MODELS["qwen3-235b"], kv_dtype="fp8", layout="hnd", query_len=4))
    assert decode.when == {
        "head_size": 128, "v_head_size": 128, "dtype": "bf16", "kv_dtype": "fp8", "kv_layout": "plain", "rows": {"max": 64},
    }  # fmt: skip


def test_report(tmp_path):
    search.report(tmp_path / "page.html", "a title", [winner()])
    page = (tmp_path / "page.html").read_text()
    assert "2 of 3 within 5 %" in page and "2 refused" in page and "1000.0 us" in page


def run_trial(job, **env):
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "tritonattn.tuning.trial"], input=json.dumps(job), env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_a_candidate_that_breaks_is_refused():
    found = run_trial(trial.job(SMALL, {"BLOCK_M": 48}, "gfx942", None), TRITON_INTERPRET="0")
    assert found["refused"]


def test_a_candidate_is_compiled_judged_and_predicted():
    good = {"BLOCK_M": 64, "BLOCK_N": 32, "NUM_STAGES": 1, "num_warps": 4, "num_stages": 1, "waves_per_eu": 2, "matrix_instr_nonkdim": 16}
    found = run_trial(trial.job(Case("prefill", MODELS["llama-3-8b"], query_len=64, kv_len=64), good, "gfx950", None), TRITON_INTERPRET="0")
    assert 0 < found["predicted"] < 1e-3 and found["bound"]


def test_a_sweep_on_the_interpreter_and_its_resumption(tmp_path):
    path = os.pathsep.join([str(ROOT), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tritonattn", "tune", "--kernel", "decode", "--shape", "2/1x32", "--kv-layout", "nhd", "--kv-len", "64",
               "--batch", "2", "--jobs", "1", "--out", str(tmp_path), "--json"]  # fmt: skip
    first = subprocess.run(command, env=env, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    made = json.loads(first.stdout)[0]
    assert made["provenance"]["kind"] == "measured" and made["provenance"]["device"] == "CPU interpreter"
    rows = table.load(tmp_path / "interpreter" / "decode.json")
    assert dict(rows[0].config) == made["config"]
    journal = (tmp_path / "interpreter" / "tune.jsonl").read_text()
    assert len(journal.splitlines()) == 2
    again = subprocess.run(command, env=env, capture_output=True, text=True)
    assert json.loads(again.stdout)[0]["config"] == made["config"]
    assert (tmp_path / "interpreter" / "tune.jsonl").read_text() == journal
