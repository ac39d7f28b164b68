"""The benchmark runs every suite on tiny sizes, finds wrong results, and reads back what it wrote."""

from __future__ import annotations

import json
import math
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from tritonattn import reference
from tritonattn.bench import report, sweep
from tritonattn.bench.cases import work
from tritonattn.bench.inputs import random_inputs
from tritonattn.bench.peers import Installed
from tritonattn.bench.rows import SUITES, Row, select
from tritonattn.bench.runner import parse_config, run_row
from tritonattn.bench.sample import sample_error
from tritonattn.bench.timing import measure
from tritonattn.cli import main

ON_CPU = not torch.cuda.is_available()
CPU = torch.device("cpu")
runs = pytest.mark.skipif(ON_CPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or the interpreter")


def test_row_names_are_unique_within_a_suite():
    for suite, rows in SUITES.items():
        names = [row.name for row in rows]
        assert len(set(names)) == len(names), suite


def test_select_takes_exact_names_before_parts():
    assert [row.name for row in select(["prefill"], ["B4 S4096 16/16"])] == ["B4 S4096 16/16"]
    assert {row.suite for row in select([], ["q4"])} == {"spec-decode", "mla"}
    with pytest.raises(ValueError, match="SUITE must be one of prefill"):
        select(["prefil"], [])
    with pytest.raises(ValueError, match="names no row of decode"):
        select(["decode"], ["B7"])


@pytest.mark.parametrize(
    ("row", "flops", "moved"),
    [
        (Row("prefill", 1, 8192, 64, 4, query_len=8192), 2 * 8192**2 * 64 * 128, 8192 * (64 + 4) * 256 * 2),
        (Row("decode", 3, 100, 8, 2), 4 * 300 * 8 * 128, 300 * 2 * 256 * 2),
        (Row("decode", 3, 100, 8, 2, window=10, fp8=True), 4 * 30 * 8 * 128, 33 * 2 * 256),
        (Row("mla", 2, 64, 16, 1, 576, 512), 2 * 128 * 16 * (576 + 512), 128 * 576 * 2),
    ],
)
def test_work_is_counted_as_elsewhere(row, flops, moved):
    assert work(row) == (flops, moved)


@pytest.mark.parametrize("window", [0, 7])
def test_sampled_error_agrees_with_the_reference(window):
    row = Row("decode", 3, 30, 4, 2, 16, query_len=4, block_size=8, window=window, key_lengths=(4, 17, 30))
    x = random_inputs(row, CPU, cached=True)
    exact, _ = reference.decode_attention(
        x.q, x.k_cache, x.v_cache, seqused_k=x.seq_lens, block_table=x.block_table, max_seqlen_q=4, kv_layout="nhd",
        window_size=x.window_size, softmax_scale=x.scale,
    )  # fmt: skip
    assert sample_error(x, exact) < 1e-12
    assert sample_error(x, exact * 1.01) == pytest.approx(0.01)
    exact[5, 1, 3] = math.nan
    assert math.isnan(sample_error(x, exact))


@runs
@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_runs_and_is_right(suite, tmp_path):
    path = tmp_path / "run.json"
    words = ["bench", suite, "--smoke", "--json", str(path)]
    for name in {"cache": ("write B16", "gather B16", "latent"), "plan": ("router B256", "call B1")}.get(suite, (SUITES[suite][-1].name,)):
        words += ["--row", name]
    assert main(words) == 0
    document = json.loads(path.read_text())
    assert document["meaningless"] and document["results"]
    for result in document["results"]:
        for name, call in result["calls"].items():
            assert "refused" not in call, f"{result['name']} {name}: {call}"
            assert call["us"] > 0 and not call["wrong"]


@runs
def test_host_time_of_calls_stands_beside_that_of_peers(monkeypatch):
    """In one process and one row; here the peers are stand-ins."""

    def attend(q, k_cache, v_cache, out, *args):
        x = inputs[-1]
        exact, _ = reference.decode_attention(
            q, k_cache, v_cache, seqused_k=x.seq_lens, block_table=x.block_table, max_seqlen_k=x.max_seqlen_k, kv_layout="nhd",
            softmax_scale=x.scale,
        )  # fmt: skip
        out.copy_(exact)

    inputs = []
    peers = Installed(None)
    peers._vllm = True
    made = peers.calls
    monkeypatch.setattr(peers, "calls", lambda x: inputs.append(x) or made(x))
    for module, name in (("triton_unified_attention", "unified_attention"), ("triton_decode_attention", "decode_attention_fwd")):
        call = attend if name == "unified_attention" else lambda q, k, v, out, lse, *args, **kwargs: attend(q, k, v, out)
        monkeypatch.setitem(sys.modules, f"vllm.v1.attention.ops.{module}", SimpleNamespace(**{name: call}))
    for row in select(["plan"], ["call B64"]):
        result = run_row(row.smoke(), torch.device("cuda" if torch.cuda.is_available() else "cpu"), peers, {})
        (peer,) = [call for name, call in result["calls"].items() if name in ("TRITON_ATTN", "TRITON_MLA")]
        assert peer["us"] > 0 and not peer["wrong"], result["name"]
        assert report.ratios([result])[0].startswith("plan: TRITON_")


@runs
def test_a_run_is_compared_with_an_earlier_one_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run, picture = str(tmp_path / "run.json"), tmp_path / "run.png"
    words = ["bench", "decode", "--row", "B1 S1024 64/4", "--smoke"]
    assert main([*words, "--json", run, "--cold"]) == 0
    assert main([*words, "--base", run, "--config", "BLOCK_N=32", "--picture", str(picture), "--only", "nhd"]) == 0
    shown = capsys.readouterr().out
    assert "base / now" in shown and "mean nothing" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "--show", run]) == 0
    assert "cold" in capsys.readouterr().out
    assert main([*words, "--seconds", "0"]) == 0
    assert "out of time for decode B1 S48 4/1" in capsys.readouterr().out


@runs
@pytest.mark.skipif(not ON_CPU, reason="its failing candidate fails in the interpreter")
def test_sweep_ranks_candidates_and_keeps_going(tmp_path, capsys):
    file, out = tmp_path / "candidates.json", tmp_path / "out.json"
    file.write_text(json.dumps([{"BLOCK_N": 32, "num_warps": 4}, {"BLOCK_N": 16, "num_warps": 4}]))
    assert main(["bench", "decode", "--smoke", "--row", "B1 S1024 64/4", "--sweep", str(file), "--json", str(out)]) == 0
    (result,) = json.loads(out.read_text())["results"]
    assert list(result["candidates"]) == [sweep.TABLE, "BLOCK_N=32", "BLOCK_N=16"]
    assert result["candidates"]["BLOCK_N=16"]["us"] > 0
    (row,) = select(["decode"], ["B1 S1024 64/4"])
    broken = sweep.sweep_row(row.smoke(), CPU, {"broken": {"BLOCK_N": 3}, sweep.TABLE: {}}, "")
    sweep.show([broken])
    assert "broken: InterpreterError" in capsys.readouterr().out and broken["candidates"][sweep.TABLE]["us"] > 0
    file.write_text('[{"BLOK_N": 32}]')
    assert main(["bench", "--smoke", "--sweep", str(file)]) == 2
    assert "entry 0" in capsys.readouterr().err


def test_configs_are_read_from_words():
    assert parse_config("BLOCK_N=64,form=tile,combine.BLOCK_S=8,CHEAP_P=True") == {
        "BLOCK_N": 64, "form": "tile", "combine.BLOCK_S": 8, "CHEAP_P": True,
    }  # fmt: skip
    for wrong, match in (("BLOCK_N", "KEY=VALUE"), ("BLOK_N=16", "unknown key 'BLOK_N'"), ("BLOCK_N=48", "must be one of 1, 2, 4")):
        with pytest.raises(ValueError, match=match):
            parse_config(wrong)


def test_wrong_results_and_cliffs_are_told():
    calls = {"tritonattn": {"wrong": True}, "other": {"wrong": True}, "tritonattn b": {"refused": "why"}}
    results = [{"suite": "s", "name": "n", "calls": calls}]
    assert report.wrong(results) == ["s n: tritonattn"]
    assert report.refusals(results) == ["s n: tritonattn b: why"]
    steps = {"B1 S8 8/1": 10.0, "B8 S8 8/1": 11.0, "B12 S8 8/1": 40.0, "B16 S8 8/1": 50.0}
    rows = [{"suite": "cliffs", "name": name, "calls": {"tritonattn nhd": {"us": us}}} for name, us in steps.items()]
    assert report.cliffs(rows) == ["cliff: S8 8/1 from B8 11.0 us to B12 40.0 us"]


def test_overall_order_counts_only_what_ran_everywhere():
    def result(**us):
        return {"candidates": {label: {"us": value, "wrong": False} for label, value in us.items()}}

    ranked = sweep.overall([result(a=10.0, b=20.0, c=1000.0), result(a=40.0, b=10.0)])
    assert [(round(mean, 2), worst, label) for mean, worst, label in ranked] == [(1.41, 2.0, "b"), (2.0, 4.0, "a")]


def test_a_call_that_raises_is_refused_and_the_others_are_timed():
    def fail():
        raise RuntimeError("no\nreason")

    times, refused = measure({"fails": fail, "works": lambda: None}, CPU)
    assert refused == {"fails": "RuntimeError: no"} and set(times) == {"works"}


@pytest.mark.skipif(not ON_CPU, reason="there is a GPU")
def test_without_a_gpu_only_smoke_runs(capsys):
    assert main(["bench", "decode"]) == 2
    assert "--smoke" in capsys.readouterr().err
    assert main(["bench", "--base", "/nowhere.json"]) == 2
