"""The benchmark runs on tiny sizes, checks what it times, and reads back what it wrote."""

from __future__ import annotations

import json
import os

import pytest
import torch

from tritonattn.bench import report
from tritonattn.bench.rows import SUITES, select
from tritonattn.cli import main

ON_CPU = not torch.cuda.is_available()


def test_row_names_are_unique_within_a_suite():
    for suite, rows in SUITES.items():
        names = [row.name for row in rows]
        assert len(set(names)) == len(names), suite


def test_select_takes_exact_names_before_parts():
    assert [row.name for row in select(["decode"], ["B64 S8192 64/4"])] == ["B64 S8192 64/4"]
    assert {row.suite for row in select([], ["q4"])} == {"spec-decode", "mla"}
    with pytest.raises(ValueError, match="SUITE must be one of prefill"):
        select(["prefil"], [])
    with pytest.raises(ValueError, match="names no row"):
        select(["decode"], ["B7"])


@pytest.mark.skipif(ON_CPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or the interpreter")
def test_smoke_run_writes_json_and_compares(tmp_path, capsys):
    path = str(tmp_path / "run.json")
    words = ["bench", "decode", "--row", "B1 S1024 64/4", "--smoke", "--json", path]
    assert main(words) == 0
    document = json.loads((tmp_path / "run.json").read_text())
    (result,) = document["results"]
    assert document["meaningless"] and set(result["calls"]) == {"tritonattn nhd", "tritonattn preshuffled"}
    for call in result["calls"].values():
        assert call["error"] < 1e-2 and not call["wrong"] and call["us"] > 0
    assert main([*words, "--base", path, "--config", "BLOCK_N=32"]) == 0
    shown = capsys.readouterr().out
    assert "base / now" in shown and "mean nothing" in shown


def test_wrong_results_are_told():
    calls = {"tritonattn": {"wrong": True}, "other": {"wrong": True}, "tritonattn b": {"refused": ""}}
    assert report.wrong([{"suite": "s", "name": "n", "calls": calls}]) == ["s n: tritonattn"]


@pytest.mark.skipif(not ON_CPU, reason="there is a GPU")
def test_without_a_gpu_only_smoke_runs(capsys):
    assert main(["bench", "decode"]) == 2
    assert "--smoke" in capsys.readouterr().err
    assert main(["bench", "--base", "/nowhere.json"]) == 2
