"""The command that holds the cost model against a GPU, with a clock that needs none."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from tritonattn.tuning import arch, model, validate
from tritonattn.tuning.worker import Worker, spread

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """Stands for the GPU: wide tiles are fast, three stages crash the process, two hang it on demand, 8 warps differ, or lose the context."""

    def __init__(self, facts):
        assert facts.name == "sm_90"

    def __call__(self, case, config):
        if config.get("NUM_STAGES") == 3:
            os._exit(9)
        if config.get("NUM_STAGES") == 5:
            time.sleep(60)
        if config.get("num_warps") == 8 and case.batch == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        seconds = 1e-3 * case.batch / config["BLOCK_N"]
        return {"seconds": seconds, "low": seconds, "high": seconds, "difference": 0.5 if config.get("num_warps") == 8 else 0.001}


def test_spearman():
    assert validate.ranks([3.0, 1.0, 2.0, 1.0]) == [4, 1.5, 3, 1.5]
    assert validate.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert validate.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(validate.spearman([1, 1], [1, 2]))


def test_enough_is_timed():
    facts = arch.by_name("sm_90")
    work = validate.cases()
    for kernel, needed in (("prefill", 30), ("decode", 30), ("mla_decode", 15)):
        assert len([c for c in work if c.kernel == kernel]) >= 2
        assert len(validate.search.space(kernel, facts)) >= needed


def test_a_worker_is_replaced():
    facts = arch.by_name("sm_90")
    case = validate.cases()[0]
    with Worker(Clock, facts) as worker:
        assert worker(case, {"BLOCK_N": 64})["seconds"] > 0
        assert worker(case, {"BLOCK_N": 64, "NUM_STAGES": 3}) == {"refused": ["the process died (9)"]}
        assert worker(case, {"BLOCK_N": 64})["seconds"] > 0
        assert worker(case, {"BLOCK_N": 64, "NUM_STAGES": 5}, seconds=1) == {"refused": ["no result in 1 s"]}
        assert worker(case, {"BLOCK_N": 64})["seconds"] > 0
        assert worker(case, {}) == {"refused": ["KeyError: 'BLOCK_N'"]}


def sleeper():
    return time.sleep


def test_stopping_early_waits_for_nothing():
    start = time.monotonic()
    results = spread([0.0, 100.0, 101.0, 102.0], 2, lambda: Worker(sleeper), lambda worker, seconds: worker(seconds, seconds=300))
    assert next(results)[0] == 0.0
    results.close()
    assert time.monotonic() - start < 50


def test_closing_a_worker_is_no_verdict():
    """A candidate under way when the sweep is interrupted must not enter the journal as one that died."""
    worker, told = Worker(sleeper), []

    def call():
        try:
            told.append(worker(100.0, seconds=300))
        except CancelledError:
            told.append("cancelled")

    thread = threading.Thread(target=call)
    thread.start()
    while worker.process is None or not worker.process.is_alive():
        time.sleep(0.05)
    time.sleep(0.5)
    worker.close()
    thread.join(60)
    assert told == ["cancelled"]


CHILD = """
import json, sys, time
from pathlib import Path
from tests.tuning.test_validate import Clock
from tritonattn.tuning import arch, validate
from tritonattn.tuning.worker import Worker
if __name__ == "__main__":
    facts = arch.by_name("sm_90")
    work = [case for case in validate.cases() if case.kernel == "decode" and case.batch in (2, 64) and not case.kv_dtype]
    with Worker(Clock, facts) as clock:
        entries = validate.measure(facts, work, 2, 11, time.monotonic() + 600, clock, lambda text: None)
    validate.save(Path(sys.argv[1]), facts, work, entries, validate.scores(entries, work, facts), "a clock")
"""


def test_from_compiling_to_scores(tmp_path):
    file = tmp_path / "figures.json"
    path = os.pathsep.join([str(ROOT), *sys.path])
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(script), str(file)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads(file.read_text())
    facts, work, entries = validate.load(file)
    assert facts is arch.by_name("H200") and len(work) == 2 and len(entries) == 22
    refused = {entry.refused for entry in entries}
    assert "the process died (9)" in refused and any("CUDA error" in why for why in refused)
    assert "differs from the row in force by 0.5" in refused and "the same code and grid as another" in refused
    made = validate.scores(entries, work, facts)
    assert [score.timed for score in made] == [score["timed"] for score in content["scores"]] and made
    timed = [entry for entry in entries if not entry.refused]
    assert all(entry.seconds and entry.reports and validate.predicted(entry, work[entry.case], facts) > 0 for entry in timed)
    report = validate.kept(timed[0].reports[0])
    assert report.main.matrix and report.grid and report.constexprs["BLOCK_N"] == timed[0].config["BLOCK_N"]
    assert model.predict(report, facts, work[timed[0].case]).bound
    command = [sys.executable, "-m", "tritonattn", "model", "--figures", str(file)]
    again = subprocess.run([*command, "--json"], env=env, capture_output=True, text=True)
    assert json.loads(again.stdout) == content["scores"], again.stderr


def test_a_file_of_something_else(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"cases": []}')
    with pytest.raises(ValueError, match="--figures must be a file that"):
        validate.load(file)


def test_the_model_orders_what_an_h200_was_seen_to_do():
    """The figures of `tritonattn model --measure` on one NVIDIA H200, Triton 3.6.0, torch 2.11, 2026-11-29; the model's constants were fitted to them."""
    facts, work, entries = validate.load(Path(__file__).with_name("h200_figures.json.gz"))
    made = validate.scores(entries, work, facts)
    for kernel, needed in (("prefill", 30), ("decode", 30), ("mla_decode", 15)):
        assert max(score.timed for score in made if score.kernel == kernel) >= needed
    for score in made:
        assert score.spearman >= 0.8 and score.regret <= 1.1, str(score)
