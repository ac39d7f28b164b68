"""The command line: what it lists, what it loads, what it answers."""
from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tritonattn.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]


def command(*words: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "tritonattn", *words], cwd=ROOT, capture_output=True, text=True, env=os.environ | variables)


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    listed = " ".join(capsys.readouterr().out.split())
    for name, (_, summary) in COMMANDS.items():
        assert f"{name} {summary}" in listed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_has_help(name, capsys):
    module = importlib.import_module(COMMANDS[name][0])
    module.add_arguments(argparse.ArgumentParser())
    assert callable(module.run)
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert "usage: tritonattn" in capsys.readouterr().out


def test_help_loads_no_command():
    modules = [module for module, _ in COMMANDS.values()]
    code = f"""
import sys
from tritonattn.cli import main
try: main(["--help"])
except SystemExit: pass
print(*[name for name in {modules!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("words", [[], ["nothing"], ["info", "--nothing"]])
def test_a_wrong_command_line_is_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_an_expected_error_is_one_line(monkeypatch, capsys):
    def fail(args):
        raise ValueError("max_tokens must be >= 1, got 0")

    monkeypatch.setattr("tritonattn.info.run", fail)
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "tritonattn info: max_tokens must be >= 1, got 0\n"
    with pytest.raises(ValueError, match="got 0"):
        main(["--traceback", "info"])


WRONG = {
    "TRITONATTN_SIM": ("foo", "must be one of gfx942, gfx950, got 'foo'"),
    "TRITONATTN_SIM_THREADS": ("0", "must be an integer of at least 1, got '0'"),
    "TRITONATTN_ARCH": ("MI100", "must be one of gfx942, gfx950, sm_90, interpreter, MI300X"),
    "TRITONATTN_LOG": ("calls", "must be call, dump or call,dump, got 'calls'"),
    "TRITONATTN_TABLES": ("/nowhere", "must be a folder that is there, got '/nowhere'"),
    "TRITONATTN_VLLM_KV_LAYOUT": ("nhd", "must be one of auto, packed, preshuffled, got 'nhd'"),
    "TRITONATTN_VLLM_ALLOW_UNTESTED": ("yes", "must be one of 0, 1, got 'yes'"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("words", [["info"], ["explain", "1@40"]], ids=" ".join)
def test_a_wrong_variable_is_one_line(name, words):
    value, said = WRONG[name]
    done = command(*words, **{"TRITON_INTERPRET": "", "TRITONATTN_SIM": "", name: value})
    assert done.returncode == 2
    assert done.stderr.startswith(f"tritonattn {words[0]}: {name} {said}")
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_all_wrong_variables_at_once():
    done = command("info", TRITON_INTERPRET="1", TRITONATTN_SIM="gfx942", TRITONATTN_SIM_THREADS="x")
    assert done.returncode == 2
    assert done.stderr == ("tritonattn info: TRITONATTN_SIM must not be set beside TRITON_INTERPRET=1, which runs no machine code to simulate, "
                           "got 'gfx942'; TRITONATTN_SIM_THREADS must be an integer of at least 1, got 'x'\n")


@pytest.mark.parametrize("use", ["from tritonattn import Router", "import tritonattn; tritonattn.mla_decode"])
def test_an_op_refuses_a_simulated_gpu_that_is_none(use):
    env = os.environ | {"TRITON_INTERPRET": "", "TRITONATTN_SIM": "foo"}
    done = subprocess.run([sys.executable, "-c", use], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert "ValueError: TRITONATTN_SIM must be one of gfx942, gfx950, got 'foo'" in done.stderr


def test_a_simulator_that_does_not_start_is_no_silent_one():
    code = (
        "import sys, types; broken = sys.modules['tritonattn.simulator'] = types.ModuleType('tritonattn.simulator')\n"
        "def use(arch): raise ValueError('no such thing')\n"
        "broken.use = use; import tritonattn"
    )
    env = os.environ | {"TRITON_INTERPRET": "", "TRITONATTN_SIM": "gfx942"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "no such thing" in done.stderr


def test_what_the_package_lacks_is_no_attribute_whatever_the_variables_are():
    env = os.environ | {"TRITON_INTERPRET": "", "TRITONATTN_SIM": "foo"}
    code = "import tritonattn; assert not hasattr(tritonattn, 'nothing_of_the_kind')"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env).returncode == 0


def test_info_names_the_simulator():
    facts = json.loads(command("info", "--json", TRITON_INTERPRET="", TRITONATTN_SIM="gfx942").stdout)
    [note] = [note for note in facts["notes"] if note.startswith("no GPU")]
    assert "gfx942 machine code" in note and "interpreter" not in note


def test_version():
    shown = command("--version")
    assert shown.returncode == 0 and shown.stdout == f"tritonattn {json.loads(command('info', '--json').stdout)['tritonattn']}\n"


@pytest.mark.parametrize("words, said", [
    (["fuzz", "--minutes", "-1"], "--minutes must be above 0 and finite, got -1.0"),
    (["fuzz", "--longest", "-1", "--op", "nothing", "--op", "Router"], "--op must be one of .*, got nothing; --longest must be at least 0, got -1"),
    (["tune", "--arch", "gfx942", "--offline", "--dry-run", "--jobs", "0"], "--jobs must be at least 1, got 0"),
    (["tune", "--dry-run", "--kernel", "prefill"], "torch finds no GPU to time on: .* --offline"),
    (["model", "--measure", "figures.json"], "--measure needs a GPU; on a CPU there is --figures FILE"),
    (["model", "--figures", "figures.json", "--jobs", "-2"], "--jobs must be at least 1, got -2"),
    (["warmup", "--model", "llama-3-8b", "--arch", "gfx942", "--jobs", "0"], "--jobs must be at least 1, got 0"),
])  # fmt: skip
def test_a_wrong_option_is_named_alone(words, said, monkeypatch, capsys):
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITONATTN_ARCH", "gfx942")  # a GPU's facts, and none to time on
    elif "GPU" in said:
        pytest.skip("there is a GPU")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(f"tritonattn {words[0]}: {said}[^;]*\n", error), error


def test_info_as_a_module_and_as_json():
    shown = command("info")
    assert shown.returncode == 0, shown.stderr
    for word in ("tritonattn", "torch", "triton", "device", "tables folders"):
        assert word in shown.stdout
    facts = json.loads(command("info", "--json").stdout)
    assert facts["device"]
    assert isinstance(facts["tables"], dict)
