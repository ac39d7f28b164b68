"""The sweep: its space is sound, a bad candidate is refused and alone in that, an interrupted sweep goes on, tables are replaced whole."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tritonattn.cli import main
from tritonattn.plan import decode_plan
from tritonattn.problem import AttnProblem
from tritonattn.tuning import arch, schema, search, table, trial
from tritonattn.tuning.cases import Case
from tritonattn.tuning.models import MODELS, Model, parse_shape
from tritonattn.tuning.worker import Worker

ROOT = Path(__file__).resolve().parents[2]
SMALL = Case("prefill", Model(2, 1, 32), query_len=16, kv_len=16)


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm_90", "interpreter", "gfx999"])
@pytest.mark.parametrize("kernel", search.KERNELS)
def test_every_candidate_could_stand_in_a_table(name, kernel):
    facts = arch.nearest(name)
    rows = [{"when": {}, "config": config, "provenance": {"kind": "default", "note": ""}} for config in search.space(kernel, facts)]
    assert len(rows) > 1
    assert schema.errors({"schema": 1, "arch": name, "kernel": kernel, "rows": rows}) == []


@pytest.mark.parametrize("text", ["64x128", "64/5x128", "a/bxc", "0/0x0", "8/8x64/64/64", "64/0x64", "-8/8x64"])
def test_bad_shapes_are_named(text):
    with pytest.raises(ValueError, match="--shape must look like 64/4x128"):
        parse_shape(text)


def test_shapes():
    assert parse_shape("64/4x128") == Model(64, 4, 128)
    assert parse_shape("16/16x192/128") == Model(16, 16, 192, 128)


@pytest.mark.parametrize(("words", "said"), [
    (["--model", "phi-2", "--shape", "8/2x64"], "--shape and --model exclude each other, got 8/2x64 and phi-2"),
    (["--shape", "8/2x20"], "head size of q and k must be a multiple of 8 from 32 to 256, got 20"),
    (["--shape", "8/2x264/32"], "from 32 to 256, got 264"),
    (["--shape", "8/2x72", "--kv-dtype", "fp8", "--kv-layout", "preshuffled"], "head_size must be a multiple of 16"),
    (["--shape", "8/2x64", "--kv-layout", "nhd,shuffled"], "kv_layout must be one of nhd, hnd, preshuffled, got 'shuffled'"),
    (["--shape", "8/2x64", "--kernel", "mla_decode"], "--kernel mla_decode has nothing to sweep for 8/2x64"),
    (["--model", "kimi-k2", "--kernel", "decode"], "--kernel decode has nothing to sweep for kimi-k2"),
    (["--shape", "8/2x64", "--query-len", "-4"], "--query-len must be from 1"),
    (["--shape", "8/2x64", "--kv-len", "0"], "--kv-len must be from 1 to 16777216, got 0"),
    (["--shape", "8/2x64", "--kv-len", "3", "--query-len", "4", "--kernel", "decode"], "it must be at least --query-len, 4, got 3"),
    (["--budget", "0"], "--budget must be above 0, got 0.0"),
])  # fmt: skip
def test_what_the_ops_refuse_is_not_swept(words, said, capsys):
    assert main(["tune", "--offline", "--arch", "gfx942", "--dry-run", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_swept(model, capsys):
    assert main(["tune", "--offline", "--arch", "gfx950", "--dry-run", "--model", model, "--kv-dtype", "fp8"]) == 0
    assert "candidates" in capsys.readouterr().out


def winner(case=SMALL, config=None):
    config = config or {"BLOCK_M": 128, "BLOCK_N": 64, "NUM_STAGES": 1, "num_warps": 4, "num_stages": 1}
    provenance = {"kind": "modelled", "model": "test", "triton": "3.6.0", "note": "test"}
    return search.Winner(case, config, provenance, [(1e-3, config), (1.01e-3, config), (2e-3, config)], 2)


def test_tables_of_a_new_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(arch, "_warned", {"gfx999"})
    monkeypatch.setenv("TRITONATTN_TABLES", str(tmp_path))
    table.forget()
    new = arch.nearest("gfx999")
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
        "head_size": 128, "v_head_size": 128, "dtype": "bf16", "kv_dtype": "fp8", "kv_layout": "plain", "rows": {"min": 33, "max": 64},
    }  # fmt: skip
    assert winner(Case("decode", MODELS["llama-3-8b"], layout="nhd")).when["rows"] == {"max": 16}
    assert winner(Case("mla_decode", MODELS["deepseek-r1"], layout="latent")).when["rows"] == {"min": 65}


def test_winners_divide_the_loads(tmp_path, monkeypatch):
    """Batches 1, 16 and 128 of 8 KV heads on 304 units: each row is found for its own batch, and for those nearest to it."""
    monkeypatch.setenv("TRITONATTN_TABLES", str(tmp_path))
    facts = replace(arch.by_name("MI300X"))  # an object of its own: the caches on the way know nothing of it
    case = Case("decode", MODELS["llama-3-8b"], layout="nhd")
    base = {"NUM_STAGES": 1, "num_stages": 1, "num_warps": 4, "form": "tile", "programs_per_cu": 1}
    made = [winner(replace(case, batch=batch), {**base, "BLOCK_N": keys}) for batch, keys in ((1, 16), (16, 32), (128, 64))]
    made.append(winner(replace(case, batch=16, kv_len=99), {**base, "BLOCK_N": 128}))  # the same load again
    assert [when["units_per_cu"] for when, _ in search.conditions(made, facts)] == [
        {"max": 0.1053}, {"min": 0.1053, "max": 1.1909}, {"min": 1.1909},
    ]  # fmt: skip
    search.write(search.Sweep(facts, None, tmp_path), "decode", made)
    table.forget()
    problem = AttnProblem(32, 8, 128, 128, torch.bfloat16, torch.bfloat16, "plain", 16, True)
    found = {batch: decode_plan(facts, problem, batch, 1, 8192).row.config["BLOCK_N"] for batch in (1, 3, 5, 16, 40, 60, 128, 256)}
    assert found == {1: 16, 3: 16, 5: 32, 16: 32, 40: 32, 60: 64, 128: 64, 256: 64}
    table.forget()


@pytest.mark.parametrize("text", ["", "0", "1,x", "1,-3"])
def test_bad_batches_are_named(text):
    with pytest.raises(ValueError, match="--batch must be positive integers"):
        search._integers("--batch", text)


def test_report(tmp_path):
    search.report(tmp_path / "page.html", "a title", [winner()])
    page = (tmp_path / "page.html").read_text()
    assert "2 of 3 within 5 %" in page and "2 refused" in page and "1000.0 us" in page


@pytest.fixture(scope="module")
def try_out():
    """`trial.outcome` in a process where Triton compiles."""
    with Worker(trial.start, env={"TRITON_INTERPRET": "0"}) as worker:
        yield lambda case, config, name: worker(case, config, arch.by_name(name), None, seconds=300)


def test_a_candidate_that_breaks_is_refused(try_out):
    assert try_out(SMALL, {"BLOCK_M": 48}, "gfx942")["refused"]


def test_a_candidate_is_compiled_judged_and_predicted(try_out):
    good = {"BLOCK_M": 64, "BLOCK_N": 32, "NUM_STAGES": 1, "num_warps": 4, "num_stages": 1, "waves_per_eu": 2, "matrix_instr_nonkdim": 16}
    found = try_out(Case("prefill", MODELS["llama-3-8b"], query_len=64, kv_len=64), good, "gfx950")
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


def stand_in_trial():
    """`trial.start` on a GPU that is not there: the model likes wide tiles, the GPU likes 64; one candidate kills its process, one hangs."""

    def outcome(case, config, facts, device, ahead):
        assert ahead and facts.name == "sm_90"
        if device is None:
            return {"refused": ["does not fit"]} if config["NUM_STAGES"] == 4 else {"predicted": 1e-3 / config["BLOCK_N"], "bound": "vector"}
        if config["num_warps"] == 8 and config["BLOCK_N"] == 128 and config["NUM_STAGES"] == 2:
            os._exit(1)
        order = [abs(config["BLOCK_N"] - 64), config["programs_per_cu"], config["num_warps"] // 8, config["NUM_STAGES"] / 100]
        return {"seconds": 1e-4 * (1 + sum(order)), "error": 0.001}

    return outcome


def test_a_sweep_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "start", stand_in_trial)
    monkeypatch.setattr(search, "_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(search, "PROMISING", 2.5)
    facts = arch.by_name("H200")
    sweep = search.Sweep(facts, "cuda", tmp_path, jobs=2)
    case = Case("decode", MODELS["llama-3-8b"], layout="nhd")
    said = []
    winner = search.search(sweep, case, said.append)
    assert winner.config["BLOCK_N"] == 64 and winner.config["num_warps"] == 4 and winner.config["programs_per_cu"] == 1
    assert winner.provenance["kind"] == "measured" and winner.provenance["device"] == "NVIDIA H200" and winner.provenance["microseconds"] == 202
    assert {config["BLOCK_N"] for _, config in winner.ranking} == {64, 128}, "32 was hopeless by the model"
    assert winner.refused == 18 + 3  # of 54: those that do not fit, and of the promising ones those that died
    assert said[-1] == "21 timed, best 202.0 us"
    before = sweep.journal.read_text()
    assert search.search(sweep, case, said.append).config == winner.config
    assert sweep.journal.read_text() == before, "an interrupted sweep goes on from the journal"
    path = search.write(sweep, "decode", [winner])
    assert json.loads(path.read_text())["rows"][0]["config"] == winner.config


def test_a_spent_budget_leaves_the_rows_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "start", stand_in_trial)
    monkeypatch.setattr(search, "_device_name", lambda device: "NVIDIA H200")
    sweep = search.Sweep(arch.by_name("H200"), "cuda", tmp_path, deadline=0.0)
    assert search.search(sweep, SMALL, lambda text: None) is None and not sweep.journal.exists()
